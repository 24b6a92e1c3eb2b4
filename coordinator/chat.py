"""Ask a Generation service and show the answer in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import grpc

from splitspec.channels import CLIENT_OPTIONS, check_peer_address
from splitspec.checks import check_sampling_ranges
from splitspec.commands import check_range
from splitspec.errors import InvalidArgument, UserError
from splitspec.v1 import generation_pb2, generation_pb2_grpc, sampling_pb2

MAX_UINT32 = 2**32 - 1


class AskFailed(Exception):
    """The service could not answer; one line for a person."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """One prompt and how to answer it. None leaves a choice to the coordinator."""

    prompt: str
    chat: bool = True
    """True: the prompt is a user's message in the model's chat template. False: it is continued."""
    system: str | None = None
    """System message of a chat."""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    draft_count: int | None = None

    def __post_init__(self) -> None:
        """Refuse what no coordinator answers, before anything is started for it.

        Raises:
            UserError: names the flag or what is wrong with the text.
        """
        for name, text in (
            ("prompt", self.prompt),
            ("system message", self.system or ""),
            ("stop string", "".join(self.stop)),
        ):
            check_unicode(name, text)
        if not self.prompt.strip():
            raise UserError("the prompt is empty")
        if self.system is not None and not self.chat:
            raise UserError("--system goes with a chat, not with --raw")
        if not all(self.stop):
            raise UserError("a --stop string is empty")
        if self.max_tokens is not None:
            check_range("--max-tokens", self.max_tokens, 1, MAX_UINT32)
        try:
            check_sampling_ranges(
                temperature=self.temperature or 0.0,
                top_p=1.0 if self.top_p is None else self.top_p,
                min_p=self.min_p or 0.0,
            )
        except InvalidArgument as error:
            raise UserError(error.message.replace("sampling.", "--").replace("_", "-")) from error

    def request(self) -> generation_pb2.GenerateRequest:
        """Return the message that asks it."""
        request = generation_pb2.GenerateRequest(
            sampling=sampling_pb2.SamplingParameters(
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
                seed=self.seed,
            ),
            max_tokens=self.max_tokens,
            stop=self.stop,
            draft_count=self.draft_count,
        )
        if not self.chat:
            request.text = self.prompt
            return request
        messages = request.conversation.messages
        if self.system is not None:
            messages.add(role="system", content=self.system)
        messages.add(role="user", content=self.prompt)
        return request


def check_unicode(name: str, text: str) -> None:
    """Refuse what a shell handed over that is no text.

    Raises:
        UserError: says which text it is.
    """
    # Bytes of an argument that are no UTF-8 arrive as lone surrogates, which no message can hold.
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"the {name} is not UTF-8") from None


@dataclass(kw_only=True)
class Answer:
    """What came back."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: generation_pb2.Finish = field(default_factory=generation_pb2.Finish)


def ask(address: str, question: Question, on_text: Callable[[str], None]) -> Answer:
    """Stream the answer to `question` from `address` through `on_text` and return all of it.

    Raises:
        UserError: the address is none, or the service refused the request.
        AskFailed: no coordinator answers there, or the answer broke off.
    """
    check_peer_address(address)
    answer = Answer()
    with grpc.insecure_channel(address, CLIENT_OPTIONS) as channel:
        call = generation_pb2_grpc.GenerationStub(channel).Generate(question.request())
        try:
            for response in call:
                answer.token_ids += response.token_ids
                answer.text += response.text_delta
                if response.text_delta:
                    on_text(response.text_delta)
                if response.HasField("finish"):
                    answer.finish.CopyFrom(response.finish)
        except grpc.RpcError as error:
            if answer.text:
                on_text("\n")  # what is said next begins a line
            raise _readable(error, address, began=bool(answer.token_ids)) from error
        finally:
            call.cancel()
    return answer


def _readable(error: grpc.RpcError, address: str, *, began: bool) -> Exception:
    assert isinstance(error, grpc.Call)
    line = " ".join((error.details() or "no details").split())
    if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
        return UserError(line)
    if began:
        return AskFailed(f"the answer broke off: {line}")
    if error.code() == grpc.StatusCode.UNIMPLEMENTED:
        return AskFailed(f"{address} is not a coordinator: it serves no Generation")
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        return AskFailed(f"no answer from {address}: {line}")
    return AskFailed(f"{error.code().name}: {line}")


def statistics_line(finish: generation_pb2.Finish) -> str:
    """Return what an answer cost and why it ended, on one line."""
    reason = generation_pb2.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower()
    return "  ".join((*_statistics(finish.statistics), f"finish {reason}", f"seed {finish.seed}"))


def _statistics(cost: generation_pb2.GenerationStatistics) -> Iterator[str]:
    yield f"tokens {cost.output_token_count}"
    if cost.round_count:
        yield f"tau {cost.mean_acceptance_length:.2f}"
    yield f"{cost.tokens_per_second:.1f} tok/s"
    yield f"first token {cost.time_to_first_token.ToMilliseconds()} ms"
    yield f"draft {cost.draft_method or 'none'}"
    yield f"rounds {cost.round_count}"
    if cost.draft_token_count:
        share = 100 * cost.accepted_token_count / cost.draft_token_count
        yield f"accepted {cost.accepted_token_count}/{cost.draft_token_count} ({share:.0f} %)"
    elif cost.draft_method:
        yield "accepted 0/0"
    if cost.replay_count:
        yield f"replays {cost.replay_count}"


def comparison_line(split: Answer, target_only: Answer) -> str:
    """Say whether the target alone wrote the same, and how much sooner the split answer was."""
    same = split.token_ids == target_only.token_ids and split.text == target_only.text
    alone = target_only.finish.statistics.tokens_per_second
    together = split.finish.statistics.tokens_per_second
    ratio = f"  speed-up {together / alone:.2f}x" if alone and together else ""
    verdict = "identical" if same else "DIFFERENT: this is a bug (law L4), please report it"
    return f"target only {alone:.1f} tok/s{ratio}  text {verdict}"

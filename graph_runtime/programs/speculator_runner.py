"""Drive a speculator program: one session, greedy, in this process.

The shifted scheme: draft slot p holds the feature of position p and the token of position p + 1.
Features come out of one method and go into the next through tensors of the host; K/V caches are
the program's own and are never seen here. `prefill` starts them anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from graph_runtime.programs.executorch_runtime import Method, Program
from graph_runtime.programs.speculator_metadata import SpeculatorMetadata
from splitspec.errors import UserError

METHODS = ("prefill", "target_verify", "draft_decode")


@dataclass(kw_only=True)
class SpeculationStatistics:
    """What one request cost."""

    emitted: int = 0
    """Tokens, the prefill bonus included."""
    rounds: int = 0
    drafted: int = 0
    """Draft tokens verified."""
    accepted: int = 0
    """Draft tokens that stood and were emitted."""
    finish: str = "length"
    """"stop": a stop token. "length": the most tokens wanted, or the context's end."""
    calls: dict[str, int] = field(default_factory=lambda: dict.fromkeys(METHODS, 0))
    """Of each method."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(METHODS, 0.0))
    """In each method."""

    @property
    def tau(self) -> float:
        """Return the mean acceptance length; the prefill bonus is not counted."""
        return (self.emitted - 1) / self.rounds if self.rounds else 0.0


class Speculator:
    """A loaded speculator program, whose one session `generate` starts anew."""

    def __init__(self, program: Program, metadata: SpeculatorMetadata, path: Path) -> None:
        """Take over a loaded program.

        Raises:
            UserError: it lacks one of METHODS.
        """
        self.metadata = metadata
        self.methods: dict[str, Method] = {}
        for name in METHODS:
            if name not in program.method_names:
                raise UserError(f"program {path} has no method {name}: export a speculator")
            method = program.load_method(name)
            assert method is not None, name
            self.methods[name] = method

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        stop_token_ids: Collection[int] = (),
        chain: int | None = None,
        emit: Callable[[list[int]], None] = lambda _ids: None,
    ) -> SpeculationStatistics:
        """Continue `prompt` greedily until a stop token, `max_tokens` or the context's end.

        Args:
            prompt: token ids, as many as one prefill takes.
            max_tokens: most tokens to emit; no more than the context holds are.
            stop_token_ids: the first of them that is emitted is the last token.
            chain: draft tokens of a round, at most the program's; None: the program's.
            emit: is called with the tokens of the prefill and of each round, as they come.

        Raises:
            UserError: names the argument, its value and what is accepted; nothing has run.
        """
        chain = self.metadata.chain_len if chain is None else chain
        self._check(prompt, max_tokens, chain)
        request = _Request(
            budget=min(max_tokens, self.metadata.max_seq_len - len(prompt)),
            stop_token_ids=frozenset(stop_token_ids),
            chain=chain,
            emit=emit,
        )
        length = len(prompt)
        token, features = self._call("prefill", request, prompt, 0)
        new = [int(token)]
        if self._take(request, new) or self._is_near_end(length):
            return request.statistics
        draft_tokens = self._draft(request, [*prompt[1:], *new], features, 0)
        while True:
            accepted, new, features = self._verify(request, new[-1], draft_tokens, length)
            if self._take(request, new, accepted) or self._is_near_end(length + len(new)):
                return request.statistics
            draft_tokens = self._draft(request, new, features, length)
            length += len(new)

    def _verify(
        self, request: _Request, pending: int, draft_tokens: list[int], length: int
    ) -> tuple[int, list[int], torch.Tensor]:
        """Run the window at `length`.

        Returns:
            The draft tokens that stand, the tokens to emit, and their rows' features [1, a + 1, H].
        """
        # The method's width is fixed: a shorter chain is padded with rows that nobody reads.
        padding = [pending] * (self.metadata.chain_len - len(draft_tokens))
        ids, features = self._call(
            "target_verify", request, [pending, *draft_tokens, *padding], length
        )
        chosen: list[int] = ids[0].tolist()
        accepted = 0
        while accepted < len(draft_tokens) and draft_tokens[accepted] == chosen[accepted]:
            accepted += 1
        request.statistics.rounds += 1
        request.statistics.drafted += len(draft_tokens)
        return accepted, chosen[: accepted + 1], features[:, : accepted + 1].contiguous()

    def _draft(
        self, request: _Request, tokens: Sequence[int], features: torch.Tensor, start: int
    ) -> list[int]:
        """Seed the draft slots from `start` on; return the chain that follows.

        Args:
            request: whose turn it is.
            tokens: those of positions start + 1 .. start + T.
            features: of positions start .. start + T - 1, [1, T, H].
            start: first slot to write; those before it hold what they have to.
        """
        ids, features = self._call("draft_decode", request, tokens, start, features)
        chain = [int(ids[0, -1])]
        position = start + len(tokens)
        while len(chain) < request.chain:
            last = features[:, -1:].contiguous()
            ids, features = self._call("draft_decode", request, chain[-1:], position, last)
            chain.append(int(ids[0, -1]))
            position += 1
        return chain

    def _take(self, request: _Request, new: list[int], accepted: int = 0) -> bool:
        """Emit tokens up to a stop token or the budget; return whether one of them was reached."""
        statistics = request.statistics
        stop = next((i for i, token in enumerate(new) if token in request.stop_token_ids), None)
        kept = new if stop is None else new[: stop + 1]
        kept = kept[: request.budget - statistics.emitted]
        statistics.emitted += len(kept)
        statistics.accepted += min(accepted, len(kept))
        request.emit(kept)
        if kept[-1] in request.stop_token_ids:
            statistics.finish = "stop"
            return True
        return statistics.emitted == request.budget

    def _is_near_end(self, length: int) -> bool:
        """Return whether a window at `length` would reach beyond the context."""
        return length + self.metadata.chain_len >= self.metadata.max_seq_len

    def _call(
        self,
        name: str,
        request: _Request,
        tokens: Sequence[int],
        start: int,
        *features: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        end = start + len(tokens)
        assert 0 <= start < end <= self.metadata.max_seq_len, (name, start, end)
        began = time.perf_counter()
        first, second = self.methods[name].execute(
            [torch.tensor([list(tokens)]), *features, torch.arange(start, end)]
        )
        request.statistics.seconds[name] += time.perf_counter() - began
        request.statistics.calls[name] += 1
        return first, second

    def _check(self, prompt: Sequence[int], max_tokens: int, chain: int) -> None:
        metadata = self.metadata
        if max_tokens < 1:
            raise UserError(f"max tokens is {max_tokens}; expected at least 1")
        if not 1 <= chain <= metadata.chain_len:
            raise UserError(f"chain is {chain}; the program takes 1 to {metadata.chain_len}")
        if not metadata.min_prefill_chunk <= len(prompt) <= metadata.max_prefill_chunk:
            raise UserError(
                f"the prompt has {len(prompt)} tokens; the program takes "
                f"{metadata.min_prefill_chunk} to {metadata.max_prefill_chunk}"
            )
        for token in prompt:
            if not 0 <= token < metadata.vocab_size:
                raise UserError(
                    f"token id {token} of the prompt is not in 0..{metadata.vocab_size - 1}"
                )


@dataclass(frozen=True, kw_only=True)
class _Request:
    budget: int
    """Most tokens to emit."""
    stop_token_ids: frozenset[int]
    chain: int
    emit: Callable[[list[int]], None]
    statistics: SpeculationStatistics = field(default_factory=SpeculationStatistics)

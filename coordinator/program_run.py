"""`splitspec run --program FILE`: one prompt through a speculator program, without services.

The program runs in a child process, `python -m graph_runtime speculate FILE`, because this package
knows no tensors: token ids go in and come out as JSON lines. Text is made of them here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from coordinator.chat import check_unicode
from coordinator.launch import ServiceFailed, child_environment
from coordinator.template import ChatTemplate
from coordinator.text import Detokenizer, ModelText
from splitspec.errors import InvalidArgument, UserError
from splitspec.folders import model_folder

USER_ERROR = 2
NO_BOS = -1
_BOTH = {"prompt", "program", "model", "max_tokens", "chat", "system", "threads", "cache_dir"}
_PROGRAM_ONLY = {"chat_prefix", "chat_suffix", "stop_ids", "stop_token", "bos_id", "chain"}


@dataclass(frozen=True, kw_only=True)
class ProgramRun:
    """One prompt, and how to answer it with a program. None leaves a choice to the model's files.

    Its fields are the flags of the command.
    """

    program: Path
    prompt: str
    model: str
    """Whose tokenizer and chat template are used."""
    max_tokens: int
    chat: bool = True
    system: str | None = None
    chat_prefix: str | None = None
    """What stands before the prompt, in place of the chat template; also alone."""
    chat_suffix: str | None = None
    stop_ids: str | None = None
    """Token ids, "1,50,106", in place of the model's end tokens."""
    stop_token: tuple[str, ...] = ()
    """Texts of further stop tokens."""
    bos_id: int | None = None
    """The first token, put there unless the prompt begins with it; NO_BOS: none is put there. None:
    what the tokenizer adds. A chat template's own tokens stay in any case."""
    chain: int | None = None
    """Draft tokens a round; None: the program's."""
    threads: int | None = None
    cache_dir: Path

    def __post_init__(self) -> None:
        """Refuse what no program answers, before anything is started for it.

        Raises:
            UserError: names the flag or what is wrong with the text.
        """
        check_unicode("prompt", self.prompt)
        if not self.prompt.strip():
            raise UserError("the prompt is empty")
        if self.system is not None and not (self.chat and not self._is_framed):
            raise UserError("--system goes with the chat template, not with --raw or --chat-prefix")
        if self._is_framed and not self.chat:
            raise UserError("--chat-prefix and --chat-suffix do not go with --raw")

    @property
    def _is_framed(self) -> bool:
        return self.chat_prefix is not None or self.chat_suffix is not None

    def prompt_ids(self, text: ModelText) -> list[int]:
        """Return the prompt's tokens.

        Raises:
            UserError: the model has no chat template, or it refuses the messages.
        """
        if not self.chat:
            written, is_template = self.prompt, False
        elif self._is_framed:
            written = f"{self.chat_prefix or ''}{self.prompt}{self.chat_suffix or ''}"
            is_template = False
        else:
            written, is_template = self._render(text), True
        # A template writes its special tokens itself.
        specials = self.bos_id is None and not is_template
        ids = text.encode(written, add_special_tokens=specials)
        if self.bos_id in (None, NO_BOS, *ids[:1]):  # a template may have written it
            return ids
        assert self.bos_id is not None
        return [self.bos_id, *ids]

    def stop_token_ids(self, text: ModelText) -> frozenset[int]:
        """Return the tokens that end the answer.

        Raises:
            UserError: `stop_ids` are no ids, or a stop token's text is not one token.
        """
        ids = set(text.eos_token_ids)
        if self.stop_ids is not None:
            parts = [part.strip() for part in self.stop_ids.split(",") if part.strip()]
            if not all(part.isascii() and part.isdigit() and len(part) <= 9 for part in parts):
                shown = self.stop_ids if len(self.stop_ids) <= 80 else f"{self.stop_ids[:77]}..."
                raise UserError(f'--stop-ids {shown!r}: expected token ids, "1,50,106"')
            ids = {int(part) for part in parts}
        for stop in self.stop_token:
            check_unicode("stop token", stop)
            tokens = text.encode(stop, add_special_tokens=False)
            if len(tokens) != 1:
                raise UserError(f"--stop-token {stop!r} is {len(tokens)} tokens; expected one")
            ids.update(tokens)
        return frozenset(ids)

    def _render(self, text: ModelText) -> str:
        messages = [{"role": "user", "content": self.prompt}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        try:
            return ChatTemplate(text).render(messages)
        except InvalidArgument as error:
            raise UserError(f"{error.message}; or give --raw or --chat-prefix") from error


def refuse_flags(given: Iterable[str], *, with_program: bool) -> None:
    """Refuse flags of `run` that mean nothing with a program, or without one.

    Args:
        given: parameters of the command line, as they are called in Python.
        with_program: whether `--program` is among them.

    Raises:
        UserError: names the first such flag.
    """
    for name in given:
        flag = f"--{name.replace('_', '-')}"
        if with_program and name not in _BOTH | _PROGRAM_ONLY:
            raise UserError(f"{flag} does not go with --program")
        if not with_program and name in _PROGRAM_ONLY:
            raise UserError(f"{flag} goes with --program only")


def run_program(run: ProgramRun) -> None:
    """Answer the prompt: text on standard output as it comes, then the statistics line.

    Raises:
        UserError: a user's mistake, also one that the program's process found.
        ServiceFailed: that process broke down.
    """
    text = ModelText.load(model_folder(run.model, run.cache_dir))
    stops = run.stop_token_ids(text)
    request = {
        "token_ids": run.prompt_ids(text),
        "max_tokens": run.max_tokens,
        "stop_token_ids": sorted(stops),
        "chain": run.chain,
    }
    detokenizer = Detokenizer(text)
    statistics: dict[str, Any] = {}
    times: list[float] = []
    with _program_process(run) as (requests, answers):
        for line in answers:
            answer = json.loads(line)
            if "program" in answer:
                _check_tokenizer(run, text, answer["program"])
                times.append(time.perf_counter())
                with suppress(BrokenPipeError):  # it ended, and has said why
                    print(json.dumps(request), file=requests, flush=True)
            elif "token_ids" in answer:
                times.append(time.perf_counter())
                _show(detokenizer.push([i for i in answer["token_ids"] if i not in stops]))
            else:
                statistics = answer["statistics"]
    _show(detokenizer.flush() + "\n")
    print(statistics_line(statistics, times), file=sys.stderr)


def statistics_line(statistics: dict[str, Any], times: list[float]) -> str:
    """Return what an answer cost and why it ended, on one line.

    Args:
        statistics: what the program's process said.
        times: seconds on one clock: of the request, and of each part of the answer.
    """
    rounds, seconds = statistics["rounds"], statistics["seconds"]
    parts = [f"tokens {statistics['emitted']}"]
    if rounds:
        parts.append(f"tau {statistics['tau']:.2f}")
    after_first = times[-1] - times[1]
    speed = (statistics["emitted"] - 1) / after_first if after_first > 0 else 0.0
    parts.append(f"{speed:.1f} tok/s")
    parts.append(f"first token {1e3 * (times[1] - times[0]):.0f} ms")
    parts.append(f"draft eagle3  rounds {rounds}")
    if rounds:
        accepted, drafted = statistics["accepted"], statistics["drafted"]
        parts.append(f"accepted {accepted}/{drafted} ({100 * accepted / drafted:.0f} %)")
        for name, method in (("verify", "target_verify"), ("draft", "draft_decode")):
            parts.append(f"{name} {1e3 * seconds[method] / rounds:.1f} ms a round")
    parts.append(f"finish {statistics['finish']}")
    return "  ".join(parts)


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _check_tokenizer(run: ProgramRun, text: ModelText, program: dict[str, Any]) -> None:
    if program["tokenizer_hash"] != text.tokenizer_hash:
        raise UserError(
            f"program {run.program} has tokenizer hash {program['tokenizer_hash']}; that of "
            f"--model {run.model} is {text.tokenizer_hash}"
        )


@contextmanager
def _program_process(run: ProgramRun) -> Iterator[tuple[IO[str], IO[str]]]:
    """Start the program's process; yield its standard input and output.

    It is ended on every way out. Should this process be killed, its input ends, and with it the
    child.

    Raises:
        UserError: the child found a user's mistake.
        ServiceFailed: it broke down.
    """
    arguments = ["-m", "graph_runtime", "speculate", str(run.program.expanduser())]
    if run.threads is not None:
        arguments += ["--threads", str(run.threads)]
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(
            [sys.executable, "-P", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env=child_environment(),
            start_new_session=True,  # a terminal's Ctrl-C reaches this process alone
        )
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            yield child.stdin, child.stdout
            code = child.wait()
        except BaseException:
            child.kill()
            raise
        finally:
            child.wait()
            child.stdout.close()
            with suppress(BrokenPipeError):
                child.stdin.close()
        said.seek(0)
        lines = said.read().decode("utf-8", "replace").strip().splitlines() or ["it said nothing"]
        if code == USER_ERROR:
            raise UserError(lines[-1].removeprefix("error: "))
        if code:
            how = f"was ended by signal {-code}" if code < 0 else f"exited with status {code}"
            raise ServiceFailed(f"the program's process {how}: {lines[-1]}")

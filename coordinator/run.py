"""`splitspec run`: the three processes on this machine, one prompt, one statistics line."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
from rich.console import Console
from rich.text import Text

from coordinator.chat import Question, ask, comparison_line, statistics_line
from coordinator.launch import (
    ServiceCommand,
    ServiceFailed,
    child_environment,
    new_log_dir,
    services,
)
from splitspec.channels import CLIENT_OPTIONS
from splitspec.drafts import MODEL_METHODS
from splitspec.errors import UserError
from splitspec.folders import model_folder
from splitspec.v1 import generation_pb2, generation_pb2_grpc

READY_SECONDS = 600.0
"""Model services that have to export their programs first need minutes on a slow machine."""
CONNECT_SECONDS = 5.0
"""How long a coordinator may need to find a drafter that serves; it tries every 0.2 s."""
CONNECT_POLL_SECONDS = 0.02
QUIET_SECONDS = 15.0
"""How often a wait is mentioned where there is no terminal to redraw."""
PULL_USER_ERROR = 2
PROGRESS = re.compile(r"^(?!\d{4}-).*\b\d{1,3} ?%")
"""A bar, "export 8da8w:  40%|...", in contrast to a service's log lines, which begin with a date.
A person who waits is told of nothing else: the rest is for whoever reads the log."""
PRECISIONS = {
    "executorch": ("fp32", "8da8w", "8da4w", "q4_1"),
    "torch": ("fp32", "bf16"),
}
"""Runtime -> precisions, as the verifier has them: what it would refuse is refused before a start.
The first runtime is its default."""
METHODS = ("ngram", *MODEL_METHODS, "none")
DRAFT_SAMPLINGS = ("argmax", "coupled")
"""As the drafter has them."""
MAX_DRAFT_COUNT = 7
"""What the verifier allows as it is started here, and drafters do too: their default. A DFlash
draft whose block is shorter drafts as many as that has."""
DRAFT_COUNTS = {"eagle3": 4, "dflash": 4}
"""Method -> draft tokens a round where nobody says, if not the coordinator's default. An EAGLE-3
draft costs a pass a token, and on a CPU a window of 8 rows costs 1.6 times one of 5, which costs
little more than one row. A DFlash draft costs one pass whatever their number, but its window costs
the same: with a trial draft 1.23 times target-only's speed with 4, 0.92 with 7 (benchmarks/LOG.md).
ngram drafts no further than it has reason to."""
SERVICE_MODULES = {
    "drafter": "drafter_service",
    "verifier": "verifier_service",
    "coordinator": "coordinator",
}
MAX_SOCKET_DIR_LENGTH = 64
"""A unix socket's whole path has 103 bytes on macOS, and "/splitspec-abcdefgh/coordinator.sock" is
36 of them."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What to start. None leaves a choice to the service."""

    model: str
    draft: str
    """A drafting method, or "none": no drafter is started."""
    runtime: str | None
    precision: str | None
    threads: int | None
    trace_file: Path | None
    cache_dir: Path
    compare: bool
    """Answer a second time without drafts, and say whether the text is the same."""
    draft_model: Path | None = None
    """Folder of the draft's checkpoint; one of MODEL_METHODS has one."""
    draft_sampling: str | None = None
    block_length: int | None = None
    """dflash: slots of a block; the drafter knows how many its checkpoint allows."""

    def __post_init__(self) -> None:
        if self.draft not in METHODS:
            raise UserError(f"--draft {self.draft!r} is not {' or '.join(METHODS)}")
        self._check_draft()
        runtime = self.runtime or next(iter(PRECISIONS))
        if runtime not in PRECISIONS:
            raise UserError(f"--runtime {runtime!r} is not {' or '.join(PRECISIONS)}")
        if self.precision is not None and self.precision not in PRECISIONS[runtime]:
            known = ", ".join(PRECISIONS[runtime])
            raise UserError(f"--precision {self.precision!r}: --runtime {runtime} has {known}")
        if self.compare and self.draft == "none":
            raise UserError("--compare needs a draft to compare with; it is none")
        if self.trace_file is not None and not self.trace_file.expanduser().parent.is_dir():
            raise UserError(f"--trace-file: {self.trace_file.parent} is not a folder")

    def _check_draft(self) -> None:
        has_model = self.draft in MODEL_METHODS
        if has_model and self.draft_model is None:
            raise UserError(f"--draft {self.draft} needs --draft-model, the folder of a checkpoint")
        for name, value in (
            ("draft-model", self.draft_model),
            ("draft-sampling", self.draft_sampling),
        ):
            if value is not None and not has_model:
                owners = " or ".join(MODEL_METHODS)
                raise UserError(f"--{name} goes with --draft {owners}; it is {self.draft}")
        if self.block_length is not None and self.draft != "dflash":
            raise UserError(f"--block-length goes with --draft dflash; it is {self.draft}")
        if self.draft_model is not None and not self.draft_model.expanduser().is_dir():
            raise UserError(f"--draft-model {str(self.draft_model)!r} is not a folder")
        if self.draft_sampling not in (None, *DRAFT_SAMPLINGS):
            known = " or ".join(DRAFT_SAMPLINGS)
            raise UserError(f"--draft-sampling {self.draft_sampling!r} is not {known}")


def run_prompt(question: Question, config: RunConfig) -> None:
    """Prepare the model, start the services, stream the answer and print what it cost.

    Raises:
        UserError: a user's mistake, also one that a service found.
        SystemExit: a user's mistake that the model's puller found and told.
        ServiceFailed, AskFailed: a service could not start or answer.
    """
    config = replace(config, model=_prepared_model(config.model, config.cache_dir))
    with (
        tempfile.TemporaryDirectory(prefix="splitspec-", dir=_socket_parent()) as sockets,
        Waiting() as waiting,
        services(
            service_commands(config, Path(sockets)),
            log_dir=new_log_dir(config.cache_dir),
            timeout_seconds=READY_SECONDS,
            on_wait=waiting.show,
        ) as children,
    ):
        if config.draft != "none":
            _wait_for_drafter(children[-1].command.address)
        waiting.stop()
        _answer(question, config, children[-1].command.address)


def _wait_for_drafter(address: str) -> None:
    """Wait until the coordinator is connected to the drafter, which serves: an answer that began
    before would have to be prefilled again. One that stays away is done without.
    """
    request = generation_pb2.GenerationGetModelRequest()
    give_up = time.monotonic() + CONNECT_SECONDS
    with grpc.insecure_channel(address, CLIENT_OPTIONS) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        while time.monotonic() < give_up:
            with suppress(grpc.RpcError):
                if stub.GetModel(request, timeout=CONNECT_SECONDS).draft_method:
                    return
            time.sleep(CONNECT_POLL_SECONDS)


def service_commands(config: RunConfig, sockets: Path) -> list[ServiceCommand]:
    """Return what to start, in order, on unix sockets in the folder `sockets`."""
    names = ["verifier", "coordinator"] if config.draft == "none" else [*SERVICE_MODULES]
    address = {name: f"unix:{sockets}/{name}.sock" for name in names}
    flags: dict[str, dict[str, object]] = {
        "drafter": {"draft": config.draft, **_model_flags(config)},
        "verifier": {
            "model": config.model,
            "runtime": config.runtime,
            "precision": config.precision,
            "threads": config.threads,
            "fuse-for": _draft_folder(config),
            "cache-dir": config.cache_dir.expanduser(),
        },
        "coordinator": {
            "model": config.model,
            "verifier": address["verifier"],
            "drafter": address.get("drafter"),
            "draft-count": DRAFT_COUNTS.get(config.draft),
            "cache-dir": config.cache_dir.expanduser(),
        },
    }
    trace_file = None if config.trace_file is None else config.trace_file.expanduser().resolve()
    return [
        ServiceCommand(
            name=name,
            address=address[name],
            arguments=(
                *("-m", SERVICE_MODULES[name], "serve", "--address", address[name]),
                *_as_arguments({**flags[name], "trace-file": trace_file}),
            ),
        )
        for name in names
    ]


def _draft_folder(config: RunConfig) -> Path | None:
    return None if config.draft_model is None else config.draft_model.expanduser()


def _model_flags(config: RunConfig) -> dict[str, object]:
    """Return what a drafter with a model is told; its precision is left to it."""
    if config.draft not in MODEL_METHODS:
        return {}
    return {
        "draft-model": _draft_folder(config),
        "target": config.model,
        "rows": "fused",  # the verifier is started to fuse for this very draft
        "draft-sampling": config.draft_sampling,
        "block-length": config.block_length,
        "runtime": config.runtime,
        "threads": config.threads,
        "cache-dir": config.cache_dir.expanduser(),
    }


def _as_arguments(flags: dict[str, object]) -> Iterator[str]:
    for name, value in flags.items():
        if value is not None:
            yield from (f"--{name}", str(value))


def _answer(question: Question, config: RunConfig, address: str) -> None:
    def show(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    split = ask(address, question, show)
    show("\n")
    print(statistics_line(split.finish), file=sys.stderr)
    if config.compare:
        again = replace(question, draft_count=0, seed=split.finish.seed)
        target_only = ask(address, again, lambda _text: None)
        print(comparison_line(split, target_only), file=sys.stderr)


def _prepared_model(model: str, cache_dir: Path) -> str:
    """Return what the services call the model; pulls it first when it is not here.

    The puller is a process of its own: it shows its progress, or the one line of a user's mistake,
    on our standard error, and prints one line, the model's folder.

    Raises:
        SystemExit: a user's mistake, which the puller has told.
        ServiceFailed: the puller itself failed.
    """
    if _is_here(model, cache_dir):
        return model
    pull = ["-P", "-m", "graph_runtime", "model", "pull", model]
    done = subprocess.run(
        [sys.executable, *pull, "--cache-dir", str(cache_dir.expanduser())],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        env=child_environment(),
    )
    if done.returncode == PULL_USER_ERROR:
        raise SystemExit(PULL_USER_ERROR)
    if done.returncode:
        raise ServiceFailed(f"pulling the model {model!r} failed with status {done.returncode}")
    (folder,) = done.stdout.splitlines()
    # A GGUF file has no name of its own: its converted folder stands in.
    return model if _is_here(model, cache_dir) else folder


def _is_here(model: str, cache_dir: Path) -> bool:
    with suppress(UserError):
        return model_folder(model, cache_dir).is_dir()
    return False


def _socket_parent() -> str | None:
    """Return where to put sockets; a deep temporary folder would make their paths too long."""
    return "/tmp" if len(tempfile.gettempdir()) > MAX_SOCKET_DIR_LENGTH else None


class Waiting:
    """A spinner with the progress of what is waited for; without a terminal plain lines."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._status = self._console.status("starting the services")
        self._progress: dict[str, str] = {}
        self._text = Text()
        self._mentioned = time.monotonic()

    def __enter__(self) -> Waiting:
        self._status.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.stop()

    def show(self, name: str, line: str) -> None:
        """Say that the service `name`, which last logged `line`, is not ready yet."""
        if PROGRESS.match(line):
            self._progress[name] = line
        text = Text(f"starting the {name}  {self._progress.get(name, '')}".rstrip())
        text.truncate(max(20, self._console.width - 4), overflow="ellipsis")
        if self._console.is_terminal:
            self._status.update(text)
        elif text != self._text and time.monotonic() - self._mentioned > QUIET_SECONDS:
            self._text, self._mentioned = text, time.monotonic()
            self._console.print(text)

    def stop(self) -> None:
        """Take the spinner away."""
        self._status.stop()

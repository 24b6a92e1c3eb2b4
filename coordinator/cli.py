"""The `splitspec` command: a thin table from verbs to modules.

Services and tools run as their own modules (`python -m ...`), so that no service imports another
to be offered here. `run` and `generate` are in `coordinator/run.py` and `coordinator/chat.py`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from coordinator.chat import MAX_UINT32, AskFailed, Question, ask, statistics_line
from coordinator.launch import ServiceFailed
from coordinator.program_run import ProgramRun, refuse_flags, run_program
from coordinator.run import MAX_DRAFT_COUNT, RunConfig, run_prompt
from splitspec.commands import run_command_line
from splitspec.drafts import AUTO, find_draft
from splitspec.errors import UserError
from splitspec.folders import DEFAULT_CACHE_DIR

EXIT_FAILURE, EXIT_USER_ERROR, EXIT_INTERRUPTED = 1, 2, 130

VERBS: dict[tuple[str, str], tuple[str, str, str]] = {
    ("serve", "verifier"): (
        "verifier_service",
        "serve",
        "Run the target and decide which draft tokens stand.",
    ),
    ("serve", "drafter"): ("drafter_service", "serve", "Propose draft tokens for a target."),
    ("serve", "coordinator"): (
        "coordinator",
        "serve",
        "Answer prompts with a verifier and a drafter that run already.",
    ),
    ("export", "target"): (
        "verifier_service",
        "export target",
        "Lower the target to a program in the cache, unless it is there.",
    ),
    ("export", "eagle3"): (
        "drafter_service",
        "export eagle3",
        "Lower an EAGLE-3 draft to a program in the cache, unless it is there.",
    ),
    ("export", "dflash"): (
        "drafter_service",
        "export dflash",
        "Lower a DFlash draft to a program in the cache, unless it is there.",
    ),
    ("export", "speculator"): (
        "graph_runtime",
        "export speculator",
        "Lower a target and its EAGLE-3 draft to one program, for `run --program`.",
    ),
    ("model", "pull"): ("graph_runtime", "model pull", "Download and convert a model."),
    ("model", "list"): (
        "graph_runtime",
        "model list",
        "List models, pulled and known ones, and the trained drafts that ship for them.",
    ),
    ("model", "show"): (
        "graph_runtime",
        "model show",
        "Show a model's shape, hashes, licence and trained drafts; or a draft's.",
    ),
    ("train", "rollouts"): (
        "drafter_service",
        "train rollouts",
        "Let a target write the text that its drafts are trained on.",
    ),
    ("train", "eagle3"): ("drafter_service", "train eagle3", "Train an EAGLE-3 draft on it."),
    ("train", "dflash"): ("drafter_service", "train dflash", "Train a DFlash draft on it."),
    ("train", "evaluate"): (
        "drafter_service",
        "train evaluate",
        "Measure a draft's tau by the served verifier's rule.",
    ),
    ("train", "plot"): ("drafter_service", "train plot", "Draw a run's loss and tau as a PNG."),
}
"""(group, verb) -> (module, its verb, help). What follows the verb is passed on as it is."""

GROUPS = {
    "serve": "Serve one of the three processes.",
    "export": "Export a model to an ExecuTorch program.",
    "model": "Pull, list and show models.",
    "train": "Train drafts on the target's own text, and measure them.",
}

app = typer.Typer(
    help="Speculative decoding split across services: the target's exact text, sooner.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Prompt = Annotated[str, typer.Argument(help='What to ask. "-" reads it from standard input.')]
Chat = Annotated[bool, typer.Option("--chat/--raw", help="Chat, or continue the text as it is.")]
System = Annotated[str | None, typer.Option(help="System message of the chat.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy, the default.")]
TopK = Annotated[
    int | None, typer.Option(min=0, max=MAX_UINT32, help="Keep the k likeliest tokens.")
]
TopP = Annotated[float | None, typer.Option(help="Keep this much probability.")]
MinP = Annotated[float | None, typer.Option(help="Drop tokens below this share of the likeliest.")]
Seed = Annotated[
    int | None, typer.Option(min=0, max=2**64 - 1, help="Repeats a sampled answer exactly.")
]
MaxTokens = Annotated[
    int | None, typer.Option(min=1, max=MAX_UINT32, help="Most tokens; default: context's end.")
]
Stop = Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")]
DraftCount = Annotated[
    int | None, typer.Option(min=0, max=MAX_UINT32, help="Draft tokens a round; 0: target only.")
]
Program = Annotated[Path | None, typer.Option(help="Speculator program that answers alone.")]
Chain = Annotated[int | None, typer.Option(help="--program: draft tokens a round.")]
ChatPrefix = Annotated[
    str | None, typer.Option(help="--program: before the prompt, for the chat template.")
]
ChatSuffix = Annotated[
    str | None, typer.Option(help="--program: after the prompt, for the chat template.")
]
StopIds = Annotated[
    str | None, typer.Option(help='--program: end tokens, "1,50", for the model\'s own.')
]
StopToken = Annotated[
    list[str] | None, typer.Option(help="--program: text of a further end token; repeatable.")
]
BosId = Annotated[
    int | None,
    typer.Option(min=-1, max=MAX_UINT32, help="--program: token put first; -1: none."),
]
CacheDir = Annotated[
    Path, typer.Option(envvar="SPLITSPEC_CACHE_DIR", help="Models, programs and logs.")
]


@app.command()
def run(
    context: typer.Context,
    prompt: Prompt,
    model: Annotated[str, typer.Option(help="Pulled model, or a folder.")] = "smollm2-135m",
    draft: Annotated[
        str,
        typer.Option(
            help="ngram; eagle3 or dflash: the trained draft that ships for the model; auto: the "
            "better one of them, else ngram; a draft's folder; none: target only."
        ),
    ] = AUTO,
    draft_model: Annotated[
        Path | None, typer.Option(help="A draft's folder, in place of one that ships.")
    ] = None,
    block_length: Annotated[
        int | None,
        typer.Option(min=2, max=MAX_UINT32, help="dflash: slots of a block; default: as trained."),
    ] = None,
    draft_sampling: Annotated[
        str | None,
        typer.Option(help="eagle3, dflash: argmax or coupled; how sampled answers are drafted."),
    ] = None,
    draft_count: Annotated[
        int | None,
        typer.Option(min=0, max=MAX_DRAFT_COUNT, help="Draft tokens a round; 0: target only."),
    ] = None,
    max_tokens: MaxTokens = 256,
    chat: Chat = True,
    system: System = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = None,
    stop: Stop = None,
    compare: Annotated[bool, typer.Option(help="Answer target-only too, and compare.")] = False,
    runtime: Annotated[str | None, typer.Option(help="executorch or torch.")] = None,
    precision: Annotated[str | None, typer.Option(help="Precision of the target.")] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Threads of the target, and of a draft.")
    ] = None,
    trace_file: Annotated[Path | None, typer.Option(help="JSON-lines file for spans.")] = None,
    program: Program = None,
    chain: Chain = None,
    chat_prefix: ChatPrefix = None,
    chat_suffix: ChatSuffix = None,
    stop_ids: StopIds = None,
    stop_token: StopToken = None,
    bos_id: BosId = None,
    cache_dir: CacheDir = DEFAULT_CACHE_DIR,
) -> None:
    """Answer a prompt with a drafter, a verifier and a coordinator on this machine.

    With --program one exported speculator answers, in place of the three.
    """
    with _exit_codes():
        refuse_flags(_given(context), with_program=program is not None)
        if program is not None:
            run_program(
                ProgramRun(
                    program=program,
                    prompt=_read(prompt),
                    model=model,
                    max_tokens=max_tokens or 1,
                    chat=chat,
                    system=system,
                    chat_prefix=chat_prefix,
                    chat_suffix=chat_suffix,
                    stop_ids=stop_ids,
                    stop_token=tuple(stop_token or ()),
                    bos_id=bos_id,
                    chain=chain,
                    threads=threads,
                    cache_dir=cache_dir,
                )
            )
            return
        question = Question(
            prompt=_read(prompt),
            chat=chat,
            system=system,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            max_tokens=max_tokens,
            stop=tuple(stop or ()),
            draft_count=draft_count,
        )
        named = find_draft(draft, draft_model, target=model)
        config = RunConfig(
            model=model,
            draft=named.method,
            runtime=runtime,
            precision=precision,
            threads=threads,
            trace_file=trace_file,
            cache_dir=cache_dir,
            compare=compare,
            draft_model=named.folder,
            draft_sampling=draft_sampling,
            block_length=block_length,
        )
        run_prompt(question, config)


@app.command()
def generate(
    prompt: Prompt,
    address: Annotated[
        # SPLITSPEC_ADDRESS is where a service listens, which need not be where it is reached.
        str, typer.Option(envvar="SPLITSPEC_COORDINATOR", help="A coordinator's address.")
    ] = "127.0.0.1:7100",
    chat: Chat = True,
    system: System = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = None,
    max_tokens: MaxTokens = None,
    stop: Stop = None,
    draft_count: DraftCount = None,
    stats: Annotated[bool, typer.Option(help="Print the statistics line.")] = False,
) -> None:
    """Ask a running coordinator and stream its answer."""
    with _exit_codes():
        question = Question(
            prompt=_read(prompt),
            chat=chat,
            system=system,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            max_tokens=max_tokens,
            stop=tuple(stop or ()),
            draft_count=draft_count,
        )
        answer = ask(address, question, _show)
        _show("\n")
        if stats:
            print(statistics_line(answer.finish), file=sys.stderr)


@app.command()
def health(
    address: Annotated[str, typer.Argument(help="host:port or unix:/path")],
) -> None:
    """Print a service's health; exit with 0 when it is SERVING."""
    _become("splitspec.probe", [address])


def _become(module: str, arguments: list[str]) -> None:
    """Replace this process, so that signals and exit codes are the module's own."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *arguments])


def _add_verb(group: typer.Typer, verb: str, module: str, module_verb: str, text: str) -> None:
    @group.command(
        verb,
        help=text,
        add_help_option=False,  # --help is the module's
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def pass_on(context: typer.Context) -> None:
        _become(module, [*module_verb.split(), *context.args])


def _add_groups() -> None:
    for name, text in GROUPS.items():
        group = typer.Typer(help=text, no_args_is_help=True)
        for (owner, verb), passed_on in VERBS.items():
            if owner == name:
                _add_verb(group, verb, *passed_on)
        app.add_typer(group, name=name)


def _given(context: typer.Context) -> list[str]:
    """Return the parameters that the command line gives, by their names in Python."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]


def _read(prompt: str) -> str:
    if prompt != "-":
        return prompt
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError:
        raise UserError("the prompt is not UTF-8") from None


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@contextlib.contextmanager
def _exit_codes() -> Iterator[None]:
    """Turn the ends of a command into one line and an exit code; SIGTERM unwinds like Ctrl-C."""

    def unwind(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, unwind)
    try:
        yield
    except UserError as error:
        _fail(str(error), EXIT_USER_ERROR)
    except (AskFailed, ServiceFailed) as error:
        _fail(str(error), EXIT_FAILURE)
    except BrokenPipeError:
        # The reader of our output went away; a flush at exit would only complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(EXIT_FAILURE) from None
    except KeyboardInterrupt:
        print(file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _fail(line: str, code: int) -> None:
    print(f"error: {line}", file=sys.stderr)
    raise typer.Exit(code) from None


_add_groups()


def main() -> None:
    """Run the command line."""
    run_command_line(app)


if __name__ == "__main__":
    main()

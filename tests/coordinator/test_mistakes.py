"""A user's mistake on the command line: one line, exit code 2, and nothing is started for it."""

from __future__ import annotations

import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator import run
from coordinator.chat import Question, statistics_line
from coordinator.run import RunConfig
from drafter_service.config import (
    DEFAULT_DRAFT_COUNTS,
    DRAFT_SAMPLINGS,
    METHODS,
    MODEL_METHODS,
)
from graph_runtime.load import TORCH_DTYPES
from splitspec.errors import UserError
from splitspec.v1 import generation_pb2
from verifier_service.config import DEFAULT_PRECISIONS, VerifierConfig

ROOT = Path(__file__).parents[2]
MISTAKES = {
    "run --temprature 1 x": "no such option --temprature (did you mean --temperature?)",
    "generate": "missing argument 'prompt'",
    "generate --top-k -5 x": "invalid value for '--top-k': ",
    "generate --top-k 4294967296 x": "invalid value for '--top-k': ",
    "generate --top-p 0 x": "--top-p is 0.0; expected above 0, up to 1",
    "generate --temperature nan x": "--temperature is nan; expected 0..100",
    "generate --address 127.0.0.1:99999 x": "127.0.0.1:99999: port '99999' is not valid",
    "generate --address nowhere x": "'nowhere' is not an address: expected host:port or unix:/path",
    "generate --raw --system s x": "--system goes with a chat",
    "helth": "no such command 'helth'. Did you mean 'health'?",
    "health 127.0.0.1:99999": "127.0.0.1:99999: port '99999' is not valid",
    "serve drafter --draft-cuont 1": "no such option --draft-cuont",
    "serve coordinator": "missing option '--model'",
    "model pull": "missing argument 'name'",
    "run --max-tokens 0 x": "invalid value for '--max-tokens': ",
    "run --draft-count 8 x": "invalid value for '--draft-count': ",
    "run --draft foo x": "--draft 'foo' is neither a folder nor one of ngram, eagle3, dflash, none",
    "run --draft . x": ". holds no config.json",
    "run --draft . --draft-model . x": "--draft '.' names a draft, and --draft-model . too",
    "run --model other --draft eagle3 x": "--draft eagle3: no such trained draft ships for 'other'",
    "run --model other --draft dflash x": "--draft dflash: no such trained draft ships for 'other'",
    "run --draft-model . x": ". holds no config.json",
    "run --draft ngram --draft-model . x": "--draft-model goes with --draft eagle3 or dflash; it",
    "run --draft none --draft-sampling argmax x": "--draft-sampling goes with --draft eagle3 or ",
    "run --draft eagle3 --draft-model /nowhere x": "--draft-model '/nowhere' is not a folder",
    "run --draft dflash --draft-model /nowhere x": "--draft-model '/nowhere' is not a folder",
    "run --draft eagle3 --draft-model . --block-length 4 x": "--block-length goes with --draft dfl",
    "run --draft eagle3 --draft-model . --draft-sampling top x": "--draft-sampling 'top' is not",
    "run --draft dflash --draft-model . --draft-sampling top x": "--draft-sampling 'top' is not",
    "run --runtime foo x": "--runtime 'foo' is not executorch or torch",
    "run --precision foo x": "--precision 'foo': --runtime executorch has fp32, 8da8w",
    "run --runtime torch --precision 8da8w x": "--precision '8da8w': --runtime torch has",
}


def splitspec(
    *arguments: str | bytes, cache: Path, typed: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """Run the command with the only model it may ask for missing from `cache`."""
    return subprocess.run(
        [sys.executable, "-m", "coordinator.cli", *arguments],
        input=typed,
        capture_output=True,
        cwd=ROOT,
        env={"SPLITSPEC_CACHE_DIR": str(cache), "LC_ALL": "C", "PIP_NO_INDEX": "1"},
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line_and_starts_nothing(line: str, tmp_path: Path) -> None:
    done = splitspec(*line.split(), cache=tmp_path)
    assert (done.returncode, done.stdout) == (2, b"")
    told = done.stderr.decode()
    assert told.startswith(f"error: {MISTAKES[line]}")
    assert told.count("\n") == 1
    assert not list(tmp_path.iterdir()), "nothing is pulled, started or logged"


@pytest.mark.parametrize("verb", ["generate", "run"])
@pytest.mark.parametrize(("prompt", "typed"), [("-", b"\xff\xfe"), (b"\xff\xfe", b"")])
def test_a_prompt_that_is_not_utf8_is_one_line(
    verb: str, prompt: str | bytes, typed: bytes, tmp_path: Path
) -> None:
    done = splitspec(verb, prompt, cache=tmp_path, typed=typed)
    assert (done.returncode, done.stderr) == (2, b"error: the prompt is not UTF-8\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("line", ["--help", "run --help", "serve --help", "serve drafter --help"])
def test_help_is_no_mistake(line: str, tmp_path: Path) -> None:
    done = splitspec(*line.split(), cache=tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"Usage" in done.stdout


def test_no_command_at_all_shows_the_help(tmp_path: Path) -> None:
    done = splitspec(cache=tmp_path)
    assert done.returncode == 2
    shown = done.stdout + done.stderr
    assert b"Usage" in shown
    assert b"error" not in shown


def test_run_knows_the_choices_of_the_services_that_it_starts() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # executorch warns of itself
        programs = pytest.importorskip("graph_runtime.programs")
    known = {"executorch": programs.PRECISIONS, "torch": tuple(TORCH_DTYPES)}
    assert known == run.PRECISIONS
    assert list(run.PRECISIONS) == list(DEFAULT_PRECISIONS)
    assert VerifierConfig.runtime == next(iter(run.PRECISIONS))
    assert set(run.METHODS) == {*METHODS, "none"}
    assert set(run.MODEL_METHODS) == set(MODEL_METHODS)
    assert set(run.DRAFT_COUNTS) == set(run.MODEL_METHODS)
    assert run.DRAFT_SAMPLINGS == DRAFT_SAMPLINGS
    assert VerifierConfig.max_draft_count == run.MAX_DRAFT_COUNT
    assert set(DEFAULT_DRAFT_COUNTS.values()) == {run.MAX_DRAFT_COUNT}


@pytest.mark.parametrize(
    ("change", "named"),
    [({"stop": ("a", "")}, "stop string is empty"), ({"system": "\udcff"}, "message is not UTF-8")],
)
def test_a_question_that_nobody_answers_is_refused(change: dict[str, object], named: str) -> None:
    with pytest.raises(UserError, match=named):
        replace(Question(prompt="hello"), **change)  # type: ignore[arg-type]


def test_the_statistics_say_how_it_was_drafted_and_why_it_ended() -> None:
    cost = generation_pb2.GenerationStatistics(round_count=3, draft_method="ngram")
    finish = generation_pb2.Finish(
        reason=generation_pb2.FINISH_REASON_LENGTH, seed=5, statistics=cost
    )
    line = statistics_line(finish)
    assert line.endswith("draft ngram  rounds 3  accepted 0/0  finish length  seed 5")
    cost.draft_method = ""
    finish.statistics.CopyFrom(cost)
    assert statistics_line(finish).endswith("draft none  rounds 3  finish length  seed 5")


@pytest.mark.parametrize("method", ["ngram", "eagle3", "dflash"])
def test_the_statistics_line_tells_the_methods_apart(method: str) -> None:
    cost = generation_pb2.GenerationStatistics(
        round_count=3, draft_token_count=6, accepted_token_count=3, draft_method=method
    )
    line = statistics_line(generation_pb2.Finish(statistics=cost))
    assert line.split("  ")[4:] == [
        f"draft {method}",
        "rounds 3",
        "accepted 3/6 (50 %)",
        "finish unspecified",
        "seed 0",
    ]


def test_a_wait_shows_progress_and_no_other_log_line(capsys: pytest.CaptureFixture[str]) -> None:
    waiting = run.Waiting()
    shown = []
    for line in (
        "Error in cpuinfo: failed to parse the list of present processors",
        "2026-01-01 10:00:00,123 verifier INFO VerifierConfig(model='a', share='40%')",
        "export 8da8w:  40%|####      | 2/5 [00:10<00:15,  5.10s/phase]",
        "I 00:00:00.001 executorch: a line in between",
    ):
        waiting._mentioned = float("-inf")
        waiting.show("verifier", line)
        shown.append(capsys.readouterr().err.strip())
    bar = "starting the verifier  export 8da8w:  40%|####      | 2/5 [00:10<00:15,  5.10s/phase]"
    assert shown[0] == "starting the verifier"
    assert shown[1] == ""
    assert bar.startswith(shown[2].rstrip("…"))
    assert "40%" in shown[2]
    assert shown[3] == ""


def test_a_runtime_left_open_is_checked_as_the_default(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--runtime executorch has"):
        RunConfig(
            model="tiny",
            draft="ngram",
            runtime=None,
            precision="bf16",
            threads=None,
            trace_file=None,
            cache_dir=tmp_path,
            compare=False,
        )

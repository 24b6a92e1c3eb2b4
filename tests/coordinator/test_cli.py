"""The `splitspec` command: what it passes on, what it prints, how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

import drafter_service.__main__
import verifier_service.__main__
from coordinator import cli, run
from coordinator.chat import Answer, Question, comparison_line
from coordinator.run import RunConfig, service_commands
from splitspec import drafts
from splitspec.errors import UserError
from splitspec.v1 import generation_pb2
from tests.coordinator.fake_service import FakeGeneration, fake_server
from tests.shipped import lay_draft

ROOT = Path(__file__).parents[2]
TEXT = "héllo wörld again \n"
SPLITSPEC = [sys.executable, "-m", "coordinator.cli"]


@pytest.fixture
def generation(tmp_path: Path) -> Iterator[FakeGeneration]:
    """A Generation service at unix:{tmp_path}/generation.sock."""
    fake = FakeGeneration()
    server = fake_server(f"unix:{tmp_path}/generation.sock", fake)
    yield fake
    server.stop(0).wait()


def generate(
    tmp_path: Path, *arguments: str, typed: str | None = None
) -> subprocess.CompletedProcess[str]:
    address = f"unix:{tmp_path}/generation.sock"
    return subprocess.run(
        [*SPLITSPEC, "generate", "--address", address, *arguments],
        input=typed,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=False,
    )


def test_generate_prints_the_answer_and_nothing_else(
    generation: FakeGeneration, tmp_path: Path
) -> None:
    done = generate(tmp_path, "hello")
    assert (done.returncode, done.stdout, done.stderr) == (0, TEXT, "")
    request = generation.requests[0]
    assert [(m.role, m.content) for m in request.conversation.messages] == [("user", "hello")]
    assert not request.HasField("max_tokens")
    assert not request.sampling.HasField("temperature")


def test_every_flag_of_generate_reaches_the_request(
    generation: FakeGeneration, tmp_path: Path
) -> None:
    flags = "--raw --temperature 0.7 --top-k 0 --top-p 0.9 --min-p 0.05 --seed 18446744073709551615"
    more = "--max-tokens 5 --stop END --stop . --draft-count 3 --stats -"
    done = generate(tmp_path, *flags.split(), *more.split(), typed="continue thís")
    assert done.returncode == 0
    assert done.stderr == (
        "tokens 3  tau 2.00  25.0 tok/s  first token 210 ms  draft ngram  rounds 1  "
        "accepted 1/4 (25 %)  finish stop  seed 11\n"
    )
    request = generation.requests[0]
    assert (request.text, request.max_tokens, request.draft_count) == ("continue thís", 5, 3)
    assert list(request.stop) == ["END", "."]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.7, 0.9, 0.05)
    assert sampling.HasField("top_k")
    assert sampling.seed == 2**64 - 1


def test_a_refused_request_is_the_users_mistake(generation: FakeGeneration, tmp_path: Path) -> None:
    done = generate(tmp_path, "hello", "--draft-count", "1000")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: draft_count is 1000; expected 0..7\n"
    assert len(generation.requests) == 1


def test_a_failing_service_is_one_line_and_a_failure(
    generation: FakeGeneration, tmp_path: Path
) -> None:
    done = generate(tmp_path, "hello", "--max-tokens", "99")
    assert (done.returncode, done.stderr) == (1, "error: INTERNAL: the engine failed\n")
    assert len(generation.requests) == 1


def test_an_answer_that_breaks_off_is_told_on_a_line_of_its_own(
    generation: FakeGeneration, tmp_path: Path
) -> None:
    done = generate(tmp_path, "break off")
    assert (done.returncode, done.stdout) == (1, TEXT)
    assert done.stderr == "error: the answer broke off: the verifier was lost\n"
    assert len(generation.requests) == 1


def test_a_service_that_is_no_coordinator_is_named(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/generation.sock"
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_insecure_port(address)
    server.start()
    try:
        done = generate(tmp_path, "hello")
    finally:
        server.stop(0).wait()
    assert done.returncode == 1
    assert done.stderr == f"error: {address} is not a coordinator: it serves no Generation\n"


def test_a_service_that_is_not_there_is_one_line_that_names_it(tmp_path: Path) -> None:
    done = generate(tmp_path, "hello")
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: no answer from unix:{tmp_path}/generation.sock: ")
    assert done.stderr.count("\n") == 1


def test_generate_asks_the_coordinator_that_the_environment_names(
    generation: FakeGeneration, tmp_path: Path
) -> None:
    """SPLITSPEC_ADDRESS is where a service listens: it must not be asked."""
    variables = {
        "SPLITSPEC_COORDINATOR": f"unix:{tmp_path}/generation.sock",
        "SPLITSPEC_ADDRESS": f"unix:{tmp_path}/nobody.sock",
    }
    done = subprocess.run(
        [*SPLITSPEC, "generate", "hello"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **variables},
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, TEXT), done.stderr
    assert len(generation.requests) == 1


def test_an_empty_prompt_is_the_users_mistake(tmp_path: Path) -> None:
    done = generate(tmp_path, "-", typed=" \n")
    assert (done.returncode, done.stderr) == (2, "error: the prompt is empty\n")


def test_ctrl_c_ends_quietly_and_cancels_the_call(
    generation: FakeGeneration, tmp_path: Path
) -> None:
    with subprocess.Popen(
        [*SPLITSPEC, "generate", "--address", f"unix:{tmp_path}/generation.sock", "forever"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    ) as command:
        assert command.stdout is not None
        assert command.stdout.read(1)
        os.kill(command.pid, signal.SIGINT)
        _, errors = command.communicate(timeout=20)
    assert (command.returncode, errors.strip()) == (130, b"")
    assert generation.cancelled.wait(5), "law L7: the call must end with its client"


@pytest.mark.parametrize(("group", "verb"), sorted(cli.VERBS))
def test_a_verb_becomes_its_module_with_all_its_arguments(
    group: str, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []

    def record(_path: str, arguments: list[str]) -> None:
        calls.append(arguments)

    monkeypatch.setattr(os, "execv", record)
    result = CliRunner().invoke(cli.app, [group, verb, "x", "--flag", "a b", "--help"])
    assert result.exit_code == 0, result.output
    module, module_verb, text = cli.VERBS[group, verb]
    expected = ["-P", "-m", module, *module_verb.split(), "x", "--flag", "a b", "--help"]
    assert calls == [[sys.executable, *expected]]
    listed = CliRunner().invoke(cli.app, [group, "--help"], env={"COLUMNS": "120"}).output
    assert text in listed
    assert "python -m" not in listed


def config(tmp_path: Path, draft: str = "ngram", *, compare: bool = False) -> RunConfig:
    return RunConfig(
        model="tiny",
        draft=draft,
        runtime="torch",
        precision=None,
        threads=2,
        trace_file=None,
        cache_dir=tmp_path,
        compare=compare,
    )


@pytest.mark.parametrize(
    ("flags", "method", "shipped"),
    [
        ([], "eagle3", "tiny-eagle3"),
        (["--draft", "dflash"], "dflash", "tiny-dflash"),
        (["--draft", "{}/tiny-dflash"], "dflash", "tiny-dflash"),
        (["--draft-model", "{}/tiny-dflash"], "dflash", "tiny-dflash"),
        (["--draft", "ngram"], "ngram", None),
        (["--draft", "none"], "none", None),
        (["--model", "other"], "ngram", None),
    ],
)
def test_run_drafts_with_what_ships_for_its_model_unless_told(
    flags: list[str],
    method: str,
    shipped: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("eagle3", "dflash"):
        lay_draft(tmp_path, "tiny", name)
    monkeypatch.setattr(drafts, "weights_dir", lambda: tmp_path)
    asked: list[RunConfig] = []
    monkeypatch.setattr(cli, "run_prompt", lambda _question, config: asked.append(config))
    given = [flag.format(tmp_path) for flag in flags]
    result = CliRunner().invoke(cli.app, ["run", "--model", "tiny", *given, "hello"])
    assert result.exit_code == 0, result.output
    folder = None if shipped is None else tmp_path / shipped
    assert [(c.draft, c.draft_model) for c in asked] == [(method, folder)]


def test_run_starts_three_services_with_the_flags_they_know(tmp_path: Path) -> None:
    lines = {
        command.name: " ".join(command.arguments)
        for command in service_commands(config(tmp_path), tmp_path)
    }
    at = f"unix:{tmp_path}"
    assert lines == {
        "drafter": f"-m drafter_service serve --address {at}/drafter.sock --draft ngram",
        "verifier": f"-m verifier_service serve --address {at}/verifier.sock --model tiny "
        f"--runtime torch --threads 2 --cache-dir {tmp_path}",
        "coordinator": f"-m coordinator serve --address {at}/coordinator.sock --model tiny "
        f"--verifier {at}/verifier.sock --drafter {at}/drafter.sock --cache-dir {tmp_path}",
    }
    without = service_commands(config(tmp_path, "none"), tmp_path)
    assert [command.name for command in without] == ["verifier", "coordinator"]
    assert "--drafter" not in without[1].arguments


@pytest.mark.parametrize("method", run.MODEL_METHODS)
def test_run_of_a_draft_model_makes_verifier_and_drafter_agree_on_fused_rows(
    method: str, tmp_path: Path
) -> None:
    (tmp_path / "head").mkdir()
    with_model = replace(
        config(tmp_path), draft=method, draft_model=tmp_path / "head", draft_sampling="coupled"
    )
    lines = {
        command.name: " ".join(command.arguments)
        for command in service_commands(with_model, tmp_path)
    }
    assert lines["drafter"].endswith(
        f"--draft {method} --draft-model {tmp_path}/head --target tiny --rows fused "
        f"--draft-sampling coupled --runtime torch --threads 2 --cache-dir {tmp_path}"
    )
    assert lines["verifier"].endswith(
        f"--model tiny --runtime torch --threads 2 --fuse-for {tmp_path}/head "
        f"--cache-dir {tmp_path}"
    )
    assert "--draft-count 4 " in lines["coordinator"], "a window of 5 rows costs little more than 1"


@pytest.mark.parametrize(("method", "block_length"), [("eagle3", None), ("dflash", 5)])
def test_run_starts_services_with_flags_that_they_take(
    method: str, block_length: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "head").mkdir()
    with_model = replace(
        config(tmp_path),
        draft=method,
        draft_model=tmp_path / "head",
        draft_sampling="argmax",
        block_length=block_length,
    )
    services = {"drafter": drafter_service.__main__, "verifier": verifier_service.__main__}
    for name, service in services.items():
        monkeypatch.setattr(service, "run_service", lambda serving: serving.close())
        monkeypatch.setattr(service, "model_folder", lambda *_: tmp_path, raising=False)
        (command,) = (c for c in service_commands(with_model, tmp_path) if c.name == name)
        told = "--block-length 5" in " ".join(command.arguments)
        assert told == (name == "drafter" and block_length is not None)
        result = CliRunner().invoke(service.app, list(command.arguments[2:]))
        assert result.exit_code == 0, (name, result.output, result.exception)


@pytest.mark.parametrize("length", [run.MAX_SOCKET_DIR_LENGTH, run.MAX_SOCKET_DIR_LENGTH + 1, 200])
def test_the_longest_socket_path_is_one_that_every_system_takes(
    length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: a temporary folder of 72 characters made paths of 108, which Linux refuses."""
    monkeypatch.setattr(run.tempfile, "gettempdir", lambda: "/" + "t" * (length - 1))
    folder = Path(run._socket_parent() or run.tempfile.gettempdir()) / "splitspec-abcdefgh"
    paths = [command.address for command in service_commands(config(tmp_path), folder)]
    assert max(len(path.removeprefix("unix:")) for path in paths) <= 103


def test_run_streams_an_answer_compares_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models" / "tiny" / "config.json").write_text("{}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    fake = "tests.coordinator.fake_service"
    monkeypatch.setattr(run, "SERVICE_MODULES", dict.fromkeys(run.SERVICE_MODULES, fake))
    run.run_prompt(Question(prompt="hello"), config(tmp_path, compare=True))
    shown = capsys.readouterr()
    assert shown.out == TEXT
    statistics, comparison = shown.err.strip().split("\n")[-2:]
    assert statistics.startswith("tokens 3  tau 2.00  25.0 tok/s")
    assert comparison == "target only 10.0 tok/s  speed-up 2.50x  text identical"
    logs = sorted(path.name for path in tmp_path.glob("logs/run-*/*"))
    assert logs == ["coordinator.log", "drafter.log", "verifier.log"]


def test_a_model_that_cannot_be_had_is_the_users_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.CompletedProcess([], run.PULL_USER_ERROR, stdout="")
    monkeypatch.setattr(run.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(SystemExit) as ended:  # the puller has said why
        run.run_prompt(Question(prompt="hello"), config(tmp_path))
    assert ended.value.code == 2


def test_a_comparison_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--compare needs a draft"):
        config(tmp_path, "none", compare=True)


def test_a_comparison_says_when_law_l4_is_broken() -> None:
    finish = generation_pb2.Finish()
    same, other = Answer(token_ids=[1], finish=finish), Answer(token_ids=[2], finish=finish)
    assert "DIFFERENT" in comparison_line(same, other)
    assert "identical" in comparison_line(same, same)

"""`train evaluate` on tiny targets with drafts that know all, something or nothing."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drafter_service.training.answers import print_results
from drafter_service.training.commands.evaluate import evaluate as command
from drafter_service.training.evaluate import draft_method, evaluate
from drafter_service.training.evaluate_config import (
    EvaluateConfig,
    parse_counts,
    parse_temperatures,
)
from splitspec.errors import UserError
from tests.dflash_planted import VOCAB_SIZE, write_planted_draft, write_planted_target
from tests.dflash_planted import write_random_draft as write_random_dflash
from tests.eagle3_copy import write_copy_head, write_copy_target, write_random_head
from tests.tiny import write_tiny_model
from verifier_service.config import DEFAULT_PRECISIONS

ROOT = Path(__file__).parents[3]
CLASSES = ("maths", "chat")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("e")
    write_copy_target(folder / "copy")
    write_copy_head(folder / "head")
    write_random_head(folder / "random-head")
    write_planted_target(folder / "planted")
    write_planted_draft(folder / "draft")
    write_random_dflash(folder / "random-draft")
    write_tiny_model(folder / "tiny", seed=3)
    write_prompts(folder / "prompts.jsonl", 4)
    return folder


def write_prompts(file: Path, count: int) -> Path:
    rng = random.Random(1)
    lines: list[dict[str, Any]] = [
        {"class": CLASSES[i % 2], "prompt_ids": rng.choices(range(3, VOCAB_SIZE), k=5 + 9 * i)}
        for i in range(count - 1)
    ]
    lines.append({"class": "chat", "prompt": "Who is there?"})
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return file


def config(folder: Path, target: str, draft: str, **fields: Any) -> EvaluateConfig:
    given: dict[str, Any] = {
        "target": str(folder / target),
        "draft_model": folder / draft,
        "prompts": folder / "prompts.jsonl",
        "draft_counts": (1, 3, 5),
        "max_tokens": 25,
        "max_context_length": 128,
        "runtime": "torch",
        "draft_runtime": "torch",
        "cache_dir": folder / "cache",
    }
    return EvaluateConfig(**{**given, **fields})


def taus(result: dict[str, Any]) -> dict[tuple[float, int], float]:
    return {(one["temperature"], one["draft_count"]): one["tau"] for one in result["results"]}


def test_a_head_that_copies_the_target_gives_k_plus_1_greedy_and_coupled(folder: Path) -> None:
    result = evaluate(config(folder, "copy", "head"))
    assert result["method"] == "eagle3"
    assert result["draft_sampling"] == "coupled"
    # 24 tokens after the first: rounds of 2, 4 and 6 come out even.
    assert taus(result) == {(t, k): k + 1 for t in (0.0, 0.7) for k in (1, 3, 5)}
    for one in result["results"]:
        assert one["acceptance"] == [1.0] * one["draft_count"]
        assert one["answers"] == 4
        assert one["tokens_after_first"] == 4 * 24
        assert {name: own["answers"] for name, own in one["by_class"].items()} == {
            "maths": 2,
            "chat": 2,
        }


def test_a_dflash_draft_that_knows_the_target_gives_k_plus_1_greedy_and_coupled_only(
    folder: Path,
) -> None:
    coupled = evaluate(config(folder, "planted", "draft", draft_sampling="coupled"))
    assert coupled["method"] == "dflash"
    assert taus(coupled) == {(t, k): k + 1 for t in (0.0, 0.7) for k in (1, 3, 5)}
    default = evaluate(config(folder, "planted", "draft", sessions=3))
    assert default["draft_sampling"] == "argmax"
    assert all(taus(default)[0.0, k] == k + 1 for k in (1, 3, 5))
    # Its argmax is no sample of the target: some stand, and not all.
    assert all(1.1 < taus(default)[0.7, k] < k + 1 for k in (1, 3, 5))


@pytest.mark.parametrize(
    ("target", "draft"), [("copy", "random-head"), ("planted", "random-draft")]
)
def test_a_random_draft_gives_little_more_than_1(folder: Path, target: str, draft: str) -> None:
    result = evaluate(config(folder, target, draft, draft_counts=(4,)))
    assert all(1.0 <= tau < 1.1 for tau in taus(result).values())


def test_sessions_that_share_steps_change_no_figure(folder: Path) -> None:
    def figures(sessions: int) -> list[dict[str, Any]]:
        own = config(folder, "planted", "draft", sessions=sessions, draft_counts=(3,))
        return [{**one, "seconds": 0} for one in evaluate(own)["results"]]

    assert figures(1) == figures(3) == figures(4)


def test_the_tables_have_a_row_for_each_temperature_and_k(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_results(evaluate(config(folder, "copy", "head", draft_counts=(1, 3)))["results"])
    lines = [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["T", "K", "answers", "tau", "no loop", "maths", "chat"]
    assert [line[:4] for line in lines[1:5]] == [
        [t, k, "4", f"{int(k) + 1}.000"] for t in ("0", "0.7") for k in ("1", "3")
    ]
    assert lines[7] == ["T", "K", "answers", "tau", "maths", "chat"]
    assert lines[14] == ["T", "K", "1", "2", "3"]
    assert lines[15] == ["0", "1", "1.000", "-", "-"]
    assert lines[16] == ["0", "3", "1.000", "1.000", "1.000"]


def test_the_answer_ends_where_the_context_does(folder: Path) -> None:
    long = folder / "long.jsonl"
    long.write_text(json.dumps({"prompt_ids": list(range(3, 103))}))
    own = config(folder, "copy", "head", prompts=long, max_tokens=240, draft_counts=(3, 7))
    result = evaluate(own)
    assert {one["tokens_after_first"] for one in result["results"]} == {128 - 100 - 1}
    assert taus(result)[0.0, 3] == 3.857  # 27 tokens in 7 rounds
    full = json.dumps({"prompt_ids": [5] * 128})
    (folder / "full.jsonl").write_text(f'{{"prompt": "x"}}\n\n{full}\n')
    with pytest.raises(UserError, match=r"full\.jsonl:3: the prompt has 128 tokens"):
        evaluate(replace(own, prompts=folder / "full.jsonl"))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"draft_model": Path("/nowhere")}, "--draft-model '/nowhere' is not a folder"),
        ({"target": "no-such-model"}, "model 'no-such-model' is neither"),
        ({"draft_counts": (3, 8)}, "--draft-counts 8: this draft drafts 7 at most"),
        ({"prompts": Path("/nowhere.jsonl")}, "cannot read the prompts"),
        ({"precision": "8da8w"}, "precision is '8da8w'"),
        ({"device": "gpu"}, "device is 'gpu'"),
        ({"max_context_length": 4096}, "4096"),
    ],
)
def test_what_is_wrong_is_named(folder: Path, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        evaluate(replace(config(folder, "copy", "head"), **fields))


def test_a_token_that_the_target_does_not_have_is_named_by_its_line(folder: Path) -> None:
    file = folder / "beyond.jsonl"
    file.write_text(f'{{"prompt_ids": [3]}}\n{{"prompt_ids": [3, {VOCAB_SIZE}]}}\n')
    with pytest.raises(UserError, match=rf"beyond\.jsonl:2: token {VOCAB_SIZE} is not below"):
        evaluate(config(folder, "copy", "head", prompts=file))


def test_a_draft_of_another_target_is_refused(folder: Path) -> None:
    with pytest.raises(UserError):
        evaluate(config(folder, "tiny", "head"))


def test_the_method_is_told_by_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    assert draft_method(folder / "head") == "eagle3"
    assert draft_method(folder / "draft") == "dflash"
    with pytest.raises(UserError):
        draft_method(tmp_path)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"draft_counts": (0,)}, "--draft-counts 0 is not in"),
        ({"temperatures": (-1.0,)}, "--temperatures -1.0 is not in"),
        ({"temperatures": (float("nan"),)}, "--temperatures nan"),
        ({"max_tokens": 0}, "--max-tokens 0"),
        ({"sessions": 0}, "--sessions 0"),
        ({"max_context_length": 1}, "--max-context-length 1"),
        ({"prompt_count": 0}, "--prompt-count 0"),
        ({"threads": 0}, "--threads 0"),
        ({"runtime": "onnx"}, "--runtime 'onnx' is not executorch or torch"),
        ({"draft_runtime": "onnx"}, "--draft-runtime 'onnx'"),
        ({"draft_sampling": "beam"}, "--draft-sampling 'beam' is not argmax or coupled"),
        ({"out": Path("/nowhere/out.json")}, "--out: /nowhere is not a folder"),
    ],
)
def test_a_flag_out_of_its_range_is_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        EvaluateConfig(draft_model=Path("d"), prompts=Path("p"), **fields)


def test_lists_are_parsed_or_refused_by_the_flag() -> None:
    assert parse_counts("3, 5,7") == (3, 5, 7)
    assert parse_temperatures("0,0.7") == (0.0, 0.7)
    for value in ("", "3,,5", "3.5", "-3", "three"):
        with pytest.raises(UserError, match="--draft-counts"):
            parse_counts(value)
    for value in ("", "0,", "warm"):
        with pytest.raises(UserError, match="--temperatures"):
            parse_temperatures(value)


def test_the_target_s_precision_is_the_served_one() -> None:
    for runtime, precision in DEFAULT_PRECISIONS.items():
        own = EvaluateConfig(draft_model=Path("d"), prompts=Path("p"), runtime=runtime)
        assert own.chosen_precision == precision


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    code = (
        "import typer; from drafter_service.training.commands.evaluate import evaluate;"
        "from splitspec.commands import run_command_line;"
        "app = typer.Typer(); app.command()(evaluate); run_command_line(app)"
    )
    given = ["--target", str(folder / "copy"), "--cache-dir", str(folder / "cache")]
    return subprocess.run(
        [sys.executable, "-c", code, *given, *flags],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=False,
    )


def test_the_command_prints_tables_and_one_json_line_last_and_writes_it(
    folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "figures.json"
    done = run(
        folder,
        *("--draft", str(folder / "head"), "--prompts", str(folder / "prompts.jsonl")),
        *("--runtime", "torch", "--draft-runtime", "torch", "--max-context-length", "128"),
        *("--draft-counts", "3", "--temperatures", "0,1", "--max-tokens", "9"),
        *("--out", str(out), "--threads", "1"),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads(out.read_text())
    assert [(one["draft_count"], one["tau"]) for one in result["results"]] == [(3, 4.0), (3, 4.0)]
    assert result["prompts"] == 4
    assert "8/8" in done.stderr, "a bar of all answers"


def test_the_command_tells_a_mistake_in_one_line(folder: Path) -> None:
    prompts = folder / "broken.jsonl"
    prompts.write_text('{"prompt": "fine"}\n{"prompt": \n')
    done = run(folder, "--draft-model", str(folder / "head"), "--prompts", str(prompts))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "broken.jsonl:2" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("draft", "said"),
    [
        ("ngram", "--draft ngram is ngram for "),
        ("auto", "--draft auto is ngram for "),
        ("eagel3", "--draft 'eagel3' is neither a folder nor one of ngram, eagle3, dflash"),
        ("dflash", "--draft dflash: no such trained draft ships for "),
        ("copy", "states no drafting method"),
    ],
)
def test_a_draft_without_a_checkpoint_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, draft: str, said: str
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(UserError) as caught:
        command(
            prompts=folder / "prompts.jsonl",
            draft=draft,
            target=str(folder / "copy"),
            cache_dir=folder / "cache",
        )
    assert said in str(caught.value)

"""The speed benchmark on tiny models: which methods it compares, and what it counts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks import generate
from splitspec.errors import UserError
from tests.eagle3_copy import write_copy_head, write_copy_target

MAX_TOKENS = 41
"""One and a multiple of 4 and 5: rounds of K 3 and 4 come out even."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a target, the EAGLE-3 head that copies it, and prompts."""
    folder = tmp_path_factory.mktemp("g")
    write_copy_target(folder / "target")
    write_copy_head(folder / "head")
    rng = random.Random(3)
    words = ["the tram", "a hill", "is it late", "who knows", "sing"]
    lines = [{"prompt": " and ".join(rng.choices(words, k=n))} for n in (1, 4, 9)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def run(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    """Run the benchmark; return its last line."""
    code = generate.main(
        [
            *("--model", str(folder / "target"), "--prompts", str(folder / "prompts.jsonl")),
            *("--runtime", "torch", "--threads", "1", "--cache-dir", str(folder / "cache")),
            *("--max-tokens", str(MAX_TOKENS), *flags),
        ]
    )
    assert code == 0, "the texts are identical"
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


def test_methods_of_one_run_are_counted_apart(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(folder, capsys, "--methods", f"ngram:2,{folder / 'head'}:4")
    assert result["identical"] is True
    base, ngram, head = (result[name] for name in ("target-only", "ngram:2", "head:4"))
    assert {one["rounds"] * one["tau"] for one in (base, head)} == {3 * (MAX_TOKENS - 1)}
    assert (base["tau"], head["tau"]) == (1.0, 5.0)
    assert (base["drafted"], ngram["method"], head["method"]) == (0, "ngram", "eagle3")
    assert head["acceptance_length_counts"] == [0, 0, 0, 0, 3 * (MAX_TOKENS - 1) // 5]
    assert head["speed_up"] == round(head["tokens_per_second"] / base["tokens_per_second"], 3)
    assert head["draft_ms"] > 0.0
    assert base["draft_ms"] == 0.0
    assert head["peak_mib"].keys() == {"verifier", "drafter", "coordinator"}
    # What is not asked must not compute: a process that polls would take tens of percent.
    assert all(one["idle_cpu_percent"] < 30.0 for one in (base, ngram, head))


def test_one_method_alone_is_compared_with_the_target_on_its_own_processes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--draft-model", str(folder / "head"), "--draft-count", "3", "--temperature", "0.7")
    result = run(folder, capsys, "--draft", "eagle3", "--sessions", "2", *flags)
    assert result["eagle3:3"]["tau"] == 4.0
    assert result["target-only"]["tau"] == 1.0


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        ("ngram,none", "--methods none"),
        ("ngram:0", "--methods ngram:0"),
        ("ngram,ngram:7", "--methods ngram:7"),
        ("eagle3", "no such trained draft ships"),
        ("/nowhere:4", "'/nowhere' is neither a folder nor one of"),
    ],
)
def test_methods_that_cannot_be_compared_are_refused(folder: Path, methods: str, said: str) -> None:
    flags = ["--model", str(folder / "target"), "--methods", methods]
    with pytest.raises(UserError) as caught:
        generate.main([*flags, "--prompts", str(folder / "prompts.jsonl")])
    assert said in str(caught.value)


def test_prompts_of_token_ids_are_refused_by_their_line(folder: Path) -> None:
    (folder / "ids.jsonl").write_text('{"prompt": "x"}\n{"prompt_ids": [5]}\n')
    flags = ["--model", str(folder / "target"), "--methods", "ngram"]
    with pytest.raises(UserError, match=r"ids\.jsonl:2 has prompt_ids"):
        generate.main([*flags, "--prompts", str(folder / "ids.jsonl")])

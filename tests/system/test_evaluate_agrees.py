"""`train evaluate` counts what three processes do: same tokens, same rounds, same acceptance.

The benchmark of running services is asked with the same file of prompts, and must count the same.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import acceptance
from drafter_service.training.evaluate import evaluate
from drafter_service.training.evaluate_config import EvaluateConfig
from tests.dflash_planted import VOCAB_SIZE, write_partial_draft
from tests.eagle3_copy import LOOK_BACK, write_copy_head, write_copy_target

DRAFT_COUNTS = (2, 5)
MAX_TOKENS = 30
LENGTH = 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a target, an EAGLE-3 head, a DFlash draft that is right in part, and prompts."""
    folder = tmp_path_factory.mktemp("a")
    write_copy_target(folder / "target")
    write_copy_head(folder / "eagle3")
    write_partial_draft(folder / "dflash", look_back=LOOK_BACK)
    rng = random.Random(2)
    lines: list[dict[str, Any]] = [
        {"class": "ids", "prompt_ids": rng.choices(range(3, VOCAB_SIZE), k=length)}
        for length in (1, 9, 40)
    ]
    lines += [{"class": "text", "prompt": text} for text in ("Who is there?", "Zwei\nZeilen 🙂")]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


@pytest.mark.parametrize(
    ("method", "draft_sampling", "temperature"),
    [("eagle3", "argmax", 0.7), ("dflash", "argmax", 0.0), ("dflash", "coupled", 1.0)],
)
def test_one_process_and_three_count_the_same(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    method: str,
    draft_sampling: str,
    temperature: float,
) -> None:
    one = evaluate(
        EvaluateConfig(
            target=str(folder / "target"),
            draft_model=folder / method,
            prompts=folder / "prompts.jsonl",
            draft_counts=DRAFT_COUNTS,
            temperatures=(temperature,),
            max_tokens=MAX_TOKENS,
            max_context_length=LENGTH,
            sessions=2,
            runtime="torch",
            draft_runtime="torch",
            draft_sampling=draft_sampling,
            threads=1,
            cache_dir=folder / "cache",
        )
    )
    capsys.readouterr()
    served = _benchmark(
        folder,
        capsys.readouterr,
        *("--draft", method, "--draft-model", str(folder / method)),
        *("--draft-sampling", draft_sampling, "--temperatures", str(temperature)),
    )
    assert served["differing_answers"] == 0
    for own, three in zip(one["results"], served["results"], strict=True):
        for key in ("temperature", "draft_count"):
            assert own[key] == three[key]
        for key in ("answers", "tau", "tokens_after_first", "rounds", "no_loop", "by_class"):
            assert own[key] == three[key], key
        # Rounds that an answer's end cuts short count among those that drafted less.
        assert all(
            three_share <= own_share
            for own_share, three_share in zip(own["acceptance"], three["acceptance"], strict=True)
        )
        assert own["acceptance"][0] not in (0.0, 1.0), "the draft is right in part"
    assert one["results"][0]["by_class"].keys() == {"ids", "text"}


def _benchmark(folder: Path, read: Callable[[], Any], *flags: str) -> dict[str, Any]:
    """Run benchmarks/acceptance.py, which starts three processes; return its last line."""
    code = acceptance.main(
        [
            *("--model", str(folder / "target"), "--prompts", str(folder / "prompts.jsonl")),
            *("--draft-counts", ",".join(map(str, DRAFT_COUNTS))),
            *("--max-tokens", str(MAX_TOKENS), "--max-context-length", str(LENGTH)),
            *("--sessions", "2", "--threads", "1", "--cache-dir", str(folder / "cache")),
            *("--runtime", "torch", "--draft-runtime", "torch"),
            *flags,
        ]
    )
    assert code == 0
    result: dict[str, Any] = json.loads(read().out.splitlines()[-1])
    return result

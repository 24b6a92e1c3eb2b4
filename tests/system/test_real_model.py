"""The main job on SmolLM2-135M-Instruct as it ships: real prompts, the default precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import RealModel
from tests.system.cluster import Cluster, running_cluster

pytestmark = pytest.mark.real_model
MAX_TOKENS = 24
SAMPLINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "greedy": (20, {}),
    "T 0.7 top-p 0.9": (7, {"temperature": 0.7, "top_p": 0.9, "seed": 20}),
    "T 1.0": (7, {"temperature": 1.0, "seed": 21}),
}
"""How many prompts, and how their answers are sampled. Seven have a K of 1 to 7 each; the many
samplings of many prompts are those of tiny models, in test_lossless.py."""


@pytest.fixture(scope="module")
def real_cluster(
    real_model: RealModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    folder, cache_dir = real_model.folder, real_model.cache_dir
    flags = ["--max-context-length", "1024", "--threads", "2"]
    for cluster in running_cluster(tmp_path_factory.mktemp("r"), folder, flags, cache_dir):
        cluster.start_coordinator(None)
        cluster.start_coordinator("ngram")
        yield cluster


@pytest.mark.parametrize("sampling", list(SAMPLINGS))
def test_l4_real_prompts_speculative_equals_target_only(
    real_cluster: Cluster, prompts: list[str], sampling: str
) -> None:
    count, parameters = SAMPLINGS[sampling]
    drafted = 0
    for index, prompt in enumerate(prompts[:count]):
        fields = {
            "conversation": {"messages": [{"role": "user", "content": prompt}]},
            "sampling": parameters,
            "max_tokens": MAX_TOKENS,
        }
        alone = real_cluster.generate("coordinator-target", **fields)
        split = real_cluster.generate("coordinator-ngram", draft_count=1 + index % 7, **fields)
        assert split.token_ids == alone.token_ids
        assert split.text == alone.text
        drafted += split.finish.statistics.draft_token_count
    assert drafted > 0


def test_the_answer_is_sensible_english(real_cluster: Cluster) -> None:
    question = {"role": "user", "content": "Name the capital of France and the capital of Italy."}
    answer = real_cluster.generate(
        "coordinator-ngram", conversation={"messages": [question]}, max_tokens=40
    )
    assert "Paris" in answer.text
    assert "Rome" in answer.text

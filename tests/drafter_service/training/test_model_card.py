"""A published draft's card: front matter that hubs read, and every figure of the run."""

from __future__ import annotations

from typing import Any

import yaml

from drafter_service.training.model_card import render


def run(**changes: Any) -> dict[str, Any]:
    """Return the content of a finished run's run.json."""
    return {
        "method": "dflash",
        "target_model_id": "smollm2-135m",
        "target_model_hash": "ab" * 32,
        "rollouts": {
            "parameters": {"seed": 1, "passes": 12, "temperatures": {"0": 0.5, "0.7": 0.3}},
            "counts": {"loops": 321, "held_out": 250},
            "rows": 24000,
            "row_length": 512,
            "tokens": 12288000,
        },
        "parameters": {
            "target": "smollm2-135m",
            "seed": 7,
            "batch_rows": 16,
            "learning_rate": 0.002,
            "precision": "8da8w",
            "tap_layers": [1, 8, 14, 20, 26],
            "steps": None,
            "seconds": 230.0,
            "block_length": 8,
        },
        "facts": {"mask_token_id": 16, "block_length": 8},
        "trained_parameters": 19360000,
        "weights": "ema",
        "steps": 12840,
        "seconds": 230.04,
        "epochs": 8.5512,
        "loss": 2.9,
        "tau": {"3": 2.63, "5": 2.978, "7": 3.105},
        "sampled_tau": {"3": 2.01, "5": 2.1, "7": 2.149},
        "untrained_tau": {"3": 1.0, "5": 1.0, "7": 1.0},
        **changes,
    }


def test_hubs_can_read_the_front_matter() -> None:
    card = render(run())
    _, front, rest = card.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "license": "apache-2.0",
        "base_model": "smollm2-135m",
        "library_name": "splitspec",
        "tags": ["speculative-decoding", "draft-model"],
    }
    assert rest.startswith("\n# DFlash draft for smollm2-135m\n")


def test_the_card_names_the_target_and_its_hash_and_two_commands_to_use_it() -> None:
    card = render(run())
    assert "ab" * 32 in card
    assert "\nsplitspec model pull smollm2-135m\n" in card
    assert "\nsplitspec run --model smollm2-135m --draft DIR" in card


def test_the_card_tells_data_recipe_and_figures() -> None:
    card = render(run())
    for line in (
        "24,000 conversations of 512 tokens, 12,288,000 tokens in all",
        "| temperatures | 0 0.5, 0.7 0.3 |",
        "| loops | 321 |",
        "| steps | 12,840 |",
        "| epochs | 8.55 |",
        "| weights kept | ema |",
        "| learning_rate | 0.002 |",
        "| tap_layers | 1, 8, 14, 20, 26 |",
        "| mask_token_id | 16 |",
        "| trained parameters | 19,360,000 |",
        "| held-out conversations | K = 3 | K = 5 | K = 7 |",
        "| greedy answers | 2.63 | 2.98 | 3.10 |",
        "| sampled answers | 2.01 | 2.10 | 2.15 |",
        "| untrained, greedy answers | 1.00 | 1.00 | 1.00 |",
    ):
        assert f"\n{line}\n" in card or line in card.replace("\n", " "), line
    assert card.count("| block_length |") == 1
    assert "None" not in card


def test_a_k_that_one_kind_of_row_lacks_is_left_empty() -> None:
    card = render(run(sampled_tau={}, untrained_tau={"3": 1.0}))
    assert "| sampled answers |  |  |  |" in card
    assert "| untrained, greedy answers | 1.00 |  |  |" in card


def test_a_run_without_held_out_rows_says_that_nothing_was_measured() -> None:
    card = render(run(tau={}, sampled_tau={}, untrained_tau={}))
    assert "nothing was measured" in card
    assert "K =" not in card


def test_an_eagle3_card_names_its_method() -> None:
    card = render(run(method="eagle3"))
    assert "# EAGLE-3 draft for smollm2-135m" in card
    assert "arXiv:2503.01840" in card
    assert "DFlash" not in card


def test_the_targets_licence_is_told_where_it_is_known() -> None:
    assert "The target: Apache-2.0 too." in render(run())
    assert "The target: see the target's licence." in render(run(target_model_id="some-8b"))

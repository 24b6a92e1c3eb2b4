"""RoPE tables against the papers' formulas in float64, one number at a time."""

from __future__ import annotations

import math

import pytest
import torch

from graph_runtime.decoder import rotate
from graph_runtime.rope import rope_tables
from graph_runtime.rope_config import RopeScaling, rope_from_config

D = 16
THETA = 10000.0


def plain(i: int) -> float:
    return THETA ** (-2 * i / D)


def llama3(i: int) -> float:
    """Llama 3.1: factor 8, low 1, high 4, 64 positions."""
    wavelength = 2 * math.pi / plain(i)
    if wavelength < 64 / 4:
        return plain(i)
    if wavelength > 64 / 1:
        return plain(i) / 8
    smooth = (64 / wavelength - 1) / (4 - 1)
    return (1 - smooth) * plain(i) / 8 + smooth * plain(i)


def yarn(i: int) -> float:
    """YaRN, equations 17 to 23: factor 8, 64 positions, beta 32 and 1."""
    low, high = (
        D * math.log(64 / (beta * 2 * math.pi)) / (2 * math.log(THETA)) for beta in (32, 1)
    )
    low, high = max(math.floor(low), 0), min(math.ceil(high), D - 1)
    ramp = min(max((i - low) / (high - low), 0), 1)
    return ramp * plain(i) / 8 + (1 - ramp) * plain(i)


@pytest.mark.parametrize(
    ("scaling", "frequency", "magnitude"),
    [
        ({}, plain, 1.0),
        ({"rope_scaling": {"type": "linear", "factor": 8}}, lambda i: plain(i) / 8, 1.0),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
                    "original_max_position_embeddings": 64,
                }
            },
            llama3,
            1.0,
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn", "rope_theta": THETA, "factor": 8,
                    "original_max_position_embeddings": 64,
                }
            },
            yarn,
            0.1 * math.log(8) + 1,
        ),
    ],
    ids=["default", "linear", "llama3", "yarn"],
)  # fmt: skip
def test_tables_hold_the_papers_angles(
    scaling: dict[str, object], frequency: object, magnitude: float
) -> None:
    rope = rope_from_config({"max_position_embeddings": 512, "rope_theta": THETA, **scaling})
    cos, sin = rope_tables(rope, D, 100)
    assert cos.shape == sin.shape == (100, D)
    assert callable(frequency)
    for position in (0, 1, 7, 99):
        for i in range(D // 2):
            angle = position * frequency(i)
            for half in (i, i + D // 2):
                assert cos[position, half].item() == pytest.approx(
                    magnitude * math.cos(angle), abs=1e-5
                )
                assert sin[position, half].item() == pytest.approx(
                    magnitude * math.sin(angle), abs=1e-5
                )


def test_a_rotated_product_depends_on_the_distance_alone() -> None:
    cos, sin = rope_tables(RopeScaling(kind="default", theta=THETA), D, 64)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, D, generator=generator)

    def product(at_q: int, at_k: int) -> float:
        turned_q = rotate(q.view(1, 1, D), cos[at_q].view(1, 1, D), sin[at_q].view(1, 1, D))
        turned_k = rotate(k.view(1, 1, D), cos[at_k].view(1, 1, D), sin[at_k].view(1, 1, D))
        return float((turned_q * turned_k).sum())

    assert product(20, 13) == pytest.approx(product(57, 50), abs=1e-4)
    assert abs(product(20, 13) - product(20, 12)) > 1e-3

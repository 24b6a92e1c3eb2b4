"""A tiny target and greedy text of its own, made by the plainest loop."""

from __future__ import annotations

from pathlib import Path

import torch

from drafter_service.training.store import Provenance, Rollouts
from drafter_service.training.target import TrainingTarget, load_training_target
from tests.tiny import write_tiny_model

ROW_LENGTH = 48
OPENING = 4
HELD_OUT = 8


def tiny_target(folder: Path, *, precision: str = "fp32") -> TrainingTarget:
    """Write a model to `folder` and load it."""
    write_tiny_model(folder, vocab_size=300, n_layers=3, hidden=32, intermediate=48)
    return load_training_target(folder, device="cpu", precision=precision, cache_dir=folder)


def greedy_text(target: TrainingTarget, rows: int = 40) -> Rollouts:
    """Return rows of a random opening and what the target greedily goes on with."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(3, target.config.vocab_size, (rows, OPENING), generator=generator)
    while tokens.shape[1] < ROW_LENGTH:
        _, final = target.forward(tokens, (0,))
        tokens = torch.cat((tokens, target.logits(final[:, -1]).argmax(-1, keepdim=True)), dim=1)
    roles = torch.zeros_like(tokens, dtype=torch.uint8)
    roles[:, OPENING:] = 1
    return Rollouts(
        provenance=Provenance(
            model_id=target.model_id,
            model_hash=target.model_hash,
            tokenizer_hash=target.tokenizer_hash,
            opening_length=0,
            user_end_token=2,
            parameters={},
        ),
        tokens=tokens.int(),
        roles=roles,
        temperatures=torch.zeros(rows),
        training_rows=torch.arange(HELD_OUT, rows),
        held_out_rows=torch.arange(HELD_OUT),
        counts={"rows": rows},
    )

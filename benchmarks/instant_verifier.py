"""A verifier whose target costs nothing: what is left of a round is coordinator and wire.

    python benchmarks/instant_verifier.py MODEL_FOLDER ADDRESS SLOT_COUNT

Everything but the model pass is the real verifier: server, sessions, verification, commit.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from graph_runtime.model_files import tokenizer_hash
from graph_runtime.target import Span, SpanOutput, TargetInfo
from splitspec.serving import run_service
from verifier_service.config import VerifierConfig
from verifier_service.engine import Engine
from verifier_service.server import serve_verifier

CONTEXT_LENGTH = 4096
WIDEST = 128


class InstantTarget:
    """Implements `graph_runtime.target.Target` with one fixed answer."""

    def __init__(self, folder: Path, slot_count: int) -> None:
        vocab_size = int(json.loads((folder / "config.json").read_text())["vocab_size"])
        self._logits = torch.zeros(WIDEST, vocab_size)
        self._logits[:, vocab_size // 2] = 9.0
        self.info = TargetInfo(
            model_id="instant",
            model_hash="0" * 64,
            tokenizer_hash=tokenizer_hash(folder),
            vocab_size=vocab_size,
            n_layers=1,
            tap_layers=(0,),
            row_width=1,
            row_dtype=torch.float32,
            min_prefill_chunk=1,
            max_prefill_chunk=WIDEST,
            max_context_length=CONTEXT_LENGTH,
            slot_count=slot_count,
            precision="fp32",
            runtime="torch",
        )

    def step(self, spans: Sequence[Span]) -> list[SpanOutput]:
        """Return the fixed answer for every span."""
        return [
            SpanOutput(
                logits=self._logits[: span.logits_count],
                rows=torch.zeros(len(span.token_ids), 1) if span.wants_rows else None,
            )
            for span in spans
        ]

    def copy_prefix(self, source: int, destination: int, length: int) -> None:
        """Do nothing: there is no cache."""


def main() -> None:
    """Serve until SIGTERM."""
    folder, address, slot_count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    config = VerifierConfig(model=str(folder), runtime="torch", address=address)
    torch.set_num_threads(1)
    target = InstantTarget(folder, slot_count)
    run_service(
        serve_verifier(config, lambda: Engine(target, max_draft_count=config.max_draft_count))
    )


if __name__ == "__main__":
    main()

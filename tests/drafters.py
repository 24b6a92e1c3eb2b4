"""Fake drafters that know the true continuation: always right, always wrong, or by a coin.

    python tests/drafters.py --kind right|wrong|coin-flip|rows --continuations FILE --address A

serves one as a real process on the drafter's own server. FILE is a JSON list of
`{"prompt": [ids], "tokens": [ids that the target alone emits]}`; a prompt that is not in it gets no
drafts. `rows` drafts as `right` and wants RAW_TAPS rows, which it checks and counts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    # NOTE: the script's own folder holds `splitspec/` and `drafter_service/` of the tests, which
    # would hide the packages of these names.
    sys.path[0] = str(Path(__file__).parents[1])

from drafter_service.config import DrafterConfig
from drafter_service.drafter import DrafterInfo, DraftWork, SessionParameters
from drafter_service.server import serve_drafter
from splitspec.rows import NO_ROWS, RowFormat
from splitspec.serving import run_service
from splitspec.v1 import rows_pb2

Distort = Callable[[int, int], int]
"""(true token id, its position) -> what is drafted."""
DTYPES = {
    "float32": rows_pb2.ROW_DTYPE_FLOAT32,
    "bfloat16": rows_pb2.ROW_DTYPE_BFLOAT16,
    "float16": rows_pb2.ROW_DTYPE_FLOAT16,
}


def right(true_id: int, position: int) -> int:
    """Draft the truth."""
    del position
    return true_id


def wrong(true_id: int, position: int) -> int:
    """Draft another valid id."""
    del position
    return true_id - 1 if true_id else 1


def coin_flip(true_id: int, position: int, *, seed: int = 0) -> int:
    """Draft the truth at about half of the positions, the same ones in every run."""
    coin = random.Random(seed * 1_000_003 + position).random()
    return (right if coin < 0.5 else wrong)(true_id, position)


DISTORTIONS: dict[str, Distort] = {
    "right": right,
    "wrong": wrong,
    "coin-flip": coin_flip,
    "rows": right,
}


class OracleDrafter:
    """Knows what the target will say, and drafts it through `distort`."""

    pass_count = 0

    def __init__(
        self,
        kind: str,
        continuations: Sequence[tuple[Sequence[int], Sequence[int]]],
        *,
        row_format: RowFormat = NO_ROWS,
        tap_layers: tuple[int, ...] = (),
        max_draft_count: int = 7,
        slot_count: int = 64,
        instant: bool = True,
    ) -> None:
        self._distort = DISTORTIONS[kind]
        self._known = [(list(prompt), [*prompt, *tokens]) for prompt, tokens in continuations]
        self._info = DrafterInfo(
            method=f"fake-{kind}",
            model_id=f"fake-{kind}",
            row_format=row_format,
            tap_layers=tap_layers,
            max_draft_count=max_draft_count,
            max_context_length=65_536,
            slot_count=slot_count,
            instant=instant,
        )
        self.tokens: dict[int, list[int]] = {}
        self.parameters: dict[int, SessionParameters] = {}

    @property
    def info(self) -> DrafterInfo:
        """Return what is loaded."""
        return self._info

    def open(self, slot: int, parameters: SessionParameters) -> None:
        """Begin an empty context."""
        assert slot not in self.tokens, slot
        self.tokens[slot] = []
        self.parameters[slot] = parameters

    def step(self, works: Sequence[DraftWork]) -> list[list[int]]:
        """Extend each context, then draft what is known to follow."""
        assert len({work.slot for work in works}) == len(works), "a slot appears twice"
        return [self._run(work) for work in works]

    def _run(self, work: DraftWork) -> list[int]:
        tokens = self.tokens[work.slot]
        assert len(tokens) == work.start, "law L2"
        tokens.extend(work.token_ids)
        if work.draft_count == 0 or work.pending_token_id is None:
            return []
        text = [*tokens, work.pending_token_id]
        true_ids = self._continuation(text)[: work.draft_count]
        return [self._distort(true_id, len(text) + i) for i, true_id in enumerate(true_ids)]

    def _continuation(self, text: list[int]) -> list[int]:
        """Return what follows `text`, of the longest prompt that it begins with."""
        begun = [
            (len(prompt), full)
            for prompt, full in self._known
            if len(prompt) < len(text) and full[: len(text)] == text
        ]
        return max(begun, default=(0, text))[1][len(text) :]

    def release(self, slot: int) -> None:
        """Forget a context."""
        del self.tokens[slot], self.parameters[slot]


class RowsDrafter(OracleDrafter):
    """Wants RAW_TAPS rows: one for each committed position, in order (law L2).

    Keeps a digest of every row by the tokens up to its position: the same tokens must give the same
    row, bit for bit, whatever window or chunk they were run in (law L4).
    """

    def __init__(
        self,
        continuations: Sequence[tuple[Sequence[int], Sequence[int]]],
        *,
        row_format: RowFormat,
        tap_layers: tuple[int, ...],
        report: Path | None = None,
        instant: bool = False,
    ) -> None:
        super().__init__(
            "rows",
            continuations,
            row_format=row_format,
            tap_layers=tap_layers,
            instant=instant,
        )
        self._report = report
        self._digests: dict[bytes, bytes] = {}
        self.row_count = 0
        self.changed_row_count = 0
        self.session_count = 0

    def open(self, slot: int, parameters: SessionParameters) -> None:
        """Begin an empty context."""
        super().open(slot, parameters)
        self.session_count += 1

    def _run(self, work: DraftWork) -> list[int]:
        self._check_rows(work)
        return super()._run(work)

    def _check_rows(self, work: DraftWork) -> None:
        size = self.info.row_format.row_bytes
        rows = work.rows or b""
        assert len(rows) == len(work.token_ids) * size, "law L2: a row for each committed token"
        prefix = hashlib.sha256()
        for token_id in self.tokens[work.slot]:
            prefix.update(token_id.to_bytes(8))
        for i, token_id in enumerate(work.token_ids):
            prefix.update(token_id.to_bytes(8))
            digest = hashlib.sha256(rows[i * size : (i + 1) * size]).digest()
            self.changed_row_count += self._digests.setdefault(prefix.digest(), digest) != digest
            self.row_count += 1

    def release(self, slot: int) -> None:
        """Forget a context and write the report anew."""
        super().release(slot)
        if self._report is not None:
            counts = {
                "rows": self.row_count,
                "changed_rows": self.changed_row_count,
                "sessions": self.session_count,
            }
            self._report.write_text(json.dumps(counts))


def _load(arguments: argparse.Namespace) -> OracleDrafter:
    entries = json.loads(arguments.continuations.read_text())
    continuations = [(entry["prompt"], entry["tokens"]) for entry in entries]
    if arguments.kind != "rows":
        return OracleDrafter(arguments.kind, continuations)
    row_format = RowFormat(
        kind=rows_pb2.ROW_KIND_RAW_TAPS,
        dtype=DTYPES[arguments.row_dtype],
        width=arguments.row_width,
    )
    taps = tuple(int(layer) for layer in arguments.tap_layers.split(","))
    return RowsDrafter(
        continuations, row_format=row_format, tap_layers=taps, report=arguments.report
    )


def main() -> None:
    """Serve one fake until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=sorted(DISTORTIONS), required=True)
    parser.add_argument("--continuations", type=Path, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--tap-layers", default="1", help="rows: 0-based, ascending, with commas")
    parser.add_argument("--row-width", type=int, default=64, help="rows: taps * hidden width")
    parser.add_argument("--row-dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--report", type=Path, help="rows: JSON file with the counts so far")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    config = DrafterConfig(address=arguments.address)
    run_service(serve_drafter(config, partial(_load, arguments)))


if __name__ == "__main__":
    main()

"""The fake drafters of the system tests do what their names say."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from drafter_service.drafter import DraftWork, SessionParameters
from splitspec.rows import RowFormat
from splitspec.v1 import drafter_pb2 as pb
from splitspec.v1 import rows_pb2
from tests.drafter_service.served import draft, opened
from tests.drafter_service.test_process import LIMIT_SECONDS, ROOT, process
from tests.drafters import OracleDrafter, RowsDrafter

PROMPT, TOKENS = [5, 6], list(range(10, 110))


def drafts(kind: str, length: int, count: int = 100) -> list[int]:
    """Return what a fake drafts after `length` true tokens."""
    drafter = OracleDrafter(kind, [([9], [9]), (PROMPT, TOKENS)])
    drafter.open(0, SessionParameters())
    return drafter.step([_work([*PROMPT, *TOKENS[: length - 1]], TOKENS[length - 1], count)])[0]


def _work(ids: list[int], pending: int, count: int, rows: bytes | None = None) -> DraftWork:
    return DraftWork(
        slot=0,
        parameters=SessionParameters(),
        start=0,
        token_ids=ids,
        rows=rows,
        pending_token_id=pending,
        draft_count=count,
    )


def test_right_drafts_the_truth_and_wrong_never_does() -> None:
    assert drafts("right", 1, 3) == [11, 12, 13]
    assert drafts("right", 98) == [108, 109]
    wrong = drafts("wrong", 1)
    assert len(wrong) == 99
    assert all(a != b for a, b in zip(wrong, TOKENS[1:], strict=True))
    assert min(wrong) >= 0


def test_the_coin_falls_both_ways_and_the_same_for_every_draft_count() -> None:
    long = drafts("coin-flip", 1)
    stands = [a == b for a, b in zip(long, TOKENS[1:], strict=True)]
    assert 30 < sum(stands) < 70
    assert drafts("coin-flip", 1, 7) == long[:7]
    assert drafts("coin-flip", 4, 7) == long[3:10]


def test_an_unknown_prompt_gets_no_drafts() -> None:
    drafter = OracleDrafter("right", [(PROMPT, TOKENS)])
    drafter.open(0, SessionParameters())
    assert drafter.step([_work([5, 7], 10, 3)]) == [[]]


def test_l2_missing_rows_are_noticed_and_changed_rows_are_counted() -> None:
    taps = RowFormat(kind=rows_pb2.ROW_KIND_RAW_TAPS, dtype=rows_pb2.ROW_DTYPE_FLOAT16, width=1)
    drafter = RowsDrafter([(PROMPT, TOKENS)], row_format=taps, tap_layers=(0,))
    for rows in (b"aabb", b"aacc"):
        drafter.open(0, SessionParameters())
        assert drafter.step([_work(PROMPT, 10, 1, rows)]) == [[11]]
        drafter.release(0)
    assert (drafter.row_count, drafter.changed_row_count) == (4, 1)
    drafter.open(0, SessionParameters())
    with pytest.raises(AssertionError, match="law L2"):
        drafter.step([_work(PROMPT, 10, 1, b"aa")])


@pytest.mark.parametrize("kind", ["right", "rows"])
def test_a_fake_serves_as_a_process(tmp_path: Path, kind: str) -> None:
    file, report = tmp_path / "c.json", tmp_path / "report.json"
    file.write_text(json.dumps([{"prompt": PROMPT, "tokens": TOKENS}]))
    address = f"unix:{tmp_path}/f.sock"
    command = [sys.executable, "tests/drafters.py", "--kind", kind, "--address", address]
    command += ["--continuations", str(file), "--row-width", "2", "--report", str(report)]
    rows = {"kind": 2, "dtype": 1, "width": 2, "start": 0, "count": 2, "inline": bytes(16)}
    fields = {"rows": rows} if kind == "rows" else {}
    steps = [[opened(1)], [draft(1, 0, PROMPT, pending=10, count=2, **fields)]]
    with process(command, address) as (child, stub):
        requests = (
            pb.DrafterRunStepsRequest(step=i + 1, items=items) for i, items in enumerate(steps)
        )
        replies = list(stub.RunSteps(requests, timeout=LIMIT_SECONDS))
        assert list(replies[1].results[0].draft.draft_token_ids) == [11, 12]
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=LIMIT_SECONDS)
        assert child.returncode == 0
    if kind == "rows":
        counts = {"rows": 2, "changed_rows": 0, "sessions": 1}
        assert json.loads(report.read_text()) == counts
    help_text = [sys.executable, str(ROOT / "tests" / "drafters.py"), "--help"]
    subprocess.run(help_text, check=True, capture_output=True, timeout=LIMIT_SECONDS)

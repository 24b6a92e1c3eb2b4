"""A speculator program behind a pipe: one request in, its tokens out, as JSON lines.

Standard output gets `{"program": {...}}`, the metadata, once the program is loaded. Then standard
input is read for one line, the request:

    {"token_ids": [...], "max_tokens": 64, "stop_token_ids": [2], "chain": 3}

where `chain` may be null. `{"token_ids": [...]}` follow as tokens come, and at the end
`{"statistics": {...}}`. A process whose standard input ends is nobody's any more and ends too.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from graph_runtime.load import needing_executorch
from splitspec.errors import UserError


def speculate(path: Path, threads: int | None) -> None:
    """Load the program at `path` and answer the one request on standard input.

    Raises:
        UserError: what is wrong with the program or the request, in one line.
    """
    answers = _take_stdout()
    with needing_executorch():
        from graph_runtime.programs.speculator_load import load_speculator
    speculator = load_speculator(path, threads)
    _say(answers, program=asdict(speculator.metadata))
    line = sys.stdin.readline()
    if not line.strip():
        return
    request = _request(line)
    threading.Thread(target=_end_with_input, daemon=True).start()
    statistics = speculator.generate(
        request["token_ids"],
        max_tokens=request["max_tokens"],
        stop_token_ids=request["stop_token_ids"],
        chain=request["chain"],
        emit=lambda token_ids: _say(answers, token_ids=token_ids),
    )
    _say(answers, statistics={**asdict(statistics), "tau": statistics.tau})


def _request(line: str) -> dict[str, Any]:
    """Return the request of one line.

    Raises:
        UserError: it is no request.
    """
    try:
        match json.loads(line):
            case {
                "token_ids": list(token_ids),
                "max_tokens": int(),
                "stop_token_ids": list(stops),
                "chain": int() | None,
            } as request if all(type(token) is int for token in [*token_ids, *stops]):
                return dict(request)
    except ValueError:
        pass
    raise UserError(
        "the request is no JSON object with token_ids, max_tokens, stop_token_ids, chain"
    )


def _end_with_input() -> None:
    """End this process, whatever it does, as its standard input ends: so does a killed parent's."""
    while sys.stdin.readline():
        pass
    os._exit(1)


def _take_stdout() -> IO[str]:
    """Return stdout for our own lines; what libraries print there goes to stderr from now on."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _say(answers: IO[str], **content: Any) -> None:
    print(json.dumps(content), file=answers, flush=True)

"""`Target` on an ExecuTorch program: one loaded copy of the weights, a cache of tensors a slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graph_runtime.programs.executorch_runtime import Method, Program
from graph_runtime.programs.metadata import ProgramMetadata
from graph_runtime.programs.rows import run_rows
from graph_runtime.programs.slot_cache import MASKED, MIN_ROWS, SlotCache
from graph_runtime.target import Span, SpanOutput, TargetInfo
from splitspec.errors import UserError


class ProgramTarget:
    """Implements `Target`. Spans run one after the other: each has a cache of its own."""

    def __init__(self, program: Program, metadata: ProgramMetadata, info: TargetInfo) -> None:
        """Load the methods of `program`: this is where weights are packed for the CPU."""
        self._program = program  # the methods borrow from it
        self._step_method = load_method(program, "step")
        self._head_method = load_method(program, "head")
        self._metadata = metadata
        self._info = info
        self._slots = [SlotCache(metadata) for _ in range(info.slot_count)]
        self._columns = torch.arange(metadata.max_capacity)
        self._group = metadata.n_heads // metadata.n_kv_heads

    @property
    def info(self) -> TargetInfo:
        """Return what is loaded."""
        return self._info

    def step(self, spans: Sequence[Span]) -> list[SpanOutput]:
        """Run the spans; see `Target.step`."""
        slots = [span.slot for span in spans]
        assert len(set(slots)) == len(slots), slots
        return [self._run(span) for span in spans]

    def copy_prefix(self, source: int, destination: int, length: int) -> None:
        """Copy K/V of positions [0, length) between slots; see `Target.copy_prefix`."""
        assert source != destination, source
        assert 0 <= length <= self._slots[source].capacity, length
        self._slots[destination].copy_from(self._slots[source], length)

    def _run(self, span: Span) -> SpanOutput:
        count = len(span.token_ids)
        end = span.start + count
        assert 1 <= count <= self._metadata.max_step_rows, count
        assert 0 <= span.start < end <= self._info.max_context_length, (span.start, end)
        assert 0 <= span.logits_count <= count, (span.logits_count, count)
        # The copy of a single row is written one position further on, where nothing is valid yet.
        padding = max(MIN_ROWS - count, 0)
        slot = self._slots[span.slot]
        slot.reserve(end + padding, kept=span.start)
        slot.clear_from(span.start)
        tokens = torch.tensor([*span.token_ids, *span.token_ids[:padding]])
        positions = torch.arange(span.start, end + padding)
        masks = self._masks(positions, slot.capacity)
        hidden, rows = self._step_method.execute([tokens, positions, *masks, *slot.tensors])
        slot.overflowed |= not bool(hidden.isfinite().all())
        wanted = hidden[count - span.logits_count : count]
        return SpanOutput(
            logits=self._logits(wanted), rows=rows[:count] if span.wants_rows else None
        )

    def _masks(self, positions: torch.Tensor, capacity: int) -> list[torch.Tensor]:
        """Return one mask [1, group * N, capacity] a sliding window, rows of a head together."""
        column = self._columns[None, :capacity]
        position = positions[:, None]
        masks = []
        for window in self._metadata.windows:
            hidden = column > position
            if window:
                hidden |= column <= position - window
            mask = torch.zeros(hidden.shape).masked_fill_(hidden, MASKED)
            masks.append(mask.repeat(self._group, 1)[None])
        return masks

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [M, V] of hidden [M, H]; M may be 0."""
        if not len(hidden):
            return torch.empty(0, self._metadata.vocab_size)
        return run_rows(self._head_method, [hidden], self._metadata.max_head_rows)[0]


def load_method(program: Program, name: str) -> Method:
    """Load one method: this is where its weights are packed for the CPU.

    Raises:
        UserError: the program has none of that name, or this runtime cannot run it.
    """
    try:
        method = program.load_method(name)
    except (KeyError, RuntimeError) as error:
        raise UserError(f"program has no usable method {name}: export it again") from error
    assert method is not None, name
    return method

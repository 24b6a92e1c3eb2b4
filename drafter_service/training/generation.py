"""The target writes conversations: many rows at once, one captured decode step at a time.

A row is one stream: opening, user turn, answer, user turn, ... The target writes user turns too,
unless a seed instruction stands there, and what the chat template puts between turns is forced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from drafter_service.training.decode_step import StepAttention, StepContext
from drafter_service.training.store import Pass
from drafter_service.training.target import TrainingTarget
from drafter_service.training.turns import Turns
from graph_runtime.kv_cache import padded_length

USER_TEMPERATURE = 1.0
GUARD_STEPS = 16
"""Positions between two looks for rows that repeat themselves."""
LOOP_TOKENS = 24
LOOP_LAG = 64
"""A row loops when its last LOOP_TOKENS tokens stood at most this many positions earlier."""
_LEAST_UNIFORM = 2.0**-25
"""Below every uniform but 0, whose Gumbel value is not finite."""


@dataclass(frozen=True, kw_only=True)
class PassPlan:
    """What a pass of B rows starts from."""

    forced: Sequence[Sequence[int]]
    """B token lists that rows begin with: the opening, or that and a whole user turn."""
    temperatures: Sequence[float]
    """B temperatures of the rows' answers."""
    seed: int
    """Of the pass's noise, 63 bits."""


class RowWriter:
    """B rows of S tokens on the target's device, written again and again."""

    def __init__(self, target: TrainingTarget, turns: Turns, *, rows: int, length: int) -> None:
        """Allocate caches and state; on CUDA capture a step for every 64 positions."""
        assert len(turns.opening) < length <= target.max_row_length, length
        self._target, self._rows, self._length = target, rows, length
        device = target.device
        self._context = StepContext(device)
        attentions: list[nn.Module] = [
            StepAttention(self._context, target, window, rows=rows, length=length)
            for window in target.config.sliding_windows
        ]
        self._decoder = target.decoder_with(attentions)
        self._decoder.tap_layers = (target.config.n_layers - 1,)
        self._turns = _TurnTables(turns, target.config.vocab_size, device)
        margin = self._turns.patterns.shape[1] + 1
        self._tokens = torch.zeros(rows, length, dtype=torch.int64, device=device)
        self._roles = torch.zeros(rows, length, dtype=torch.uint8, device=device)
        self._forced = torch.zeros(rows, length + margin, dtype=torch.int64, device=device)
        self._is_forced = torch.zeros(rows, length + margin, dtype=torch.bool, device=device)
        self._answering = torch.zeros(rows, dtype=torch.bool, device=device)
        self._temperatures = torch.zeros(rows, device=device)
        self._user_temperature = torch.tensor(USER_TEMPERATURE, device=device)
        self._generator = torch.Generator(device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        if device.type == "cuda":
            self._capture()

    @torch.no_grad()
    def write(self, plan: PassPlan, report: Callable[[int], object]) -> tuple[Pass, int]:
        """Write one pass; the same plan gives the same tokens on the same device.

        Args:
            plan: for this writer's number of rows.
            report: is told how many more positions are done, from time to time.

        Returns:
            The rows, and how many turns were ended because they repeated themselves.
        """
        self._start(plan)
        loop_ends = torch.zeros((), dtype=torch.int64, device=self._tokens.device)
        for position in range(self._length - 1):
            self._run(padded_length(position + 1))
            if (position + 1) % GUARD_STEPS == 0:
                loop_ends += self._end_loops(position + 1)
                report(GUARD_STEPS)
        report((self._length - 1) % GUARD_STEPS)
        written = Pass(
            tokens=self._tokens.to(torch.int32).cpu(),
            roles=self._roles.cpu(),
            temperatures=self._temperatures.cpu(),
        )
        return written, int(loop_ends)

    def _start(self, plan: PassPlan) -> None:
        """Set the state to that before the first step of `plan`."""
        assert len(plan.forced) == len(plan.temperatures) == self._rows, len(plan.forced)
        assert max(map(len, plan.forced)) < self._length
        forced = torch.zeros(self._forced.shape, dtype=torch.int64)
        is_forced = torch.zeros(self._forced.shape, dtype=torch.bool)
        for row, ids in enumerate(plan.forced):
            forced[row, : len(ids)] = torch.tensor(ids)
            is_forced[row, : len(ids)] = True
        self._forced.copy_(forced)
        self._is_forced.copy_(is_forced)
        self._tokens.zero_()
        self._tokens[:, 0] = self._forced[:, 0]
        self._roles.zero_()
        self._answering.fill_(False)
        self._temperatures.copy_(torch.tensor(plan.temperatures))
        self._context.position.zero_()
        self._generator.manual_seed(plan.seed)

    def _run(self, context_length: int) -> None:
        if self._graphs:
            self._graphs[context_length].replay()
        else:
            self._step(context_length)

    def _step(self, context_length: int) -> None:
        """Choose every row's next token and move on; nothing here waits for the device."""
        position = self._context.set(context_length)
        newest = self._tokens.index_select(1, position)[:, 0]
        hidden, _ = self._decoder.hidden(newest, position.expand(self._rows))
        chosen = self._choose(self._target.logits(self._decoder.norm(hidden)))
        following = position + 1
        forced = self._forced.index_select(1, following)[:, 0]
        is_forced = self._is_forced.index_select(1, following)[:, 0]
        end = torch.where(self._answering, self._turns.answer_end, self._turns.user_end)
        # Another special token ends the turn too, but it is not what the target chose.
        is_text = self._turns.is_text[chosen] | (chosen == end)
        token = torch.where(is_forced, forced, torch.where(is_text, chosen, end))
        self._tokens.index_copy_(1, following, token[:, None])
        role = self._answering & ~is_forced & is_text
        self._roles.index_copy_(1, following, role.to(torch.uint8)[:, None])
        # The opening may hold turns of its own, a system's.
        ended = (token == end) & (following >= self._turns.opening_length)
        self._force_pattern(following, ended)
        self._answering.logical_xor_(ended)
        position.add_(1)

    def _choose(self, logits: torch.Tensor) -> torch.Tensor:
        """Return argmax(logits + T * Gumbel noise) [B] int64 of logits [B, V] float32."""
        temperatures = torch.where(self._answering, self._temperatures, self._user_temperature)
        noise = torch.rand(logits.shape, generator=self._generator, device=logits.device)
        noise.clamp_(min=_LEAST_UNIFORM).log_().neg_().log_().neg_()
        return noise.mul_(temperatures[:, None]).add_(logits).argmax(dim=-1)

    def _force_pattern(self, end: torch.Tensor, ended: torch.Tensor) -> None:
        """Force what stands after the turns that `ended` [B] bool at the position `end` [1]."""
        columns = end + 1 + self._turns.places
        whose = self._answering.long()
        forced = self._forced.index_select(1, columns)
        is_forced = self._is_forced.index_select(1, columns)
        put = ended[:, None] & self._turns.in_pattern[whose] & ~is_forced
        forced = torch.where(put, self._turns.patterns[whose], forced)
        self._forced.index_copy_(1, columns, forced)
        self._is_forced.index_copy_(1, columns, is_forced | put)

    def _end_loops(self, newest: int) -> torch.Tensor:
        """Force the end of turns that repeat themselves; return how many, scalar int64.

        Args:
            newest: position of the newest token.
        """
        history = self._tokens[:, max(0, newest + 1 - LOOP_TOKENS - LOOP_LAG) : newest + 1]
        if history.shape[1] <= LOOP_TOKENS or newest + 1 >= self._length:
            return torch.zeros((), dtype=torch.int64, device=history.device)
        earlier = history.unfold(1, LOOP_TOKENS, 1)[:, :-1]
        loops = (earlier == history[:, None, -LOOP_TOKENS:]).all(dim=2).any(dim=1)
        loops &= ~self._is_forced[:, newest + 1]
        end = torch.where(self._answering, self._turns.answer_end, self._turns.user_end)
        self._forced[:, newest + 1] = torch.where(loops, end, self._forced[:, newest + 1])
        self._is_forced[:, newest + 1] |= loops
        return loops.sum()

    @torch.no_grad()
    def _capture(self) -> None:
        """Capture the step for every padded context length.

        All before the first pass, so that a pass's noise does not depend on what ran before it.
        """
        stream = torch.cuda.Stream()
        pool = torch.cuda.graph_pool_handle()
        for context_length in range(padded_length(1), padded_length(self._length) + 1, 64):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self._context.position.zero_()
                    self._step(context_length)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(self._generator)
            with torch.cuda.graph(graph, pool=pool):
                self._step(context_length)
            self._graphs[context_length] = graph


class _TurnTables:
    """`Turns` as tensors; index 0 is the user's, 1 the assistant's."""

    def __init__(self, turns: Turns, vocab_size: int, device: torch.device) -> None:
        self.opening_length = len(turns.opening)
        self.user_end = torch.tensor(turns.user_end, device=device)
        self.answer_end = torch.tensor(turns.answer_end, device=device)
        pieces = (turns.answer_opening, turns.user_opening)
        width = max(1, *map(len, pieces))
        padded = [[*piece, *[0] * (width - len(piece))] for piece in pieces]
        self.patterns = torch.tensor(padded, device=device)
        """[2, P] int64: what follows the end of a turn."""
        self.places = torch.arange(width, device=device)
        lengths = torch.tensor([len(piece) for piece in pieces], device=device)
        self.in_pattern = self.places < lengths[:, None]
        """[2, P] bool."""
        is_text = torch.zeros(vocab_size, dtype=torch.bool)
        is_text[[token for token in turns.text_tokens if token < vocab_size]] = True
        self.is_text = is_text.to(device)
        """[V] bool: tokens that may stand inside a turn."""

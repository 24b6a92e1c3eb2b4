"""Answer prompts as the three services do, in one process: draft, verify, commit, round by round.

The rule is the served one: the target's own choice at each position, greedy or sampled with noise
of (seed, position, token), and a draft token stands iff it equals that choice. The drafter is the
one that is served, and gets what it gets there: the rows of committed positions, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from drafter_service.drafter import Drafter, DraftSampling, DraftWork, SessionParameters
from drafter_service.training.answers import Answer
from graph_runtime.choice import Sampling, choose
from graph_runtime.target import Span, SpanOutput, Target


@dataclass(frozen=True, kw_only=True)
class Question:
    """One prompt, and how it is to be answered."""

    prompt_class: str
    prompt_ids: Sequence[int]
    sampling: Sampling
    draft_sampling: DraftSampling
    draft_count: int
    """K."""
    output_limit: int
    """Tokens to emit at most, at least 1; with the prompt it fits the target's context."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One question's answer, and what became of each round's draft tokens."""

    answer: Answer
    rounds: Sequence[tuple[int, int]]
    """Draft tokens and accepted tokens of each round, those beyond the answer's end left out."""


@dataclass(slots=True, kw_only=True)
class _Session:
    """One generation."""

    question: Question
    number: int
    slot: int
    tokens: list[int]
    """Prompt and everything emitted; the last one is pending once the prefill is over."""
    answer_ids: list[int] = field(default_factory=list)
    """What was emitted up to the end."""
    committed_length: int = 0
    context_length: int = 0
    """Of the drafter, before the next work."""
    rows: torch.Tensor | None = None
    """[committed_length - context_length, row width]; None: none, or the drafter wants none."""
    rounds: list[tuple[int, int]] = field(default_factory=list)
    has_ended: bool = False

    @property
    def draft_room(self) -> int:
        """Return K, less where the output limit comes first."""
        return min(self.question.draft_count, self.question.output_limit - len(self.answer_ids) - 1)

    def work(self, draft_count: int) -> DraftWork:
        """Return what the drafter has not got yet, and draft from there (law L2)."""
        begin, end = self.context_length, self.committed_length
        assert self.rows is None or len(self.rows) == end - begin, "law L2: a row a position"
        rows, self.rows, self.context_length = self.rows, None, end
        question = self.question
        return DraftWork(
            slot=self.slot,
            parameters=parameters_of(question),
            start=begin,
            token_ids=self.tokens[begin:end],
            rows=None if rows is None else _bytes(rows),
            pending_token_id=self.tokens[end] if draft_count else None,
            draft_count=draft_count,
        )

    def emit(self, token_ids: Sequence[int], stop_token_ids: Collection[int]) -> int:
        """Take emitted tokens; return how many of them are the answer's: it may end before."""
        self.tokens += token_ids
        for count, token_id in enumerate(token_ids, start=1):
            self.answer_ids.append(token_id)
            is_full = len(self.answer_ids) == self.question.output_limit
            if token_id in stop_token_ids or is_full:
                self.has_ended = True
                return count
        return len(token_ids)

    def outcome(self) -> Outcome:
        """Return the finished answer."""
        answer = Answer(
            prompt_class=self.question.prompt_class,
            token_ids=self.answer_ids,
            round_count=len(self.rounds),
        )
        return Outcome(answer=answer, rounds=self.rounds)


def parameters_of(question: Question) -> SessionParameters:
    """Return what a drafter is told at the opening of a question's session."""
    sampling = question.sampling
    return SessionParameters(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        draft_sampling=question.draft_sampling,
    )


class Chain:
    """A target and a drafter that answer questions together."""

    def __init__(
        self, target: Target, drafter: Drafter, *, stop_token_ids: Collection[int]
    ) -> None:
        """Join a loaded pair; `drafter` takes the target's raw rows as float32, or no rows.

        Args:
            target: its tap layers are the drafter's.
            drafter: with at least as many slots as there will be sessions at once.
            stop_token_ids: the answer ends with the first of them.
        """
        self._target = target
        self._drafter = drafter
        self._stop_token_ids = stop_token_ids
        self._wants_rows = drafter.info.row_format.row_bytes > 0

    @torch.inference_mode()
    def answer(
        self,
        questions: Sequence[Question],
        *,
        session_count: int,
        on_outcome: Callable[[Outcome], object],
    ) -> list[Outcome]:
        """Answer all questions, `session_count` at once in packed steps; outcomes in their order.

        Raises:
            NonFiniteLogits: the target's logits are no numbers.
        """
        outcomes: dict[int, Outcome] = {}
        slots = list(range(session_count - 1, -1, -1))
        waiting = list(enumerate(questions))[::-1]
        running: list[_Session] = []
        while waiting or running:
            while waiting and slots:
                running.append(self._begin(*waiting.pop(), slots.pop()))
            self._round([session for session in running if not session.has_ended])
            for session in (session for session in running if session.has_ended):
                self._drafter.release(session.slot)
                slots.append(session.slot)
                outcomes[session.number] = session.outcome()
                on_outcome(outcomes[session.number])
            running = [session for session in running if not session.has_ended]
        return [outcomes[number] for number in range(len(questions))]

    def _begin(self, number: int, question: Question, slot: int) -> _Session:
        """Prefill a prompt; the drafter gets its rows chunk by chunk."""
        prompt = list(question.prompt_ids)
        session = _Session(question=question, number=number, slot=slot, tokens=prompt)
        self._drafter.open(slot, parameters_of(question))
        end, largest = len(prompt), self._target.info.max_prefill_chunk
        for begin in range(0, end, largest):
            chunk = prompt[begin : begin + largest]
            is_last = begin + len(chunk) == end
            (output,) = self._step([session], [chunk], [int(is_last)])
            self._commit(session, output, len(chunk))
            if not is_last:
                self._drafter.step([session.work(0)])
        session.emit(choose(output.logits, question.sampling, [end]), self._stop_token_ids)
        assert len(session.tokens) == session.committed_length + 1, "law L1"
        return session

    def _round(self, sessions: Sequence[_Session]) -> None:
        """Draft and verify once for each session, in one packed step each (law L5)."""
        if not sessions:
            return
        drafts: list[list[int]] = [[] for _ in sessions]
        drafting = [i for i, session in enumerate(sessions) if session.draft_room > 0]
        if drafting:
            works = [sessions[i].work(sessions[i].draft_room) for i in drafting]
            for i, ids in zip(drafting, self._drafter.step(works), strict=True):
                drafts[i] = ids
        windows = [[s.tokens[-1], *ids] for s, ids in zip(sessions, drafts, strict=True)]
        outputs = self._step(sessions, windows, [len(window) for window in windows])
        for session, draft_ids, output in zip(sessions, drafts, outputs, strict=True):
            self._verify(session, draft_ids, output)

    def _verify(self, session: _Session, draft_ids: Sequence[int], output: SpanOutput) -> None:
        """Emit the target's own choices as far as the draft tokens equal them, and one more."""
        first = session.committed_length + 1
        positions = range(first, first + 1 + len(draft_ids))
        chosen = choose(output.logits, session.question.sampling, positions, draft_ids)
        accepted = 0
        while accepted < len(draft_ids) and draft_ids[accepted] == chosen[accepted]:
            accepted += 1
        emitted = chosen[: accepted + 1]
        self._commit(session, output, accepted + 1)
        kept = session.emit(emitted, self._stop_token_ids)
        committed = session.committed_length - first + 1
        assert 1 <= committed == len(emitted) <= len(draft_ids) + 1, "law L3"
        assert len(session.tokens) == session.committed_length + 1, "law L1"
        # Of a round that the answer's end cuts, the kept tokens were drafted and accepted.
        is_cut = kept <= accepted
        session.rounds.append((kept, kept) if is_cut else (len(draft_ids), accepted))

    def _step(
        self,
        sessions: Sequence[_Session],
        token_ids: Sequence[Sequence[int]],
        wanted: Sequence[int],
    ) -> list[SpanOutput]:
        """Run one packed step of the target, each session from its committed length on."""
        spans = [
            Span(
                slot=session.slot,
                start=session.committed_length,
                token_ids=ids,
                logits_count=count,
                wants_rows=self._wants_rows,
            )
            for session, ids, count in zip(sessions, token_ids, wanted, strict=True)
        ]
        return self._target.step(spans)

    def _commit(self, session: _Session, output: SpanOutput, count: int) -> None:
        """Commit the first `count` positions of a span, and keep their rows for the drafter."""
        session.committed_length += count
        if self._wants_rows:
            assert output.rows is not None
            rows = output.rows[:count]
            session.rows = rows if session.rows is None else torch.cat([session.rows, rows])


def _bytes(rows: torch.Tensor) -> bytes:
    """Return rows [c, row width] as row-major little-endian float32."""
    data: bytes = rows.to(torch.float32).cpu().contiguous().numpy().tobytes()
    return data

"""What a request cost, as its last response, its span and the process's metrics say it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

from google.protobuf import duration_pb2

from coordinator.batching import Trip
from coordinator.requests import Plan
from coordinator.rounds import Emit
from coordinator.sessions import Session
from splitspec import telemetry
from splitspec.metrics import ROUND_PHASES, CoordinatorMetrics
from splitspec.telemetry import Attributes, Span
from splitspec.v1 import generation_pb2


class RequestClock:
    """When a request arrived, and when its tokens came."""

    def __init__(self) -> None:
        self.arrival = perf_counter()
        self.first_token: float | None = None
        self.last_token = self.arrival

    def token(self) -> None:
        """Note that tokens have come now."""
        self.last_token = perf_counter()
        if self.first_token is None:
            self.first_token = self.last_token


def finish_message(
    session: Session, clock: RequestClock, output_count: int, reason: int, draft_method: str
) -> generation_pb2.Finish:
    """Return the end of an answer that showed `output_count` tokens."""
    first = clock.first_token or clock.last_token
    counts = session.acceptance_length_counts
    rounds = sum(counts)
    accepted = sum(index * count for index, count in enumerate(counts))
    after_first = clock.last_token - first
    speed = (output_count - 1) / after_first if output_count > 1 and after_first > 0 else 0.0
    times = session.times
    statistics = generation_pb2.GenerationStatistics(
        prompt_token_count=session.prompt_length,
        output_token_count=output_count,
        round_count=rounds,
        target_only_round_count=session.target_only_round_count,
        draft_token_count=session.draft_token_count,
        accepted_token_count=accepted,
        acceptance_length_counts=counts,
        replay_count=len(session.replay_causes),
        time_to_first_token=_duration(first - clock.arrival),
        total_time=_duration(clock.last_token - clock.arrival),
        tokens_per_second=speed,
        mean_acceptance_length=(accepted + rounds) / rounds if rounds else 0.0,
        round_times=generation_pb2.RoundTimes(
            draft=_duration(times.draft),
            verify=_duration(times.verify),
            wire=_duration(times.wire),
            coordinator=_duration(times.coordinator),
        ),
        draft_method=draft_method if session.draft_count else "",
    )
    return generation_pb2.Finish(
        reason=generation_pb2.FinishReason.Name(reason),
        seed=session.sampling.seed,
        statistics=statistics,
    )


def request_attributes(plan: Plan, model_id: str) -> Attributes:
    """Return the GenAI attributes that are known at the start of a request."""
    sampling = plan.sampling
    seed = sampling.seed
    attributes: dict[str, telemetry.AttributeValue] = {
        telemetry.GEN_AI_OPERATION: (
            telemetry.OPERATION_CHAT if plan.is_chat else telemetry.OPERATION_TEXT
        ),
        telemetry.GEN_AI_PROVIDER: telemetry.PROVIDER,
        telemetry.GEN_AI_REQUEST_MODEL: model_id,
        telemetry.GEN_AI_REQUEST_MAX_TOKENS: plan.output_limit,
        telemetry.GEN_AI_REQUEST_SEED: seed if seed < 2**63 else str(seed),
        telemetry.GEN_AI_USAGE_INPUT_TOKENS: len(plan.prompt_ids),
    }
    for key, field in (
        (telemetry.GEN_AI_REQUEST_TEMPERATURE, "temperature"),
        (telemetry.GEN_AI_REQUEST_TOP_K, "top_k"),
        (telemetry.GEN_AI_REQUEST_TOP_P, "top_p"),
    ):
        if sampling.HasField(field):
            attributes[key] = getattr(sampling, field)
    if plan.stops:
        attributes[telemetry.GEN_AI_REQUEST_STOP] = list(plan.stops)
    return attributes


def describe_finish(span: Span, finish: generation_pb2.Finish, model_id: str) -> None:
    """Set on `splitspec.generate` what is known at the end of a request."""
    statistics = finish.statistics
    span.set(telemetry.GEN_AI_RESPONSE_MODEL, model_id)
    span.set(telemetry.GEN_AI_RESPONSE_FINISH_REASONS, [finish_name(finish.reason)])
    span.set(
        telemetry.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK,
        statistics.time_to_first_token.ToNanoseconds() / 1e9,
    )
    span.set(telemetry.GEN_AI_USAGE_OUTPUT_TOKENS, statistics.output_token_count)
    span.set(telemetry.KEY_ROUND_COUNT, statistics.round_count)
    span.set(telemetry.KEY_REPLAY_COUNT, statistics.replay_count)
    span.set(telemetry.KEY_DRAFT_METHOD, statistics.draft_method)
    span.set(telemetry.KEY_MEAN_ACCEPTANCE_LENGTH, statistics.mean_acceptance_length)


def finish_name(reason: int) -> str:
    """Return "stop" or "length"."""
    return generation_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()


class Meters:
    """Feeds the process's metrics: steps as they are answered, requests as they end."""

    def __init__(self, metrics: CoordinatorMetrics) -> None:
        self._metrics = metrics
        self._wire = {
            (peer, way): metrics.wire_bytes.labels(f"{kind}_{way}")
            for peer, kind in (("verifier", "verify"), ("drafter", "draft"))
            for way in ("request", "response")
        }

    def step(self, peer: str, request_bytes: int, response_bytes: int, trip: Trip) -> None:
        """Count one step's bytes."""
        del trip
        self._wire[peer, "request"].inc(request_bytes)
        self._wire[peer, "response"].inc(response_bytes)

    def round_meter(self, session: Session, emit: Emit) -> Emit:
        """Return `emit` with every round observed behind it."""
        metrics = self._metrics
        phases = {phase: metrics.round_seconds.labels(phase) for phase in ROUND_PHASES}
        before = replace(session.times)
        drafted = rounds = 0

        def emit_and_observe(ids: Sequence[int]) -> generation_pb2.FinishReason | None:
            nonlocal before, drafted, rounds
            finish = emit(ids)
            now, count = session.times, sum(session.acceptance_length_counts)
            if count != rounds:
                for phase, histogram in phases.items():
                    histogram.observe(getattr(now, phase) - getattr(before, phase))
                metrics.inter_token_latency.observe((now.total - before.total) / len(ids))
                metrics.draft_tokens_chosen.observe(session.draft_token_count - drafted)
                before, drafted, rounds = replace(now), session.draft_token_count, count
            return finish

        return emit_and_observe

    def finished(self, finish: generation_pb2.Finish) -> None:
        """Count an answered request."""
        metrics, statistics = self._metrics, finish.statistics
        metrics.requests.labels(finish_name(finish.reason)).inc()
        metrics.time_to_first_token.observe(statistics.time_to_first_token.ToNanoseconds() / 1e9)
        metrics.request_latency.observe(statistics.total_time.ToNanoseconds() / 1e9)

    def failed(self, outcome: str) -> None:
        """Count a request that ended otherwise."""
        self._metrics.requests.labels(outcome).inc()

    def session_ended(self, session: Session, output_count: int) -> None:
        """Count what a session did, however it ended."""
        metrics = self._metrics
        metrics.prompt_tokens.inc(session.prompt_length)
        metrics.generation_tokens.inc(output_count)
        counts = session.acceptance_length_counts
        rounds = sum(counts)
        metrics.drafts.inc(rounds - session.target_only_round_count)
        metrics.draft_tokens.inc(session.draft_token_count)
        metrics.accepted_tokens.inc(sum(index * count for index, count in enumerate(counts)))
        for position in range(len(counts) - 1):
            stood = sum(counts[position + 1 :])
            metrics.accepted_tokens_per_pos.labels(str(position)).inc(stood)
        for cause, count in Counter(session.replay_causes).items():
            metrics.replays.labels(cause).inc(count)


def _duration(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(max(0, round(seconds * 1e9)))
    return duration

"""What processes check of a message in the same way: unknown fields, steps, sampling parameters."""

from __future__ import annotations

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from splitspec.errors import InvalidArgument
from splitspec.v1 import drafter_pb2, sampling_pb2, verifier_pb2

StepRequest = verifier_pb2.VerifierRunStepsRequest | drafter_pb2.DrafterRunStepsRequest

MAX_TEMPERATURE = 100.0
IMPLEMENTED_SAMPLING = frozenset(("temperature", "top_k", "top_p", "min_p", "seed"))
"""Fields of SamplingParameters that mean something; a set field beside them is refused."""


def refuse_unknown(name: str, message: Message) -> None:
    """Refuse fields of `message` itself that this version does not know: nothing is ignored.

    Raises:
        InvalidArgument: names the message and the field number.
    """
    unknown = UnknownFieldSet(message)
    if len(unknown):
        raise InvalidArgument.of(
            name, f"carrying unknown field {unknown[0].field_number}", "known fields only"
        )


def refuse_unknown_within(name: str, message: Message) -> None:
    """Refuse unknown fields of `message` and of every message inside it.

    Raises:
        InvalidArgument: names the innermost message and the field number.
    """
    refuse_unknown(name, message)
    for field, value in message.ListFields():
        if field.type != FieldDescriptor.TYPE_MESSAGE or field.message_type.GetOptions().map_entry:
            continue
        for inner in [value] if isinstance(value, Message) else value:
            refuse_unknown_within(f"{name}.{field.name}", inner)


def check_step(request: StepRequest, last_step: int, item_limit: int) -> None:
    """Refuse a step that no item of it can be blamed for; the stream ends.

    Raises:
        InvalidArgument: step numbers do not ascend, too many items, or unknown fields.
    """
    refuse_unknown("request", request)
    if request.step <= last_step:
        raise InvalidArgument.of("step", request.step, f"above {last_step}, the step before")
    if len(request.items) > item_limit:
        raise InvalidArgument.of("items count", len(request.items), f"0..{item_limit}")


def check_sampling(sampling: sampling_pb2.SamplingParameters) -> None:
    """Check what SamplingParameters says of each field; whether a seed is needed is the caller's.

    Raises:
        InvalidArgument: a value is out of its range, or a field is not known or not implemented.
    """
    refuse_unknown("sampling", sampling)
    for field, value in sampling.ListFields():
        if field.name not in IMPLEMENTED_SAMPLING:
            raise InvalidArgument.of(
                f"sampling.{field.name}", value, "unset: it is not implemented"
            )
    check_sampling_ranges(
        temperature=sampling.temperature, top_p=top_p_of(sampling), min_p=sampling.min_p
    )


def check_sampling_ranges(*, temperature: float, top_p: float, min_p: float) -> None:
    """Check the parameters that have a range.

    Raises:
        InvalidArgument: names the field as in the proto.
    """
    # NOTE: written so that NaN fails every range.
    if not 0.0 <= temperature <= MAX_TEMPERATURE:
        raise InvalidArgument.of("sampling.temperature", temperature, "0..100")
    if not 0.0 < top_p <= 1.0:
        raise InvalidArgument.of("sampling.top_p", top_p, "above 0, up to 1")
    if not 0.0 <= min_p <= 1.0:
        raise InvalidArgument.of("sampling.min_p", min_p, "0..1")


def require_seed(sampling: sampling_pb2.SamplingParameters) -> None:
    """Refuse noise without a key: a service draws none of its own.

    Raises:
        InvalidArgument: temperature > 0 and no seed.
    """
    if sampling.temperature > 0.0 and not sampling.HasField("seed"):
        raise InvalidArgument.of("sampling.seed", "not set", "a seed when temperature > 0")


def top_p_of(sampling: sampling_pb2.SamplingParameters) -> float:
    """Return top_p, whose absence means 1."""
    return sampling.top_p if sampling.HasField("top_p") else 1.0

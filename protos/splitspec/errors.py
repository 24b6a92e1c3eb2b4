"""The one exception tree. Engines raise it, servers map it to gRPC, coordinators act on `reason`.

Free of grpc and torch, so that every room may import it.
"""

from __future__ import annotations

from enum import IntEnum


class Code(IntEnum):
    """The google.rpc.Code values that splitspec uses."""

    INVALID_ARGUMENT = 3
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    INTERNAL = 13
    UNAVAILABLE = 14


DOMAIN = "splitspec"


class UserError(Exception):
    """A user's mistake, said in one line. Commands print it without a traceback and exit with 2."""


class SplitspecError(Exception):
    """An error that crosses a wire: a code, a reason, one line, and details.

    `metadata` values are short strings: they travel in trailers.
    """

    code = Code.INTERNAL
    reason = "INTERNAL"

    def __init__(self, message: str, /, **metadata: object) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = {key: str(value)[:200] for key, value in metadata.items()}


class InvalidArgument(SplitspecError):
    """Malformed item, unknown token id, bad parameter. Names the field, the value and the range."""

    code = Code.INVALID_ARGUMENT
    reason = "INVALID_ARGUMENT"

    @classmethod
    def of(cls, field: str, value: object, expected: str) -> InvalidArgument:
        """Build the standard message for `field` that held `value` instead of `expected`."""
        shown = str(value)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        return cls(
            f"{field} is {shown}; expected {expected}", field=field, value=shown, expected=expected
        )


class ContextFull(SplitspecError):
    """Prompt and output do not fit the context."""

    code = Code.INVALID_ARGUMENT
    reason = "CONTEXT_FULL"


class SessionNotFound(SplitspecError):
    """The stream has no such session."""

    code = Code.NOT_FOUND
    reason = "SESSION_NOT_FOUND"


class CommittedLengthMismatch(SplitspecError):
    """The peers disagree on a session's committed (or context) length."""

    code = Code.FAILED_PRECONDITION
    reason = "COMMITTED_LENGTH_MISMATCH"


class ModelMismatch(SplitspecError):
    """A verifier and a drafter do not fit each other."""

    code = Code.FAILED_PRECONDITION
    reason = "MODEL_MISMATCH"


class NoFreeSlot(SplitspecError):
    """Every slot is taken."""

    code = Code.RESOURCE_EXHAUSTED
    reason = "NO_FREE_SLOT"


class QueueFull(SplitspecError):
    """The coordinator's waiting room is full."""

    code = Code.RESOURCE_EXHAUSTED
    reason = "QUEUE_FULL"


class NotReady(SplitspecError):
    """The service is still loading, or the peer that it needs is."""

    code = Code.UNAVAILABLE
    reason = "NOT_READY"


class Draining(SplitspecError):
    """The service is shutting down and takes nothing new."""

    code = Code.UNAVAILABLE
    reason = "DRAINING"


class EngineFailed(SplitspecError):
    """A device fault. The service reports NOT_SERVING and its process exits."""

    code = Code.INTERNAL
    reason = "ENGINE_FAILED"


class NonFiniteLogits(SplitspecError):
    """The target has no finite largest logit for this item: its weights overflow on these tokens.

    The item fails alone, with its session as it was. A replay would fail in the same way, so the
    coordinator fails the request.
    """

    code = Code.INTERNAL
    reason = "NON_FINITE_LOGITS"


def _leaves(cls: type[SplitspecError]) -> list[type[SplitspecError]]:
    return [leaf for sub in cls.__subclasses__() for leaf in [sub, *_leaves(sub)]]


def from_wire(reason: str, message: str, metadata: dict[str, str]) -> SplitspecError:
    """Rebuild the exception that a peer sent; an unknown reason becomes a plain SplitspecError."""
    for leaf in _leaves(SplitspecError):
        if leaf.reason == reason:
            return leaf(message, **metadata)
    error = SplitspecError(message, **metadata)
    error.reason = reason
    return error

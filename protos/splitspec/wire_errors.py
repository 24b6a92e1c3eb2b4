"""How `SplitspecError` crosses gRPC: statuses, item errors and the interceptor that maps them."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from splitspec.errors import DOMAIN, Code, InvalidArgument, NotReady, SplitspecError, from_wire
from splitspec.v1 import step_pb2

logger = logging.getLogger(__name__)

RETRY_AFTER_MS = 500
"""What RESOURCE_EXHAUSTED suggests to wait: slots come back within a fraction of an answer."""


def status_of(error: SplitspecError) -> status_pb2.Status:
    """Return `error` as a google.rpc.Status: ErrorInfo, and RetryInfo where waiting helps."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    details = [any_pb2.Any()]
    details[0].Pack(info)
    if error.code == Code.RESOURCE_EXHAUSTED:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(RETRY_AFTER_MS)
        details.append(any_pb2.Any())
        details[1].Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status_pb2.Status(code=error.code, message=error.message, details=details)


async def abort(context: Any, error: SplitspecError) -> None:
    """End the call of `context` with `error`; never returns."""
    status = rpc_status.to_status(status_of(error))
    await context.abort(status.code, status.details, status.trailing_metadata)


def error_from_rpc(error: grpc.aio.AioRpcError) -> SplitspecError:
    """Rebuild what the peer raised; a failure of gRPC itself (link lost, time out) gets its code.

    UNAVAILABLE without an ErrorInfo is a peer that cannot be reached: `NotReady`.
    """
    message = error.details() or ""
    for key, value in error.trailing_metadata() or ():
        if key != rpc_status.GRPC_DETAILS_METADATA_KEY:
            continue
        with contextlib.suppress(DecodeError):  # details that nobody can read are no details
            status = status_pb2.Status.FromString(value)
            for detail in status.details:
                info = error_details_pb2.ErrorInfo()
                if detail.Unpack(info) and info.domain == DOMAIN:
                    return _rebuilt(status.code, info.reason, message, dict(info.metadata))
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        return NotReady(f"peer unreachable: {message}")
    return _rebuilt(error.code().value[0], error.code().name, message, {})


def item_error(error: SplitspecError) -> step_pb2.ItemError:
    """Return `error` as the result of one item."""
    return step_pb2.ItemError(
        code=error.code, reason=error.reason, message=error.message, metadata=error.metadata
    )


def error_from_item(error: step_pb2.ItemError) -> SplitspecError:
    """Rebuild the exception that failed an item."""
    return _rebuilt(error.code, error.reason, error.message, dict(error.metadata))


def _rebuilt(code: int, reason: str, message: str, metadata: dict[str, str]) -> SplitspecError:
    error = from_wire(reason, message, metadata)
    with contextlib.suppress(ValueError):  # a code that splitspec does not use stays INTERNAL
        error.code = Code(code)
    return error


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Map what handlers raise to a status: the only place where that happens."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """Wrap the handler of one call."""
        handler = await continuation(handler_call_details)
        if handler is None:  # an unknown method: gRPC answers UNIMPLEMENTED
            return None
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            method = getattr(handler, kind)
            if method is not None:
                wrap = _mapped_stream if inspect.isasyncgenfunction(method) else _mapped_call
                parse = _as_it_is if handler.request_streaming else handler.request_deserializer
                parsed_by_grpc = handler.request_deserializer if handler.request_streaming else None
                return handler._replace(
                    request_deserializer=parsed_by_grpc, **{kind: wrap(method, parse)}
                )
        return handler


Parse = Callable[[Any], Any]
"""How a handler gets its request. A single request is parsed inside the mapping, so that bytes
that are no message are INVALID_ARGUMENT; a stream's messages are parsed where they are read."""


def _as_it_is(request: Any) -> Any:
    return request


def _mapped_call(
    method: Callable[[Any, Any], Awaitable[Any]], parse: Parse
) -> Callable[[Any, Any], Any]:
    async def call(request: Any, context: Any) -> Any:
        try:
            return await method(parse(request), context)
        except Exception as error:
            await abort(context, _to_splitspec(error))

    return call


def _mapped_stream(
    method: Callable[[Any, Any], AsyncGenerator[Any, None]], parse: Parse
) -> Callable[[Any, Any], Any]:
    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            # aclosing: a cancelled call runs the handler's cleanup now, not at collection (L7).
            async with contextlib.aclosing(method(parse(request), context)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            await abort(context, _to_splitspec(error))

    return stream


def _to_splitspec(error: Exception) -> SplitspecError:
    if isinstance(error, grpc.aio.AbortError):
        raise error  # the handler aborted by itself
    if isinstance(error, SplitspecError):
        return error
    if isinstance(error, DecodeError):
        return InvalidArgument.of("request", "not parseable", "a message of the protocol")
    logger.error("a handler failed", exc_info=error)
    return SplitspecError(f"{type(error).__name__}: {error}"[:500])

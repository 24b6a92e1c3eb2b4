"""Every class of the error tree crosses gRPC and comes back as itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from splitspec import errors, serving
from splitspec.channels import SERVER_OPTIONS
from splitspec.errors import InvalidArgument, NotReady, SplitspecError
from splitspec.v1 import generation_pb2 as pb
from splitspec.v1.generation_pb2_grpc import (
    GenerationServicer,
    GenerationStub,
    add_GenerationServicer_to_server,
)
from splitspec.wire_errors import ErrorInterceptor

TREE = [
    cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, SplitspecError) and cls is not SplitspecError
]
DETAILS = {"field": "x", "message": "a key like any other", "self": "too", "value": "ä\n"}


class Failing(GenerationServicer):
    """Raises what it is told to, before and after a response."""

    error: BaseException = NotReady("")

    async def GetModel(self, request: Any, context: Any) -> Any:
        del request, context
        raise self.error

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        del request, context
        yield pb.GenerateResponse(text_delta="a")
        raise self.error


@pytest.fixture
async def failing(tmp_path: Path) -> AsyncIterator[tuple[Failing, GenerationStub, Any]]:
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[ErrorInterceptor()])
    servicer = Failing()
    add_GenerationServicer_to_server(servicer, server)
    address = f"unix:{tmp_path}/s"
    server.add_insecure_port(address)
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        yield servicer, GenerationStub(channel), channel
    await server.stop(None)


async def _unary_error(stub: GenerationStub) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GetModel(pb.GenerationGetModelRequest(), timeout=10)
    return caught.value


async def _stream_error(stub: GenerationStub) -> grpc.aio.AioRpcError:
    call = stub.Generate(pb.GenerateRequest(), timeout=10)
    assert (await call.read()).text_delta == "a"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return caught.value


def test_the_tree_is_the_one_of_the_error_table() -> None:
    assert {cls.reason for cls in TREE} == {
        "INVALID_ARGUMENT",
        "CONTEXT_FULL",
        "SESSION_NOT_FOUND",
        "COMMITTED_LENGTH_MISMATCH",
        "MODEL_MISMATCH",
        "NO_FREE_SLOT",
        "QUEUE_FULL",
        "NOT_READY",
        "DRAINING",
        "ENGINE_FAILED",
        "NON_FINITE_LOGITS",
    }


@pytest.mark.parametrize("cls", TREE, ids=lambda cls: cls.__name__)
async def test_a_raised_error_comes_back_as_itself(
    failing: tuple[Failing, GenerationStub, Any], cls: type[SplitspecError]
) -> None:
    servicer, stub, _ = failing
    servicer.error = cls("one line, ä", **DETAILS)
    for error in (await _unary_error(stub), await _stream_error(stub)):
        assert error.code().value[0] == cls.code
        assert error.details() == "one line, ä"
        back = serving.error_from_rpc(error)
        assert type(back) is cls
        assert (back.message, back.metadata, back.code) == ("one line, ä", DETAILS, cls.code)


@pytest.mark.parametrize("cls", TREE, ids=lambda cls: cls.__name__)
def test_an_item_error_comes_back_as_itself(cls: type[SplitspecError]) -> None:
    message = serving.item_error(cls("one line", **DETAILS))
    back = serving.error_from_item(type(message).FromString(message.SerializeToString()))
    assert type(back) is cls
    assert (back.message, back.metadata, back.code) == ("one line", DETAILS, cls.code)


async def test_exhaustion_says_when_to_retry_and_nothing_else_does(
    failing: tuple[Failing, GenerationStub, Any],
) -> None:
    servicer, stub, _ = failing
    for cls in TREE:
        servicer.error = cls("no")
        error = await _unary_error(stub)
        status = rpc_status.from_call(_SyncView(error))
        assert status is not None
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        assert status.details[0].Unpack(info)
        assert (info.domain, info.reason) == ("splitspec", cls.reason)
        waits = [detail.Unpack(retry) for detail in status.details[1:]]
        assert waits == ([True] if cls.code == errors.Code.RESOURCE_EXHAUSTED else [])
        assert bool(retry.retry_delay.ToMilliseconds()) == bool(waits)


class _SyncView:
    """An aio error in the shape that grpcio-status reads."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code = error.code
        self.details = error.details
        self._metadata = error.trailing_metadata()

    def trailing_metadata(self) -> tuple[Any, ...]:
        """Return pairs with the attributes that the synchronous API gives them."""
        pair = type("Pair", (tuple,), {"key": property(lambda s: s[0]), "value": property(_second)})
        return tuple(pair(item) for item in self._metadata)


def _second(pair: Any) -> Any:
    return pair[1]


async def test_a_bug_of_ours_is_internal_and_logged(
    failing: tuple[Failing, GenerationStub, Any], caplog: pytest.LogCaptureFixture
) -> None:
    servicer, stub, _ = failing
    servicer.error = ZeroDivisionError("oh")
    for error in (await _unary_error(stub), await _stream_error(stub)):
        assert error.code() == grpc.StatusCode.INTERNAL
        assert serving.error_from_rpc(error).reason == "INTERNAL"
        assert "ZeroDivisionError: oh" in str(error.details())
    assert "Traceback" in caplog.text


async def test_bytes_that_are_no_message_are_the_peers_invalid_argument(
    failing: tuple[Failing, GenerationStub, Any],
) -> None:
    _, _, channel = failing
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary("/splitspec.v1.Generation/GetModel")(b"\x0a\xff", timeout=10)
    assert isinstance(serving.error_from_rpc(caught.value), InvalidArgument)
    call = channel.unary_stream("/splitspec.v1.Generation/Generate")(b"\x0a\xff", timeout=10)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert isinstance(serving.error_from_rpc(caught.value), InvalidArgument)


async def test_an_unknown_method_stays_unimplemented(
    failing: tuple[Failing, GenerationStub, Any],
) -> None:
    _, _, channel = failing
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary("/splitspec.v1.Generation/Nothing")(b"", timeout=10)
    error = serving.error_from_rpc(caught.value)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert error.reason == "UNIMPLEMENTED"


async def test_a_peer_that_is_not_there_is_not_ready(tmp_path: Path) -> None:
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/nobody") as channel:
        error = serving.error_from_rpc(await _unary_error(GenerationStub(channel)))
    assert isinstance(error, NotReady)
    assert "unreachable" in error.message


@pytest.mark.parametrize(
    "details",
    [
        b"\xff",
        status_pb2.Status(
            code=9,
            details=[
                any_pb2.Any(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff")
            ],
        ).SerializeToString(),
    ],
    ids=["status", "detail"],
)
def test_details_that_are_undecodable_leave_grpcs_own_code(details: bytes) -> None:
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", details))
    for code, reason in (
        (grpc.StatusCode.UNAVAILABLE, "NOT_READY"),
        (grpc.StatusCode.DATA_LOSS, "DATA_LOSS"),
    ):
        error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, "no")
        back = serving.error_from_rpc(error)
        assert back.reason == reason
        assert "no" in back.message


def test_a_reason_from_the_future_keeps_its_name_and_code() -> None:
    error = SplitspecError("new")
    error.reason, error.code = "FROM_THE_FUTURE", errors.Code.UNAVAILABLE
    back = serving.error_from_item(serving.item_error(error))
    assert type(back) is SplitspecError
    assert (back.reason, back.code) == ("FROM_THE_FUTURE", errors.Code.UNAVAILABLE)


def test_a_huge_value_is_cut_before_it_travels_in_a_header() -> None:
    error = InvalidArgument.of("text", "x" * 100_000, "less")
    assert len(serving.status_of(error).SerializeToString()) < 1000

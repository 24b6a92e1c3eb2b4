"""Ask a splitspec process for its health: `python -m splitspec.probe ADDRESS [SERVICE]`."""

from __future__ import annotations

import asyncio
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitspec.channels import check_peer_address
from splitspec.errors import SplitspecError, UserError
from splitspec.wire_errors import error_from_rpc


async def peer_health(address: str, service: str = "", timeout_seconds: float = 3.0) -> str:
    """Return "SERVING", "NOT_SERVING" or another name of grpc.health.v1's ServingStatus.

    Raises:
        SplitspecError: the peer cannot be reached in time, or has no such service.
    """
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            response = await stub.Check(request, timeout=timeout_seconds)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
    return name


def main(arguments: list[str]) -> int:
    """Print the peer's health; return 0 when it is SERVING. Container health checks call it."""
    if len(arguments) not in (1, 2):
        print("usage: python -m splitspec.probe ADDRESS [SERVICE]", file=sys.stderr)
        return 2
    try:
        check_peer_address(arguments[0])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        status = asyncio.run(peer_health(arguments[0], "".join(arguments[1:])))
    except SplitspecError as error:
        status = f"unreachable: {error.message.removeprefix('peer unreachable: ')}"
    print(status)
    return 0 if status == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Options and addresses that both ends of a splitspec channel use."""

from __future__ import annotations

from splitspec.errors import UserError

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Cap on one message either way. Prefill rows are chunked to about 1 MiB; a packed step of 32
sessions' chunks still fits."""

_SIZES = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    *_SIZES,
    ("grpc.so_reuseport", 0),  # a port that is in use is an error, not a silent share
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
]

CLIENT_OPTIONS: list[tuple[str, int]] = [
    *_SIZES,
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


def check_peer_address(address: str) -> None:
    """Check where a peer is said to be; gRPC would take a port modulo 65536, and none for 443.

    Raises:
        UserError: it is neither unix:/path nor host:port with a port in 1..65535.
    """
    if address.startswith("unix:"):
        return
    host, _, port = address.rpartition(":")
    if not host:
        raise UserError(f"{address!r} is not an address: expected host:port or unix:/path")
    if not (port.isascii() and port.isdecimal() and 1 <= int(port) <= 65535):
        raise UserError(f"{address}: port {port!r} is not valid: expected 1..65535")

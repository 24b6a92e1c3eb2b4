"""Prometheus metrics: their names, which service reports which, and the HTTP endpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server

from splitspec.errors import UserError


@contextlib.contextmanager
def serving_metrics(address: str | None, registry: CollectorRegistry | None) -> Iterator[None]:
    """Serve `registry` over HTTP at `address` (host:port) while the block runs; None: do not.

    Raises:
        UserError: the address is malformed or cannot be bound.
    """
    if address is None or registry is None:
        yield
        return
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise UserError(f"metrics address {address!r} is not host:port")
    try:
        server, thread = start_http_server(int(port), host.strip("[]"), registry)
    except OSError as error:
        raise UserError(f"cannot serve metrics on {address}: {error.strerror}") from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

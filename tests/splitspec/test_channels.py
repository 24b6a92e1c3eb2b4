"""Where a peer may be said to be."""

from __future__ import annotations

import pytest

from splitspec import probe
from splitspec.channels import check_peer_address
from splitspec.errors import UserError


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "[::1]:65535", "verifier:7101", "unix:/a/b.sock", "dns:///host:80"]
)
def test_a_host_with_a_port_and_a_socket_are_addresses(address: str) -> None:
    check_peer_address(address)


@pytest.mark.parametrize("address", ["", "host", ":80", "host:", "host:0", "host:65536", "host:x"])
def test_anything_else_is_refused_and_named(address: str) -> None:
    with pytest.raises(UserError, match=f"^'?{address}'?.* (is not an address|is not valid): "):
        check_peer_address(address)


def test_health_says_why_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert probe.main(["127.0.0.1:99999"]) == 2
    assert capsys.readouterr().err == (
        "error: 127.0.0.1:99999: port '99999' is not valid: expected 1..65535\n"
    )
    assert probe.main(["unix:/nowhere.sock"]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("unreachable: ")
    assert "peer unreachable" not in shown

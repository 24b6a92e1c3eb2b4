"""Run services of compose.yaml through the engine's API, as far as compose.yaml uses the format.

The file itself is read, so that what is tested is what users run; a key that this reader does not
know is an error.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import docker
import yaml
from docker.errors import NotFound
from docker.models.containers import Container
from docker.models.networks import Network
from docker.models.volumes import Volume
from docker.types import Mount

KNOWN_KEYS = {
    *("image", "build", "environment", "volumes", "init", "cap_drop", "security_opt", "restart"),
    *("stop_grace_period", "command", "depends_on", "healthcheck", "ports"),
}
SECOND = 1_000_000_000
"""Nanoseconds, the engine's unit of durations."""


def read_compose(path: Path, variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the parsed file with `${NAME:-default}` replaced as compose does."""

    def value(match: re.Match[str]) -> str:
        return variables.get(match["name"]) or match["default"] or ""

    text = re.sub(r"\$\{(?P<name>\w+):-(?P<default>[^}]*)\}", value, path.read_text())
    parsed: dict[str, Any] = yaml.safe_load(text)
    return parsed


class Project:
    """One compose project: containers, a network and a volume with names of its own."""

    def __init__(
        self,
        engine: docker.DockerClient,
        compose: dict[str, Any],
        *,
        name: str,
        mounts: Sequence[Mount] = (),
        environment: Mapping[str, str],
    ) -> None:
        self.engine = engine
        self.services: dict[str, dict[str, Any]] = compose["services"]
        self.name = name
        self.containers: dict[str, Container] = {}
        self._mounts = list(mounts)
        self._environment = dict(environment)
        self.network: Network = engine.networks.create(name)
        self.volumes: dict[str, Volume] = {
            volume: engine.volumes.create(f"{name}_{volume}") for volume in compose["volumes"]
        }

    def up(self, service: str, *, timeout_seconds: float) -> None:
        """Start a service after what it depends on, in the state that it asks for."""
        for other, wanted in self.services[service].get("depends_on", {}).items():
            if other not in self.containers:
                self.up(other, timeout_seconds=timeout_seconds)
            self._wait(other, wanted["condition"], timeout_seconds)
        self.containers[service] = self._start(service)

    def wait_healthy(self, service: str, *, timeout_seconds: float) -> None:
        """Wait until the service's own health check passes."""
        self._wait(service, "service_healthy", timeout_seconds)

    def down(self) -> None:
        """Remove everything the project made; a second call finds nothing to do."""
        for container in self.containers.values():
            with contextlib.suppress(NotFound):
                container.remove(force=True, v=True)
        for made in (self.network, *self.volumes.values()):
            with contextlib.suppress(NotFound):
                made.remove()

    def logs(self, service: str) -> str:
        """Return the last lines of a service."""
        text: bytes = self.containers[service].logs(tail=20)
        return text.decode("utf-8", "replace")

    def _start(self, service: str) -> Container:
        spec = self.services[service]
        assert spec.keys() <= KNOWN_KEYS, spec.keys() - KNOWN_KEYS
        api = self.engine.api
        named = [volume.split(":") for volume in spec["volumes"]]
        mounts = [Mount(target, self.volumes[source].name) for source, target in named]
        ports = [port.split(":") for port in spec.get("ports", [])]
        host = api.create_host_config(
            mounts=[*mounts, *self._mounts],
            init=spec["init"],
            cap_drop=spec["cap_drop"],
            security_opt=spec["security_opt"],
            restart_policy={"Name": spec["restart"]},
            port_bindings={inner: (address, outer) for address, outer, inner in ports},
        )
        created = api.create_container(
            spec["image"],
            command=spec["command"],
            name=f"{self.name}-{service}",
            environment={**spec["environment"], **self._environment},
            ports=[int(inner) for _, _, inner in ports],
            healthcheck=_healthcheck(spec.get("healthcheck")),
            host_config=host,
            networking_config=api.create_networking_config(
                {self.name: api.create_endpoint_config(aliases=[service])}
            ),
        )
        container = self.engine.containers.get(created["Id"])
        self.containers[service] = container
        container.start()
        return container

    def _wait(self, service: str, condition: str, timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            container = self.containers[service]
            container.reload()
            state = container.attrs["State"]
            if condition == "service_healthy" and state["Health"]["Status"] == "healthy":
                return
            if state["Status"] == "exited" or state.get("Restarting"):
                assert condition == "service_completed_successfully", self.logs(service)
                assert state["ExitCode"] == 0, self.logs(service)
                return
            time.sleep(0.2)
        raise AssertionError(f"{service}: not {condition} in time:\n{self.logs(service)}")


def _healthcheck(spec: dict[str, Any] | None) -> dict[str, Any] | None:
    if spec is None:
        return None
    return {
        "test": spec["test"],
        # Looking more often only makes the test shorter.
        "interval": 1 * SECOND,
        "timeout": _nanoseconds(spec["timeout"]),
        "retries": spec["retries"],
        "start_period": _nanoseconds(spec["start_period"]),
    }


def _nanoseconds(duration: str) -> int:
    return int(duration[:-1]) * {"s": 1, "m": 60}[duration[-1]] * SECOND


def pip_settings(listing: str) -> dict[str, str]:
    """Return where this machine's pip looks, as build arguments; local paths mean nothing inside.

    `listing` is the output of `pip config list`.
    """
    wanted = {"index-url": "PIP_INDEX_URL", "extra-index-url": "PIP_EXTRA_INDEX_URL"}
    wanted["trusted-host"] = "PIP_TRUSTED_HOST"
    found = {}
    for line in listing.splitlines():
        name, _, value = line.partition("=")
        argument = wanted.get(name.rpartition(".")[2])
        urls = [url for url in value.strip("'\"").split() if not url.startswith("file:")]
        if argument and urls:
            found[argument] = " ".join(urls)
    found.update({name: os.environ[name] for name in wanted.values() if os.environ.get(name)})
    return found

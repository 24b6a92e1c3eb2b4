"""What compose.yaml says, read without a container engine."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import drafter_service.__main__
import verifier_service.__main__
from coordinator.run import DRAFT_COUNTS
from drafter_service.config import DrafterConfig
from splitspec import drafts
from tests.deployment.composed import read_compose
from tests.shipped import lay_draft
from tests.tiny import write_tiny_model
from verifier_service.config import VerifierConfig

ROOT = Path(__file__).parents[2]
SERVICES: dict[str, dict[str, Any]] = read_compose(ROOT / "compose.yaml", {})["services"]
PORTS = {"coordinator": 7100, "verifier": 7101, "drafter": 7102}
KINDS = {name: name.removesuffix("-gpu") for name in SERVICES if name.removesuffix("-gpu") in PORTS}
"""Service -> which of the three processes it is."""
COORDINATORS = [name for name, kind in KINDS.items() if kind == "coordinator"]


def flag(service: str, name: str) -> str:
    command: list[str] = SERVICES[service]["command"]
    return command[command.index(f"--{name}") + 1]


def started_by(*profiles: str) -> list[str]:
    """Return what `docker compose up` starts with these profiles, as compose defines them."""
    return [
        name
        for name, spec in SERVICES.items()
        if not spec.get("profiles") or set(spec["profiles"]) & set(profiles)
    ]


def test_three_services_start_without_a_profile() -> None:
    assert started_by() == ["model", "verifier", "drafter", "coordinator"]
    assert set(KINDS) == {*PORTS, "verifier-gpu", "coordinator-gpu"}


@pytest.mark.parametrize("name", KINDS)
def test_a_service_asks_its_own_grpc_health(name: str) -> None:
    port = PORTS[KINDS[name]]
    assert SERVICES[name]["command"][:2] == ["serve", KINDS[name]]
    assert flag(name, "address") == f"0.0.0.0:{port}"
    probe = ["CMD", "python", "-m", "splitspec.probe", f"127.0.0.1:{port}"]
    assert SERVICES[name]["healthcheck"]["test"] == probe


@pytest.mark.parametrize("name", COORDINATORS)
def test_a_coordinator_waits_until_the_services_that_it_asks_are_healthy(name: str) -> None:
    peers = {flag(name, kind).partition(":")[0]: kind for kind in ("verifier", "drafter")}
    for peer, kind in peers.items():
        assert flag(name, kind) == f"{peer}:{PORTS[kind]}"
        assert KINDS[peer] == kind
    healthy = {"condition": "service_healthy"}
    assert SERVICES[name]["depends_on"] == dict.fromkeys(peers, healthy)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind == "verifier"])
def test_a_verifier_waits_for_the_model_and_keeps_its_program(name: str) -> None:
    done = {"condition": "service_completed_successfully"}
    assert SERVICES[name]["depends_on"] == {"model": done}
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    cache = re.search(r"SPLITSPEC_CACHE_DIR=(\S+)", dockerfile)
    assert cache is not None
    for service in ("model", name):
        assert SERVICES[service]["volumes"] == [f"models:{cache[1]}"]
    assert read_compose(ROOT / "compose.yaml", {})["volumes"] == {"models": None}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cache with the default model pulled, for which tiny drafts ship."""
    write_tiny_model(tmp_path / "models" / "smollm2-135m")
    for method in drafts.MODEL_METHODS:
        lay_draft(tmp_path / "weights", "smollm2-135m", method)
    monkeypatch.setattr(drafts, "weights_dir", lambda: tmp_path / "weights")
    return tmp_path


def configured(
    cache: Path, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> tuple[DrafterConfig, list[VerifierConfig]]:
    """Return what the drafter and the two verifiers make of compose's commands and variables."""
    services = read_compose(ROOT / "compose.yaml", variables)["services"]
    configs: dict[str, Any] = {}
    for name, module in (
        ("drafter", drafter_service.__main__),
        ("verifier", verifier_service.__main__),
        ("verifier-gpu", verifier_service.__main__),
    ):
        monkeypatch.setattr(module, "run_service", lambda serving: serving.close())
        monkeypatch.setattr(module.logger, "info", partial(_keep, configs, name))
        given = services[name]["environment"]
        environment = {key: None if value is None else str(value) for key, value in given.items()}
        result = CliRunner().invoke(
            module.app,
            [services[name]["command"][0], *services[name]["command"][2:]],
            env={**environment, "SPLITSPEC_CACHE_DIR": str(cache)},
        )
        assert result.exit_code == 0, (name, result.output, result.exception)
    return configs.pop("drafter"), list(configs.values())


@pytest.mark.parametrize(
    ("said", "method"), [("", "eagle3"), ("eagle3", "eagle3"), ("dflash", "dflash")]
)
def test_drafter_and_verifiers_mean_the_draft_that_ships(
    said: str, method: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"SPLITSPEC_DRAFT": said} if said else {}
    drafter, verifiers = configured(cache, variables, monkeypatch)
    folder = cache / "weights" / f"smollm2-135m-{method}"
    assert (drafter.draft, drafter.draft_model) == (method, folder)
    assert (drafter.rows, drafter.target) == ("fused", "smollm2-135m")
    assert [verifier.fuse_for for verifier in verifiers] == [folder, folder]


@pytest.mark.parametrize("said", ["ngram", ""])
def test_ngrams_are_drafted_where_they_are_asked_for_or_nothing_ships(
    said: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not said:
        monkeypatch.setattr(drafts, "weights_dir", lambda: cache / "missing")
    variables = {"SPLITSPEC_DRAFT": said} if said else {}
    drafter, verifiers = configured(cache, variables, monkeypatch)
    assert (drafter.draft, drafter.draft_model) == ("ngram", None)
    assert [verifier.fuse_for for verifier in verifiers] == [None, None]


def test_one_variable_makes_them_draft_with_a_folder_in_the_volume(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the head of compose.yaml says; a block may be made shorter besides."""
    said = re.findall(r"#   export (.*)", (ROOT / "compose.yaml").read_text())
    assert said == ["SPLITSPEC_DRAFT=/var/lib/splitspec/head"]
    folder = lay_draft(cache, "mine", "dflash")
    variables = {"SPLITSPEC_DRAFT": str(folder), "SPLITSPEC_BLOCK_LENGTH": "8"}
    drafter, verifiers = configured(cache, variables, monkeypatch)
    assert (drafter.draft, drafter.draft_model, drafter.block_length) == ("dflash", folder, 8)
    assert [verifier.fuse_for for verifier in verifiers] == [folder, folder]


def test_a_round_on_a_cpu_has_as_many_draft_tokens_as_in_run() -> None:
    assert flag("coordinator", "draft-count") == str(DRAFT_COUNTS["eagle3"])


def _keep(configs: dict[str, Any], name: str, _format: str, config: Any) -> None:
    configs[name] = config


def test_the_gpu_profile_alone_reserves_a_gpu_and_the_target_runs_on_it() -> None:
    reserving = {name: spec["deploy"] for name, spec in SERVICES.items() if "deploy" in spec}
    device = {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    assert reserving == {"verifier-gpu": {"resources": {"reservations": {"devices": [device]}}}}
    assert SERVICES["verifier-gpu"]["profiles"] == ["gpu"]
    assert flag("verifier-gpu", "device") == "cuda"


def test_only_coordinators_are_published_and_only_on_this_machine() -> None:
    published = {name: SERVICES[name]["ports"] for name in KINDS if "ports" in SERVICES[name]}
    assert published == {
        "coordinator": ["127.0.0.1:7100:7100"],
        "coordinator-gpu": ["127.0.0.1:7200:7100"],
    }


@pytest.mark.parametrize("profiles", [(), ("gpu",), ("telemetry",), ("gpu", "telemetry")])
def test_no_two_services_that_start_together_publish_one_port(profiles: tuple[str, ...]) -> None:
    """Guards: `--profile gpu up` started two coordinators on 127.0.0.1:7100."""
    ports = [port for name in started_by(*profiles) for port in SERVICES[name].get("ports", [])]
    outer = [port.rpartition(":")[0] for port in ports]
    assert all(place.startswith("127.0.0.1:") for place in outer)
    assert len(set(outer)) == len(outer)


def test_prometheus_reads_every_service() -> None:
    (job,) = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())["scrape_configs"]
    read = {name: found["port"] for found in job["dns_sd_configs"] for name in found["names"]}
    served = {name: int(flag(name, "metrics-address").rpartition(":")[2]) for name in KINDS}
    assert read == served


def test_the_documented_commands_name_profiles_and_services_that_exist() -> None:
    profiles = {profile for spec in SERVICES.values() for profile in spec.get("profiles", [])}
    for file in ("compose.yaml", "README.md"):
        text = (ROOT / file).read_text()
        commands = re.findall(r"docker compose[^#`]*?up --build(?:\s+\w+-gpu)?", text)
        assert commands, file
        for command in commands:
            assert set(re.findall(r"--profile (\w+)", command)) <= profiles, command
            assert set(command.partition("--build")[2].split()) <= SERVICES.keys(), command

"""compose.yaml on a real container engine: build, up, health, a killed drafter, down."""

from __future__ import annotations

import gc
import shutil
import socket
import subprocess
import sys
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path

import docker
import grpc
import pytest
from docker.errors import DockerException, NotFound
from docker.types import Mount

from splitspec.v1 import generation_pb2, generation_pb2_grpc
from tests.deployment.composed import Project, pip_settings, read_compose
from tests.tiny import write_tiny_model

pytestmark = pytest.mark.container
ROOT = Path(__file__).parents[2]
IMAGE = "splitspec:deployment-test"
START_SECONDS = 120


@pytest.fixture(scope="module")
def engine() -> Iterator[docker.DockerClient]:
    client, problem = None, None
    try:
        client = docker.from_env(timeout=600)
        client.ping()
    except DockerException as error:
        problem = str(error)
    if problem is None:
        yield client
    if client is not None:
        client.close()
    with warnings.catch_warnings():
        # NOTE: the SDK leaves sockets of ended streams and of failed connections to the garbage
        # collector, whose warning would fail whatever test runs then.
        warnings.simplefilter("ignore", ResourceWarning)
        del client
        gc.collect()
    if problem is not None:
        pytest.skip(f"no container engine answers: {problem}")


@pytest.fixture(scope="module")
def image(engine: docker.DockerClient) -> str:
    """Build deploy/Dockerfile the way this machine's own pip installs."""
    pip = [sys.executable, "-m", "pip"]
    listing = subprocess.run(
        [*pip, "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    wheels = ROOT / "deploy" / "wheels"
    if not any(wheels.glob("torch-*")):
        # Wheels that pip finds on this machine's disk have to travel with the build.
        torch = subprocess.run(
            ["sed", "-n", r's/.*"\(torch==[0-9.]*\)".*/\1+cpu/p', str(ROOT / "pyproject.toml")],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        download = [*pip, "download", "--quiet", "--no-deps", "--dest", str(wheels), torch]
        subprocess.run(download, check=False, capture_output=True)
    built, _ = engine.images.build(
        path=str(ROOT),
        dockerfile="deploy/Dockerfile",
        tag=IMAGE,
        buildargs=pip_settings(listing),
        network_mode="host",
        rm=True,
    )
    return str(built.tags[0])


@pytest.fixture(scope="module")
def address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def project(
    engine: docker.DockerClient, image: str, address: str, tmp_path: Path
) -> Iterator[Project]:
    """The project with a tiny model in place of the pulled one, coordinator and all, up."""
    write_tiny_model(tmp_path / "tiny")
    for path in [tmp_path, *tmp_path.rglob("*")]:
        path.chmod(0o755)  # the image's user is not ours
    variables = {"SPLITSPEC_IMAGE": image, "SPLITSPEC_MODEL": "/model"}
    variables["SPLITSPEC_PORT"] = address.partition(":")[2]
    project = Project(
        engine,
        read_compose(ROOT / "compose.yaml", variables),
        name=f"splitspec-{uuid.uuid4().hex[:8]}",
        mounts=[Mount("/model", str(tmp_path / "tiny"), type="bind", read_only=True)],
        environment={"SPLITSPEC_RUNTIME": "torch", "SPLITSPEC_THREADS": "1"},
    )
    try:
        project.up("coordinator", timeout_seconds=START_SECONDS)
        project.wait_healthy("coordinator", timeout_seconds=START_SECONDS)
        yield project
    finally:
        project.down()


def generate(
    address: str,
    *,
    kill_after: int | None = None,
    victim: docker.models.containers.Container = None,
) -> tuple[list[int], generation_pb2.Finish]:
    """Return a long answer's tokens; kill `victim` once `kill_after` tokens are here."""
    request = generation_pb2.GenerateRequest(
        text="one two three one two three one two", ignore_eos=True, max_tokens=900
    )
    tokens: list[int] = []
    with grpc.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        for response in stub.Generate(request, timeout=120):
            tokens += response.token_ids
            if kill_after is not None and len(tokens) >= kill_after:
                victim.kill()
                kill_after = None
    return tokens, response.finish


def test_an_answer_from_outside_survives_its_drafters_container(
    engine: docker.DockerClient, project: Project, address: str
) -> None:
    whole, finish = generate(address)
    assert len(whole) == 900
    assert finish.statistics.draft_method == "ngram"
    assert finish.statistics.accepted_token_count > 0

    drafter = project.containers["drafter"]
    tokens, finish = generate(address, kill_after=20, victim=drafter)
    assert tokens == whole, "law L4: a lost drafter changes when tokens come, never which"
    assert finish.statistics.target_only_round_count > 100, "the drafter was killed too late"

    drafter.start()
    project.wait_healthy("drafter", timeout_seconds=START_SECONDS)
    for service in ("coordinator", "verifier", "drafter"):
        container = project.containers[service]
        container.stop(timeout=15)
        container.reload()
        assert container.attrs["State"]["ExitCode"] == 0, project.logs(service)

    project.down()
    with pytest.raises(NotFound):
        engine.networks.get(project.name)
    for volume in project.volumes.values():
        with pytest.raises(NotFound):
            engine.volumes.get(volume.name)


@pytest.mark.parametrize("command", [["docker", "compose"], ["docker-compose"]], ids=["v2", "v1"])
def test_compose_itself_accepts_the_file_with_every_profile(command: list[str]) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    if subprocess.run([*command, "version"], capture_output=True, check=False).returncode:
        pytest.skip(f"{' '.join(command)} is not available")
    profiles = ["--profile", "gpu", "--profile", "telemetry"]
    done = subprocess.run(
        [*command, "-f", str(ROOT / "compose.yaml"), *profiles, "config"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr

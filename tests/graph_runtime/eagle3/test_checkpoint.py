"""A draft's tensors: every one accounted for, embeddings and head its own or the target's."""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from graph_runtime.eagle3.checkpoint import (
    Eagle3Checkpoint,
    Eagle3Source,
    load_checkpoint,
    load_fusion,
)
from graph_runtime.model_files import model_hash, tokenizer_hash
from splitspec.errors import UserError
from tests.eagle3_layouts import LAYOUTS, random_weights, weights_for, write_draft
from tests.tiny import write_tiny_model

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
Q_PROJ = "midlayer.self_attn.q_proj.weight"
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("target"), n_layers=8)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("untied"), n_layers=8, tied=False)


def load(folder: Path, target: Path | None = None, **source: Any) -> Eagle3Checkpoint:
    return load_checkpoint(
        Eagle3Source(folder=folder, target=target, **source), folder.parent / "cache"
    )


def target_tensor(folder: Path, name: str) -> torch.Tensor:
    return load_file(folder / WEIGHTS)[name]


def written(tmp_path: Path, **tensors: torch.Tensor | None) -> Path:
    weights = random_weights(1)
    return write_draft(tmp_path / "draft", layout="specforge", weights=weights, tensors=tensors)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_one_set_of_weights_is_the_same_from_every_layout(
    layout: str, dtype: torch.dtype, target: Path, tmp_path: Path
) -> None:
    weights = weights_for(layout, 1)
    folder = write_draft(tmp_path / "d", layout=layout, weights=weights, dtype=dtype)
    own = layout in ("speculators", "deepspec")
    draft = load(folder, target, embeddings="own" if own else "auto")
    expected = {name: t.to(dtype).float() for name, t in weights.tensors.items()}
    if not own:
        expected[EMBEDDING] = target_tensor(target, "model.embed_tokens.weight")
    assert draft.tensors.keys() == expected.keys()
    for name, tensor in draft.tensors.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, expected[name]), name
    assert draft.model_hash == model_hash(folder, tmp_path / "cache")
    assert draft.tokenizer_hash == tokenizer_hash(target)


@pytest.mark.parametrize(
    "options",
    [
        {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
        {"norm_before_fc": True},
        {"head_dim": 32, "qk_norm": True},
        {"target_hidden": 96},
        {"n_taps": 5, "draft_vocab_size": None},
    ],
    ids=str,
)
def test_every_option_s_tensors_are_loaded(options: dict[str, Any], tmp_path: Path) -> None:
    weights = random_weights(1, **options)
    draft = load(write_draft(tmp_path / "d", layout="speculators", weights=weights))
    assert draft.tensors.keys() == weights.tensors.keys()
    for name, tensor in draft.tensors.items():
        assert torch.equal(tensor, weights.tensors[name]), name
    assert draft.tokenizer_hash is None


def test_without_aux_states_the_target_s_final_norm_is_taken(target: Path, tmp_path: Path) -> None:
    weights = random_weights(1, n_taps=0, hidden_norm=False)
    folder = write_draft(tmp_path / "d", layout="modelopt", weights=weights)
    norm = target_tensor(target, "model.norm.weight")
    name = "fusion.target_norm.weight"
    draft = load(folder, target)
    assert torch.equal(draft.tensors[name], norm)
    assert draft.tensors.keys() == {*weights.tensors, name}
    _, _, fusion = load_fusion(Eagle3Source(folder=folder, target=target), tmp_path / "cache")
    assert fusion.keys() == {name}
    assert torch.equal(fusion[name], norm)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_fusion_loads_alone_and_needs_no_embeddings(
    layout: str, target: Path, tmp_path: Path
) -> None:
    weights = weights_for(layout, 1)
    folder = write_draft(tmp_path / "d", layout=layout, weights=weights, embeddings=False)
    source = Eagle3Source(folder=folder, tap_layers=(1, 2, 3, 4, 5)[: weights.n_taps])
    config, digest, fusion = load_fusion(source, tmp_path / "cache")
    assert fusion.keys() == {name for name in weights.tensors if name.startswith("fusion.")}
    for name, tensor in fusion.items():
        assert torch.equal(tensor, weights.tensors[name]), name
    assert digest == model_hash(folder, tmp_path / "cache")
    whole = load(folder, target, tap_layers=source.tap_layers, embeddings="target")
    assert whole.config == config
    assert whole.model_hash == digest


def test_shards_load_as_the_single_file_does(target: Path, tmp_path: Path) -> None:
    folder = written(tmp_path)
    single = load(folder, target)
    shard(folder)
    sharded = load(folder, target)
    assert sharded.config == single.config
    for name, tensor in single.tensors.items():
        assert torch.equal(tensor, sharded.tensors[name]), name


def shard(folder: Path, **twice: torch.Tensor) -> None:
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        content = {name: tensors[name] for name in part}
        save_file({**content, **twice}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / WEIGHTS).unlink()


# Embeddings


def test_absent_embeddings_are_the_target_s_and_the_log_says_so(
    target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    draft = load(written(tmp_path), target)
    shared = target_tensor(target, "model.embed_tokens.weight")
    assert torch.equal(draft.tensors[EMBEDDING], shared)
    assert "shares the target's embedding: model.embed_tokens.weight of" in caplog.text


def test_e18_a_head_without_own_embedding_is_refused_without_a_target(tmp_path: Path) -> None:
    folder = written(tmp_path)
    with pytest.raises(UserError, match=r"no tensor embed_tokens\.weight; give --target"):
        load(folder, tap_layers=(1, 3, 4))
    with pytest.raises(UserError, match=r"--embeddings is own; the draft holds no tensor embed"):
        load(folder, tap_layers=(1, 3, 4), embeddings="own")


def test_the_embeddings_of_a_target_of_another_width_cannot_be_shared(tmp_path: Path) -> None:
    target = write_tiny_model(tmp_path / "target", n_layers=8, hidden=96)
    weights = random_weights(1, target_hidden=96)
    folder = write_draft(tmp_path / "d", layout="specforge", weights=weights)
    with pytest.raises(UserError, match="of the draft's hidden_size"):
        load(folder, target)
    own = write_draft(tmp_path / "o", layout="specforge", weights=weights, embeddings=True)
    assert torch.equal(load(own, target).tensors[EMBEDDING], weights.tensors[EMBEDDING])


def test_trap_random_embed_tokens_saved_by_an_exporter_are_refused_until_somebody_chooses(
    target: Path, tmp_path: Path
) -> None:
    weights = weights_for("speculators", 7)
    folder = write_draft(tmp_path / "d", layout="speculators", weights=weights)
    with pytest.raises(
        UserError,
        match=r"embed_tokens.weight is unrelated .* cosine .* -?0\.0\d.*--embeddings own or target",
    ):
        load(folder, target)
    own = load(folder, target, embeddings="own").tensors[EMBEDDING]
    assert torch.equal(own, weights.tensors[EMBEDDING])
    shared = load(folder, target, embeddings="target").tensors[EMBEDDING]
    assert torch.equal(shared, target_tensor(target, "model.embed_tokens.weight"))
    with pytest.raises(UserError, match="--embeddings is target; give --target"):
        load(folder, embeddings="target")


def test_an_own_embedding_that_was_trained_from_the_target_s_is_used(
    target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    table = target_tensor(target, "model.embed_tokens.weight")
    torch.manual_seed(5)
    trained = table + 0.3 * table.std() * torch.randn_like(table)
    folder = write_draft(
        tmp_path / "d",
        layout="speculators",
        weights=weights_for("speculators", 1),
        tensors={EMBEDDING: trained},
    )
    assert torch.equal(load(folder, target).tensors[EMBEDDING], trained)
    assert "uses its own embedding" in caplog.text
    assert "mean cosine to the target's 0.9" in caplog.text


def test_an_own_embedding_that_is_the_target_s_is_said_to_be(
    target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    table = target_tensor(target, "model.embed_tokens.weight")
    folder = write_draft(
        tmp_path / "d",
        layout="speculators",
        weights=weights_for("speculators", 1),
        tensors={EMBEDDING: table},
    )
    assert torch.equal(load(folder, target).tensors[EMBEDDING], table)
    assert "the draft's embedding is the target's" in caplog.text


def test_a_part_of_an_embedding_is_no_embedding(target: Path, tmp_path: Path) -> None:
    folder = written(tmp_path, **{EMBEDDING: torch.zeros(150, 64)})
    with pytest.raises(UserError, match=r"embed_tokens.weight is \[150, 64\]; .* \[300, 64\]"):
        load(folder, target)


# The head


@pytest.mark.parametrize("layout", LAYOUTS)
def test_trap_an_own_lm_head_is_never_ignored(layout: str, target: Path, tmp_path: Path) -> None:
    weights = weights_for(layout, 1, draft_vocab_size=None)
    folder = write_draft(
        tmp_path / "d", layout=layout, weights=weights, config={"tie_word_embeddings": True}
    )
    head = load(folder, target, embeddings="target").tensors[HEAD]
    assert torch.equal(head, weights.tensors[HEAD])


def test_an_absent_head_is_the_target_s_and_the_log_says_so(
    target: Path, untied: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    weights = random_weights(1, draft_vocab_size=None)
    folder = write_draft(tmp_path / "d", layout="modelopt", weights=weights, tensors={HEAD: None})
    head = load(folder, untied).tensors[HEAD]
    assert torch.equal(head, target_tensor(untied, "lm_head.weight"))
    assert "no head of its own: lm_head.weight of" in caplog.text
    head = load(folder, target).tensors[HEAD]
    assert torch.equal(head, target_tensor(target, "model.embed_tokens.weight"))
    assert "no head of its own: model.embed_tokens.weight of" in caplog.text


def test_e18_an_absent_head_is_refused_without_a_target(tmp_path: Path) -> None:
    weights = weights_for("speculators", 1, draft_vocab_size=None)
    folder = write_draft(
        tmp_path / "d", layout="speculators", weights=weights, tensors={HEAD: None}
    )
    with pytest.raises(UserError, match=r"missing tensor lm_head\.weight; give --target"):
        load(folder)


def test_a_head_that_deepspec_tied_to_its_embedding_is_that(tmp_path: Path) -> None:
    weights = weights_for("deepspec", 1)
    for tied in (True, False):
        folder = write_draft(
            tmp_path / str(tied),
            layout="deepspec",
            weights=weights,
            config={"tie_word_embeddings": tied},
            tensors={HEAD: None},
        )
        if tied:
            assert torch.equal(load(folder).tensors[HEAD], weights.tensors[EMBEDDING])
        else:
            with pytest.raises(UserError, match=HEAD):
                load(folder)


def test_an_absent_head_is_the_target_s_whatever_a_speculators_file_says_about_ties(
    untied: Path, tmp_path: Path
) -> None:
    folder = write_draft(
        tmp_path / "d",
        layout="speculators",
        weights=weights_for("speculators", 1, draft_vocab_size=None),
        config={"tie_word_embeddings": True},
        nested={"tie_word_embeddings": True},
        tensors={HEAD: None},
    )
    head = load(folder, untied, embeddings="own").tensors[HEAD]
    assert torch.equal(head, target_tensor(untied, "lm_head.weight"))


@pytest.mark.parametrize("stated", [100, None])
def test_an_absent_head_of_a_reduced_vocabulary_is_refused(
    stated: int | None, target: Path, tmp_path: Path
) -> None:
    folder = write_draft(
        tmp_path / "d",
        layout="specforge",
        weights=random_weights(1),
        config={"draft_vocab_size": stated},
        tensors={HEAD: None},
    )
    with pytest.raises(UserError, match=r"missing tensor lm_head.weight: of a draft .* 100 ids"):
        load(folder, target)


# Strictness


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_missing_tensor_is_named_as_the_file_names_it(
    layout: str, target: Path, tmp_path: Path
) -> None:
    weights = weights_for(layout, 1)
    folder = write_draft(tmp_path / "d", layout=layout, weights=weights)
    names = set(load_file(folder / WEIGHTS)) - {EMBEDDING, HEAD, "d2t", "t2d"}
    assert len(names) >= 12
    for name in sorted(names):
        write_draft(folder, layout=layout, weights=weights, tensors={name: None})
        with pytest.raises(UserError, match=f"missing tensor {name}"):
            load(folder, target, embeddings="target")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_misshapen_tensor_is_named_with_both_shapes(
    layout: str, target: Path, tmp_path: Path
) -> None:
    weights = weights_for(layout, 1)
    folder = write_draft(tmp_path / "d", layout=layout, weights=weights)
    stored = load_file(folder / WEIGHTS)
    for name in sorted(set(stored) - {"d2t", "t2d"}):
        shape = list(stored[name].shape)
        wrong = torch.zeros(shape[0] + 1, *shape[1:])
        write_draft(folder, layout=layout, weights=weights, tensors={name: wrong})
        with pytest.raises(UserError, match=name) as caught:
            load(folder, target, embeddings="target")
        assert str(list(wrong.shape)) in str(caught.value)
        assert str(shape) in str(caught.value) or name == HEAD


def test_an_unexpected_tensor_is_named_with_its_shape(target: Path, tmp_path: Path) -> None:
    for name in ("more.weight", "layer.more", "fusion.fc.weight", "layers.0.input_layernorm.weight",
                 "fc.bias", "fc.weight_scale", "target_norm.weight"):  # fmt: skip
        folder = written(tmp_path, **{name: torch.zeros(3)})
        with pytest.raises(UserError, match=rf"unexpected tensor {name} \[3\]"):
            load(folder, target)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [Q_PROJ, HEAD, "fc.weight", EMBEDDING])
def test_a_weight_that_is_not_finite_is_refused_and_named(
    name: str, value: float, target: Path, tmp_path: Path
) -> None:
    folder = written(tmp_path, **{EMBEDDING: torch.ones(300, 64)})
    stored = load_file(folder / WEIGHTS)
    stored[name][5, 3] = value
    save_file(stored, folder / WEIGHTS)
    with pytest.raises(UserError, match=f"tensor {name} holds values that are not finite"):
        load(folder, target, embeddings="own")


def test_a_weight_that_is_no_floating_point_is_refused(target: Path, tmp_path: Path) -> None:
    folder = written(tmp_path, **{Q_PROJ: torch.zeros(64, 128, dtype=torch.int8)})
    with pytest.raises(UserError, match=rf"tensor {Q_PROJ} is torch\.int8"):
        load(folder, target)


def test_a_weight_of_a_dtype_that_cannot_be_read_is_refused(target: Path, tmp_path: Path) -> None:
    halves = torch.zeros(64, 64, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    folder = written(tmp_path, **{Q_PROJ: halves})
    with pytest.raises(
        UserError, match=rf"tensor {Q_PROJ} is torch\.float4_e2m1fn_x2; expected fl"
    ):
        load(folder, target)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_weights_of_more_or_fewer_bits_are_read(
    dtype: torch.dtype, target: Path, tmp_path: Path
) -> None:
    half = torch.full((64, 128), 0.5)
    folder = written(tmp_path, **{Q_PROJ: half.to(dtype)})
    read = load(folder, target).tensors["layer.self_attn.q_proj.weight"]
    assert torch.equal(read, half)


@pytest.mark.parametrize("name", [HEAD, EMBEDDING, "norm.weight", "fc.weight", "d2t", "t2d"])
def test_a_tensor_without_elements_is_refused_and_named(
    name: str, target: Path, tmp_path: Path
) -> None:
    shape = {HEAD: (0, 64), EMBEDDING: (0, 64), "fc.weight": (64, 0)}.get(name, (0,))
    folder = written(tmp_path, **{name: torch.zeros(shape)})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "draft_vocab_size": None}))
    said = re.escape(f"tensor {name} is {list(shape)}, without elements")
    with pytest.raises(UserError, match=said):
        load(folder, target)


def test_a_tensor_in_two_shards_is_refused(target: Path, tmp_path: Path) -> None:
    folder = written(tmp_path)
    shard(folder, **{"norm.weight": torch.ones(64)})
    with pytest.raises(UserError, match=r"b\.safetensors: tensor norm\.weight is in a\.saf"):
        load(folder, target)


def test_a_pickle_is_never_opened(target: Path, tmp_path: Path) -> None:
    folder = written(tmp_path)
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin is a pickle"):
        load(folder, target)


@pytest.mark.parametrize("size", [0, 7, 100, 2_000, 20_000])
def test_a_truncated_file_is_one_clear_line(size: int, target: Path, tmp_path: Path) -> None:
    folder = written(tmp_path)
    os.truncate(folder / WEIGHTS, size)
    with pytest.raises(UserError, match="not a readable safetensors file") as caught:
        load(folder, target)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_not_there_is_one_clear_line(target: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*config\.json"):
        load(tmp_path / "gone", target)
    with pytest.raises(UserError, match=r"cannot read .*config\.json"):
        load(written(tmp_path), tmp_path / "gone")


def test_stored_rotary_buffers_are_ignored(target: Path, tmp_path: Path) -> None:
    load(written(tmp_path, **{"midlayer.self_attn.rotary_emb.inv_freq": torch.zeros(8)}), target)


def test_only_the_tensors_that_are_needed_are_read_of_the_target(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    from graph_runtime.checkpoint import StoredTensor

    original = StoredTensor.read
    monkeypatch.setattr(
        StoredTensor, "read", lambda self: (read.append(str(self.path)), original(self))[1]
    )
    load(written(tmp_path), target)
    assert read.count(str(target / WEIGHTS)) == 1

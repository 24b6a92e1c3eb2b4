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

from graph_runtime.dflash.checkpoint import DFlashCheckpoint, load_checkpoint, load_fusion
from graph_runtime.drafts.source import DraftSource
from graph_runtime.model_files import model_hash, tokenizer_hash
from splitspec.errors import UserError
from tests.dflash_layouts import LAYOUTS, covered, random_weights, write_draft
from tests.tiny import write_tiny_model

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
SHARED = (EMBEDDING, HEAD)
Q_PROJ = "layers.1.self_attn.q_proj.weight"
FILE = "model.safetensors"
WEIGHTS = random_weights(1)
REDUCED = random_weights(1, draft_vocab_size=100)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("untied"), tied=False)


def load(folder: Path, target: Path | None = None, **source: Any) -> DFlashCheckpoint:
    return load_checkpoint(
        DraftSource(folder=folder, target=target, **source), folder.parent / "cache"
    )


def target_tensor(folder: Path, name: str) -> torch.Tensor:
    return load_file(folder / FILE)[name]


def written(tmp_path: Path, layout: str = "z-lab", **tensors: torch.Tensor | None) -> Path:
    return write_draft(tmp_path / "draft", WEIGHTS, layout=layout, tensors=tensors)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_trap_one_set_of_weights_is_the_same_from_every_layout(
    layout: str, dtype: torch.dtype, own: bool, target: Path, tmp_path: Path
) -> None:
    folder = write_draft(
        tmp_path / "d",
        WEIGHTS,
        layout=layout,
        dtype=dtype,
        own_embeddings=own,
        tap_layers=(0, 2, 3),
    )
    draft = load(folder, target, embeddings="own" if own else "auto")
    expected = {name: t.to(dtype).float() for name, t in WEIGHTS.tensors.items()}
    if not own:
        expected[EMBEDDING] = target_tensor(target, "model.embed_tokens.weight")
        expected[HEAD] = expected[EMBEDDING]
    assert draft.config.tap_layers == (0, 2, 3)
    assert draft.tensors.keys() == expected.keys()
    for name, tensor in draft.tensors.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, expected[name]), name
    assert draft.target_ids is None
    assert draft.model_hash == model_hash(folder, tmp_path / "cache")
    assert draft.tokenizer_hash == tokenizer_hash(target)


@pytest.mark.parametrize(
    "options",
    [
        {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
        {"head_dim": 32, "n_layers": 1},
        {"target_hidden": 96},
        {"n_taps": 5, "n_layers": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_option_s_tensors_are_loaded(
    layout: str, options: dict[str, Any], tmp_path: Path
) -> None:
    weights = random_weights(1, **options)
    taps = range(weights.n_taps)
    folder = write_draft(
        tmp_path / "d", weights, layout=layout, tap_layers=taps, own_embeddings=True
    )
    draft = load(folder)
    assert draft.tensors.keys() == weights.tensors.keys()
    for name, tensor in draft.tensors.items():
        assert torch.equal(tensor, weights.tensors[name]), name
    assert draft.tokenizer_hash is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_fusion_loads_alone_and_needs_no_embeddings(
    layout: str, target: Path, tmp_path: Path
) -> None:
    folder = written(tmp_path, layout)
    config, digest, fusion = load_fusion(DraftSource(folder=folder), tmp_path / "cache")
    assert fusion.keys() == {"fusion.fc.weight", "fusion.norm.weight"}
    for name, tensor in fusion.items():
        assert torch.equal(tensor, WEIGHTS.tensors[name]), name
    whole = load(folder, target)
    assert whole.config == config
    assert whole.model_hash == digest == model_hash(folder, tmp_path / "cache")


def test_shards_load_as_the_single_file_does(target: Path, tmp_path: Path) -> None:
    folder = written(tmp_path)
    single = load(folder, target)
    shard(folder)
    sharded = load(folder, target)
    assert sharded.config == single.config
    for name, tensor in single.tensors.items():
        assert torch.equal(tensor, sharded.tensors[name]), name


def shard(folder: Path, **twice: torch.Tensor) -> None:
    tensors = load_file(folder / FILE)
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({**{name: tensors[name] for name in part}, **twice}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / FILE).unlink()


# Embeddings and head


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_absent_embedding_and_head_are_the_target_s_and_the_log_says_so(
    layout: str, target: Path, untied: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = written(tmp_path, layout)
    draft = load(folder, untied)
    assert torch.equal(draft.tensors[EMBEDDING], target_tensor(untied, "model.embed_tokens.weight"))
    assert torch.equal(draft.tensors[HEAD], target_tensor(untied, HEAD))
    assert "shares the target's embedding: model.embed_tokens.weight of" in caplog.text
    assert "no head of its own: lm_head.weight of" in caplog.text
    draft = load(folder, target)
    assert torch.equal(draft.tensors[HEAD], target_tensor(target, "model.embed_tokens.weight"))
    assert "no head of its own: model.embed_tokens.weight of" in caplog.text


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_draft_that_shares_is_refused_without_a_target(layout: str, tmp_path: Path) -> None:
    folder = written(tmp_path, layout)
    with pytest.raises(UserError, match=r"no tensor embed_tokens\.weight; give --target"):
        load(folder)
    with pytest.raises(UserError, match=r"--embeddings is own; the draft holds no tensor embed"):
        load(folder, embeddings="own")
    headless = write_draft(
        tmp_path / "h", WEIGHTS, layout=layout, own_embeddings=True, tensors={HEAD: None}
    )
    with pytest.raises(UserError, match=r"missing tensor lm_head\.weight; give --target"):
        load(headless)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_target_of_another_width_shares_neither_embedding_nor_head(
    layout: str, tmp_path: Path
) -> None:
    target = write_tiny_model(tmp_path / "target", hidden=96)
    weights = random_weights(1, target_hidden=96)
    folder = write_draft(tmp_path / "d", weights, layout=layout)
    with pytest.raises(UserError, match="of the draft's hidden_size"):
        load(folder, target)
    headless = write_draft(
        tmp_path / "h", weights, layout=layout, own_embeddings=True, tensors={HEAD: None}
    )
    with pytest.raises(UserError, match=r"missing tensor lm_head.weight; .* draft's hidden_size"):
        load(headless, target)
    own = write_draft(tmp_path / "o", weights, layout=layout, own_embeddings=True)
    assert torch.equal(load(own, target).tensors[EMBEDDING], weights.tensors[EMBEDDING])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_own_embedding_unrelated_to_the_target_s_is_refused_until_somebody_chooses(
    layout: str, target: Path, tmp_path: Path
) -> None:
    folder = write_draft(tmp_path / "d", WEIGHTS, layout=layout, own_embeddings=True)
    with pytest.raises(UserError, match=r"unrelated .* cosine .*--embeddings own or target"):
        load(folder, target)
    own = load(folder, target, embeddings="own").tensors[EMBEDDING]
    assert torch.equal(own, WEIGHTS.tensors[EMBEDDING])
    shared = load(folder, target, embeddings="target").tensors[EMBEDDING]
    assert torch.equal(shared, target_tensor(target, "model.embed_tokens.weight"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_trap_an_own_head_is_never_ignored(layout: str, target: Path, tmp_path: Path) -> None:
    folder = write_draft(
        tmp_path / "d",
        WEIGHTS,
        layout=layout,
        own_embeddings=True,
        config={"tie_word_embeddings": True},
    )
    head = load(folder, target, embeddings="target").tensors[HEAD]
    assert torch.equal(head, WEIGHTS.tensors[HEAD])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_absent_head_is_the_target_s_unless_deepspec_ties_it_to_the_own_embedding(
    layout: str, untied: Path, tmp_path: Path
) -> None:
    folder = write_draft(
        tmp_path / "d",
        WEIGHTS,
        layout=layout,
        own_embeddings=True,
        config={"tie_word_embeddings": True},
        tensors={HEAD: None},
    )
    head = load(folder, untied, embeddings="own").tensors[HEAD]
    tied = layout == "deepspec"
    expected = WEIGHTS.tensors[EMBEDDING] if tied else target_tensor(untied, HEAD)
    assert torch.equal(head, expected)


# Vocabulary


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_a_reduced_vocabulary_s_ids_become_target_ids(
    layout: str, own: bool, target: Path, tmp_path: Path
) -> None:
    folder = write_draft(tmp_path / "d", REDUCED, layout=layout, own_embeddings=own)
    draft = load(folder, target, embeddings="own" if own else "auto")
    assert draft.target_ids is not None
    assert draft.target_ids.tolist() == REDUCED.target_ids
    assert (draft.config.vocab_size, draft.config.draft_vocab_size) == (300, 100)
    assert torch.equal(draft.tensors[HEAD], REDUCED.tensors[HEAD])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_reduced_vocabulary_without_its_map_or_its_head_is_refused(
    layout: str, target: Path, tmp_path: Path
) -> None:
    folder = write_draft(tmp_path / "d", REDUCED, layout=layout, tensors={"d2t": None, "t2d": None})
    with pytest.raises(UserError, match=r"missing tensor d2t: .* 100 rows for 300"):
        load(folder, target)
    write_draft(folder, REDUCED, layout=layout, tensors={HEAD: None})
    with pytest.raises(UserError, match=r"missing tensor lm_head.weight: of a draft .* 100 ids"):
        load(folder, target)
    others = covered([i + 1 for i in REDUCED.target_ids or []], 301)[:300]
    write_draft(folder, REDUCED, layout=layout, tensors={"t2d": others})
    with pytest.raises(UserError, match="other ids than those that t2d marks"):
        load(folder, target)


def test_a_padded_vocabulary_loses_the_padding(target: Path, tmp_path: Path) -> None:
    padding = torch.zeros(20, 64)
    folder = write_draft(
        tmp_path / "d",
        WEIGHTS,
        layout="speculators",
        config={"draft_vocab_size": 320},
        nested={"vocab_size": 320},
        tensors={name: torch.cat((WEIGHTS.tensors[name], padding)) for name in SHARED},
    )
    draft = load(folder, target, embeddings="own")
    assert (draft.config.vocab_size, draft.config.draft_vocab_size) == (300, 300)
    for name in SHARED:
        assert torch.equal(draft.tensors[name], WEIGHTS.tensors[name])


# Strictness


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_missing_tensor_is_named_as_the_file_names_it(
    layout: str, target: Path, tmp_path: Path
) -> None:
    folder = written(tmp_path, layout)
    names = set(load_file(folder / FILE))
    assert len(names) == 2 * 11 + 3
    for name in sorted(names):
        written(tmp_path, layout, **{name: None})
        with pytest.raises(UserError, match=f"missing tensor {name}"):
            load(folder, target)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_misshapen_tensor_is_named_with_both_shapes(
    layout: str, target: Path, tmp_path: Path
) -> None:
    folder = write_draft(tmp_path / "draft", WEIGHTS, layout=layout, own_embeddings=True)
    for name, tensor in sorted(load_file(folder / FILE).items()):
        shape = list(tensor.shape)
        wrong = torch.zeros(shape[0] + 1, *shape[1:])
        write_draft(folder, WEIGHTS, layout=layout, own_embeddings=True, tensors={name: wrong})
        with pytest.raises(UserError, match=name) as caught:
            load(folder, target, embeddings="target")
        assert str(list(wrong.shape)) in str(caught.value)
        assert str(shape) in str(caught.value) or name == HEAD


@pytest.mark.parametrize(
    "name",
    ["more.weight", "fusion.fc.weight", "fusion.norm.weight", "fc.bias", "fc.weight_scale",
     "layers.2.input_layernorm.weight", "layers.0.self_attn.q_proj.bias", "layers.0.more",
     "hidden_norm.bias", "verifier_norm.weight"],
)  # fmt: skip
def test_an_unexpected_tensor_is_named_with_its_shape(
    name: str, target: Path, tmp_path: Path
) -> None:
    folder = written(tmp_path, **{name: torch.zeros(3)})
    with pytest.raises(UserError, match=rf"unexpected tensor {name} \[3\]"):
        load(folder, target)


def test_fewer_layers_than_the_tensors_are_refused(target: Path, tmp_path: Path) -> None:
    folder = write_draft(
        tmp_path / "d", WEIGHTS, config={"num_hidden_layers": 1, "layer_types": None}
    )
    with pytest.raises(UserError, match=r"unexpected tensor layers.1.input_layernorm.weight"):
        load(folder, target)


def test_training_s_frozen_copies_in_speculators_files_are_ignored_and_the_log_says_so(
    target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    copies = {
        "verifier_norm.weight": torch.ones(64),
        "verifier_lm_head.weight": torch.ones(300, 64),
    }
    plain = load(written(tmp_path / "p", "speculators"), target)
    draft = load(written(tmp_path / "c", "speculators", **copies), target)
    assert draft.tensors.keys() == plain.tensors.keys()
    assert torch.equal(draft.tensors[HEAD], plain.tensors[HEAD])
    for name in copies:
        assert f"{name} is training's copy and is not used" in caplog.text
        misshapen = written(tmp_path / "m", "speculators", **{name: torch.ones(63, 64)})
        with pytest.raises(UserError, match=rf"tensor {name} is \[63, 64\]; "):
            load(misshapen, target)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [Q_PROJ, HEAD, "fc.weight", EMBEDDING, "hidden_norm.weight"])
def test_a_weight_that_is_not_finite_is_refused_and_named(
    name: str, value: float, tmp_path: Path
) -> None:
    folder = write_draft(tmp_path / "d", WEIGHTS, own_embeddings=True)
    tensor = load_file(folder / FILE)[name].clone()
    tensor.view(-1)[-1] = value
    write_draft(folder, WEIGHTS, own_embeddings=True, tensors={name: tensor})
    with pytest.raises(UserError, match=rf"tensor {name} holds values that are not finite"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64], ids=str)
def test_a_weight_that_is_no_floating_point_number_is_refused(
    dtype: torch.dtype, target: Path, tmp_path: Path
) -> None:
    folder = written(tmp_path, **{Q_PROJ: torch.zeros(64, 64, dtype=dtype)})
    with pytest.raises(UserError, match=rf"tensor {Q_PROJ} is {dtype}"):
        load(folder, target)


@pytest.mark.parametrize("name", [HEAD, EMBEDDING, "norm.weight", "fc.weight", "d2t", "t2d"])
def test_a_tensor_without_elements_is_refused_and_named(
    name: str, target: Path, tmp_path: Path
) -> None:
    shape = {HEAD: (0, 64), EMBEDDING: (0, 64), "fc.weight": (64, 0)}.get(name, (0,))
    folder = written(tmp_path, **{name: torch.zeros(shape)})
    said = re.escape(f"tensor {name} is {list(shape)}, without elements")
    with pytest.raises(UserError, match=said):
        load(folder, target)


def test_a_file_without_tensors_is_said_to_hold_none(tmp_path: Path) -> None:
    folder = written(tmp_path)
    save_file({}, folder / FILE)
    with pytest.raises(UserError, match="draft: its safetensors hold no tensors"):
        load(folder)


def test_a_tensor_in_two_shards_is_refused(target: Path, tmp_path: Path) -> None:
    folder = written(tmp_path)
    shard(folder, **{"norm.weight": torch.ones(64)})
    with pytest.raises(UserError, match=r"b\.safetensors: tensor norm\.weight is in a\.saf"):
        load(folder, target)


def test_a_pickle_is_never_opened(target: Path, tmp_path: Path) -> None:
    folder = written(tmp_path)
    (folder / FILE).rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin is a pickle"):
        load(folder, target)


@pytest.mark.parametrize("size", [0, 7, 100, 2_000, 20_000])
def test_a_truncated_file_is_one_clear_line(size: int, target: Path, tmp_path: Path) -> None:
    folder = written(tmp_path)
    os.truncate(folder / FILE, size)
    with pytest.raises(UserError, match="not a readable safetensors file") as caught:
        load(folder, target)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_not_there_is_one_clear_line(target: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*config\.json"):
        load(tmp_path / "gone", target)
    with pytest.raises(UserError, match=r"target .*gone: cannot read .*config\.json"):
        load(written(tmp_path), tmp_path / "gone")


def test_stored_rotary_buffers_are_ignored(target: Path, tmp_path: Path) -> None:
    load(written(tmp_path, **{"layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}), target)

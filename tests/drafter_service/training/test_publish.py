"""Published checkpoints: what public engines read, in files of a bounded size, always whole."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm

from drafter_service.training import publish
from drafter_service.training.publish import (
    SHARD_BYTES,
    dflash_config,
    eagle3_config,
    fold_tap_rms,
    largest_head,
    publish_dflash,
    publish_eagle3,
)
from graph_runtime.architecture import DecoderConfig, parse_config
from graph_runtime.dflash import checkpoint as dflash_checkpoint
from graph_runtime.drafts.keys import rope
from graph_runtime.drafts.source import DraftSource
from graph_runtime.eagle3 import checkpoint as eagle3_checkpoint
from splitspec.errors import UserError

H, FF, V, VD, D, HEADS, KV_HEADS, TAPS = 64, 96, 300, 200, 16, 4, 2, (1, 3, 6)
ROPES = {
    "plain": {"rope_theta": 100000.0},
    "linear": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "llama3": {
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    },
    "yarn": {
        "rope_theta": 1e6,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 16.0,
            "mscale": 0.7,
            "mscale_all_dim": 0.9,
        },
    },
}


def target(**keys: object) -> DecoderConfig:
    """Return the shape of a target of 8 layers."""
    return parse_config({
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": V,
        "hidden_size": H,
        "intermediate_size": FF,
        "num_hidden_layers": 8,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        **keys,
    })  # fmt: skip


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, torch.Tensor]:
    """Return float32 weights of the shapes."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}


def layer_shapes(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    """Return a layer's shapes as both layouts name them; q, k and v project from `width`."""
    return {
        f"{prefix}.self_attn.q_proj.weight": (HEADS * D, width),
        f"{prefix}.self_attn.k_proj.weight": (KV_HEADS * D, width),
        f"{prefix}.self_attn.v_proj.weight": (KV_HEADS * D, width),
        f"{prefix}.self_attn.o_proj.weight": (H, HEADS * D),
        f"{prefix}.mlp.gate_proj.weight": (FF, H),
        f"{prefix}.mlp.up_proj.weight": (FF, H),
        f"{prefix}.mlp.down_proj.weight": (H, FF),
        f"{prefix}.input_layernorm.weight": (H,),
        f"{prefix}.post_attention_layernorm.weight": (H,),
    }


def eagle3_tensors(draft_vocabulary: int = VD) -> dict[str, torch.Tensor]:
    """Return an EAGLE-3 draft's weights by their published names."""
    return random_tensors({
        "fc.weight": (H, len(TAPS) * H),
        **layer_shapes("midlayer", 2 * H),
        "midlayer.hidden_norm.weight": (H,),
        "norm.weight": (H,),
        "lm_head.weight": (draft_vocabulary, H),
    })  # fmt: skip


def dflash_tensors() -> dict[str, torch.Tensor]:
    """Return a DFlash draft's weights of two layers by their published names."""
    shapes = {"fc.weight": (H, len(TAPS) * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
    for i in range(2):
        shapes |= layer_shapes(f"layers.{i}", H)
        shapes |= {f"layers.{i}.self_attn.{part}_norm.weight": (D,) for part in "qk"}
    return random_tensors(shapes)


def write_eagle3(folder: Path, **tensors: torch.Tensor) -> Path:
    """Publish an EAGLE-3 draft whose ids are every V-th id but the first hundred."""
    config = eagle3_config(target(), tap_layers=TAPS, intermediate_size=FF, draft_vocab_size=VD)
    publish_eagle3(
        folder,
        {**eagle3_tensors(), **tensors},
        target_ids=torch.arange(V - VD, V),
        config=config,
        model_card="a card\n",
    )
    return folder


def write_dflash(folder: Path, **tensors: torch.Tensor) -> Path:
    """Publish a DFlash draft of two layers."""
    config = dflash_config(target(), tap_layers=TAPS, n_layers=2, block_size=8, mask_token_id=16)
    publish_dflash(folder, {**dflash_tensors(), **tensors}, config=config, model_card="a card\n")
    return folder


def state_dict(folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor by its name as public loaders find it: through the index."""
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = {}
    for name, file in weight_map.items():
        with safe_open(folder / file, framework="pt") as opened:
            tensors[name] = opened.get_tensor(name)
    return tensors


class PublicEagle3(nn.Module):
    """The modules of SafeAILab's EAGLE-3 draft by its names, of transformers' parts."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        config = AutoConfig.from_pretrained(folder)
        width, heads = config.hidden_size, config.num_attention_heads
        layers = config.eagle_config["eagle_aux_hidden_state_layer_ids"]
        eps = config.rms_norm_eps
        self.midlayer = nn.Module()
        self.midlayer.self_attn = LlamaAttention(config, layer_idx=0)
        for part, count in (("q", heads), ("k", config.num_key_value_heads)):
            linear = nn.Linear(2 * width, count * config.head_dim, bias=False)
            setattr(self.midlayer.self_attn, f"{part}_proj", linear)
        self.midlayer.self_attn.v_proj = nn.Linear(*reversed(linear.weight.shape), bias=False)
        self.midlayer.mlp = LlamaMLP(config)
        for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
            setattr(self.midlayer, name, LlamaRMSNorm(width, eps))
        self.fc = nn.Linear(len(layers) * config.target_hidden_size, width, bias=False)
        self.norm = LlamaRMSNorm(width, eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))


class PublicDFlash(nn.Module):
    """The modules of z-lab's draft by its names, of transformers' parts."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        config = AutoConfig.from_pretrained(folder)
        layers = config.dflash_config["target_layer_ids"]
        self.layers = nn.ModuleList(
            Qwen3DecoderLayer(config, i) for i in range(config.num_hidden_layers)
        )
        self.norm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.fc = nn.Linear(len(layers) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)


def test_a_module_with_the_public_names_of_eagle3_loads_the_checkpoint_strictly(
    tmp_path: Path,
) -> None:
    folder = write_eagle3(tmp_path / "draft")
    network = PublicEagle3(folder)
    network.load_state_dict(state_dict(folder))
    for name, tensor in eagle3_tensors().items():
        assert torch.equal(network.state_dict()[name], tensor.bfloat16().float()), name
    known = network.t2d.nonzero()[:, 0]
    assert torch.equal(torch.arange(VD) + network.d2t, known)
    assert known.tolist() == list(range(V - VD, V))


def test_a_module_with_the_public_names_of_dflash_loads_the_checkpoint_strictly(
    tmp_path: Path,
) -> None:
    folder = write_dflash(tmp_path / "draft")
    network = PublicDFlash(folder)
    network.load_state_dict(state_dict(folder))
    for name, tensor in dflash_tensors().items():
        assert torch.equal(network.state_dict()[name], tensor.bfloat16().float()), name


def test_the_drafter_reads_the_eagle3_checkpoint_with_the_taps_it_was_trained_on(
    tmp_path: Path,
) -> None:
    source = eagle3_checkpoint.Eagle3Source(folder=write_eagle3(tmp_path / "draft"))
    config, _, _ = eagle3_checkpoint.load_fusion(source, tmp_path)
    assert (config.tap_layers, config.layout) == (TAPS, "specforge")
    assert (config.draft_vocab_size, config.vocab_size) == (VD, V)
    assert (config.post_norm_feedback, config.norm_before_residual) == (False, False)


def test_the_drafter_reads_the_dflash_checkpoint_with_the_taps_it_was_trained_on(
    tmp_path: Path,
) -> None:
    config = dflash_checkpoint.load_config(DraftSource(folder=write_dflash(tmp_path / "draft")))
    assert (config.tap_layers, config.layout) == (TAPS, "z-lab")
    assert (config.block_size, config.mask_token_id, config.n_layers) == (8, 16, 2)
    assert config.causal == (False, False)
    assert not config.sample_from_anchor


@pytest.mark.parametrize("kind", ROPES)
def test_a_draft_states_the_targets_rope(kind: str) -> None:
    trained = target(**ROPES[kind])
    written = dflash_config(trained, tap_layers=(0,), n_layers=1, block_size=8, mask_token_id=0)
    assert rope(json.loads(json.dumps(written))) == trained.rope


def test_every_file_is_filled_up_to_the_limit_in_the_order_of_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 60_000
    monkeypatch.setattr(publish, "SHARD_BYTES", limit)
    folder = write_eagle3(tmp_path / "draft")
    files = sorted(folder.glob("model-*.safetensors"))
    assert len(files) > 2
    held: list[list[tuple[str, int]]] = []
    for i, path in enumerate(files):
        assert path.name == f"model-{i + 1:05}-of-{len(files):05}.safetensors"
        assert path.stat().st_size <= limit
        with safe_open(path, framework="pt") as opened:
            held.append([(name, opened.get_tensor(name).nbytes) for name in sorted(opened.keys())])
    names = [name for shard in held for name, _ in shard]
    assert names == sorted([*eagle3_tensors(), "d2t", "t2d"])
    for shard, following in pairwise(held):
        room = limit - 2048 - sum(size for _, size in shard)
        assert following[0][1] > room, (shard, following[0])


def test_the_largest_head_fits_in_one_file_and_one_row_more_does_not(tmp_path: Path) -> None:
    most = largest_head(H)
    config = {**eagle3_config(target(), tap_layers=TAPS, intermediate_size=FF, draft_vocab_size=1),
              "vocab_size": most + 1}  # fmt: skip
    for rows in (most, most + 1):
        tensors = {"lm_head.weight": torch.zeros(rows, H)}
        ids = torch.arange(rows)
        if rows > most:
            with pytest.raises(UserError, match=re.escape(f"--draft-vocab-size in [1, {most}]")):
                publish_eagle3(
                    tmp_path / "b", tensors, target_ids=ids, config=config, model_card=""
                )
        else:
            publish_eagle3(tmp_path / "a", tensors, target_ids=ids, config=config, model_card="")
            sizes = [path.stat().st_size for path in (tmp_path / "a").glob("*.safetensors")]
            assert SHARD_BYTES - 1024 < max(sizes) <= SHARD_BYTES
    assert not (tmp_path / "b").exists()


def test_a_head_of_the_shipped_width_has_room_for_13312_rows() -> None:
    assert 13312 <= largest_head(576) <= math.floor(15 * 2**20 / (576 * 2))


def test_another_tensor_that_fits_in_no_file_is_named_with_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "SHARD_BYTES", 20_000)
    with pytest.raises(UserError, match=r"fc.weight \[64, 192\] is 24576 bytes.*at most 20000"):
        write_dflash(tmp_path / "draft")


def test_the_same_tensors_give_the_same_files(tmp_path: Path) -> None:
    folders = [write_eagle3(tmp_path / name) for name in ("one", "two")]
    contents = [{p.name: p.read_bytes() for p in folder.iterdir()} for folder in folders]
    assert contents[0] == contents[1]
    assert "README.md" in contents[0]


@pytest.mark.parametrize("value", [math.nan, math.inf, 3.4e38])
def test_a_tensor_that_is_not_finite_in_bf16_is_refused_by_name(
    tmp_path: Path, value: float
) -> None:
    bad = torch.ones(H)
    bad[3] = value
    with pytest.raises(UserError, match=r"tensor norm\.weight holds 1 of 64 values"):
        write_dflash(tmp_path / "draft", **{"norm.weight": bad})
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_is_there_is_replaced_whole(tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path / "draft")
    (folder / "training.json").write_text("{}")
    write_dflash(folder)
    assert set(state_dict(folder)) == set(dflash_tensors())
    assert not (folder / "training.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def test_a_folder_that_holds_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "letter.txt").write_text("mine")
    with pytest.raises(UserError, match="draft holds something else; expected a checkpoint"):
        write_dflash(tmp_path / "draft")
    assert (tmp_path / "draft" / "letter.txt").read_text() == "mine"


def test_what_a_killed_writer_left_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / ".draft.part").mkdir()
    (tmp_path / ".draft.part" / "model-00001-of-00001.safetensors").write_bytes(b"half")
    write_dflash(tmp_path / "draft")
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def test_a_place_that_cannot_be_written_is_a_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        write_dflash(tmp_path / "file" / "draft")


def test_folding_the_tap_rms_takes_raw_taps_where_scaled_ones_were_trained_on() -> None:
    generator = torch.Generator().manual_seed(3)
    fc = torch.randn(5, 12, generator=generator)
    rms = torch.tensor([0.5, 2.0, 40.0])
    taps = torch.randn(3, 4, generator=generator) * rms[:, None]
    folded = fold_tap_rms(fc, rms)
    for row in range(5):
        wanted = sum(
            float(fc[row, 4 * t + i]) * float(taps[t, i]) / float(rms[t])
            for t in range(3)
            for i in range(4)
        )
        given = float(folded[row].double() @ taps.flatten().double())
        assert given == pytest.approx(wanted, rel=1e-5, abs=1e-5)

"""The stage as a whole: passes, resuming, plans, refusals, the command."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from drafter_service.training import rollouts as stage
from drafter_service.training.commands.rollouts import rollouts as command
from drafter_service.training.rollouts import plan_pass, write_rollouts
from drafter_service.training.rollouts_config import RolloutsConfig
from drafter_service.training.store import open_rollouts
from drafter_service.training.turns import read_turns
from splitspec.errors import UserError
from tests.drafter_service.training.chat_templates import TEMPLATES, write_templated_model


@pytest.fixture
def config(tmp_path: Path) -> RolloutsConfig:
    """Return a run of three passes of a tiny model on the CPU."""
    folder = write_templated_model(tmp_path / "tiny", TEMPLATES["plain"], logit_scale=0.2)
    seeds = tmp_path / "seeds.txt"
    seeds.write_text("Sing.\nDance.\nWalk in the rain.\n")
    return RolloutsConfig(
        target=str(folder),
        out=tmp_path / "out",
        passes=3,
        rows=6,
        length=128,
        device="cpu",
        seeds=seeds,
        seeded_share=0.5,
        cache_dir=tmp_path / "cache",
    )


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_run_that_ended_early_continues_with_the_same_bytes(
    config: RolloutsConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = write_rollouts(config)
    assert sorted(files(config.out)) == [
        "pass-00000.safetensors",
        "pass-00001.safetensors",
        "pass-00002.safetensors",
        "rollouts.json",
    ]
    assert whole.tokens.shape == (18, 128)
    cut = replace(config, out=tmp_path / "cut")
    write_pass = stage.write_pass

    def stop_after_the_first(folder: Path, index: int, written: object) -> None:
        if index:
            raise KeyboardInterrupt
        write_pass(folder, index, written)  # type: ignore[arg-type]

    monkeypatch.setattr(stage, "write_pass", stop_after_the_first)
    with pytest.raises(KeyboardInterrupt):
        write_rollouts(cut)
    assert sorted(files(cut.out)) == ["pass-00000.safetensors", "rollouts.json"]
    monkeypatch.setattr(stage, "write_pass", write_pass)
    write_rollouts(cut)
    assert files(cut.out) == files(config.out)


def test_more_passes_are_added_and_other_parameters_refused(config: RolloutsConfig) -> None:
    write_rollouts(replace(config, passes=1))
    first = files(config.out)["pass-00000.safetensors"]
    assert len(write_rollouts(replace(config, passes=2)).tokens) == 12
    assert files(config.out)["pass-00000.safetensors"] == first
    with pytest.raises(UserError, match="made with seed 1, this run has 2"):
        write_rollouts(replace(config, seed=2))
    other = write_templated_model(config.out.parent / "other", TEMPLATES["plain"], seed=9)
    with pytest.raises(UserError, match="made with model_"):
        write_rollouts(replace(config, target=str(other)))


def test_the_folder_says_who_wrote_it_and_what_is_kept(config: RolloutsConfig) -> None:
    written = write_rollouts(replace(config, passes=1))
    described = json.loads((config.out / "rollouts.json").read_text())
    assert described["model_id"] == "tiny"
    assert described["parameters"]["seeded_share"] == 0.5
    assert described["parameters"]["seeds"] == "seeds.txt"
    assert described["counts"] == {"passes": 1, **written.counts}
    counts = written.counts
    dropped = counts["short"] + counts["looping"] + counts["duplicate"]
    assert counts["rows"] == 6 == dropped + counts["training"] + counts["held_out"]
    assert open_rollouts(config.out, model_hash=described["model_hash"]).counts == counts


def test_no_instruction_is_answered_greedily_twice(config: RolloutsConfig) -> None:
    turns = read_turns(Path(config.target))
    seeds = [turns.encode(text) for text in ("Sing.", "Dance.", "Walk in the rain.", "Cook.")]
    wide = replace(config, rows=10, seeded_share=0.4, passes=40)
    used: list[tuple[int, ...]] = []
    for index in range(wide.passes):
        plan = plan_pass(wide, index, turns, seeds)
        own = [ids for ids in plan.forced if list(ids) == list(turns.opening)]
        assert len(own) == 6
        for ids, temperature in zip(plan.forced, plan.temperatures, strict=True):
            if len(ids) > len(turns.opening):
                assert ids[-1] == turns.user_end
                assert temperature > 0.0 or tuple(ids) not in used
                used.append(tuple(ids))
    assert len(set(used[:4])) == 4, "each is used before one is used again"
    assert all(used.count(ids) == 40 for ids in set(used))


def test_temperatures_have_their_shares_and_passes_differ(config: RolloutsConfig) -> None:
    turns = read_turns(Path(config.target))
    wide = replace(config, rows=4000, seeded_share=0.0)
    plans = [plan_pass(wide, index, turns, []) for index in (0, 1)]
    for plan in plans:
        shares = [plan.temperatures.count(value) / 4000 for value in (0.0, 0.7, 1.0)]
        assert shares == pytest.approx([0.5, 0.3, 0.2], abs=0.04)
    assert plans[0].seed != plans[1].seed
    assert plans[0].temperatures != plans[1].temperatures
    assert plans[1] == plan_pass(wide, 1, turns, [])


def test_a_seed_instruction_with_a_special_token_is_refused(config: RolloutsConfig) -> None:
    assert config.seeds is not None
    config.seeds.write_text("Sing.\nSay <|im_end|> now.\n")
    with pytest.raises(UserError, match=r"'Say <\|im_end\|> now\.' holds a special token"):
        write_rollouts(config)


def test_instructions_longer_than_half_a_row_are_left_out(config: RolloutsConfig) -> None:
    assert config.seeds is not None
    config.seeds.write_text("walk " * 60)
    with pytest.raises(UserError, match="--length 128 is too short: no instruction"):
        write_rollouts(config)
    config.seeds.write_text("walk " * 60 + "\nSing.\n")
    written = write_rollouts(replace(config, passes=1))
    assert written.provenance.parameters["seeds_count"] == 1


def test_rows_longer_than_the_models_context_are_refused(config: RolloutsConfig) -> None:
    with pytest.raises(UserError, match=r"--length 4096 is not in \d+\.\.2048"):
        write_rollouts(replace(config, length=4096))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("passes", 0),
        ("rows", 0),
        ("length", 63),
        ("seed", -1),
        ("seeded_share", 1.5),
        ("precision", "int3"),
    ],
)
def test_a_value_out_of_its_range_is_refused_by_its_flag(name: str, value: object) -> None:
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')} '?{value}"):
        RolloutsConfig(**{name: value})  # type: ignore[arg-type]


def test_the_precision_follows_the_device() -> None:
    assert RolloutsConfig(device="cuda:1").chosen_precision == "bf16"
    assert RolloutsConfig(device="cpu").chosen_precision == "fp32"
    assert RolloutsConfig(device="cpu", precision="8da8w").chosen_precision == "8da8w"


def test_the_command_has_a_flag_a_field_and_prints_the_counts(config: RolloutsConfig) -> None:
    app = typer.Typer()
    app.command()(command)
    arguments = []
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    for name, value in {**values, "passes": 1, **asdict(values.pop("filters"))}.items():
        if value is not None and name != "filters":
            arguments += ["--" + name.replace("_", "-"), str(value)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    counts = open_rollouts(config.out).counts
    for name, count in counts.items():
        assert f"{name} {count}\n" in result.output

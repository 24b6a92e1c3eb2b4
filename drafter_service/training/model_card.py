"""The README.md of a published draft: what it is, how it was made, how good it is, its limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_METHODS = {
    "eagle3": ("EAGLE-3", "arXiv:2503.01840", "one decoder layer that drafts a chain of tokens"),
    "dflash": ("DFlash", "arXiv:2602.06036", "a few layers that draft a block of tokens at once"),
}
_APACHE = "apache-2.0"
_TARGET_LICENCES = {"smollm2": _APACHE}
"""By the beginning of the target's name, in small letters."""
_USUAL = ("seed", "batch_rows", "learning_rate", "precision")
"""Parameters that stand first, whatever the method is."""


def render(run: Mapping[str, Any]) -> str:
    """Return the card in Markdown, with the YAML front matter that model hubs read.

    Args:
        run: content of a finished run's run.json.
    """
    name, paper, what = _METHODS[run["method"]]
    target, target_hash = run["target_model_id"], run["target_model_hash"]
    sections = [
        _front_matter(target),
        f"# {name} draft for {target}\n\n"
        f"A draft for speculative decoding ({name}, {paper}): {what}. The target checks every "
        f"token, so the text is the target's own, sooner. Of the target it reads the layers "
        f"{_listed(run['parameters']['tap_layers'])} (0-based layer outputs).\n\n"
        f"Trained for `{target}`, model hash (SHA-256 of config.json and weights) `{target_hash}`. "
        "With another target, or other weights of it, few drafts stand.",
        _use(target),
        _data(run),
        _recipe(run),
        _figures(run),
        _limits(),
        _licence(target),
    ]
    return "\n\n".join(sections) + "\n"


def _front_matter(target: str) -> str:
    lines = [
        "---",
        f"license: {_APACHE}",
        f"base_model: {target}",
        "library_name: splitspec",
        "tags:",
        "- speculative-decoding",
        "- draft-model",
        "---",
    ]
    return "\n".join(lines)


def _use(target: str) -> str:
    return (
        "## Use\n\n"
        "```sh\n"
        f"splitspec model pull {target}\n"
        f'splitspec run --model {target} --draft DIR "Why is the sky blue?"\n'
        "```\n\n"
        "`DIR` is this folder. Weights are bf16 safetensors in the method's public layout."
    )


def _data(run: Mapping[str, Any]) -> str:
    rollouts = run["rollouts"]
    text = (
        "## Data\n\n"
        f"The target's own text and nothing else: {rollouts['rows']:,} conversations of "
        f"{rollouts['row_length']} tokens, {rollouts['tokens']:,} tokens in all, in which the "
        "target wrote the answers and most of the user turns (`splitspec train rollouts`)."
    )
    rows = [(key, value) for key, value in rollouts["parameters"].items() if value is not None]
    rows += list(rollouts["counts"].items())
    return f"{text}\n\n{_table(('rollouts', 'value'), rows)}"


def _recipe(run: Mapping[str, Any]) -> str:
    parameters = dict(run["parameters"])
    first = [(key, parameters.pop(key)) for key in _USUAL]
    rest = [(key, value) for key, value in parameters.items() if value is not None]
    facts = [(key, value) for key, value in run["facts"].items() if key not in parameters]
    made = [
        ("steps", run["steps"]),
        ("epochs", round(run["epochs"], 2)),
        ("seconds of steps", round(run["seconds"], 1)),
        ("trained parameters", run["trained_parameters"]),
        ("weights kept", run["weights"]),
    ]
    table = _table((f"train {run['method']}", "value"), [*made, *first, *rest, *facts])
    return f"## Recipe\n\n{table}"


def _figures(run: Mapping[str, Any]) -> str:
    """Return tau by K: of the finished draft on both kinds of held-out rows, and the untrained."""
    kinds = {
        "greedy answers": run["tau"],
        "sampled answers": run["sampled_tau"],
        "untrained, greedy answers": run["untrained_tau"],
    }
    counts = sorted({int(k) for tau in kinds.values() for k in tau})
    if not counts:
        return "## Figures\n\nNo rows were held out, so nothing was measured."
    header = ("held-out conversations", *(f"K = {k}" for k in counts))
    rows = [
        (kind, *(f"{tau[str(k)]:.2f}" if str(k) in tau else "" for k in counts))
        for kind, tau in kinds.items()
    ]
    return (
        "## Figures\n\n"
        "tau, the mean number of tokens that a round emits with K draft tokens, over the target's "
        f"own text that no step saw:\n\n{_table(header, rows)}"
    )


def _limits() -> str:
    return (
        "## Limits\n\n"
        "- tau is no speed-up: what a round costs depends on the machine.\n"
        "- Acceptance falls with the temperature, and on text that is unlike the target's own "
        "chat answers: other languages, long contexts beyond the training rows, raw prompts.\n"
        "- Drafts alone are no model: their text means nothing without the target's check."
    )


def _licence(target: str) -> str:
    found = [v for start, v in _TARGET_LICENCES.items() if target.lower().startswith(start)]
    of_target = "Apache-2.0 too" if _APACHE in found else "see the target's licence"
    return f"## Licence\n\nThis draft: Apache-2.0. The target: {of_target}."


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return _listed(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_cell(v)}" for key, v in value.items())
    return str(value).replace("|", "\\|").replace("\n", " ")


def _listed(values: Sequence[object]) -> str:
    return ", ".join(_cell(value) for value in values)

"""Where the keys of a DFlash draft's `config.json` are: exporters nest some and not others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from graph_runtime.config_values import boolean, integer, refused
from graph_runtime.drafts.keys import is_given, object_at
from splitspec.errors import UserError

NESTED = "dflash_config"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class DFlashKeys:
    """Where a layout keeps its keys."""

    layout: str
    top: Mapping[str, Any]
    nested: Mapping[str, Any]
    """`dflash_config`, empty where there is none."""
    layer: Mapping[str, Any]
    """The decoder layers': `transformer_layer_config` of speculators, else `top`."""

    def stated(self, *keys: str) -> dict[str, Any]:
        """Return what is stated for a key, or its synonyms, under the names that errors show."""
        places = (("", self.top), (f"{NESTED}.", self.nested))
        return {f"{at}{key}": p[key] for key in keys for at, p in places if is_given(p, key)}

    def flag(self, *keys: str) -> bool | None:
        """Return a flag, which some exporters nest and others do not; None: nobody states it.

        Raises:
            UserError: it is no flag, or two places disagree.
        """
        stated = self.stated(*keys)
        return _agreed({name: boolean(stated, name) for name in stated})

    def count(self, key: str, *, least: int, most: int) -> int | None:
        """Return an integer in [least, most], nested or not; None: nobody states it.

        Raises:
            UserError: it is none, or two places disagree.
        """
        stated = self.stated(key)
        return _agreed({name: integer(stated, name, least=least, most=most) for name in stated})


def read_keys(layout: str, config: Mapping[str, Any]) -> DFlashKeys:
    """Find the places of a layout's keys.

    Raises:
        UserError: a place is missing or no object.
    """
    layer: Mapping[str, Any] = config
    if layout == "speculators":
        layer = object_at(config, "transformer_layer_config")
        if not layer:
            raise refused("transformer_layer_config", None, "an object")
    return DFlashKeys(layout=layout, top=config, nested=object_at(config, NESTED), layer=layer)


def _agreed(stated: Mapping[str, T]) -> T | None:
    """Return the one value that all places state; None: no place does.

    Raises:
        UserError: two places disagree.
    """
    (first, value), *others = stated.items() if stated else [("", None)]
    for name, other in others:
        if other != value:
            raise UserError(
                f"config.json: {first} is {value!r}, and {name} is {other!r}; expected one value"
            )
    return value

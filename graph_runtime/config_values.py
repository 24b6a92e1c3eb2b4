"""Read single values of a `config.json`: their type and range are checked, null is the default."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from splitspec.errors import UserError

LARGEST_NUMBER = 1e30
"""Still a float32, and so is its reciprocal."""


def read_config_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file `path`.

    Raises:
        UserError: it is missing, no JSON, or no object; or a key stands twice.
    """
    if path.exists() and not path.is_file():  # reading a pipe would never end
        raise UserError(f"{path} is no regular file")
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no JSON object")
    return content


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; readers disagree on which of two equal keys counts.

    Raises:
        ValueError: names the key.
    """
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} stands twice")
        found[key] = value
    return found


def integer(values: Mapping[str, Any], key: str, *, least: int, most: int) -> int:
    """Return an integer in [least, most].

    Raises:
        UserError: it is missing, or something else: names the key, the value and the range.
    """
    value = values.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise refused(key, value, f"an integer in [{least}, {most}]")
    return value


def number(
    values: Mapping[str, Any],
    key: str,
    default: float | None = None,
    *,
    above: float = 0.0,
    most: float = LARGEST_NUMBER,
) -> float:
    """Return a finite number in (above, most]; null is the default, if there is one.

    Raises:
        UserError: it is missing, or something else: names the key, the value and the range.
    """
    value = values.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, int | float) and not isinstance(value, bool) and above < value <= most:
        return float(value)  # NaN is in no range
    raise refused(key, value, f"a number above {above:g}, up to {most:g}")


def boolean(values: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    """Return true or false; null is the default.

    Raises:
        UserError: it is something else, like "false": names the key and the value.
    """
    value = values.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise refused(key, value, "true or false")
    return value


def refused(key: str, value: object, expected: str) -> UserError:
    """Return the one line for a value that is not what was expected."""
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return UserError(f"config.json: {key} is {shown}; expected {expected}")

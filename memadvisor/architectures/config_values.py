"""Numbers of a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memadvisor.errors import UsageError

Config = Mapping[str, Any]


def whole(config: Config, *keys: str, default: int | None = None, least: int = 1) -> int:
    """The first of these keys that has a number. Raises KeyError where none has and there is no default, UsageError where it
    is no whole number of `least` or more.
    """
    for key in keys:
        value = config.get(key)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                kind = "positive whole number" if least else "whole number"
                raise UsageError(f"{key} is {value!r}.", hint=f"it is a {kind}.")
            return value
    if default is None:
        raise KeyError(keys[0])
    return default


def layer_numbers(config: Config, key: str) -> list[int] | None:
    """Numbers of layers; None where the config does not say. Raises UsageError where it says something else."""
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or any(not isinstance(one, int) or isinstance(one, bool) for one in value):
        raise UsageError(f"{key} is {value!r}.", hint="it is a list of whole numbers, each of a layer.")
    return value

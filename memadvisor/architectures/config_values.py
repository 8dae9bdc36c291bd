"""Numbers of a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memadvisor.errors import UsageError

Config = Mapping[str, Any]


def whole(config: Config, *keys: str, default: int | None = None) -> int:
    """The first of these keys that has a number. Raises KeyError where none has and there is no default, UsageError where it
    is no positive whole number.
    """
    for key in keys:
        value = config.get(key)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{key} is {value!r}.", hint="it is a positive whole number.")
            return value
    if default is None:
        raise KeyError(keys[0])
    return default

"""What the Python interface is called with: a value of a wrong kind is named in one line, before anything has begun."""

from __future__ import annotations

import operator
import os
from pathlib import Path
from typing import Any, TypeVar

from memadvisor.autocast import wrong_autocast
from memadvisor.chunked_loss import ChunkedLoss
from memadvisor.errors import UsageError

_T = TypeVar("_T")
_MOST = 10**9  # steps, ranks, samples: beyond it is a digit too many
_LONGEST = 60  # characters of a wrong value that are shown


def path_of(value: Any, name: str, hint: str) -> Path:
    """A file or directory that the caller names."""
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        raise UsageError(f"{name} is {_shown(value)}, which is no path.", hint=hint)
    if "\0" in os.fspath(value):
        raise UsageError(f"{name} is {_shown(value)}, which holds a NUL.", hint=hint)
    return Path(value)


def whole(value: Any, name: str, *, least: int, most: int = _MOST, hint: str | None = None) -> int:
    """A whole number, of numpy too; a bool is none. `hint` is for what takes something else as well."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if not least <= number <= most:
        raise UsageError(f"{name} is {_shown(value)}.", hint=hint or f"give a whole number from {least} on.")
    return number


def whole_or_none(value: Any, name: str, *, least: int) -> int | None:
    return None if value is None else whole(value, name, least=least)


def chunked_loss_of(value: Any) -> ChunkedLoss | None:
    """`"auto"`, or how many rows a chunk has."""
    if value is None or value == "auto":
        return None if value is None else ChunkedLoss()
    if isinstance(value, str):
        raise UsageError(
            f"chunked_loss is {_shown(value)}.", hint='give "auto", or a whole number from 1 on.'
        )
    return ChunkedLoss(rows=whole(value, "chunked_loss", least=1))


def autocast_of(value: Any) -> str | None:
    if value is None or (isinstance(value, str) and not wrong_autocast(value)):
        return value
    wrong = wrong_autocast(value) if isinstance(value, str) else f"{_shown(value)} is not done; use bf16"
    raise UsageError(f"autocast is {_shown(value)}.", hint=f"{wrong}.")


def of_kind(value: Any, kind: type[_T], name: str, hint: str) -> _T:
    if not isinstance(value, kind):
        raise UsageError(f"{name} is {_shown(value)}, which is no {kind.__name__}.", hint=hint)
    return value


def _shown(value: Any) -> str:
    """A number or a text as it stands; of anything else what it is, for a model's repr is a page."""
    if not isinstance(value, bool | int | float | str | bytes | None):
        return f"of type {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."

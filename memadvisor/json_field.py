"""Values of a JSON file that know their place in it, `units[3].zero_stage`, so that an error can name the field."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from memadvisor.run.files import read_input

_T = TypeVar("_T")

_WORDS = {
    str: "text",
    int: "a whole number",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}
_LONGEST = 40  # characters of a wrong value that are shown


@dataclass(frozen=True, slots=True)
class JsonField:
    """What stands at a place of a file; "" is the whole of it. All methods raise ValueError, naming the place."""

    value: Any
    place: str = ""

    def __getitem__(self, name: str) -> JsonField:
        """The field of that name, which must be there."""
        if name not in self.typed(dict):
            raise ValueError(f"{self._inside(name)!r} is missing")
        return JsonField(self.value[name], self._inside(name))

    def get(self, name: str, default: Any = None) -> JsonField:
        return JsonField(self.typed(dict).get(name, default), self._inside(name))

    def items(self) -> list[tuple[str, JsonField]]:
        """The fields of an object, whatever their names."""
        return [(str(name), self[name]) for name in self.typed(dict)]

    def __iter__(self) -> Iterator[JsonField]:
        """The entries of a list."""
        values = self.value if isinstance(self.value, tuple) else self.typed(list)
        return (JsonField(value, f"{self.place}[{index}]") for index, value in enumerate(values))

    def typed(self, kind: type, *, optional: bool = False) -> Any:
        """The value, which must be of that type; of `optional` ones also null."""
        if self.value is None and optional:
            return None
        if not isinstance(self.value, kind) or (kind is int and isinstance(self.value, bool)):
            self.refuse(_WORDS[kind])
        return self.value

    def maybe(self, read: Callable[[JsonField], _T]) -> _T | None:
        """What `read` makes of it; None of null, which a field that is not there is too."""
        return None if self.value is None else read(self)

    def refuse(self, belongs: str) -> NoReturn:
        """Raise ValueError: this value stands where `belongs` does."""
        text = json.dumps(self.value, default=repr)
        shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
        raise ValueError(f"{self.place or 'the whole'} is {shown}, where {belongs} belongs")

    def _inside(self, name: str) -> str:
        escaped = json.dumps(name)[1:-1]
        return f"{self.place}.{escaped}" if self.place else escaped


def read_json(path: Path) -> JsonField:
    """A file's whole value. Raises OSError, and ValueError saying where it is broken."""
    try:
        return JsonField(json.loads(read_input(path)))
    except (ValueError, RecursionError) as error:
        raise ValueError(where_broken(error)) from error


def where_broken(error: ValueError | RecursionError) -> str:
    """What is wrong with a text of JSON or TOML that cannot be parsed, and in which line."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg}, line {error.lineno}, column {error.colno}"
    if isinstance(error, UnicodeDecodeError):
        return "it is not text in UTF-8"
    return "it nests too deeply" if isinstance(error, RecursionError) else str(error)

"""What is in memory of several units, summed up as it comes and goes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Present:
    """Units of which something is there, and the bytes of all of it. `size_of`: by unit; of others nothing can be there."""

    def __init__(self, size_of: Mapping[str, int]) -> None:
        self._size_of = size_of
        self._sizes: dict[str, int] = {}
        self.total_bytes = 0

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    def items(self) -> Iterable[tuple[str, int]]:
        return self._sizes.items()

    def add(self, name: str) -> None:
        if name not in self._sizes:
            self._sizes[name] = self._size_of.get(name, 0)
            self.total_bytes += self._sizes[name]

    def discard(self, name: str) -> None:
        self.total_bytes -= self._sizes.pop(name, 0)

    def clear(self) -> None:
        self._sizes.clear()
        self.total_bytes = 0

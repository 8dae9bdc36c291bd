"""Replacing names of torch, so that taking the engine off leaves every one of them as it was found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Undo:
    """A list of things to take back, in reverse order."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []

    def add(self, step: Callable[[], object]) -> None:
        self._steps.append(step)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name`; taken back, an inherited name is inherited again."""
        own = name in vars(owner)
        original = getattr(owner, name)
        setattr(owner, name, value)

        def restore() -> None:
            if getattr(owner, name) is not value:
                return  # somebody else's wrapper around ours stays
            if own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)

        self._steps.append(restore)

    def run(self) -> None:
        while self._steps:
            self._steps.pop()()

"""What an action asks of a lane, as far as memory knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A collective that an action needs, and the bytes that live only while compute waits for it.

    Of no bytes, it is no collective: what lives only while the action is done. `beside`: what of `staging` is there beside
    all that was held before the action and all that is held after it, which are both there for a moment.
    """

    operation: str
    size_bytes: int
    staging: Mapping[str, int]
    beside: Mapping[str, int] = field(default_factory=dict)

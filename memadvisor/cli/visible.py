"""Others' words for a terminal, which acts on control characters: as escapes, not left out."""

from __future__ import annotations


def visible(text: str) -> str:
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)

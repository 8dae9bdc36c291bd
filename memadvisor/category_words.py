"""Categories of memory as sentences name them."""

from __future__ import annotations


def category_name(category: str) -> str:
    return category.replace("_", " ")


def category_plural(category: str) -> str:
    """For sentences: `activations`, `optimizer state`."""
    plurals = {
        "temporary": "temporaries",
        "communication": "communication buffers",
        "weight_copy": "weight copies",
    }
    if category in ("parameter", "gradient", "activation", "input"):
        return f"{category}s"
    return plurals.get(category, category_name(category))

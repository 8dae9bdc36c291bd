"""What the column `compile` says torch.compile has: yes or no, the name of a mode, or `model,loss`."""

from __future__ import annotations

import re

from memadvisor.layout_table.cells import Cells
from memadvisor.layout_table.columns import plain as plain_word


def compiled_parts(cells: Cells) -> set[str]:
    """Of `model,loss`, those that are said to be compiled."""
    return set(re.split(r"[\s,;+]+", (cells.text("compile") or "").lower())) & {"model", "loss"}


def is_compiled(cells: Cells) -> bool:
    """Whether torch.compile has the model."""
    parts = compiled_parts(cells)
    return "model" in parts or (not parts and bool(_compiles(cells)))


def _compiles(cells: Cells) -> bool | None:
    """Yes or no; modes and backends of torch.compile are yes, and eager is no."""
    word = plain_word(cells.text("compile") or "")
    if word == "eager":
        return False
    return word in ("inductor", "maxautotune", "reduceoverhead", "torchcompile") or cells.flag("compile")

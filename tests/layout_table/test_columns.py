"""docs/layout-table.md defines every column, with all of its names and what is taken without it."""

from pathlib import Path

import pytest

from memadvisor.layout_table.columns import COLUMNS

LINES = (Path(__file__).parents[2] / "docs/layout-table.md").read_text().splitlines()


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.name)
def test_the_documentation_says_what_the_reader_does(column):
    (line,) = (line for line in LINES if line.startswith(f"| `{column.name}` |"))
    _, _, aliases, meaning, without, _ = (part.strip() for part in line.split("|"))

    assert aliases == ", ".join(f"`{alias}`" for alias in column.aliases)
    assert (meaning, without) == (column.meaning, column.without)

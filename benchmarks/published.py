"""Predictions against published measurements: errors, fits, regret, the null baseline, and figures.

    python benchmarks/published.py DIR [--write docs/accuracy.md]

DIR holds the tables that `docs/accuracy.md` names, as CSV files; each says there where it is from, and its columns are those of
docs/layout-table.md. Prints the targets; with --write the page is written, and its figures into a folder of the same name.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pandas as pd

from benchmarks.accuracy.analytic import recompute_cells, zero_largest, zero_states
from benchmarks.accuracy.held_out import held_out_lines
from benchmarks.accuracy.page import page, targets
from benchmarks.accuracy.plots import figure
from benchmarks.accuracy.tables import TABLES, Published, score_table

_MOST_DOTS = 4000
_MOST_GROUPS = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--write", type=Path, metavar="PAGE.md")
    arguments = parser.parse_args()
    directory = arguments.directory
    missing = [each.name for each in TABLES if not (directory / f"{each.name}.csv").is_file()]
    if missing:
        sys.exit(f"{directory} lacks {', '.join(missing)}: docs/accuracy.md says where the tables are from.")
    frames = {published.name: score_table(directory, published) for published in TABLES}
    cells = {
        "zero_model_states": zero_states(directory),
        "zero_max_model": zero_largest(directory),
        "recompute_memory": recompute_cells(directory),
    }
    for row in targets(frames, cells):
        print(
            f"{'met' if row.met else 'NOT':4}{row.what:58}{row.reached:>16}  target {row.target:22} null {row.null}"
        )
    if arguments.write is not None:
        figures = _write_figures(frames, arguments.write)
        held_out = held_out_lines(arguments.write.with_suffix("") / "held_out.json")
        arguments.write.write_text(page(frames, cells, figures, held_out), encoding="utf-8")


def _write_figures(frames: dict[str, pd.DataFrame], written: Path) -> dict[str, str]:
    """Path of each figure, relative to the page, by its title."""
    folder = written.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for published in TABLES:
        for quantity, column, unit, scale in (("step time", "s", "s", 1.0), ("memory", "bytes", "GB", 1e9)):
            text = _figure(frames[published.name], published, quantity, column, unit, scale)
            if text is not None:
                title = f"{published.name}: {quantity}"
                path = folder / f"{published.name}_{quantity.replace(' ', '_')}.svg"
                path.write_text(text, encoding="utf-8")
                paths[title] = f"{folder.name}/{path.name}"
    return paths


def _figure(
    frame: pd.DataFrame, published: Published, quantity: str, column: str, unit: str, scale: float
) -> str | None:
    rows = frame[frame[f"measured_{column}"].notna() & frame[f"predicted_{column}"].notna()]
    if rows.empty:
        return None
    measured, predicted = rows[f"measured_{column}"], rows[f"predicted_{column}"]
    kept = rows[:: -(-len(rows) // _MOST_DOTS)]
    names = _groups(kept[published.group].astype(str), published.group)
    dots = {
        name: list(zip(measured[index] / scale, predicted[index] / scale, strict=True))
        for name, index in names.groupby(names).groups.items()
    }
    return figure(
        f"{published.name}: {quantity} of {len(rows)} rows",
        unit,
        dots,
        {
            "predicted": list((predicted / measured - 1).abs()),
            "null baseline": list((rows[f"null_{column}"] / measured - 1).abs()),
        },
    )


def _groups(values: pd.Series, column: str) -> pd.Series:
    """Names of groups for the legend; the rarest share one where there are too many."""
    known = list(values.value_counts().index)
    common = set(known if len(known) <= _MOST_GROUPS else known[: _MOST_GROUPS - 1])
    label = "" if column in ("model", "schedule") else f"{column} "
    return values.map(lambda value: f"{label}{value}" if value in common else "others")


if __name__ == "__main__":
    main()

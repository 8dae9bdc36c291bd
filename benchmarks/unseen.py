"""Predictions against published tables that no fit ran on.

    python benchmarks/unseen.py [--write docs/accuracy-unseen.md]

The tables lie in benchmarks/unseen, whose README says what their rows are. Prints the errors of each; with --write the page.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pandas as pd

from benchmarks.accuracy.scores import errors
from benchmarks.accuracy.tables import score_table
from benchmarks.accuracy.unseen import UNSEEN, unseen_page

DIRECTORY = Path(__file__).resolve().parent / "unseen"


def score_unseen() -> dict[str, pd.DataFrame]:
    """The frame of each table, by its name."""
    return {published.name: score_table(DIRECTORY, published) for published in UNSEEN}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, metavar="PAGE.md")
    arguments = parser.parse_args()
    frames = score_unseen()
    for name, frame in frames.items():
        time, memory = (
            errors(frame[f"predicted_{unit}"], frame[f"measured_{unit}"]) for unit in ("s", "bytes")
        )
        print(
            f"{name:20} {len(frame):3} rows  time {time.mape:6.1%} ({time.bias:+.1%})  memory {memory.mape:6.1%} ({memory.bias:+.1%})"
        )
    if arguments.write is not None:
        arguments.write.write_text(unseen_page(frames), encoding="utf-8")


if __name__ == "__main__":
    main()

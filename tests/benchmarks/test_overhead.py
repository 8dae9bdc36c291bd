"""The benchmark of the overhead runs, and its figures hang together."""

import json
import os
import subprocess
from pathlib import Path

from tests.warm_python import warm_python

ROOT = Path(__file__).parents[2]
SMALL = [
    "--rounds",
    "1",
    "--steps",
    "2",
    "--layers",
    "1",
    "--dim",
    "32",
    "--heads",
    "2",
    "--seq",
    "32",
    "--micro-batch",
    "2",
    "--device",
    "cpu",
]


def test_every_variant_is_measured_against_the_plain_steps_of_its_round():
    done = subprocess.run(
        [warm_python(), ROOT / "benchmarks" / "overhead.py", "--json", *SMALL],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for found in json.loads(done.stdout).values():
        table, facts = found["steps"], found["facts"]
        assert {"plain", "timed", "traced", "torch.profiler", "FlopCounterMode", "MemTracker"} <= set(table)
        assert table["plain"]["wall_ratio"] == table["plain"]["cpu_ratio"] == 1
        assert table["traced"]["cpu_s"] > table["plain"]["cpu_s"]
        for row in table.values():
            assert row["wall_s"] > 0
            assert row["wall_ratio"] == row["wall_s"] / table["plain"]["wall_s"]  # of a single round
        assert facts["journal_bytes_of_traced_step"] > facts["journal_bytes_per_timed_step"] > 0
        assert 0 < facts["stated_fraction"] < 1

"""The check of the whole loop runs on a CPU too, with torch and numpy alone, and what it prints holds."""

import os
import subprocess
from pathlib import Path

from tests.warm_python import warm_python

ROOT = Path(__file__).parents[2]


def test_the_loop_closes_without_any_views_package(tmp_path):
    """bf16 GPT: captured peak within 1 % of torch's own, the plan under its budget, predicted peak within 5 %."""
    for name in ("rich", "textual", "plotly", "pandas", "pynvml"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not on this machine')\n")
    done = subprocess.run(
        [
            warm_python(),
            ROOT / "benchmarks" / "gpu_check.py",
            "--device",
            "cpu",
            "--rounds",
            "0",
            "--steps",
            "7",
            "--models",
            "moe",
            "--only",
            "loop",
            "allocator",
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)},
        text=True,
        capture_output=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines()[1:] if "  " in line]
    table = {line.split("  ")[0]: line for line in lines}

    assert abs(percentage(table["peak, captured"])) < 1
    assert percentage(table["peak, unexplained"]) < 1
    assert abs(percentage(table["model states, captured"].removesuffix(" of expected"))) < 0.1
    assert table["losses, profiled against plain"].endswith("the same")
    assert table["peak with the plan, captured"].endswith("within budget")
    assert abs(percentage(table["peak with the plan, predicted"])) < 5
    assert table["losses, with the plan against plain"].endswith("the same")
    assert table["moe: loss, profiled against plain"].endswith("the same")
    assert "MiB" in table["moe: reserved, captured step simulated"]
    assert table["moe: reserved, max_memory_reserved"].endswith("not recorded")  # there is no GPU here


def percentage(line):
    number, sign = line.split()[-2:]
    assert sign == "%"
    return float(number)

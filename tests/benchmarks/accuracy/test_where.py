"""Where a table's errors lie."""

import pandas as pd

from benchmarks.accuracy.where import apart_by_stage


def frame(*jobs):
    shape = dict.fromkeys(
        ("model", "dp", "tp", "micro_batch_size", "grad_accum", "seq_len", "global_batch_seqs"), 1
    )
    columns = ("n_gpus", "pp", "zero_stage", "measured_s", "predicted_s", "ran")
    return pd.DataFrame([shape | dict(zip(columns, job, strict=True)) for job in jobs])


def test_twins_are_told_apart_by_how_much_longer_the_slower_one_takes():
    rows = apart_by_stage(
        frame(
            (8, 1, 0, 1.0, 1.0, True),
            (8, 1, 1, 1.5, 1.02, True),
            (64, 1, 0, 2.0, 1.0, True),
            (64, 1, 1, 1.0, 1.0, True),
        )
    )
    assert "| 8 | 1 | 50.0 % | 50 % | 1 | 2.0 % |" in rows
    assert "| 64 | 1 | 100.0 % | 100 % | 1 | 0.0 % |" in rows


def test_pipelines_failures_and_single_jobs_have_no_twin():
    jobs = [
        (8, 2, 0, 1.0, 1.0, True),
        (8, 2, 1, 9.0, 1.0, True),
        (8, 1, 0, 1.0, 1.0, True),
        (8, 1, 1, 1.0, 1.0, False),
    ]
    assert apart_by_stage(frame(*jobs)) == []

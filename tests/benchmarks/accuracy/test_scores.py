"""Definitions of errors, fits and regret on a table of six rows, worked out by hand."""

import math

import pandas as pd
import pytest

from benchmarks.accuracy.decisions import decided
from benchmarks.accuracy.scores import (
    errors,
    fit_judgement,
    null_bytes,
    null_seconds,
    regret,
    shuffled_regret,
)

NAN = float("nan")
ROWS = pd.DataFrame(
    {
        "model": ["a", "a", "a", "b", "b", "c"],
        "n_gpus": [8, 8, 8, 8, 8, 8],
        "measured_s": [10.0, 20.0, NAN, 4.0, 5.0, NAN],
        "predicted_s": [12.0, 10.0, 30.0, 5.0, 4.0, 1.0],
        "fits": [True, True, True, True, False, True],
    }
)
RAN = ROWS.measured_s.notna()


def test_errors_are_relative_to_the_measured():
    found = errors(ROWS.predicted_s, ROWS.measured_s)
    assert found.num_rows == 4  # of +20 %, -50 %, +25 %, -20 %
    assert found.mape == pytest.approx(0.2875)
    assert found.median == pytest.approx(0.225)
    assert found.p90 == pytest.approx(0.25 + 0.7 * 0.25)
    assert found.bias == pytest.approx(-0.0625)
    # Ranks: measured 3 4 1 2, predicted 4 3 2 1.
    assert found.spearman == pytest.approx(1 - 6 * 4 / (4 * 15))


def test_one_row_has_an_error_and_no_rank():
    found = errors(pd.Series([3.0]), pd.Series([2.0]))
    assert found.mape == 0.5 and math.isnan(found.spearman)


def test_fits_are_judged_against_what_ran():
    found = fit_judgement(ROWS.fits, RAN)
    assert found.accuracy == 0.5  # rows 0, 1, 3
    assert found.said_fits_but_failed == 1.0
    assert found.said_oom_but_ran == 0.25


def test_the_pick_is_the_fastest_that_is_said_to_fit():
    found = regret(ROWS, ROWS.predicted_s, ROWS.fits)
    # Of a the second is taken, which took 20 s in place of 10; of b the first, which was the fastest; nothing of c ran.
    assert (found.decisions, found.failed_picks, found.no_pick) == (2, 0, 0)
    assert found.mean == 0.5 and found.worst == 1.0


def test_a_pick_that_failed_has_no_regret_and_no_pick_is_no_decision():
    first = pd.Series([5.0, 10.0, 1.0, 5.0, 4.0, 1.0])
    found = regret(ROWS, first, ROWS.fits & (ROWS.model != "b"))
    assert (found.decisions, found.failed_picks, found.no_pick) == (1, 1, 1)
    assert math.isnan(found.mean)


def test_the_null_baseline_knows_bubble_and_recomputation_alone():
    shape = {
        "n_layers": 2,
        "hidden": 4,
        "ffn": 8,
        "vocab": 10,
        "seq_len": 16,
        "n_gpus": 2,
        "dp": 1,
        "tp": 1,
        "cp": 1,
    }
    rows = pd.DataFrame([shape] * 3).assign(
        pp=[1, 2, 2],
        recompute=["none", "none", "full"],
        micro_batch_size=1,
        global_batch_seqs=4,
        measured_s=[1.0, NAN, NAN],
        measured_bytes=[NAN, 3.0, NAN],
    )
    assert null_seconds(rows).tolist() == pytest.approx([1.0, 1.25, 1.25 * 4 / 3])
    # Parameters: 2 (64 + 96) / pp + 80 of both tables; activations 34 x 16 x 4 x 2 / pp of min(pp, 4) microbatches.
    states, kept = 16 * (160 + 80), 16 * 4 * 2
    plain = [16 * (320 + 80) + 34 * kept, states + 34 * kept, states + 2 * kept]
    assert null_bytes(rows).tolist() == pytest.approx([3.0 * value / plain[1] for value in plain])


def test_random_orders_decide_between_equal_predictions():
    rows = pd.DataFrame(
        {
            "model": ["a", "a"],
            "n_gpus": [8, 8],
            "measured_s": [1.0, 3.0],
            "seq_len": [1, 1],
            "global_batch_seqs": [1, 1],
        }
    )
    alike, all_fit = pd.Series([1.0, 1.0]), pd.Series([True, True])
    assert regret(rows, alike, all_fit).mean == 0.0
    mean, failed = shuffled_regret(rows, alike, all_fit, times=200)
    assert 0.8 < mean < 1.2  # half of the picks are three times slower
    assert failed == 0


def test_each_decision_tells_its_pick_and_the_best_and_their_mean_is_the_regret():
    found = decided(ROWS)
    assert found[["pick", "best"]].values.tolist() == [[1, 0], [3, 3]]
    assert found.regret.mean() == regret(ROWS, ROWS.predicted_s, ROWS.fits).mean

import json

import pytest

from memadvisor.cli.main import main
from tests.analyzers.test_comparison import PLAN
from tests.make_run import make_run, write_run
from tests.report.hostile import hostile_run


@pytest.fixture
def run_directory(tmp_path):
    return write_run(make_run(plan=PLAN), tmp_path / "run")


def test_limits_that_hold_give_code_0_and_a_line_each(run_directory, capsys):
    limits = ["--max-peak", "4MiB", "--max-unexplained", "1%", "--max-prediction-error", "0.25"]
    assert main(["check", str(run_directory), *limits]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert "pass  peak at most 4.00 MiB: measured 3.87 MiB (rank 0, in backward of blocks.2)" in lines
    assert "pass  error of the predicted peak at most 25.0 %: measured 23.4 % (predicted too much)" in lines
    assert "pass  record whole: every rank, to its end" in lines
    assert lines[-1] == "all limits hold"


def test_one_that_does_not_gives_code_1_and_nothing_on_stderr(run_directory, capsys):
    """MFU is not recorded: nobody knows the peak of a synthetic processor."""
    assert main(["check", str(run_directory), "--max-peak", "3MiB", "--min-mfu", "1%"]) == 1

    captured = capsys.readouterr()
    assert "FAIL  peak at most 3.00 MiB: measured 3.87 MiB (rank 0" in captured.out
    assert "FAIL  MFU at least 1.0 %: not recorded (ranks 0, 1: no peak FLOP/s of float32" in captured.out
    assert captured.out.endswith("2 of 2 limits not held\n")
    assert captured.err == ""


def test_figures_that_three_digits_do_not_tell_apart_are_given_in_full(run_directory, capsys):
    assert main(["check", str(run_directory), "--max-peak", "4052871"]) == 1

    assert "peak at most 4052871 B: measured 4052872 B" in capsys.readouterr().out


def test_json_says_the_same(run_directory, capsys):
    limits = ["--max-peak", "4MiB", "--min-mfu", "40%", "--peak-tflops", "0.01"]
    assert main(["check", str(run_directory), *limits, "--json"]) == 1

    value = json.loads(capsys.readouterr().out)
    assert (value["format"], value["holds"], value["missing"]) == (1, False, [])
    peak, mfu = value["gates"]
    assert (peak["gate"], peak["limit"], peak["measured"]) == ("max_peak_bytes", 4 * 2**20, 4_052_872)
    assert (peak["holds"], peak["kind"], peak["asked"], peak["rank"]) == (True, "measured", "at most", 0)
    assert (mfu["holds"], mfu["asked"], mfu["quantity"]) == (False, "at least", "fraction")
    assert mfu["measured"] == pytest.approx(143_278_080 / 0.102 / 1e10)


def test_a_baseline_of_another_kind_is_compared_and_named(run_directory, tmp_path, capsys):
    baseline = write_run(make_run(num_blocks=4, exit_code=None), tmp_path / "baseline")
    assert main(["check", str(run_directory), "--baseline", str(baseline), "--max-growth", "0"]) == 0

    out = " ".join(capsys.readouterr().out.split())
    assert "the baseline is of another kind: it differs in number of parameters" in out
    assert "the baseline's record is not whole: rank 1: no ending (killed?) after 8 steps" in out
    assert "pass growth of the peak at most 0.0 %: measured -18.7 % (rank 0)" in out


def test_a_killed_run_fails(tmp_path, capsys):
    run = write_run(make_run(exit_code=None, missing_ranks=(1,)), tmp_path / "run")
    assert main(["check", str(run), "--max-peak", "1GiB"]) == 1

    out = capsys.readouterr().out
    assert "pass  peak" in out
    assert "FAIL  record whole: rank 1: no record" in out
    assert "FAIL  record whole: rank 0: no ending (killed?) after 8 steps" in out
    assert out.endswith("the record is not whole\n")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--json"],
        ["--max-peak", "plenty"],
        ["--max-peak", "0"],
        ["--min-mfu", "40"],
        ["--min-mfu", "0"],
        ["--min-mfu", "101%"],
        ["--min-hfu", "nan"],
        ["--max-step-time", "-1"],
        ["--max-step-time", "1h"],
        ["--max-growth", "5%"],
        ["--max-peak", "1G", "--baseline", "{run}"],
        ["--max-growth", "5%", "--baseline", "no/such/run"],
        ["--max-peak", "1G", "--convention", "palm"],
        ["--max-peak", "1G", "--peak-tflops", "989"],
        ["--min-mfu", "0.4", "--peak-tflops", "fast"],
        ["--min-mfu", "0.4", "--hardware", "abacus"],
    ],
)
def test_what_makes_no_sense_is_one_line_and_code_2(arguments, run_directory, capsys):
    assert main(["check", str(run_directory), *(a.format(run=run_directory) for a in arguments)]) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert captured.err.startswith("memadvisor check: ")


def test_a_directory_that_is_no_run_is_code_2(tmp_path, capsys):
    assert main(["check", str(tmp_path), "--max-peak", "1GiB"]) == 2
    assert "is not a run" in capsys.readouterr().err


def test_names_from_the_users_program_are_shown_as_they_are(tmp_path, capsys):
    run = write_run(hostile_run(), tmp_path / "run")
    main(["check", str(run), "--max-peak", "1GiB", "--min-mfu", "0.1"])

    out = capsys.readouterr().out
    assert "<u>processor</u>" in out
    assert "\x1b" not in out

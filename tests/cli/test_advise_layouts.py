"""`memadvisor advise RUN --gpus 2xhardware.json`: exit codes, stable JSON, a plan file, and what is refused."""

import json

import pytest

from memadvisor.cli.main import main
from memadvisor.hardware.hardware import CollectiveCurve, Hardware
from memadvisor.hardware.load import save_hardware
from memadvisor.plan_file import load_plan
from tests.make_run import make_run, write_run


@pytest.fixture
def words(tmp_path):
    run = write_run(make_run(num_ranks=1), tmp_path / "run")
    curves = tuple(
        CollectiveCurve(operation=name, num_ranks=2, sizes_bytes=(2**20,), durations_s=(0.001,))
        for name in ("all_reduce", "all_gather", "reduce_scatter")
    )
    save_hardware(
        Hardware(
            name="synthetic processor",
            kind="measured",
            source="a test",
            memory_bytes=None,
            memory_bandwidth_bytes_per_s=1e10,
            peak_flops_per_s={"float32": 1e11},
            collectives=curves,
        ),
        tmp_path / "here.json",
    )
    return ["advise", str(run), "--gpus", f"2x{tmp_path / 'here.json'}"]


def test_the_fastest_layouts_are_shown_and_its_plan_is_written(words, tmp_path, capsys):
    output = tmp_path / "plan.json"
    assert main([*words, "--memory", "1GiB", "-o", str(output)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "(measured times), 4 samples a step" in text and "fastest of each kind (predicted)" in text
    assert load_plan(output).num_ranks == 2


def test_json_has_the_stable_keys(words, capsys):
    assert main([*words, "--memory", "1GiB", "--batch", "8", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert (value["num_accelerators"], value["batch_samples"], value["times"]) == (2, 8, "measured")
    keys = {"layout", "recomputed", "stage_units", "step_time_s", "peak_memory_bytes", "p_oom", "mfu", "why"}
    assert all(keys <= set(one) for one in value["best"])
    assert value["counts"]["num_layouts"] > len(value["front"]) > 0


def test_nothing_that_fits_is_exit_code_1(words, tmp_path, capsys):
    output = tmp_path / "plan.json"
    assert main([*words, "--memory", "64KiB", "-o", str(output)]) == 1
    assert "needs least" in " ".join(capsys.readouterr().out.split())
    assert not output.exists()


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ([], "--memory 4GiB"),
        (["--memory", "1GiB", "--policy", "sqrt"], "--policy is for plans of ranks"),
        (["--memory", "1GiB", "--optimizer-bits", "8"], "--optimizer-bits is for plans of ranks"),
        (["--memory", "1GiB", "--batch", "0"], "--batch is 0"),
    ],
)
def test_what_makes_no_sense_is_one_line_and_exit_code_2(words, more, named, capsys):
    assert main([*words, *more]) == 2
    error = capsys.readouterr().err
    assert named in error and error.count("\n") == 1


def test_another_device_needs_the_rates_of_the_recorded_one(words, tmp_path, capsys):
    gpus = ["advise", words[1], "--gpus", "8xH100"]
    assert main([*gpus, "--batch", "8"]) == 2
    assert "'synthetic processor', whose rates are not known" in capsys.readouterr().err
    assert main([*gpus, "--batch", "8", "--hardware", words[-1].removeprefix("2x")]) == 0
    assert "times scaled by roofline" in " ".join(capsys.readouterr().out.split())

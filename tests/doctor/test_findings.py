"""What the doctor's facts mean: what is as it should be, what is said with its consequence, what will not work."""

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from memadvisor.doctor.facts import TIME_LIMIT_S, DeviceFacts, HostFacts, TorchFacts, TrialFacts
from memadvisor.doctor.findings import ODD_VARIABLES, TESTED_TORCH, findings, trial_finding
from memadvisor.doctor.host import PACKAGES

GIB = 2**30
HOST = HostFacts(
    python_version="3.12.1",
    package_versions=dict.fromkeys(PACKAGES, "1.0"),
    num_cores=8,
    quota_cores=None,
    free_memory_bytes=64 * GIB,
    free_shared_memory_bytes=8 * GIB,
    directory="/runs",
    can_write=True,
    free_disk_bytes=100 * GIB,
    variables={},
    driver_version=None,
    driver_devices=(),
)
ON_CPU = TorchFacts(
    version="2.13.0+cpu",
    cuda_version=None,
    devices=(),
    device_error=None,
    backends=("gloo",),
    num_threads=8,
)
H100 = DeviceFacts(name="NVIDIA H100 80GB HBM3", memory_bytes=80 * GIB, free_bytes=79 * GIB)
ON_CUDA = replace(
    ON_CPU, version="2.12.1", cuda_version="12.8", devices=(H100, H100), backends=("gloo", "nccl")
)
TRIAL = TrialFacts(
    num_ranks=1,
    exit_code=0,
    last_words="",
    is_same_output=True,
    peak_bytes=10 * 2**20,
    unexplained_bytes=0,
)


def _of(subject, host=HOST, torch=ON_CPU):
    (found,) = [finding for finding in findings(host, torch) if finding.subject == subject]
    return found


@pytest.mark.parametrize("torch", (ON_CPU, ON_CUDA))
def test_a_machine_as_it_should_be_has_no_hint(torch):
    found = findings(HOST, torch)
    assert {finding.state for finding in found} == {"ok"}
    assert all(finding.hint is None for finding in found)


def test_bounds_are_those_of_the_package():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[<>=]", requirement)[0] for requirement in project["dependencies"]]
    (first_major, first), (last_major, last) = TESTED_TORCH
    assert sorted(names) == sorted(("torch", *PACKAGES))
    assert f"torch>={first_major}.{first},<{last_major}.{last + 1}" in project["dependencies"]


@pytest.mark.parametrize("version", ("2.10.1", "2.16.0+cu130", "3.0", "git1234"))
def test_another_torch_is_a_warning(version):
    found = _of("torch", torch=replace(ON_CPU, version=version))
    assert found.state == "warning" and "tested with 2.11 to 2.15" in found.hint


def test_torch_that_cannot_be_imported_is_the_problem_and_its_words_are_kept():
    found = findings(HOST, "ImportError: libcudart.so.12: cannot open shared object file")
    (torch,) = [finding for finding in found if finding.subject == "torch"]
    assert torch.state == "problem" and "libcudart.so.12" in torch.text
    assert "devices" not in {finding.subject for finding in found}


def test_what_is_not_installed_is_named_with_the_command():
    versions = {**HOST.package_versions, "plotly": None, "textual": None}
    found = _of("packages", replace(HOST, package_versions=versions))
    assert (found.state, found.hint) == ("problem", "pip install textual plotly")


def test_a_gpu_that_torch_does_not_use_is_a_problem():
    seen = replace(HOST, driver_version="550.54", driver_devices=("NVIDIA A10",))
    assert "build for CPU" in _of("devices", seen).hint
    broken = replace(ON_CUDA, devices=(), device_error="CUDA driver initialization failed")
    found = _of("devices", seen, broken)
    assert found.state == "problem" and "initialization failed" in found.hint


def test_a_gpu_that_others_have_filled_is_a_warning():
    found = _of("devices", torch=replace(ON_CUDA, devices=(H100, replace(H100, free_bytes=GIB))))
    assert found.state == "warning" and "1.00 GiB of 80.0 GiB free on the fullest" in found.text


def test_a_gpu_of_unknown_peak_needs_calibration_for_mfu():
    found = _of("devices", torch=replace(ON_CUDA, devices=(replace(H100, name="Moonchip 9"),)))
    assert found.state == "warning" and "Moonchip 9" in found.hint and "calibrate" in found.hint


def test_more_threads_than_cores_or_their_quota_is_a_warning():
    assert "OMP_NUM_THREADS=4" in _of("cores", replace(HOST, num_cores=4)).hint
    assert "OMP_NUM_THREADS=1" in _of("cores", replace(HOST, quota_cores=1.5)).hint


@pytest.mark.parametrize(
    "subject, field, value",
    (
        ("memory", "free_memory_bytes", GIB),
        ("shared memory", "free_shared_memory_bytes", 64 * 2**20),
        ("disk", "free_disk_bytes", 10**9),
    ),
)
def test_what_is_scarce_is_a_warning_and_what_is_not_seen_is_none(subject, field, value):
    assert _of(subject, replace(HOST, **{field: value})).state == "warning"
    assert _of(subject, replace(HOST, **{field: None})).state == "ok"


def test_a_directory_that_takes_no_files_is_a_problem():
    assert _of("disk", replace(HOST, can_write=False)).state == "problem"


@pytest.mark.parametrize("name", ODD_VARIABLES)
def test_variables_that_change_what_is_measured_are_named_when_on(name):
    assert "environment" not in {f.subject for f in findings(replace(HOST, variables={name: "0"}), ON_CPU)}
    on = _of("environment", replace(HOST, variables={name: "DETAIL"}))
    assert on.text == f"{name}=DETAIL" and ODD_VARIABLES[name] in on.hint


@pytest.mark.parametrize(
    "change, state, word",
    (
        ({}, "ok", "unexplained 0 B"),
        ({"exit_code": 1, "last_words": "RuntimeError: no address"}, "problem", "no address"),
        ({"exit_code": None}, "problem", "did not end"),
        ({"is_same_output": False}, "problem", "something else"),
        ({"peak_bytes": None, "unexplained_bytes": None}, "problem", "no peak"),
        ({"unexplained_bytes": 2**20}, "warning", "no label"),
    ),
)
def test_a_trial_is_judged_by_how_it_ended_and_what_it_left(change, state, word):
    found = trial_finding(replace(TRIAL, **change))
    assert found.state == state and word in f"{found.text} {found.hint}"


def test_a_trial_that_did_not_end_points_at_busy_cores_and_takes_no_last_line_for_the_reason():
    """On a busy machine it had printed its summary, which stood there as what was wrong."""
    found = trial_finding(replace(TRIAL, exit_code=None, last_words="traffic      2.00 MiB a step"))
    assert f"{TIME_LIMIT_S:.0f} s" in found.text
    assert found.hint.startswith("it takes seconds where cores are free")
    assert found.hint.endswith("; it last said: traffic      2.00 MiB a step")

"""What torch's own algorithm for convolutions needs where a smaller micro-batch brings it in place of oneDNN's."""

import os
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import memadvisor
from memadvisor.analyzers.segments import RecordedStep
from memadvisor.analyzers.slow_convolutions import Convolution
from tests.warm_python import warm_python

ROOT = Path(__file__).parents[2]
WHOLE = 16


@given(
    st.integers(1, 33),
    st.sampled_from([1, 3, 8, 17, 64]),
    st.sampled_from([1, 4, 16]),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.integers(1, 2),
    st.integers(0, 2),
    st.tuples(st.integers(5, 40), st.integers(5, 40)),
)
@settings(max_examples=300, deadline=None)
def test_the_algorithm_is_the_one_that_torch_chooses(
    num_samples, channels, out, kernel, stride, padding, sides
):
    if kernel == (1, 1):
        padding = 0
    images, filters = torch.empty(num_samples, channels, *sides), torch.empty(out, channels, *kernel)
    with torch.no_grad():
        places = torch.nn.functional.conv2d(images[:1], filters, None, stride, padding).shape[2:]
    chosen = torch._C._select_conv_backend(
        images, filters, None, (stride, stride), (padding, padding), (1, 1), False, (0, 0), 1, None
    )

    one = Convolution(tuple(images.shape), tuple(filters.shape), places.numel())

    takes_onednn = one.takes_onednn(num_samples, torch.get_num_threads())
    assert (chosen == torch._C._ConvBackend.Mkldnn) is takes_onednn
    assert takes_onednn or chosen == torch._C._ConvBackend.Slow2d


@cache
def recorded(directory, size, *options):
    out = directory / "-".join(["run", str(size), *options])
    subprocess.run(
        [warm_python(), "-m", "memadvisor", "profile", "--out", out, "convolutions.py", str(size), str(WHOLE // size), *options],
        cwd=ROOT / "tests" / "scripts",
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=120,
        check=True,
    )  # fmt: skip
    return RecordedStep(memadvisor.load(out))


def first_peaks(step):
    """Of the first micro-batch's units, by phase."""
    return {
        (segment.phase, segment.unit): sum(segment.captured.peak.values())
        for segment in step.segments
        if segment.micro_batch == 0 and segment.unit
    }


@pytest.mark.parametrize("size", [8, 2, 1])
def test_a_step_with_fewer_samples_is_as_high_in_each_unit_as_one_that_was_recorded_so(
    tmp_path_factory, size
):
    directory = tmp_path_factory.getbasetemp()
    whole = recorded(directory, WHOLE)

    assert first_peaks(whole.captured(WHOLE // size)) == first_peaks(recorded(directory, size).captured())
    assert whole.slow_convolutions(WHOLE // size)


def test_in_other_dtypes_torch_has_another_rule_and_nothing_is_said(tmp_path_factory):
    """Under autocast to bfloat16 all of these stay with oneDNN, however few their samples are."""
    whole = recorded(tmp_path_factory.getbasetemp(), WHOLE, "bfloat16")

    assert not whole.slow_convolutions(WHOLE)

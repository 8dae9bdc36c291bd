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


def convolutions():
    """(samples, channels, output channels, groups, filters, strides, dilations, sides, is_transposed)"""

    def with_sides(num_sides):
        # Filters of one place beside longer ones: steps along the longer ones are read from the sides.
        filters = st.tuples(*[st.integers(1, 3 if num_sides == 3 else 5)] * num_sides)
        few = st.tuples(*[st.integers(1, 2)] * num_sides)
        sides = st.tuples(*[st.integers(8, 12 if num_sides == 3 else 40)] * num_sides)
        return st.tuples(filters, few, few, sides)

    channels = st.sampled_from([1, 2, 4, 16, 64])
    groups = st.sampled_from([1, 1, 1, 2])
    shapes = st.integers(1, 3).flatmap(with_sides)
    return st.tuples(st.integers(1, 33), channels, channels, groups, shapes, st.booleans())


@given(convolutions())
@settings(max_examples=600, deadline=None)
def test_the_algorithm_is_the_one_that_torch_chooses(one):
    num_samples, channels, out, groups, (kernel, strides, dilations, sides), is_transposed = one
    channels, out = channels * groups, out * groups
    if kernel[-2:] in ((1,), (1, 1)):
        dilations = (1,) * len(sides)  # which shapes would not tell here, nor change the result
    padding = tuple((places - 1) * apart // 2 for places, apart in zip(kernel, dilations, strict=True))
    images = torch.empty(num_samples, channels, *sides)
    ends = (channels, out // groups) if is_transposed else (out, channels // groups)
    filters = torch.empty(*ends, *kernel)
    if len(sides) == 1:  # as torch sees them, and the trace does not
        images, filters = images.unsqueeze(2), filters.unsqueeze(2)
        strides, padding, dilations = (1, *strides), (0, *padding), (1, *dilations)
    zeros = (0,) * len(strides)
    how = (strides, padding, dilations, is_transposed, zeros, groups)
    result = torch.ops.aten.convolution(images.to("meta"), filters.to("meta"), None, *how)
    chosen = torch._C._select_conv_backend(images, filters, None, *how, None)

    one = Convolution(*(tuple(each.shape) for each in (images, filters, result)), is_transposed)

    takes_onednn = one.takes_onednn(num_samples, torch.get_num_threads())
    # oneDNN's transposed ones have no name in Python.
    assert (chosen == torch._C._ConvBackend.Mkldnn or "?" in str(chosen)) is takes_onednn
    assert takes_onednn or "Slow" in str(chosen)


@cache
def recorded(directory, size, *options, script="convolutions.py"):
    out = directory / "-".join([script, str(size), *options])
    subprocess.run(
        [warm_python(), "-m", "memadvisor", "profile", "--out", out, script, str(size), str(WHOLE // size), *options],
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


@pytest.mark.parametrize("size", [8, 2, 1])
def test_so_is_one_with_transposed_deep_long_dilated_and_grouped_convolutions(tmp_path_factory, size):
    """And with channels last; within 0.05 % of the step's peak."""
    directory = tmp_path_factory.getbasetemp()
    script = "kinds_of_convolutions.py"
    whole = recorded(directory, WHOLE, script=script)

    predicted = first_peaks(whole.captured(WHOLE // size))
    measured = first_peaks(recorded(directory, size, script=script).captured())

    assert measured.keys() == predicted.keys()
    off_bytes = max(abs(predicted[unit] - measured[unit]) for unit in measured)
    assert off_bytes <= 5e-4 * max(measured.values())


def test_a_result_tells_what_is_transposed(tmp_path_factory):
    """Of a U-Net's step up, whose shapes are a plain convolution's with as many channels too, FLOPs tell."""
    whole = recorded(tmp_path_factory.getbasetemp(), WHOLE, script="kinds_of_convolutions.py")

    slow = whole.slow_convolutions(WHOLE)

    assert {"flat.3.up", "deep.3.1", "long.2.1", "last.2.0", "flat.1.0", "deep.2.1"} <= slow
    assert not {"flat.0", "flat.1.2", "flat.2.1", "long.2.0"} & slow  # large filters and groups stay


def test_in_other_dtypes_torch_has_another_rule_and_nothing_is_said(tmp_path_factory):
    """Under autocast to bfloat16 all of these stay with oneDNN, however few their samples are."""
    whole = recorded(tmp_path_factory.getbasetemp(), WHOLE, "bfloat16")

    assert not whole.slow_convolutions(WHOLE)

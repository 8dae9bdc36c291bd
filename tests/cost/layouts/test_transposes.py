"""What operands of 8 bits that are not transposed save, in bytes counted by hand."""

from dataclasses import replace

import pytest

from memadvisor.architectures.load import load_architecture
from memadvisor.cost.layouts.estimate import estimate_step
from memadvisor.cost.layouts.transposes import on_card
from memadvisor.hardware.clusters import parse_cluster
from memadvisor.hardware.load import named_hardware
from memadvisor.layout import Layout, TrainingStep
from memadvisor.software import find_preset
from memadvisor.software_dtypes import with_precision

LLAMA = load_architecture("llama3-8b")
MATRICES = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)


def step_of(preset, precision):
    software = with_precision(find_preset(preset).software, precision)
    return TrainingStep(layout=Layout(data=8, zero_stage=1), seq_len=2048, software=software)


@pytest.mark.parametrize(
    ("card", "precision", "transposes"),
    [
        ("H100-SXM-80GB", "fp8", True),
        ("RTX-5090", "fp8", True),
        ("B200", "fp8", False),
        ("GB300", "fp8-cs", False),
        ("B200", "fp8-mx", True),
        ("B200", "nvfp4", True),
        ("B200", "bf16", True),
    ],
)
def test_products_of_the_data_centers_blackwell_take_either_order(card, precision, transposes):
    """Where a tensor has one scale; blocks have theirs along one dimension."""
    step = on_card(step_of("nemo", precision), named_hardware(card))
    assert step.software.transposes == transposes


@pytest.mark.parametrize("preset", ["nemo", "megatron-core"])
def test_a_matrix_is_held_once_and_not_transposed_besides(preset):
    """A byte of each of the layers' matrices, that is gathered in 8 bits or kept beside 16."""
    step, cluster = step_of(preset, "fp8"), parse_cluster("8xB200")
    kept = replace(step, software=replace(step.software, scales="blocks"))
    either, one = (estimate_step(LLAMA, each, cluster).worst for each in (kept, step))
    assert either.allocated_bytes - one.allocated_bytes == pytest.approx(MATRICES)

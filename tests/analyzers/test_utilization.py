import dataclasses

import pytest

from memadvisor.analyzers.step_time import step_time
from memadvisor.analyzers.utilization import compute_dtype, product_dtype, utilization
from memadvisor.hardware.hardware import Hardware
from memadvisor.run.records import Operator, Span
from tests.make_run import make_run, storage

TOKENS, HIDDEN, VOCABULARY, SEQUENCE, BATCH = 128, 64, 512, 32, 4
WEIGHTS = 3 * 12 * HIDDEN**2 + HIDDEN * VOCABULARY  # of the matrix products: blocks and head
HARDWARE = Hardware(
    name="a machine",
    kind="given",
    source="a test",
    memory_bytes=None,
    memory_bandwidth_bytes_per_s=None,
    peak_flops_per_s={"float32": 1e10},
)


def utilization_of(hardware=HARDWARE, **changes):
    rank = make_run(num_ranks=1, **changes).ranks[0]
    return utilization(rank, step_time(rank), hardware)


def test_model_flops_are_six_a_weight_and_token_and_the_needed_pairs_of_attention():
    """Causal attention: 2 products of 2 FLOPs on T(T+1)/2 pairs forward, and twice that backward."""
    result = utilization_of()

    pairs = SEQUENCE * (SEQUENCE + 1) // 2
    attention = 3 * 3 * (2 * 2 * BATCH * HIDDEN * pairs)
    assert result.model_flops_per_step == 6 * WEIGHTS * TOKENS + attention


def test_mfu_is_flops_by_time_by_peak():
    result = utilization_of()

    assert result.step_time_s == pytest.approx(0.1)
    assert result.mfu == pytest.approx(result.model_flops_per_step / 0.1 / 1e10)
    assert result.convention == "exact"


def test_recomputation_raises_executed_flops_only():
    plain, recomputed = utilization_of(), utilization_of(recompute=("blocks.1",))

    block_forward = 2 * 12 * HIDDEN**2 * TOKENS + 4 * BATCH * HIDDEN * SEQUENCE**2
    assert recomputed.model_flops_per_step == plain.model_flops_per_step
    assert recomputed.executed_flops_per_step == plain.executed_flops_per_step + block_forward
    assert recomputed.hfu > recomputed.mfu


def test_palm_counts_six_a_parameter_and_the_full_square_of_attention():
    result = utilization_of()

    num_parameters = WEIGHTS + HIDDEN * VOCABULARY
    per_token = 6 * num_parameters + 12 * 3 * HIDDEN * SEQUENCE
    assert result.palm_flops_per_step == per_token * TOKENS
    assert result.mfu_palm == pytest.approx(per_token * TOKENS / 0.1 / 1e10)


def test_palm_is_unknown_where_no_attention_was_seen():
    rank = make_run(num_ranks=1).ranks[0]
    rank = dataclasses.replace(
        rank, operators=tuple(row for row in rank.operators if "attention" not in row.name)
    )

    assert utilization(rank, step_time(rank), HARDWARE).palm_flops_per_step is None


def test_without_a_peak_for_the_dtype_there_are_flops_but_no_mfu():
    half = dataclasses.replace(HARDWARE, peak_flops_per_s={"bfloat16": 1e12})

    for hardware in (None, half):
        result = utilization_of(hardware)
        assert (result.mfu, result.hfu, result.mfu_palm) == (None, None, None)
        assert result.model_flops_per_step > 0


def test_without_a_traced_step_flops_are_unknown_not_zero():
    result = utilization_of(traced_step=None)

    assert result.model_flops_per_step is None
    assert result.executed_flops_per_step is None
    assert result.mfu is None


def test_where_no_product_was_seen_flops_are_unknown_not_zero():
    """What torch.compile's mode "reduce-overhead" replays runs no operator that is seen: MFU was given as 0.0 %."""
    rank = make_run(num_ranks=1).ranks[0]
    unseen = tuple(dataclasses.replace(row, model_flops=0, executed_flops=0) for row in rank.operators)
    result = utilization(dataclasses.replace(rank, operators=unseen), step_time(rank), HARDWARE)

    assert result.model_flops_per_step is None
    assert result.mfu is result.hfu is None
    assert result.conventions["exact"].reason == "no product was seen"


def test_under_autocast_the_products_decide_the_dtype():
    """Parameters stay float32 while matrix products give bfloat16."""
    rank = make_run(num_ranks=1).ranks[0]
    storages = tuple(
        dataclasses.replace(row, dtype="bfloat16") if row.operator == "aten::mm" else row
        for row in rank.storages
    )

    assert compute_dtype(rank) == "float32"
    assert compute_dtype(dataclasses.replace(rank, storages=storages)) == "bfloat16"


def test_bytes_that_an_operator_keeps_as_workspace_are_no_dtype():
    rank = make_run(num_ranks=1).ranks[0]
    workspace = storage(operator="aten::mkldnn_rnn_layer", dtype="uint8", size_bytes=10**9)

    assert compute_dtype(dataclasses.replace(rank, storages=(*rank.storages, workspace))) == "float32"


def test_an_evaluation_pass_is_no_training():
    """A forward between the steps runs, but neither the model's training nor MFU needs it."""
    rank = make_run(num_ranks=1).ranks[0]
    first_s = rank.operators[0].start_s
    extra = Operator("aten::mm", "head", "head", "forward", first_s - 0.004, first_s - 0.003, 10**9, 10**9)
    evaluation = Span(3, "evaluation", "", 0, first_s - 0.005, first_s - 0.002)
    evaluating = dataclasses.replace(
        rank, operators=(extra, *rank.operators), spans=(evaluation, *rank.spans)
    )

    before, after = (utilization(r, step_time(r), HARDWARE) for r in (rank, evaluating))
    assert after.model_flops_per_step == before.model_flops_per_step
    assert after.executed_flops_per_step == before.executed_flops_per_step


def test_what_an_optimizer_multiplies_runs_but_is_not_needed():
    rank = make_run(num_ranks=1).ranks[0]
    newton_schulz = Operator("aten::mm", "", "", "optimizer", 0.0, 0.1, 1000, 1000)
    muon = dataclasses.replace(rank, operators=(*rank.operators, newton_schulz))

    before, after = (utilization(r, step_time(r), HARDWARE) for r in (rank, muon))
    assert after.model_flops_per_step == before.model_flops_per_step
    assert after.executed_flops_per_step == before.executed_flops_per_step + 1000


@pytest.mark.parametrize(
    ("matmul", "convolution", "peaks", "dtype"),
    [
        ("tf32", "ieee", ("float32", "tf32"), "tf32"),
        ("ieee", "tf32", ("float32", "tf32"), "float32"),  # its products are no convolutions
        ("tf32", "ieee", ("float32",), "float32"),  # a card before Ampere, whatever the script allows
        (None, None, ("float32", "tf32"), "float32"),  # an older run
    ],
)
def test_float32_that_is_multiplied_as_tf32_has_its_peak(matmul, convolution, peaks, dtype):
    rank = make_run(num_ranks=1).ranks[0]
    process = dataclasses.replace(rank.process, float32_matmul=matmul, float32_convolution=convolution)
    hardware = dataclasses.replace(HARDWARE, peak_flops_per_s=dict.fromkeys(peaks, 1e12))

    assert product_dtype(dataclasses.replace(rank, process=process), hardware) == dtype

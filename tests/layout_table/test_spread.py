"""How a row spreads a model over its ranks."""

import pytest

from tests.layout_table.test_read import case_of, read_one


def test_whole_experts_on_tensor_parallel_ranks():
    """Megatron Core's expert_tensor_parallel_size of 1: eight ranks share experts, four of them by tensor parallelism."""
    experts = {"n_experts": "64", "dp": "8", "tp": "4", "n_gpus": "32", "ep": "8"}
    parted, whole = (case_of(**experts, etp=etp).step for etp in ("4", "1"))
    assert (parted.layout.expert, parted.software.whole_experts, parted.expert_ranks) == (8, False, 8)
    assert (whole.layout.expert, whole.software.whole_experts, whole.expert_ranks) == (2, True, 8)
    beyond = case_of(**{**experts, "ep": "32"}).step
    assert (beyond.layout.expert, beyond.software.whole_experts) == (8, True)
    assert "expert_tensor is 2" in (read_one(**experts, etp="2").error or "")
    assert "whole experts" in (read_one(**{**experts, "ep": "2"}, etp="1").error or "")


@pytest.mark.parametrize(
    ("text", "stage"),
    [("optim", 1), ("optim_grads", 2), ("optim_grads_params", 3), ("fully_shard", 3), ("full", 3), ("distributed optimizer", 1)],
)  # fmt: skip
def test_what_is_sharded_in_the_trainers_own_words(text, stage):
    assert case_of(zero_stage=text).step.layout.zero_stage == stage


@pytest.mark.parametrize("text", ["HSDP", "hybrid", "HYBRID_SHARD_ZERO2"])
def test_hybrid_sharding_is_understood_in_the_column_of_stages_too(text):
    """There it was taken for sharding over all replicas."""
    assert case_of(dp="16", zero_stage=text).step.layout.shard == 8


@pytest.mark.parametrize(
    ("text", "schedule", "chunks"),
    [
        ("ScheduleInterleaved1F1B", "interleaved", 2),
        ("Schedule1F1B", "1f1b", 1),
        ("interleave", "interleaved", 2),
        ("DualPipeV", "dualpipe-v", 2),
        ("dualpipe_v", "dualpipe-v", 2),
        ("ZBVZeroBubble", "zb-v", 2),
        ("depth-first", "interleaved", 2),  # arXiv:2211.05953's word for Megatron's
        ("Hanayo (W=2)", "1f1b", 1),
        ("kFkB", "1f1b", 1),
    ],
)
def test_schedules_in_the_words_of_torch_and_of_their_authors(text, schedule, chunks):
    given = {"chunks": "2"} if schedule == "interleaved" else {}
    layout = case_of(pp="2", dp="4", n_gpus="8", grad_accum="8", pp_schedule=text, **given).step.layout
    assert (layout.schedule, layout.chunks) == (schedule, chunks)


@pytest.mark.parametrize(
    ("columns", "replicas", "said"),
    [
        ({"n_gpus": "32", "dp": "16", "tp": "2", "cp": "2"}, 8, "dp 16 is another count"),
        ({"n_gpus": "32", "dp": "4", "tp": "2", "shard": "4"}, 16, "dp 4 is another count"),
        ({"n_gpus": "8", "nodes": "2", "tp": "8", "pp": "2"}, 1, "each of 2 nodes"),
    ],
)
def test_columns_that_count_otherwise_leave_a_prediction_with_a_note(columns, replicas, said):
    row = read_one(**columns)
    assert row.case is not None
    assert row.case.step.layout.data == replicas
    assert said in "; ".join(row.notes)


def test_paddles_first_stage_is_that_of_the_optimizers_state():
    assert case_of(n_gpus="8", zero_stage="os").step.layout.zero_stage == 1

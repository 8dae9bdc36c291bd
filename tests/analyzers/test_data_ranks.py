"""Ranks that split a model between them train on the same samples."""

import dataclasses

import pytest

from memadvisor.analyzers.analysis import analyze
from memadvisor.analyzers.data_ranks import num_data_ranks
from memadvisor.analyzers.model_states import model_states
from memadvisor.analyzers.segments import captured_step
from memadvisor.errors import UsageError
from memadvisor.run.parallel_records import PipelineStage, ShardGroup, TensorParallel
from tests.make_run import make_run


def with_ranks(run, change):
    return dataclasses.replace(run, ranks=tuple(change(place, rank) for place, rank in enumerate(run.ranks)))


def split(run, num_ranks):
    rows = (TensorParallel("", num_ranks),)
    return with_ranks(run, lambda place, rank: dataclasses.replace(rank, tensor_parallel=rows))


def staged(run):
    def stage(place):
        return PipelineStage("", place, len(run.ranks), place, len(run.ranks), "Schedule1F1B", 4, False)

    return with_ranks(run, lambda place, rank: dataclasses.replace(rank, pipeline_stages=(stage(place),)))


def test_samples_of_ranks_that_split_layers_count_once():
    run = make_run(num_ranks=4)
    plain = analyze(run)
    assert analyze(split(run, 2)).samples_per_s == pytest.approx(plain.samples_per_s / 2)
    assert num_data_ranks(split(run, 2).ranks[0]) == 2


def test_samples_of_a_pipeline_are_those_of_its_first_stage():
    run = make_run(num_ranks=4)
    first = analyze(run).ranks[0].step_time
    assert analyze(staged(run)).samples_per_s == pytest.approx(first.samples_per_s)
    assert num_data_ranks(staged(run).ranks[0]) == 1


def test_theory_is_of_the_ranks_own_part():
    rank = split(make_run(num_ranks=4), 4).ranks[0]
    assert model_states(rank, None).theory_text == "this rank's part of layers split over 4 ranks"
    rank = split(make_run(num_ranks=4), 2).ranks[0]
    assert model_states(rank, None).theory_text.endswith("over 2 ranks, ZeRO stage 0 on 2 ranks")


def test_a_record_of_no_ranks_at_all_is_one_of_this_rank_alone():
    run = split(make_run(num_ranks=2), 0)
    assert (
        num_data_ranks(run.ranks[0]) == 2 and analyze(run).samples_per_s == analyze(make_run()).samples_per_s
    )

    group = ShardGroup("", 0, 1, True, None, None, False, True)
    sharded = with_ranks(run, lambda place, rank: dataclasses.replace(rank, shard_groups=(group,)))
    assert model_states(sharded.ranks[0], None).expected_bytes > 0


def test_no_data_parallel_plan_is_made_for_ranks_that_split_layers():
    with pytest.raises(UsageError, match="split the layers"):
        captured_step(split(make_run(num_ranks=2), 2))

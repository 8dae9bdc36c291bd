"""A case's prediction is the cost model's; an open micro-batch is the fastest that fits."""

import dataclasses

import pytest

from memadvisor.architectures.load import load_architecture
from memadvisor.cost.layouts.estimate import estimate_step
from memadvisor.errors import UsageError
from memadvisor.hardware.clusters import parse_cluster
from memadvisor.layout import Layout, TrainingStep
from memadvisor.layout_table.read import LayoutCase, LayoutRow
from memadvisor.planning.predict_layouts import predict_case, predict_row


def case(*, model="llama3-8b", gpus="8xH100", is_open=True, sequences=16, **layout):
    step = TrainingStep(layout=Layout(num_microbatches=sequences, **layout), seq_len=4096)
    return LayoutCase(
        architecture=load_architecture(model),
        step=step,
        cluster=parse_cluster(gpus),
        micro_batch_is_open=is_open,
    )


def test_an_open_micro_batch_is_the_best_of_all_that_fit():
    open_case = case(model="llama3.2-3b", data=8, zero_stage=3)
    chosen = predict_case(open_case)

    def estimate(size):
        layout = dataclasses.replace(
            open_case.step.layout, micro_batch_size=size, num_microbatches=16 // size
        )
        return estimate_step(
            open_case.architecture, dataclasses.replace(open_case.step, layout=layout), open_case.cluster
        )

    fitting = [each for each in map(estimate, (1, 2, 4, 8, 16)) if each.fits]
    assert 1 < len(fitting) < 5 and len({each.step_time_s for each in fitting}) > 1
    assert chosen.estimate.step_time_s == min(each.step_time_s for each in fitting)
    assert chosen.step.global_batch_sequences == open_case.step.global_batch_sequences


def test_the_pipelines_pieces_are_kept_where_they_are_asked_for():
    piped = case(pipeline=8, sequences=16, is_open=False)
    pieces = predict_case(piped, timeline=True).estimate.pipeline.timeline

    assert {piece.device for piece in pieces} == set(range(8))
    assert predict_case(piped).estimate.pipeline.timeline is None


def test_where_nothing_fits_the_smallest_is_shown():
    chosen = predict_case(case(model="gpt3-175b", gpus="H100"))
    assert chosen.step.layout.micro_batch_size == 1 and not chosen.estimate.fits


def test_a_row_has_its_numbers_or_its_error():
    impossible = case(tensor=3)
    with pytest.raises(UsageError):
        predict_case(impossible)

    failed = predict_row(LayoutRow(line=2, case=impossible, notes=("assumed",)))
    assert failed.prediction is None and failed.error and failed.notes == ("assumed",)
    unread = predict_row(LayoutRow(line=3, case=None, error="no"))
    assert (unread.prediction, unread.error) == (None, "no")
    done = predict_row(LayoutRow(line=4, case=case(data=8, zero_stage=3)))
    assert done.error is None and "micro_batch_size" in done.notes[0]

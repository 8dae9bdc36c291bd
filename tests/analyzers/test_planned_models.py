"""Which models are trained, and have gradients when a piece of the step begins."""

from dataclasses import replace

import pytest

from memadvisor.analyzers.pieces import cut_step
from memadvisor.analyzers.planned_models import check_trained, live_gradients
from memadvisor.errors import UsageError
from tests.make_run import make_run


def test_a_forward_that_finds_no_gradient_has_none_though_their_memory_is_there():
    """As under DistributedDataParallel(gradient_as_bucket_view=True), whose buckets outlast `zero_grad()`."""
    rank = make_run(num_micro_batches=2).ranks[0]
    spans = [
        replace(span, has_gradients=span.micro_batch > 0) if span.kind in ("forward", "backward") else span
        for span in rank.spans
    ]
    pieces = cut_step(spans, rank.traced_step)
    units = tuple(replace(unit, model="") for unit in rank.units)
    found = live_gradients(replace(rank, spans=tuple(spans), units=units), pieces)
    first = next(place for place, piece in enumerate(pieces) if piece.phase == "backward")

    for place, (piece, alive) in enumerate(zip(pieces, found, strict=True)):
        has_none = piece.micro_batch == 0 and (piece.phase == "forward" or place == first)
        assert alive == (frozenset() if has_none else None)


def test_a_model_that_is_called_with_others_parameters_is_not_trained():
    """As by torch.func.functional_call: a plan was made, and `run` refused it."""
    rank = make_run().ranks[0]
    spans = tuple(span for span in rank.spans if span.kind != "unit_backward")
    states = tuple(replace(state, parameter="(0)") for state in rank.optimizer_states)

    check_trained(rank)
    check_trained(replace(rank, spans=spans))
    with pytest.raises(UsageError, match="functional_call"):
        check_trained(replace(rank, spans=spans, optimizer_states=states))


def test_a_step_without_a_backward_has_nothing_to_free():
    """Of gradients by torch.func.jvp: the model was said to be called with parameters from elsewhere."""
    rank = make_run().ranks[0]
    spans = tuple(span for span in rank.spans if span.kind not in ("backward", "unit_backward"))

    with pytest.raises(UsageError, match="no backward pass"):
        check_trained(replace(rank, spans=spans, optimizer_states=()))

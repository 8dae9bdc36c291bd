"""Whose backward runs where a unit returns what the last unit inside of it has returned."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import memadvisor
from memadvisor.analyzers.nested_backwards import with_nested_backwards
from memadvisor.analyzers.segments import captured_step
from memadvisor.run.records import Operator, Span
from tests.make_run import make_run

RANK = make_run(num_ranks=1, num_blocks=1).ranks[0]


def changed(*spans, operators=(9.5,)):
    """Backwards of units one after another from 0 s on, in the traced step, and their order afterwards."""
    index = RANK.traced_step.index
    rows = [
        Span(index, "unit_backward", unit, micro_batch, start_s, end_s)
        for (unit, micro_batch, start_s, end_s) in spans
    ]
    ran = [Operator("aten::mm", "", "", "backward", at_s, at_s + 0.1, 0, 0) for at_s in operators]
    found = with_nested_backwards(replace(RANK, spans=tuple(rows), operators=tuple(ran)))
    return [(span.unit, span.micro_batch, span.start_s, span.end_s) for span in found.spans]


def test_what_runs_from_there_on_is_the_inner_ones():
    inner, outer, following = ("a.b", 0, 0.0, 1.0), ("a", 0, 1.0, 8.0), ("c", 0, 8.0, 9.0)
    swapped = [("a", 0, 0.0, 1.0), ("a.b", 0, 1.0, 8.0), following]
    assert changed(inner, outer, following) == swapped
    around = ("", 0, 8.0, 9.0)
    assert changed(inner, outer, around) == [("", 0, 0.0, 1.0), ("a", 0, 1.0, 8.0), ("a.b", 0, 8.0, 9.0)]


@pytest.mark.parametrize(
    ("spans", "operators"),
    [
        (
            (("a.b", 0, 0.0, 1.0), ("a", 0, 1.0, 8.0)),
            (0.5, 3.0),
        ),  # something ran: the outer one has work of its own
        ((("a.b", 0, 0.0, 1.0), ("a.c", 0, 1.0, 8.0)), (3.0,)),
        ((("a", 0, 0.0, 1.0), ("a.b", 0, 1.0, 8.0)), (3.0,)),
        ((("a.b", 0, 0.0, 1.0), ("a", 1, 1.0, 8.0)), (3.0,)),
        ((("a.b", 0, 0.0, 1.0), ("a", 0, 1.0, 8.0)), ()),  # nobody knows what ran
    ],
)
def test_others_are_as_they_were(spans, operators):
    assert changed(*spans, operators=operators) == list(spans)


def test_the_gradients_of_a_models_last_layer_come_in_its_own_backward(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(4):
            model(torch.randn(8, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    gradients = {
        segment.unit: segment.own_gradients.peak.get("gradient", 0)
        for segment in captured_step(prof.run).segments
        if segment.phase == "backward" and segment.unit is not None
    }

    assert gradients.pop("", 0) == 0
    assert gradients == dict.fromkeys("012", (32 + 1) * 32 * 4)

"""Whether anything of size is touched between the last backward and the optimizer step."""

from dataclasses import replace

import pytest

from memadvisor.analyzers.gradient_use import leaves_gradients_alone
from memadvisor.run.records import Operator
from tests.make_run import make_run

(PLAYED,) = make_run(num_ranks=1).ranks
PAUSE_S = 1e-4  # that the script takes between its backward and its step
RANK = replace(
    PLAYED,
    spans=tuple(replace(s, start_s=s.start_s + PAUSE_S * (s.kind == "optimizer")) for s in PLAYED.spans),
    optimizer_states=tuple(replace(s, optimizer="torch.optim.adamw.AdamW") for s in PLAYED.optimizer_states),
    storages=tuple(replace(s, last_use_s=None) if s.phase == "baseline" else s for s in PLAYED.storages),
)
SPANS = [span for span in RANK.spans if span.step == RANK.traced_step.index]
BACKWARD_S = max(span.end_s for span in SPANS if span.kind == "backward")
STEP_S = min(span.start_s for span in SPANS if span.kind == "optimizer")


def with_operator(at_s, read_bytes, written_bytes=0):
    row = Operator(
        name="aten::norm", module="", unit="", phase="outside", start_s=at_s, end_s=at_s, executed_flops=0,
        model_flops=0, read_bytes=read_bytes, written_bytes=written_bytes,
    )  # fmt: skip
    return replace(RANK, operators=(row,))


@pytest.mark.parametrize(
    ("at_s", "read_bytes", "alone"),
    [
        (BACKWARD_S, 4, True),
        (BACKWARD_S, 4096, False),
        (BACKWARD_S, None, False),
        (STEP_S, 4096, True),
        (BACKWARD_S - 1e-6, 4096, True),
    ],
)
def test_looking_at_more_than_single_numbers_stands_against_it(at_s, read_bytes, alone):
    assert leaves_gradients_alone(with_operator(at_s, read_bytes)) == alone


def test_what_is_not_known_stands_against_it():
    rank = with_operator(BACKWARD_S, 4)
    spans = tuple(span for span in rank.spans if span.kind != "optimizer")
    old = next(s for s in rank.storages if s.category == "activation")
    used = replace(old, category="gradient", phase="baseline", last_use_s=BACKWARD_S)
    whole = tuple(replace(state, optimizer="mine.Lamb") for state in rank.optimizer_states)

    assert leaves_gradients_alone(rank)
    for changed in (
        {"operators": ()},
        {"spans": spans},
        {"storages": (*rank.storages, used)},
        {"optimizer_states": whole},
    ):
        assert not leaves_gradients_alone(replace(rank, **changed)), changed

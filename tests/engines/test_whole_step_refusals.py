"""What no plan can update as wholes is refused before anything changes, and what ranks send each other runs nothing."""

from __future__ import annotations

import pytest
import torch

from memadvisor.engines.updates.whole_step import packed_state, unpacked_state
from memadvisor.errors import PlanError
from tests.engines import optimizers
from tests.engines.ranks import run_ranks
from tests.engines.trainings import Training, applied, build, make_plan


def refusals(rank: int) -> dict[str, str]:
    told = {}
    kinds = [
        optimizers.GlobalNorm,
        optimizers.Prodigal,
        optimizers.Communicating,
        optimizers.Raising,
        optimizers.Sharpness,
    ]
    for kind in kinds:
        with applied(make_plan(2, 2)):
            ddp = build(Training(), rank)
            before = {name: value.clone() for name, value in ddp.state_dict().items()}
            optimizer = kind([p for p in ddp.parameters() if p.dim()], lr=1e-2)
            ddp(torch.zeros(2, 3, dtype=torch.long)).square().mean().backward()
            try:
                optimizer.step(lambda: 0.0)
            except PlanError as error:
                told[kind.__name__] = error.one_line()
            assert all(torch.equal(before[name], value) for name, value in ddp.state_dict().items())
    return told


@pytest.mark.timeout(60)
def test_coupled_optimizers_are_refused_before_their_first_update():
    expected = {
        "GlobalNorm": "by more than that parameter's own gradient",
        "Prodigal": "by more than",
        "Communicating": "communicates with other ranks",
        "Raising": "could not be tried",
        "Sharpness": "does not call its closure once",
    }
    for told in run_ranks(refusals, 2, timeout_s=50):
        assert told.keys() == expected.keys()
        for name, text in expected.items():
            assert text in told[name] and name in told[name] and "\n" not in told[name], told[name]


class Remembered:
    """What a user's optimizer might keep for a parameter."""


def test_what_another_rank_sends_runs_nothing():
    plain = {"step": 3, "sums": [torch.ones(2), {"rate": 0.5}], "none": None}
    back = unpacked_state(packed_state(plain), torch.device("cpu"))

    assert (
        torch.equal(back["sums"][0], torch.ones(2)) and back["sums"][1] == {"rate": 0.5} and back["step"] == 3
    )
    with pytest.raises(PlanError, match="Remembered"):
        unpacked_state(packed_state({"memory": Remembered()}), torch.device("cpu"))

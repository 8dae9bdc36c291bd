import dataclasses

import pytest

from memadvisor.analyzers.environment import differing_settings
from memadvisor.plan import Plan, UnitPlan
from memadvisor.run.run import UNKNOWN
from tests.analyzers.test_comparison import PLAN
from tests.make_run import make_run


def changed(run, manifest=None, **process):
    ranks = tuple(
        dataclasses.replace(rank, process=dataclasses.replace(rank.process, **process)) for rank in run.ranks
    )
    return dataclasses.replace(
        run, ranks=ranks, manifest=dataclasses.replace(run.manifest, **(manifest or {}))
    )


def found(before, after):
    return {setting.name: (setting.before, setting.after) for setting in differing_settings(before, after)}


def test_what_differs_is_named_and_nothing_else():
    run = make_run()

    assert found(run, run) == {}
    assert found(run, changed(run, torch_version="2.12.1", num_threads=8)) == {
        "torch_version": ("2.13.0", "2.12.1"),
        "num_threads": (2, 8),
    }


@pytest.mark.parametrize(
    ("after", "names"),
    [
        (make_run(num_ranks=1), {"world_size"}),
        (make_run(device="cuda:0", device_name="NVIDIA H200"), {"device", "device_name"}),
        (make_run(micro_batch_size=8), {"samples_per_step", "tokens_per_step"}),
        (make_run(num_blocks=4), {"num_parameters"}),
        (changed(make_run(), {"script": "train_bert.py"}), {"script"}),
        (changed(make_run(), {"script": "elsewhere/train_gpt.py"}), set()),
        (changed(make_run(), {"arguments": ("--blocks", "3", "--lr", "1")}), set()),
        (make_run(plan=PLAN), set()),
    ],
)
def test_runs_of_other_work_are_of_another_kind(after, names):
    settings = differing_settings(make_run(), after)

    assert {setting.name for setting in settings if setting.changes_kind} == names
    assert settings


def test_what_one_run_did_not_record_is_no_difference():
    lost = changed(make_run(), {"script": UNKNOWN, "arguments": (), "memadvisor_version": UNKNOWN})

    assert found(make_run(), lost) == {}
    assert found(make_run(), make_run(num_steps=0)) == {}


def test_plans_are_told_apart_also_where_their_words_are_the_same():
    """Each recomputes one of three blocks."""
    one, other = (
        Plan(num_ranks=2, zero_stage=0, units=(UnitPlan(name=name, zero_stage=0, recompute=True),))
        for name in ("blocks.0", "blocks.1")
    )

    before, after = found(make_run(plan=one), make_run(plan=other))["plan"]
    assert "1 of 5 units recomputed" in before
    assert after == f"{before} (another plan)"
    assert found(make_run(plan=one), make_run(plan=one)) == {}
    assert found(make_run(), make_run(plan=one))["plan"] == (None, before)

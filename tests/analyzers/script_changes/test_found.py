"""What a change of the script would save is foretold from the wasteful script; here it is made, and measured."""

import dataclasses

import pytest
import torch.distributed as dist

from memadvisor.analyzers.script_changes.change import ScriptChange
from memadvisor.analyzers.script_changes.found import changes_of
from memadvisor.plan import Plan
from memadvisor.run.run import Run
from tests.analyzers.script_changes.trainings import train
from tests.make_run import make_run

TOLERANCE = 0.01  # of the changed script's peak
SMALL = {"batch": 1, "layers": 2}  # the states fill the memory
CASES = {
    "attention_scores": ((), ("sdpa",), {}),
    "held_results": ((), ("del",), {"layers": 1}),
    "stale_gradients": (("zeros",), (), SMALL),
    "stale_gradients late": (("late",), (), SMALL),
    "fused_updates": ((), ("fused",), SMALL),
}
IN_GROUP = {
    "bucket_views": (("ddp",), ("ddp", "view"), {"micro_batches": 2, **SMALL}),
    "repeated_reductions": (("ddp",), ("ddp", "no_sync"), {"micro_batches": 3}),
}


def found(run: Run) -> dict[str, ScriptChange]:
    rank = run.ranks[0]
    if dist.is_initialized():  # of a group of one, which the records do not count as ranks
        rank = dataclasses.replace(rank, process=dataclasses.replace(rank.process, has_ddp=True))
    return {change.kind: change for change in changes_of(run, rank)}


def peak_bytes(run: Run) -> int:
    assert run.traced_step is not None
    assert run.traced_step.peak_allocated_bytes is not None
    return run.traced_step.peak_allocated_bytes


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("case", CASES)
def test_peak_after_the_change_is_the_predicted_one(case, tmp_path):
    kind = case.split()[0]
    wasteful, changed, settings = CASES[case]
    before = train(tmp_path / "before", *wasteful, **settings)
    after = train(tmp_path / "after", *changed, **settings)

    predicted_bytes = peak_bytes(before) - found(before)[kind].peak_saved_bytes
    assert peak_bytes(after) == pytest.approx(predicted_bytes, rel=TOLERANCE)
    assert kind not in found(after)


def test_gradients_as_views_of_buckets_lower_the_peak_as_predicted(group, tmp_path):
    wasteful, changed, settings = IN_GROUP["bucket_views"]
    before = train(tmp_path / "before", *wasteful, **settings)
    after = train(tmp_path / "after", *changed, **settings)

    predicted_bytes = peak_bytes(before) - found(before)["bucket_views"].peak_saved_bytes
    assert peak_bytes(after) == pytest.approx(predicted_bytes, rel=TOLERANCE)
    assert "bucket_views" not in found(after)


def test_reductions_in_every_micro_batch_are_told_from_one(group, tmp_path):
    wasteful, changed, settings = IN_GROUP["repeated_reductions"]
    before = train(tmp_path / "before", *wasteful, **settings)
    after = train(tmp_path / "after", *changed, **settings)

    assert "in each of the step's 3 backwards" in found(before)["repeated_reductions"].seen
    assert "repeated_reductions" not in found(after)


def test_outputs_kept_step_after_step_grow(tmp_path):
    change = found(train(tmp_path / "keeps", "keeps"))["growth"]

    assert "384 KiB" in change.seen  # 4 x 96 x 256 of 4 bytes
    assert "growth" not in found(train(tmp_path / "plain"))


def test_dropped_attention_weights_stay_on_a_cpu(tmp_path):
    """There torch's fused attention knows no dropout."""
    assert "attention_scores" not in found(train(tmp_path / "run", "dropout"))


def test_nothing_is_said_of_a_run_with_a_plan():
    run = make_run(plan=Plan(num_ranks=2, zero_stage=1, units=()))

    assert changes_of(run, run.ranks[0]) == ()


def test_the_change_that_saves_most_is_first_and_what_gives_up_digits_is_last(tmp_path):
    changes = changes_of(run := train(tmp_path / "run", "zeros"), run.ranks[0])
    exact, lossy = (
        [
            change.peak_saved_bytes or 0
            for change in changes
            if not change.step_saved_s and change.is_lossy == is_lossy
        ]
        for is_lossy in (False, True)
    )
    assert exact == sorted(exact, reverse=True)
    assert len(exact) > 1 and len(lossy) == 1
    assert changes[-1].kind == "autocast"

"""What counts as held beyond its use, on steps made by hand."""

import dataclasses

from memadvisor.analyzers.checkpoint_frames import traced_calls
from memadvisor.analyzers.script_changes.change import ScriptChange
from memadvisor.analyzers.script_changes.found import script_changes
from memadvisor.analyzers.timeline import memory_timeline
from memadvisor.run.records import CallTensor, Operator, Storage
from memadvisor.run.run import RankRun
from tests.make_run import make_run, step, storage


def operator(start_s: float) -> Operator:
    return Operator("aten::mm", "", "", "forward", start_s, start_s + 0.01, 0, 0)


def rank_of(*storages: Storage) -> RankRun:
    """A step of one second with operators at every tenth, and its peak, 1000 bytes more, at the middle."""
    peak = storage(storage_id=99, birth_s=0.5, death_s=0.55, size_bytes=1000, last_use_s=0.54)
    return dataclasses.replace(
        make_run(num_ranks=1).ranks[0],
        steps=(step(index=0, start_s=0.0, end_s=1.0, traced=True),),
        storages=(*storages, peak),
        operators=tuple(operator(tenth / 10) for tenth in range(10)),
        saved=(),
        residuals=(),
        spans=(),
        module_calls=(),
        call_tensors=(),
        collectives=(),
        optimizer_states=(),
    )


def held_of(rank: RankRun) -> list[ScriptChange]:
    found = script_changes(traced_calls(rank), memory_timeline(rank), has_plan=False)
    return [change for change in found if change.kind == "held_results"]


def saved_bytes(*storages: Storage) -> int:
    return sum(change.peak_saved_bytes or 0 for change in held_of(rank_of(*storages)))


def test_a_result_that_outlives_its_last_use_is_held():
    assert saved_bytes(storage(birth_s=0.1, death_s=0.9, last_use_s=0.2, size_bytes=400)) == 400


def test_a_result_that_is_used_after_the_peak_is_not():
    assert saved_bytes(storage(birth_s=0.1, death_s=0.9, last_use_s=0.8, size_bytes=400)) == 0


def test_a_data_set_that_this_step_does_not_read_is_not():
    """It is there for steps to come."""
    assert saved_bytes(storage(phase="baseline", category="other", size_bytes=400)) == 0


def test_what_was_there_is_held_where_it_goes_without_having_been_read():
    old = storage(phase="baseline", category="other", size_bytes=400, death_s=0.7)

    assert saved_bytes(old) == 400
    assert saved_bytes(dataclasses.replace(old, last_use_s=0.1)) == 0  # a recurrent state, say


def test_what_lives_on_is_held_only_where_that_of_the_step_before_went_unread():
    new = storage(birth_s=0.1, last_use_s=0.2, size_bytes=400)
    old = storage(storage_id=1, phase="baseline", category="other", size_bytes=400, death_s=0.1)

    assert saved_bytes(new) == 0
    assert saved_bytes(new, old) == 400
    assert saved_bytes(new, dataclasses.replace(old, last_use_s=0.05)) == 0


def test_parameters_and_their_like_are_never_held():
    for category in ("parameter", "gradient", "optimizer_state", "communication", "input"):
        assert saved_bytes(storage(category=category, birth_s=0.1, death_s=0.9, size_bytes=400)) == 0


def test_what_comes_in_an_optimizers_step_is_not():
    """It may be the optimizer's own: L-BFGS has directions in its variables."""
    held = storage(birth_s=0.1, death_s=0.9, last_use_s=0.2, size_bytes=400)

    assert saved_bytes(dataclasses.replace(held, phase="optimizer")) == 0


def test_nothing_is_said_of_compiled_code():
    """What it reads is not seen."""
    held = storage(birth_s=0.1, death_s=0.9, last_use_s=0.2, size_bytes=400)
    compiled = storage(storage_id=1, birth_s=0.3, death_s=0.4, operator="Torch-Compiled Region: 0/1")

    assert saved_bytes(held, compiled) == 0


def test_what_a_second_run_of_a_checkpoint_makes_no_name_of_the_script_holds():
    """`del` of a dropout's result inside a layer of transformers was asked for."""
    assert (
        saved_bytes(storage(phase="recompute", birth_s=0.4, death_s=0.9, last_use_s=0.45, size_bytes=400))
        == 0
    )


def test_keys_and_values_in_a_cache_are_left_out_by_having_none():
    """No `del` reaches those that a model's forward keeps as it runs."""
    keys, other = (
        storage(storage_id=number, birth_s=0.1, death_s=0.9, last_use_s=0.2, size_bytes=400)
        for number in (1, 2)
    )
    cached = (CallTensor(call_id=0, storage_id=1, role="cache", is_changed=False),)
    alone, both, neither = (
        dataclasses.replace(rank_of(*storages), call_tensors=cached)
        for storages in ((keys,), (keys, other), (other,))
    )
    advice = [held_of(rank)[0].change for rank in (alone, both, neither)]

    assert ["use_cache" in text for text in advice] == [True, True, False]
    assert ["`del`" in text for text in advice] == [False, True, True]

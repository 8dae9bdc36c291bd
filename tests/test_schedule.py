"""What ZeRO stages and recomputation mean, as actions at boundaries."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memadvisor.errors import PlanError
from memadvisor.plan import Plan, UnitPlan
from memadvisor.policies import blocks_of, resolve_units
from memadvisor.run.records import Unit
from memadvisor.schedule import ActionKind, Lane, Point, Ranks, updated_at_step
from memadvisor.write_schedule import write_schedule

K = ActionKind


def unit(name, *, type_name="Block", is_block=True, trainable=True):
    return Unit(name, type_name, is_block, 10, 40, 40 if trainable else 0)


def gpt_units(num_blocks=4):
    blocks = [unit(f"blocks.{n}") for n in range(num_blocks)]
    return [
        unit("tok_emb", type_name="Embedding", is_block=False),
        *blocks,
        unit("head", type_name="Linear", is_block=False),
    ]


def by_hand(stage=0, policy="none", num_ranks=2, units=(), overlap=False, depth=0, early=False):
    return Plan(
        num_ranks=num_ranks,
        zero_stage=stage,
        policy=policy,
        units=units,
        overlap=overlap,
        gather_depth=depth,
        update_in_backward=early,
    )


def kinds(schedule, point, name=""):
    return [action.kind for action in schedule.at(point, name)]


def test_stage_0_reduces_whole_gradients_and_updates_everything():
    schedule = write_schedule(by_hand(0), gpt_units())
    [reduce] = schedule.at(Point.AFTER_BACKWARD, "blocks.1")

    assert (reduce.kind, reduce.shard, reduce.lane) == (K.REDUCE, False, Lane.COLLECTIVE)
    assert kinds(schedule, Point.BEFORE_OPTIMIZER) == [K.UPDATE] * 6
    assert schedule.at(Point.AFTER_OPTIMIZER) == ()
    assert schedule.at(Point.BEFORE_FORWARD, "blocks.1") == ()


def test_stage_1_keeps_the_whole_gradient_and_gathers_what_was_updated():
    schedule = write_schedule(by_hand(1), gpt_units())

    assert [a.shard for a in schedule.at(Point.AFTER_BACKWARD, "head")] == [False]
    assert kinds(schedule, Point.AFTER_OPTIMIZER) == [K.GATHER] * 6


@pytest.mark.parametrize("stage", [1, 2])
def test_what_is_updated_by_itself_begins_to_travel_under_the_updates_of_others(stage):
    by_unit = dataclasses.replace(by_hand(stage, overlap=True), update_by_unit=True)
    schedule = write_schedule(by_unit, gpt_units())
    names = [unit.name for unit in gpt_units()]

    assert [(a.kind, a.unit) for a in schedule.at(Point.BEFORE_OPTIMIZER)] == [
        (kind, name) for name in names for kind in (K.UPDATE, K.GATHER)
    ]
    assert schedule.at(Point.AFTER_OPTIMIZER) == ()
    assert [(a.unit, a.overlaps) for a in schedule.gathers_of_updated] == [(name, True) for name in names]
    assert kinds(schedule, Point.BEFORE_FORWARD, "blocks.1") == [K.GATHER]  # which waits for it

    waits = write_schedule(dataclasses.replace(by_unit, overlap=False), gpt_units())
    assert kinds(waits, Point.BEFORE_OPTIMIZER) == [K.UPDATE] * 6
    assert kinds(waits, Point.AFTER_OPTIMIZER) == [K.GATHER] * 6


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_what_a_forward_of_stage_3_begins_with_travels_under_the_updates_of_others(depth):
    """As many blocks as are gathered ahead in it, and what comes before them: where none is, nothing is there between steps but
    shards."""
    by_unit = dataclasses.replace(by_hand(3, overlap=True), update_by_unit=True, gather_depth=depth)
    names = [unit.name for unit in gpt_units()]

    def gathered(plan, units=None):
        found = write_schedule(plan, units or gpt_units()).at(Point.BEFORE_OPTIMIZER)
        assert {action.unit for action in found if action.kind is K.UPDATE} == set(names)
        behind = [
            (one.unit, other.unit) for one, other in itertools.pairwise(found) if other.kind is K.GATHER
        ]
        assert all(updated == unit for updated, unit in behind)
        return [unit for _, unit in behind]

    first = names[: depth + 1] if depth else []  # the embedding too
    assert gathered(by_unit) == first
    assert gathered(dataclasses.replace(by_unit, overlap=False)) == []
    assert gathered(dataclasses.replace(by_unit, update_by_unit=False)) == []
    away = tuple(UnitPlan(name=name, zero_stage=3, recompute=False) for name in names)
    away = (dataclasses.replace(away[0], optimizer_tier="disk"), *away[1:])
    assert gathered(dataclasses.replace(by_unit, units=away)) == first[1:]
    [tokens, *rest] = gpt_units()
    partly_frozen = dataclasses.replace(tokens, trainable_bytes=tokens.trainable_bytes // 2)
    assert gathered(by_unit, [partly_frozen, *rest]) == first[1:]
    layers = [dataclasses.replace(unit, is_block=False) for unit in gpt_units()]
    assert gathered(by_unit, layers) == names[:depth]


def test_stage_3_keeps_tied_weights_from_the_forward_to_the_end_of_the_backward():
    [tokens, *rest] = gpt_units()
    schedule = write_schedule(by_hand(3), [dataclasses.replace(tokens, is_shared=True), *rest])

    assert kinds(schedule, Point.BEFORE_FORWARD, "tok_emb") == [K.GATHER]
    assert kinds(schedule, Point.AFTER_FORWARD, "tok_emb") == []
    assert K.RELEASE in kinds(schedule, Point.AFTER_BACKWARD, "tok_emb")
    assert kinds(schedule, Point.AFTER_FORWARD, "head") == [K.RELEASE]


def test_stage_2_leaves_each_rank_its_shard_of_the_gradient():
    schedule = write_schedule(by_hand(2), gpt_units())

    assert [a.shard for a in schedule.at(Point.AFTER_BACKWARD, "head")] == [True]
    assert kinds(schedule, Point.AFTER_OPTIMIZER) == [K.GATHER] * 6
    assert schedule.at(Point.BEFORE_FORWARD, "head") == ()


@pytest.mark.parametrize("overlap", [False, True])
def test_units_of_stages_2_and_3_are_updated_behind_their_reduction_unless_others_use_their_parameters(
    overlap,
):
    stages = {"tok_emb": 3, "blocks.0": 3, "blocks.1": 2, "blocks.2": 1, "blocks.3": 0, "head": 3}
    units = tuple(UnitPlan(name=name, zero_stage=stage, recompute=False) for name, stage in stages.items())
    [tokens, *rest] = gpt_units()
    rows = [dataclasses.replace(tokens, is_shared=True), *rest[:-1], unit("head", trainable=False)]
    plan = by_hand(3, units=units, overlap=overlap, early=True)
    schedule = write_schedule(plan, rows)

    assert schedule.updated_in_backward == {"blocks.0", "blocks.1"}
    for name in ("blocks.0", "blocks.1"):
        *_, reduce, update = schedule.at(Point.AFTER_BACKWARD, name)
        assert (reduce.kind, update.kind) == (K.REDUCE, K.UPDATE)
        assert reduce.overlaps == update.overlaps == overlap
    late = [action.unit for action in schedule.at(Point.BEFORE_OPTIMIZER)]
    assert late == ["tok_emb", "blocks.2", "blocks.3"]
    assert [a.unit for a in schedule.at(Point.AFTER_OPTIMIZER)] == ["blocks.1", "blocks.2"]
    # Seen through for a step before that, everything is updated where it is without it.
    without = write_schedule(dataclasses.replace(plan, update_in_backward=False), rows)
    seen = updated_at_step(schedule)
    assert seen.updated_in_backward == set()
    for boundary in without.actions.keys() | seen.actions.keys():
        assert set(seen.actions[boundary]) == set(without.actions[boundary])


def test_stage_3_has_parameters_only_around_their_use():
    schedule = write_schedule(by_hand(3), gpt_units())

    for before, after in (
        (Point.BEFORE_FORWARD, Point.AFTER_FORWARD),
        (Point.BEFORE_BACKWARD, Point.AFTER_BACKWARD),
    ):
        assert kinds(schedule, before, "blocks.2") == [K.GATHER]
        assert kinds(schedule, after, "blocks.2")[0] == K.RELEASE
    assert [a.shard for a in schedule.at(Point.AFTER_BACKWARD, "blocks.2")][1:] == [True]
    assert schedule.at(Point.AFTER_OPTIMIZER) == ()


def test_overlap_gathers_the_unit_that_runs_next_in_the_plans_order():
    """The plan's units are in order of execution; the live model's are in order of definition."""
    order = ["b", "a", "c"]
    plans = tuple(UnitPlan(name=name, zero_stage=3, recompute=False) for name in order)
    units = [unit("a"), unit("b"), unit("c")]
    schedule = write_schedule(by_hand(3, units=plans, overlap=True, depth=1), units)

    def ahead(point, name):
        return [action.unit for action in schedule.at(point, name) if action.overlaps]

    assert [ahead(Point.BEFORE_FORWARD, name) for name in order] == [["a"], ["c"], []]
    assert [ahead(Point.BEFORE_BACKWARD, name) for name in order] == [[], ["b"], ["a"]]
    assert [ahead(Point.AFTER_BACKWARD, name) for name in order] == [["b"], ["a"], ["c"]]

    schedule = write_schedule(by_hand(3, units=plans, depth=2), units)
    assert [ahead(Point.BEFORE_FORWARD, name) for name in order] == [["a", "c"], ["c"], []]
    assert [ahead(Point.BEFORE_BACKWARD, name) for name in order] == [[], ["b"], ["a", "b"]]
    assert [ahead(Point.AFTER_BACKWARD, name) for name in order] == [[], [], []]


def test_what_is_not_resharded_is_released_after_its_backward_alone():
    kept = UnitPlan(name="head", zero_stage=3, recompute=False, reshard=False)
    schedule = write_schedule(by_hand(3, units=(kept,)), gpt_units())

    assert kinds(schedule, Point.AFTER_FORWARD, "head") == []
    assert kinds(schedule, Point.AFTER_BACKWARD, "head") == [K.RELEASE, K.REDUCE]
    assert kinds(schedule, Point.BEFORE_BACKWARD, "head") == [K.GATHER]  # of nothing, where it is still there


@pytest.mark.parametrize("stage", range(4))
def test_a_single_rank_communicates_nothing_at_any_stage(stage):
    schedule = write_schedule(by_hand(stage, num_ranks=1), gpt_units())
    actions = [action for actions in schedule.actions.values() for action in actions]

    assert {action.kind for action in actions} == {K.UPDATE}


def test_a_frozen_unit_is_neither_reduced_nor_updated():
    units = [unit("a"), unit("b", trainable=False)]
    schedule = write_schedule(by_hand(3), units)

    assert kinds(schedule, Point.AFTER_BACKWARD, "b") == [K.RELEASE]
    assert [action.unit for action in schedule.at(Point.BEFORE_OPTIMIZER)] == ["a"]


def test_every_layer_recomputes_the_blocks_alone():
    chosen = resolve_units(by_hand(policy="every-layer"), gpt_units())

    assert [u.name for u in chosen if u.recompute] == [f"blocks.{n}" for n in range(4)]


@pytest.mark.parametrize(("num_blocks", "kept"), [(2, 1), (4, 2), (9, 3), (12, 4), (16, 4), (25, 5)])
def test_sqrt_keeps_about_the_square_root_of_the_blocks(num_blocks, kept):
    """Every round(sqrt(n))-th block stays as it is (arXiv:1604.06174)."""
    chosen = resolve_units(by_hand(policy="sqrt"), gpt_units(num_blocks))

    assert num_blocks - sum(u.recompute for u in chosen) == kept


def test_a_plans_own_word_on_a_unit_goes_before_its_policy():
    plan = by_hand(2, "every-layer", units=(UnitPlan(name="blocks.1", zero_stage=0, recompute=False),))
    chosen = {u.name: u for u in resolve_units(plan, gpt_units())}

    assert (chosen["blocks.1"].zero_stage, chosen["blocks.1"].recompute) == (0, False)
    assert (chosen["blocks.2"].zero_stage, chosen["blocks.2"].recompute) == (2, True)


def test_of_a_unit_that_is_not_there_the_hint_names_those_that_can_be_named():
    """The unit of a model's own parameters has no name."""
    plan = dataclasses.replace(by_hand(num_ranks=1), activation_tier="disk", activation_units=("nope",))

    with pytest.raises(PlanError, match="no unit 'nope' to offload") as caught:
        resolve_units(plan, (unit("", is_block=False), *gpt_units()))

    assert "''" not in caught.value.hint
    assert "'blocks.0'" in caught.value.hint


def test_blocks_are_units_of_modules_that_have_a_twin_beside_them():
    lone, leaf = unit("encoder.only"), unit("a", type_name="Linear", is_block=False)
    elsewhere = [unit("encoder.0"), unit("decoder.0")]

    assert blocks_of([lone, leaf, *elsewhere]) == ("encoder.only", "encoder.0")
    assert blocks_of([unit("a.0"), unit("b.0"), leaf]) == ()


PLANNED = st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), min_size=1, max_size=6)


@given(PLANNED, st.integers(2, 8))
def test_laws_of_every_schedule(planned, num_ranks):
    """Reduced once and updated once a trainable unit; gathered as often as released, and never just one."""
    names = [f"u{n}" for n in range(len(planned))]
    units = [unit(name, trainable=t) for name, (_, _, t) in zip(names, planned, strict=True)]
    plans = tuple(
        UnitPlan(name=name, zero_stage=s, recompute=r) for name, (s, r, _) in zip(names, planned, strict=True)
    )
    schedule = write_schedule(by_hand(num_ranks=num_ranks, policy="chosen", units=plans), units)
    actions = [(boundary, action) for boundary, items in schedule.actions.items() for action in items]

    def count(kind, name):
        return sum(action.kind is kind and action.unit == name for _, action in actions)

    assert schedule.units == plans
    for name, (stage, recompute, trainable) in zip(names, planned, strict=True):
        assert count(K.REDUCE, name) == count(K.UPDATE, name) == int(trainable)
        assert count(K.RECOMPUTE, name) == int(recompute)
        assert count(K.RELEASE, name) == (2 if stage == 3 else 0)
        assert count(K.GATHER, name) == (2 if stage == 3 else int(stage in (1, 2) and trainable))
    for boundary, action in actions:
        assert (action.lane is Lane.COLLECTIVE) == (action.kind in (K.GATHER, K.REDUCE))
        assert boundary.unit in (action.unit, "")


def grouped(name, group, **options):
    return dataclasses.replace(unit(name, **options), shard_group=group)


def for_fsdp2(kept=(), depth=0, recomputed=(), shard_ranks=None, reshard_model=False):
    names = ("tok_emb", "blocks.0", "blocks.1", "norm", "head")
    units = tuple(
        UnitPlan(name=name, zero_stage=3, recompute=name in recomputed, reshard=name not in kept)
        for name in names
    )
    plan = dataclasses.replace(by_hand(3, "chosen", units=units, depth=depth), executor="fsdp2")
    plan = dataclasses.replace(plan, num_ranks=4, shard_ranks=shard_ranks, reshard_model=reshard_model)
    groups = {"tok_emb": "", "norm": "norm", "head": "norm"}
    return write_schedule(plan, [grouped(name, groups.get(name, name)) for name in names])


def deeds(schedule, point, name=""):
    return [(a.kind, a.unit, a.overlaps) for a in schedule.at(point, name)]


def test_fsdp2_gathers_groups_and_what_no_group_has_for_the_whole_pass():
    schedule = for_fsdp2(kept=("blocks.1",), depth=1, recomputed=("blocks.0",))

    assert deeds(schedule, Point.FORWARD_BEGINS) == [(K.GATHER, "", False), (K.GATHER, "blocks.0", True)]
    assert deeds(schedule, Point.BEFORE_FORWARD, "tok_emb") == []
    assert deeds(schedule, Point.BEFORE_FORWARD, "blocks.0") == [
        (K.GATHER, "blocks.0", False), (K.GATHER, "blocks.1", True), (K.RECOMPUTE, "blocks.0", False)
    ]  # fmt: skip
    released = {
        b.unit for b, actions in schedule.actions.items() for a in actions if b.point is Point.AFTER_FORWARD
    }
    assert released == {"blocks.0", "head"}  # norm and head are one group, whose last unit is the head
    assert deeds(schedule, Point.AFTER_FORWARD, "head") == [(K.RELEASE, "norm", False)]
    assert deeds(schedule, Point.BEFORE_BACKWARD, "head") == [
        (K.GATHER, "norm", False), (K.GATHER, "blocks.1", True)
    ]  # fmt: skip
    assert deeds(schedule, Point.AFTER_BACKWARD, "norm") == [
        (K.RELEASE, "norm", False),
        (K.REDUCE, "norm", False),
    ]
    assert deeds(schedule, Point.BACKWARD_ENDS) == [(K.RELEASE, "", False), (K.REDUCE, "", False)]
    assert schedule.stretches == (("blocks.0",),)  # what is recomputed is what is run again


def test_what_no_group_of_fsdp2_has_is_freed_after_the_models_forward_where_the_script_does_so():
    freed, kept = (for_fsdp2(kept=names, depth=1, reshard_model=True) for names in ((), ("tok_emb",)))

    assert deeds(freed, Point.FORWARD_ENDS) == [(K.RELEASE, "", False)]
    assert deeds(freed, Point.BACKWARD_BEGINS) == [(K.GATHER, "", False), (K.GATHER, "norm", True)]
    assert deeds(kept, Point.FORWARD_ENDS) == [] and deeds(kept, Point.BACKWARD_BEGINS) == [
        (K.GATHER, "norm", True)
    ]


def test_fsdp2_sums_shards_across_groups_of_ranks_that_hold_the_same():
    schedule = for_fsdp2(shard_ranks=2)

    for point, name, group in ((Point.AFTER_BACKWARD, "norm", "norm"), (Point.BACKWARD_ENDS, "", "")):
        reductions = [a for a in schedule.at(point, name) if a.kind is K.REDUCE]
        assert [(a.unit, a.ranks, a.shard) for a in reductions] == [
            (group, Ranks.INSIDE, True),
            (group, Ranks.ACROSS, False),
        ]
    assert schedule.size_of(Ranks.INSIDE) == schedule.size_of(Ranks.ACROSS) == 2


def test_a_group_of_fsdp2_is_freed_only_if_all_its_units_are():
    schedule = for_fsdp2(kept=("head",))

    assert not schedule.at(Point.AFTER_FORWARD, "head") and schedule.at(Point.AFTER_FORWARD, "blocks.1")
    assert not any(action.overlaps for actions in schedule.actions.values() for action in actions)

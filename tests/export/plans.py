"""Valid plans of every kind, with names that try to end strings, comments and lines."""

from dataclasses import replace

from hypothesis import strategies as st

from memadvisor.chunked_loss import ChunkedLoss
from memadvisor.compression import Compression
from memadvisor.errors import PlanError
from memadvisor.local_sgd import LocalSgd
from memadvisor.plan import Plan, Prediction, UnitPlan
from memadvisor.plan_checks import check_plan
from memadvisor.precision import Precision

NASTY = (
    "a\nexec('1')",
    "'; rm -rf x; '",
    '"""',
    "# \u2028x",
    "\\",
    "$(x) `y`",
    "}\n[a]\nb = 1",
    "\ud800",
    "\x1b[2J",
)
NAMES = st.sampled_from(NASTY) | st.text(max_size=9) | st.integers(0, 9).map("blocks.{}".format)
STAGES = st.sampled_from([(0,), (1,), (2,), (3,), (0, 2, 3), (0, 1)])


def is_valid(plan):
    try:
        check_plan(plan, "it")
    except PlanError:
        return False
    return True


def _of_units(**changes):
    return lambda plan: replace(plan, units=tuple(replace(unit, **changes) for unit in plan.units))


def _first_two(plan):
    names = [unit.name for unit in plan.units[:2]]
    return replace(plan, stretches=(tuple(names),)) if len(names) == 2 else plan


def _with_parts(plan):
    return replace(plan, units=tuple(replace(unit, parts=((f"{unit.name}.0",),)) for unit in plan.units))


# Each is taken where the plan is still valid with it.
CHANGES = (
    _of_units(optimizer_tier="host"),
    _of_units(optimizer_tier="disk"),
    _of_units(activation_tier="host"),
    _of_units(optimizer_bits=8),
    _of_units(activation_bits=4),
    _of_units(parameter_tier="disk", optimizer_tier="disk", zero_stage=3),
    _of_units(recompute=True, kept=("aten::addmm#1", "aten::mm")),
    _with_parts,
    _of_units(reshard=False),
    _first_two,
    lambda plan: replace(plan, precision=Precision(param_dtype="bfloat16")),
    lambda plan: replace(plan, precision=Precision(reduce_dtype="bfloat16")),
    lambda plan: replace(plan, precision=Precision(optimizer_dtype="float32")),
    lambda plan: replace(plan, shard_ranks=2),
    lambda plan: replace(plan, secondary_ranks=2),
    lambda plan: replace(plan, compression=Compression(gather_bits=8, reduce_bits=4)),
    lambda plan: replace(plan, compression=Compression(all_reduce_bits=1)),
    lambda plan: replace(plan, local_sgd=LocalSgd(period=4)),
    lambda plan: replace(plan, update_in_backward=True),
    lambda plan: replace(plan, delayed_update=True),
    lambda plan: replace(plan, update_by_unit=True),
    lambda plan: replace(plan, fused_updates=True),
    lambda plan: replace(plan, chunked_loss=ChunkedLoss(layer="head", rows=256)),
    lambda plan: replace(plan, autocast="bf16"),
)


@st.composite
def plans(draw):
    stages = draw(STAGES)
    unit = st.builds(
        UnitPlan,
        name=NAMES,
        zero_stage=st.sampled_from(stages),
        recompute=st.booleans(),
        reshard=st.booleans(),
    )
    plan = Plan(
        num_ranks=draw(st.sampled_from([1, 2, 4, 8])),
        zero_stage=max(stages),
        policy="chosen",
        units=tuple(draw(st.lists(unit, min_size=1, max_size=6, unique_by=lambda each: each.name))),
        micro_batch_size=draw(st.none() | st.integers(1, 512)),
        grad_accum=draw(st.none() | st.integers(1, 64)),
        budget_bytes=draw(st.none() | st.integers(1, 2**50)),
        why=draw(NAMES),
        overlap=draw(st.booleans()),
        gather_depth=draw(st.integers(0, 3)),
        prediction=draw(
            st.none()
            | st.builds(
                Prediction,
                peak_bytes=st.integers(0, 2**50),
                step_time_s=st.floats(0, 1e6),
                by_category_bytes=st.just({}),
                exposed_communication_s=st.just(0.0),
                peak_position=NAMES,
            )
        ),
    )
    for change in draw(st.lists(st.sampled_from(CHANGES), max_size=4)):
        changed = change(plan)
        if is_valid(changed):
            plan = changed
    return plan

"""A plan comes back as it was written, and what is no plan is refused in one line."""

import copy
import dataclasses
import json
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memadvisor.compression import Compression
from memadvisor.errors import PlanError, UsageError
from memadvisor.executors import Algorithm, algorithm_for
from memadvisor.local_sgd import LocalSgd, parse_local_sgd
from memadvisor.plan import LaneInterval, PlainRun, Plan, Prediction, RankPlan, UnitPlan, fingerprint
from memadvisor.plan_checks import check_plan
from memadvisor.plan_file import load_plan, plan_from_json, plan_to_json, save_plan
from memadvisor.planning.reasons import stages_text
from memadvisor.precision import Precision

SIZES = st.integers(0, 2**60)
SECONDS = st.floats(0, 1e9)
PREDICTIONS = st.builds(
    Prediction,
    peak_bytes=SIZES,
    step_time_s=SECONDS,
    by_category_bytes=st.dictionaries(st.text(max_size=9), SIZES, max_size=4),
    exposed_communication_s=SECONDS,
    peak_position=st.text(max_size=20),
)
UNITS = st.lists(
    st.builds(
        UnitPlan,
        name=st.text(max_size=9),
        zero_stage=st.integers(0, 3),
        recompute=st.booleans(),
        reshard=st.booleans(),
    ),
    max_size=4,
    unique_by=lambda unit: unit.name,
).map(tuple)
PLANS = st.builds(
    Plan,
    fingerprint=st.none() | st.text(max_size=16),
    num_ranks=st.integers(1, 4096),
    zero_stage=st.integers(0, 3),
    policy=st.sampled_from(["chosen", "none", "every-layer", "sqrt"]),
    units=UNITS,
    micro_batch_size=st.none() | st.integers(1, 512),
    grad_accum=st.none() | st.integers(1, 512),
    prediction=st.none() | PREDICTIONS,
    budget_bytes=st.none() | st.integers(1, 2**60),
    why=st.text(max_size=30),
    overlap=st.booleans(),
    gather_depth=st.integers(0, 9),
    reduce_depth=st.just(1),  # more are of several ranks, with overlap and stages 2 or 3
    precision=st.builds(
        Precision,
        param_dtype=st.sampled_from([None, "float32"]),
        reduce_dtype=st.sampled_from([None, "float32"]),
        optimizer_dtype=st.none(),  # else every unit is of stage 1 or more
    ),
)
# Older plans are without.
LATER = (
    *(
        "compression",
        "gather_bits",
        "reduce_bits",
        "all_reduce_bits",
        "all_reduce_top",
        "all_reduce_rank",
        "sent_bytes",
    ),
    *("reserved_bytes", "overlap", "gather_depth", "reshard", "precision", "param_dtype", "reduce_dtype"),
    *(
        "shard_ranks",
        "update_in_backward",
        "update_by_unit",
        "reduce_depth",
        "optimizer_dtype",
        "optimizer_tier",
        "exposed_transfer_s",
    ),
    "components_s",
    *("timeline", "plain"),
)
PLAN = Plan(
    fingerprint="0123456789abcdef",
    num_ranks=2,
    zero_stage=3,
    policy="chosen",
    units=(
        UnitPlan(name="blocks.0", zero_stage=3, recompute=True),
        UnitPlan(name="head", zero_stage=0, recompute=False),
    ),
    micro_batch_size=4,
    grad_accum=2,
    prediction=Prediction(
        peak_bytes=10**9,
        step_time_s=0.5,
        by_category_bytes={"parameter": 10**8},
        exposed_communication_s=0.1,
        peak_position="backward of blocks.0",
    ),
    budget_bytes=2**30,
    why="it fits",
    precision=Precision(param_dtype="float32", reduce_dtype="float32"),
    plain=PlainRun(peak_bytes=2 * 10**9, step_time_s=0.4, num_ranks=2, micro_batch_size=4),
    timeline=(
        LaneInterval("compute", "forward of blocks.0", 0.0, 0.25),
        LaneInterval("disk", "prefetch", 0.1, 0.5),
    ),
)


@given(PLANS)
def test_a_plan_comes_back(plan):
    assert plan_from_json(json.loads(json.dumps(plan_to_json(plan))), "plan") == plan


def test_where_optimizer_state_lies_comes_back_and_a_plan_without_has_no_word_of_it():
    units = (dataclasses.replace(PLAN.units[0], optimizer_tier="disk"), PLAN.units[1])
    plan = dataclasses.replace(PLAN, units=units)
    assert plan_from_json(json.loads(json.dumps(plan_to_json(plan))), "plan") == plan
    assert plan.optimizer_tiers == {"device", "disk"}
    assert "optimizer_tier" not in json.dumps(plan_to_json(PLAN))


def test_how_optimizer_state_is_coded_comes_back_and_a_plan_without_has_no_word_of_it():
    coded = dataclasses.replace(PLAN.units[0], optimizer_bits=8)
    plan = dataclasses.replace(PLAN, units=(coded, PLAN.units[1]), optimizer_bits=8)
    assert plan_from_json(json.loads(json.dumps(plan_to_json(plan))), "plan") == plan
    assert plan.optimizer_codes == {8} and coded.elsewhere == plan.elsewhere == "optimizer state in 8 bits"
    assert PLAN.elsewhere == ""
    assert "optimizer_bits" not in json.dumps(plan_to_json(PLAN))


def test_a_plan_that_updates_otherwise_comes_back_and_another_has_no_word_of_it():
    for field in ("update_in_backward", "update_by_unit"):
        plan = dataclasses.replace(PLAN, **{field: True})
        assert plan_from_json(plan_to_json(plan), "plan") == plan
        assert field not in plan_to_json(PLAN)


@pytest.mark.parametrize("num_ranks", [2, 64])
@pytest.mark.parametrize("precision", [("bfloat16", None), ("float16", "bfloat16"), (None, "bfloat16")])
def test_a_lossy_plan_comes_back_and_one_that_is_not_has_no_word_of_it(precision, num_ranks):
    lossy = dataclasses.replace(
        PLAN,
        num_ranks=num_ranks,
        units=(),
        precision=Precision(param_dtype=precision[0], reduce_dtype=precision[1]),
    )
    assert plan_from_json(plan_to_json(lossy), "plan") == lossy
    assert lossy.precision.is_lossy and not PLAN.precision.is_lossy
    assert "precision" not in plan_to_json(dataclasses.replace(PLAN, precision=Precision()))


def test_local_sgd_comes_back_as_it_was_spelt_and_a_plan_without_has_no_word_of_it():
    plan = dataclasses.replace(
        PLAN, units=(), zero_stage=0, precision=Precision(), local_sgd=parse_local_sgd("8,warmup=100")
    )
    assert plan_from_json(plan_to_json(plan), "plan") == plan
    assert plan.local_sgd == LocalSgd(period=8, warmup_steps=100)
    assert "local_sgd" not in plan_to_json(PLAN)
    for text in ("", "8,", "8,warm=1", "-8", "8 ", "8,warmup=", "x"):
        with pytest.raises(UsageError, match="is no period"):
            parse_local_sgd(text)


def test_compression_comes_back_and_is_lossy_where_there_is_any():
    lossy = dataclasses.replace(
        PLAN, units=(), precision=Precision(), compression=Compression(gather_bits=8, reduce_bits=4)
    )
    assert plan_from_json(plan_to_json(lossy), "plan") == lossy
    assert lossy.compression.is_lossy and not PLAN.compression.is_lossy
    assert "compression" not in plan_to_json(PLAN)


def test_a_plan_for_fsdp2_comes_back_and_another_has_no_word_of_it():
    units = (UnitPlan(name="blocks.0", zero_stage=3, recompute=True, reshard=False),)
    native = Algorithm(operation="all_gather", min_bytes=4096, name="native")
    ours = dataclasses.replace(PLAN, num_ranks=2, zero_stage=3, units=units)
    plan = dataclasses.replace(ours, executor="fsdp2", algorithms=(native,))

    assert plan_from_json(json.loads(json.dumps(plan_to_json(plan))), "it") == plan
    check_plan(dataclasses.replace(plan, num_ranks=4, shard_ranks=2), "it")  # HSDP
    check_plan(dataclasses.replace(plan, num_ranks=4, secondary_ranks=2), "it")  # reshard_after_forward=2
    beside = dataclasses.replace(plan, num_ranks=8, shard_ranks=4)
    check_plan(dataclasses.replace(beside, secondary_ranks=2), "it")
    with pytest.raises(PlanError, match="secondary_ranks 4 for 4 ranks"):
        check_plan(dataclasses.replace(beside, secondary_ranks=4), "it")
    freed = dataclasses.replace(plan, reshard_model=True)
    assert plan_from_json(plan_to_json(freed), "it") == freed and "reshard_model" not in plan_to_json(plan)
    assert not {"executor", "algorithms"} & plan_to_json(ours).keys()
    assert algorithm_for(plan.algorithms, "all_gather", 4096, 2) == "native"
    assert algorithm_for(plan.algorithms, "all_gather", 4095, 2) is None
    for change, words in (
        ({"zero_stage": 2, "units": ()}, "stage 2"),
        ({"shard_ranks": 3, "num_ranks": 4}, "divide the number of ranks"),
        ({"executor": "deepspeed"}, "'deepspeed'"),
        ({"executor": "built-in", "algorithms": (), "reshard_model": True}, "reshard_model for built-in"),
        ({"executor": "built-in"}, "built-in does not do"),
        ({"algorithms": (dataclasses.replace(native, name="tree"),)}, "'tree'"),
        (
            {
                "executor": "built-in",
                "algorithms": (dataclasses.replace(native, name="doubling", num_ranks=6),),
            },
            "by doubling among 6 ranks",
        ),
    ):
        with pytest.raises(PlanError, match=words):
            check_plan(dataclasses.replace(plan, **change), "it")


def test_a_plan_comes_back_from_its_file_which_is_private(tmp_path):
    path = tmp_path / "plan.json"
    save_plan(PLAN, path)

    assert load_plan(path) == PLAN
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_an_unwritable_plan_leaves_nothing_behind(tmp_path):
    with pytest.raises(UsageError, match="cannot be written"):
        save_plan(PLAN, tmp_path / "missing" / "plan.json")

    assert list(tmp_path.iterdir()) == []


def places_in(value, path=()):
    """Every place in a JSON value, as the keys that lead to it."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places_in(inner, (*path, key))


def as_json():
    return json.loads(json.dumps(plan_to_json(PLAN)))


def parent_of(value, path):
    for key in path[:-1]:
        value = value[key]
    return value


PLACES = list(places_in(as_json()))


@pytest.mark.parametrize(
    "path",
    [p for p in PLACES if isinstance(p[-1], str) and p[-1] not in ("parameter", *LATER)],
    ids=str,
)
def test_a_plan_without_one_of_its_fields_is_refused(path):
    value = as_json()
    del parent_of(value, path)[path[-1]]

    with pytest.raises(PlanError, match=r"some file is not a plan: .* is missing"):
        plan_from_json(value, "some file")


@pytest.mark.parametrize("path", PLACES, ids=str)
@pytest.mark.parametrize("wrong", [True, 1.5, "x", [], [1], {}, {"x": 1}, None, -7, 10**400, float("nan"), float("inf")], ids=repr)  # fmt: skip
def test_a_wrong_value_anywhere_is_refused_or_still_a_plan_of_right_types(path, wrong):
    value = as_json()
    parent_of(value, path)[path[-1]] = wrong
    try:
        plan = plan_from_json(value, "some file")
    except PlanError as error:
        assert "\n" not in error.one_line()
        return
    assert plan_from_json(json.loads(json.dumps(plan_to_json(plan))), "again") == plan


def named(path):
    """`units[0].kept` of ("units", 0, "kept")."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)[1:]


@pytest.mark.parametrize("path", [path for path in PLACES if path != ("format",)], ids=named)
def test_what_is_of_no_type_that_a_plan_has_is_named_by_its_place(path):
    value = as_json()
    parent_of(value, path)[path[-1]] = [None]
    with pytest.raises(PlanError) as caught:
        plan_from_json(value, "some file")
    assert str(caught.value).startswith(f"some file is not a plan: {named(path)}")


def test_a_wrong_field_of_the_fourth_unit_says_so_and_what_belongs_there():
    value = as_json()
    value["units"] = [{**value["units"][0], "name": f"blocks.{index}"} for index in range(4)]
    value["units"][3]["zero_stage"] = False
    with pytest.raises(PlanError, match=r"units\[3\]\.zero_stage is false, where a whole number belongs"):
        plan_from_json(value, "some file")
    value["units"][3] = None
    with pytest.raises(PlanError, match=r"units\[3\] is null, where an object belongs"):
        plan_from_json(value, "some file")


def test_a_byte_order_mark_is_no_part_of_a_plan(tmp_path):
    text = json.dumps(as_json())
    (tmp_path / "plan.json").write_text(text, encoding="utf-8-sig")
    assert load_plan(tmp_path / "plan.json") == plan_from_json(as_json(), "it")


def test_a_plan_whose_json_is_broken_says_in_which_line(tmp_path):
    broken = json.dumps(as_json(), indent=1).replace('"policy":', '"policy"')
    line = next(number for number, text in enumerate(broken.splitlines(), 1) if '"policy"' in text)
    (tmp_path / "plan.json").write_text(broken)
    with pytest.raises(PlanError, match=rf"is not JSON: .*, line {line}, column "):
        load_plan(tmp_path / "plan.json")


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)))  # fmt: skip
def test_no_json_value_raises_anything_but_a_plan_error(value):
    with pytest.raises(PlanError):
        plan_from_json(value, "some file")


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000, b"NaN", b"3"])
def test_a_file_that_is_no_plan_is_refused(tmp_path, data):
    path = tmp_path / "plan.json"
    path.write_bytes(data)

    with pytest.raises(PlanError, match=r"plan\.json"):
        load_plan(path)


def test_a_missing_plan_and_a_directory_are_refused(tmp_path):
    for path in (tmp_path / "gone.json", tmp_path):
        with pytest.raises(PlanError, match="cannot be read"):
            load_plan(path)


TRIPLES = st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5), st.text(max_size=5)), max_size=5)


@given(TRIPLES, st.randoms())
def test_a_fingerprint_knows_no_order(triples, random):
    shuffled = copy.copy(triples)
    random.shuffle(shuffled)

    assert fingerprint(shuffled) == fingerprint(triples)


def test_a_fingerprint_tells_names_shapes_and_dtypes_apart():
    base = ("w", "(2, 3)", "float32")
    others = [("v", *base[1:]), ("w", "(3, 2)", "float32"), ("w", "(2, 3)", "bfloat16")]

    assert len({fingerprint([triple]) for triple in (base, *others)} | {fingerprint([])}) == 5


def test_recomputed_units_are_those_that_say_so():
    assert PLAN.recomputed_units == ("blocks.0",)
    assert dataclasses.replace(PLAN, units=()).recomputed_units == ()


@pytest.mark.parametrize(("value", "depth"), [({}, 0), ({"overlap": False}, 0), ({"overlap": True}, 1)])
def test_in_older_plans_overlap_spoke_for_gathers_too(value, depth):
    older = {key: value for key, value in plan_to_json(PLAN).items() if key not in LATER} | value
    for unit in older["units"]:
        del unit["reshard"]
    plan = plan_from_json(older, "older.json")

    assert (plan.overlap, plan.gather_depth) == (bool(depth), depth)
    assert all(unit.reshard for unit in plan.units)


def test_a_mixture_is_said_by_stage_with_runs_of_units_as_their_ends():
    blocks = [UnitPlan(name=f"blocks.{n}", zero_stage=3, recompute=False, reshard=n < 4) for n in range(6)]
    tokens, head = (UnitPlan(name=name, zero_stage=2, recompute=False) for name in ("tokens", "head"))
    plan = dataclasses.replace(PLAN, units=(tokens, *blocks, head))

    assert stages_text(plan) == (
        "3 with parameters kept until the backward for blocks.4 and blocks.5, "
        "3 for 4 units blocks.0 to blocks.3, 2 for tokens and head"
    )
    assert stages_text(dataclasses.replace(PLAN, units=(tokens, head))) == "2"
    assert stages_text(dataclasses.replace(PLAN, units=())) == "3"


def chain_plan(*stretches, zero_stage=0, num_ranks=1):
    units = tuple(UnitPlan(name=name, zero_stage=zero_stage, recompute=name == "c") for name in "abcde")
    return dataclasses.replace(
        PLAN, units=units, stretches=stretches, zero_stage=zero_stage, num_ranks=num_ranks, overlap=False
    )


def test_stretches_survive_the_file_and_name_all_that_is_run_again_outer_ones_first():
    plan = chain_plan(("b", "d"), ("a", "d"))

    assert plan_from_json(json.loads(json.dumps(plan_to_json(plan))), "it") == plan
    assert plan.unit_stretches == (("a", "b", "c", "d"), ("b", "c", "d"))
    assert plan.recomputed_units == tuple("abcd")
    assert "stretches" not in plan_to_json(chain_plan())


@pytest.mark.parametrize(
    ("stretches", "said"),
    [
        ([("d", "b")], "a stretch from 'd' to 'b'"),
        ([("b", "b")], "a stretch from 'b' to 'b'"),
        ([("b", "z")], "a stretch from 'b' to 'z'"),
        ([("a", "c"), ("b", "d")], "overlap at 'b'"),
        ([("a", "c"), ("c", "d")], "overlap at 'c'"),
        ([("a", "c"), ("a", "c")], "overlap at 'a'"),
    ],
)
def test_stretches_that_neither_nest_nor_keep_apart_are_refused(stretches, said):
    with pytest.raises(PlanError, match=said):
        check_plan(chain_plan(*stretches), "It")


def test_stretches_of_units_that_are_gathered_one_by_one_are_refused():
    with pytest.raises(PlanError, match="units of ZeRO stage 3"):
        check_plan(chain_plan(("a", "b"), zero_stage=3, num_ranks=2), "It")
    check_plan(chain_plan(("a", "b"), zero_stage=2, num_ranks=2), "It")


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (
            ["gpu", "forward", 0, 1],
            r"timeline\[0\]\[0\] is \"gpu\", where one of compute, collective, host, disk belongs",
        ),
        (["disk", "prefetch", 2, 1], r"timeline\[0\]\[3\] is 1, where no earlier than its start belongs"),
        (
            ["disk", "prefetch", 2],
            r"timeline\[0\] is .*, where a lane, what it does, and from when to when belongs",
        ),
        (["disk", "prefetch", -1, 1], r"timeline\[0\]\[2\] is -1, where a number of seconds belongs"),
    ],
)
def test_a_timeline_that_is_none_is_refused_by_its_place(row, why):
    with pytest.raises(PlanError, match=why):
        plan_from_json(as_json() | {"timeline": [row]}, "some file")


def test_a_file_has_each_interval_of_the_timeline_on_a_line_of_its_own(tmp_path):
    save_plan(PLAN, tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()

    assert '\n  ["compute", "forward of blocks.0", 0.0, 0.25],\n' in text
    assert json.loads(text) == json.loads(json.dumps(plan_to_json(PLAN)))
    assert load_plan(tmp_path / "plan.json") == PLAN


def test_passes_of_a_pipelines_rank_come_back_as_they_were_written():
    lanes = (LaneInterval("compute", "forward of micro-batch 0", 0.0, 0.5),)
    ranks = tuple(
        RankPlan(rank=rank, fingerprint="f", units=PLAN.units[1:], timeline=own)
        for rank, own in enumerate((lanes, None))
    )
    plan = Plan(num_ranks=2, zero_stage=0, policy="chosen", ranks=ranks)

    value = json.loads(json.dumps(plan_to_json(plan)))

    assert "timeline" in value["ranks"][0] and "timeline" not in value["ranks"][1]
    assert plan_from_json(value, "plan") == plan

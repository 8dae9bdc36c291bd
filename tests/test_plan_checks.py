"""What no plan may ask for is refused by what is wrong with it."""

import pytest

from memadvisor.errors import PlanError
from memadvisor.plan import Plan
from memadvisor.plan_checks import check_plan
from memadvisor.plan_file import plan_from_json
from tests.test_plan import as_json

UNIT = {"name": "a", "zero_stage": 0, "recompute": True}
# What one rank of a pipeline does.
OF_RANK = {"rank": 0, "fingerprint": "0" * 16, "units": [UNIT]}


def with_parts(*parts, **more):
    return {**UNIT, "parts": list(parts), **more}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 2}, "format 2"),
        ({"num_ranks": 0}, "0 ranks"),
        ({"zero_stage": 4}, r"has zero_stage 4\."),
        ({"zero_stage": -1}, r"has zero_stage -1\."),
        *(
            (
                {"units": [UNIT, UNIT | {"name": "b", field: value}]},
                rf"has units\[1\]\.{field} {value!r} of 'b'",
            )
            for field, value in (
                ("zero_stage", -1),
                ("optimizer_tier", "tape"),
                ("activation_tier", "tape"),
                ("parameter_tier", "tape"),
                ("activation_bits", 3),
                ("optimizer_bits", 4),
            )
        ),
        ({"policy": "all"}, "'all'"),
        ({"policy": "kwai", "units": []}, "no tier for it"),
        ({"micro_batch_size": 0}, "micro_batch_size 0"),
        ({"grad_accum": -1}, "grad_accum -1"),
        ({"budget_bytes": 0}, "budget_bytes 0"),
        ({"gather_depth": -1}, "gather_depth"),
        ({"reduce_depth": 0, "overlap": True}, "reduce_depth 0"),
        ({"reduce_depth": 2, "overlap": False}, "reduce_depth 2, and no reductions to shards"),
        (
            {"reduce_depth": 2, "overlap": True, "num_ranks": 2, "units": [], "zero_stage": 1},
            "reduce_depth 2, and no reductions to shards",
        ),
        ({"num_ranks": 6, "shard_ranks": 4}, "shard_ranks 4 for 6 ranks"),
        ({"num_ranks": 4, "shard_ranks": 1}, "shard_ranks 1 for 4 ranks"),
        ({"num_ranks": 6, "secondary_ranks": 4}, "secondary_ranks 4 for 6 ranks"),
        ({"num_ranks": 4, "secondary_ranks": 4}, "secondary_ranks 4 for 4 ranks"),
        (
            {"num_ranks": 4, "secondary_ranks": 2, "units": [], "zero_stage": 1},
            "secondary_ranks 2 with ZeRO stage 1",
        ),
        (
            {"num_ranks": 8, "secondary_ranks": 2, "shard_ranks": 4, "units": [], "zero_stage": 3},
            "secondary_ranks 2, and shard_ranks 4",
        ),
        ({"num_ranks": 1, "ranks": [OF_RANK]}, "by rank, and others beside them"),
        ({"num_ranks": 2, "units": [], "ranks": [OF_RANK]}, "what ranks 0 do, of 2"),
        (
            {
                "num_ranks": 1,
                "units": [],
                "fingerprint": None,
                "zero_stage": 0,
                "precision": {},
                "ranks": [OF_RANK | {"units": [OF_RANK["units"][0] | {"zero_stage": 2}]}],
            },
            "rank 0 share or round something, or move states",
        ),
        ({"precision": {"param_dtype": "int8"}}, "param_dtype 'int8'"),
        ({"precision": {"param_dtype": "bfloat16"}}, "param_dtype bfloat16 with ZeRO stage 0"),
        (
            {"precision": {"reduce_dtype": "float16"}, "units": [], "zero_stage": 1},
            "float16 with ZeRO stage 1",
        ),
        ({"precision": {"reduce_dtype": "float16"}, "units": [], "num_ranks": 1}, "float16 with one rank"),
        ({"precision": {"optimizer_dtype": "float16"}}, "optimizer_dtype 'float16'"),
        ({"precision": {"optimizer_dtype": "float32"}}, "optimizer_dtype float32 with ZeRO stage 0"),
        ({"compression": {"gather_bits": 8}}, "gather_bits 8 with ZeRO stage 0"),
        ({"compression": {"reduce_bits": 3}}, "reduce_bits 3"),
        (
            {
                "compression": {"all_reduce_top": 4},
                "units": [],
                "num_ranks": 4,
                "zero_stage": 1,
                "shard_ranks": 2,
            },
            "stay whole, and has shard_ranks 2",
        ),
        (
            {"compression": {"reduce_bits": 8}, "precision": {"reduce_dtype": "bfloat16"}, "units": []},
            "both reduce_bits and reduce_dtype bfloat16",
        ),
        ({"local_sgd": {"period": 0}, "units": [], "zero_stage": 0}, "local SGD with period 0"),
        ({"local_sgd": {"period": 4}, "units": [], "zero_stage": 1}, "local SGD with ZeRO stage 1"),
        ({"local_sgd": {"period": 4}, "units": [], "num_ranks": 1}, "local SGD with one rank"),
        (
            {
                "local_sgd": {"period": 4},
                "compression": {"all_reduce_bits": 1},
                "precision": {},
                "units": [],
                "zero_stage": 0,
            },
            "local SGD and compressed gradients",
        ),
        ({"units": [UNIT] * 2}, "the unit 'a' twice"),
        ({"update_in_backward": True, "units": [], "zero_stage": 1}, "in the backward with ZeRO stage 1"),
        (
            {"update_in_backward": True, "units": [UNIT]},
            "in the backward with ZeRO stage 0",
        ),
        ({"update_in_backward": True, "units": [], "num_ranks": 1}, "in the backward with one rank"),
        (
            {"update_by_unit": True, "update_in_backward": True, "units": [], "zero_stage": 2},
            "one after another, and has updates in the backward",
        ),
        ({"update_by_unit": True, "fused_updates": True}, "one after another, and has fused updates"),
        ({"update_in_backward": 1}, "update_in_backward is 1, where true or false belongs"),
        ({"optimizer_tier": "tape"}, "has optimizer_tier 'tape'"),
        ({"delayed_update": True, "num_ranks": 1}, "delays updates, with all optimizer state on the device"),
        (
            {"delayed_update": True, "optimizer_tier": "disk", "num_ranks": 2},
            "delays updates, with several ranks",
        ),
        ({"units": [with_parts(["b.x"])], "num_ranks": 1}, "the part 'b.x' of 'a'"),
        ({"units": [with_parts(["a.x"], ["a.x"])], "num_ranks": 1}, "parts that share modules of 'a'"),
        (
            {"units": [with_parts(["a.x"], zero_stage=3)], "num_ranks": 2, "executor": "fsdp2"},
            "parts of 'a' that run again, with the script's own FSDP2",
        ),
        (
            {"units": [with_parts(["a.x"], kept=["aten::mm"])], "num_ranks": 1},
            "parts of 'a' that run again, with operators that it keeps",
        ),
        *(
            ({"units": [{**UNIT, "recompute": True, "kept_calls": [1, 3], **change}], "num_ranks": 1}, words)
            for change, words in (
                ({"recompute": False}, "keeps calls of 'a', which is not recomputed by itself"),
                ({"kept_calls": [3, 1]}, r"keeps calls \[3, 1\] of 'a'"),
                ({"kept_calls": [-1]}, r"keeps calls \[-1\] of 'a'"),
                ({"kept": ["aten::mm"]}, "keeps calls of 'a', and operators, parts or activations elsewhere"),
                (
                    {"activation_tier": "disk"},
                    "keeps calls of 'a', and operators, parts or activations elsewhere",
                ),
            )
        ),
        ({"optimizer_bits": 4}, "optimizer_bits 4"),
        ({"optimizer_bits": "8"}, 'optimizer_bits is "8", where a whole number belongs'),
        (
            {"optimizer_bits": 8, "optimizer_tier": "disk"},
            "in 8 bits, and keeps optimizer state on host or disk",
        ),
        (
            {"update_in_backward": True, "units": [], "zero_stage": 2, "optimizer_bits": 8},
            "in 8 bits, and updates in the backward",
        ),
        (
            {"update_in_backward": True, "units": [], "zero_stage": 2, "optimizer_tier": "disk"},
            "keeps optimizer state on the disk",
        ),
    ],
)
def test_impossible_plans_are_refused_by_what_is_wrong(change, words):
    with pytest.raises(PlanError, match=words):
        plan_from_json({**as_json(), **change}, "some file")


@pytest.mark.parametrize("changes", [{"shard_ranks": 2}, {"secondary_ranks": 2, "zero_stage": 3}])
def test_one_rank_is_named_in_the_singular(changes):
    with pytest.raises(PlanError, match=r"for 1 rank\."):
        check_plan(Plan(**{"num_ranks": 1, "zero_stage": 0, "why": "by hand", **changes}), "The plan")

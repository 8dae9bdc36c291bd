"""Exports parse in their formats, say the plan back, and drop nothing in silence."""

import ast
import dataclasses
import json
import shlex
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memadvisor.compression import Compression
from memadvisor.errors import PlanError, UsageError
from memadvisor.export.export import TARGETS, export_plan
from memadvisor.export.features import FEATURES
from memadvisor.export.quoting import printable, shell_array, yaml_scalar
from memadvisor.plan import Plan, Prediction, UnitPlan
from memadvisor.plan_checks import check_plan
from memadvisor.precision import Precision
from tests.export.plans import NASTY, is_valid, plans


def units(*stages, **changes):
    return tuple(
        UnitPlan(name=f"blocks.{i}", zero_stage=s, recompute=False, **changes) for i, s in enumerate(stages)
    )


def plan_of(*stages, num_ranks=2, **changes):
    plan = Plan(num_ranks=num_ranks, zero_stage=max(stages), policy="chosen", units=units(*stages), **changes)
    check_plan(plan, "it")
    return plan


def scalar(text):
    """Python reads the escapes of strings as YAML does."""
    return ast.literal_eval(text.strip().replace("true", "True").replace("false", "False"))


def read_yaml(text):
    """The subset that is written: two levels of keys and scalars."""
    top, inner = {}, None
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if line.startswith("#"):
            continue
        if line.startswith("  "):
            inner[key.strip()] = scalar(value)
        elif value:
            top[key] = scalar(value)
        else:
            inner = top[key] = {}
    return top


def read_shell(text):
    """Words of the array, as a shell parts them."""
    words = shlex.split(text, comments=True)
    return words[words.index("MEMADVISOR_ARGS=(") + 1 : words.index(")")]


def value_after(words, option):
    return words[words.index(option) + 1] if option in words else None


def settings_of(text):
    names = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign):
            names[node.targets[0].id] = ast.literal_eval(node.value)
    return names


def highest(plan):
    return max(unit.stage_on(plan.num_ranks) for unit in plan.units)


@given(plans())
def test_deepspeed_reads_back_stage_and_batch(plan):
    exported = export_plan(plan, "deepspeed")
    config = json.loads(exported.text)

    offloads = plan.optimizer_tiers != {"device"}
    assert config["zero_optimization"]["stage"] == max(highest(plan), int(offloads))
    assert config.get("train_micro_batch_size_per_gpu") == plan.micro_batch_size
    assert config.get("gradient_accumulation_steps") == plan.grad_accum
    assert (
        config["zero_optimization"].get("allgather_bucket_size", 2) % 2 == 0
    )  # or DeepSpeed's stages 1 and 2 fail
    assert ("activation_checkpointing" in config) == bool(plan.recomputed_units)
    assert exported.text.isascii()


@given(plans())
def test_accelerate_reads_back_ranks_and_stage(plan):
    config = read_yaml(export_plan(plan, "accelerate").text)

    assert config["num_processes"] == plan.num_ranks
    if config["distributed_type"] == "DEEPSPEED":
        assert config["deepspeed_config"]["zero_stage"] == max(1, highest(plan))
        assert config["deepspeed_config"].get("gradient_accumulation_steps") == plan.grad_accum
    elif config["distributed_type"] == "FSDP":
        assert highest(plan) == 3
        assert config["fsdp_config"]["fsdp_activation_checkpointing"] == bool(plan.recomputed_units)
    else:
        assert highest(plan) == 0


@given(plans())
def test_fsdp2_reads_back_each_unit(plan):
    text = export_plan(plan, "fsdp2").text
    settings = settings_of(text)

    assert [unit[0] for unit in settings["MODELS"][""]] == [unit.name for unit in plan.units]
    again = {name for name, _, runs_again, _, _ in settings["MODELS"][""] if runs_again}
    assert again == set(plan.recomputed_units)
    for unit, (_, reshards, _, kept, _) in zip(plan.units, settings["MODELS"][""], strict=True):
        if unit.stage_on(plan.num_ranks) == 3:
            assert bool(reshards) == unit.reshard
        assert kept == unit.kept
    compile(text, "it", "exec")
    assert text.isascii()


@given(plans(), st.sampled_from(["torchtitan", "megatron"]))
def test_arguments_read_back_batch_and_sharding(plan, target):
    words = read_shell(export_plan(plan, target).text)

    micro, accum = plan.micro_batch_size, plan.grad_accum
    batch = None if micro is None or accum is None else str(micro * accum * plan.num_ranks)
    if target == "megatron":
        assert value_after(words, "--micro-batch-size") == (None if micro is None else str(micro))
        assert value_after(words, "--global-batch-size") == batch
        assert ("--recompute-granularity" in words) == bool(plan.recomputed_units)
        assert ("--use-megatron-fsdp" in words) == (highest(plan) >= 2)
    else:
        assert value_after(words, "--training.global_batch_size") == batch
        assert (words[-1] != "activation-checkpoint:none") == bool(plan.recomputed_units)
        degrees = [
            int(value_after(words, f"--parallelism.data_parallel_{kind}_degree"))
            for kind in ("replicate", "shard")
        ]
        assert degrees[0] * degrees[1] == plan.num_ranks


@given(plans(), st.sampled_from(sorted(TARGETS)))
def test_what_is_asked_for_is_said_or_listed(plan, target):
    """Each difference stands where a human reads it; what needs more memory is said beside the budget."""
    exported = export_plan(plan, target)

    lines = exported.text.splitlines()
    for difference in exported.differences:
        assert f"- {difference.line()}" in exported.remarks
    if exported.has_comments:
        flat = " ".join(
            "".join(line.removeprefix("#") + " " for line in lines if line.startswith("#")).split()
        )
        assert all(" ".join(printable(remark).split()) in flat for remark in exported.remarks)
    warned = any(remark.startswith("NOT THE PLAN'S MEMORY") for remark in exported.remarks)
    assert warned == any(difference.needs_more_memory for difference in exported.differences)


# Field by field, where a plan's exports say it: a new field of a plan is to be given a place here, and in features.py.
READ = {
    Plan: {
        *(
            "num_ranks",
            "zero_stage",
            "policy",
            "units",
            "micro_batch_size",
            "grad_accum",
            "fingerprint",
            "models",
        ),
        *(
            "prediction",
            "budget_bytes",
            "why",
            "overlap",
            "gather_depth",
            "reduce_depth",
            "precision",
            "shard_ranks",
            "secondary_ranks",
        ),
        *(
            "update_in_backward",
            "compression",
            "local_sgd",
            "algorithms",
            "stretches",
            "optimizer_tier",
            "disk_directory",
        ),
        *("activation_tier", "activation_bits", "optimizer_bits", "parameter_tier", "delayed_update"),
        "update_by_unit",
        "fused_updates",
        "chunked_loss",
        "autocast",
        *(
            "executor",
            "reshard_model",
            "activation_units",
            "compressed_units",
            "ranks",
            "ranks_alike",
        ),  # who plays it; which units of a plan made by hand; choices by rank, which are refused
        *("timeline", "plain"),  # what is predicted, as in the prediction, and what was without the plan
    },
    UnitPlan: {
        *("name", "zero_stage", "recompute", "reshard", "optimizer_tier", "kept", "activation_tier"),
        *("optimizer_bits", "activation_bits", "parameter_tier", "parts", "kept_calls"),
    },
    Precision: {"param_dtype", "reduce_dtype", "optimizer_dtype"},
    Compression: {"gather_bits", "reduce_bits", "all_reduce_bits", "all_reduce_top", "all_reduce_rank"},
}


@pytest.mark.parametrize("kind", READ)
def test_no_field_of_a_plan_is_unknown_to_exports(kind):
    assert {field.name for field in dataclasses.fields(kind)} == READ[kind]


@pytest.mark.parametrize(
    ("feature", "changes"),
    [
        ("activation_tier", {"activation_tier": "disk"}),
        ("optimizer_bits", {"optimizer_bits": 8}),
        ("activation_bits", {"activation_bits": 2}),
    ],
)
@pytest.mark.parametrize("target", TARGETS)
def test_what_no_engine_does_is_listed_and_needs_more_memory(feature, changes, target):
    plan = dataclasses.replace(plan_of(3, 3), units=units(3, 3, **changes))
    assert is_valid(plan)

    exported = export_plan(plan, target)

    assert any(FEATURES[feature].wanted(plan) == difference.wanted for difference in exported.differences)
    assert any(remark.startswith("NOT THE PLAN'S MEMORY") for remark in exported.remarks)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_autocast_is_what_each_engine_calls_it_or_is_listed(stage):
    plan = plan_of(stage, stage, autocast="bf16", overlap=True)
    texts = {target: export_plan(plan, target).text for target in TARGETS}
    listed = {
        target
        for target in TARGETS
        if any("under autocast" in each.wanted for each in export_plan(plan, target).differences)
    }

    assert read_yaml(texts["accelerate"])["mixed_precision"] == "bf16"
    autocast = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    deepspeed = json.loads(texts["deepspeed"])
    assert deepspeed["torch_autocast"] == autocast and "bf16" not in deepspeed
    assert settings_of(texts["fsdp2"])["PARAM_DTYPE"] == "bfloat16"
    assert settings_of(texts["fsdp2"])["REDUCE_DTYPE"] == "float32"
    assert value_after(read_shell(texts["torchtitan"]), "--training.mixed_precision_param") == "bfloat16"
    assert "--bf16" in read_shell(texts["megatron"])
    assert "--accumulate-allreduce-grads-in-fp32" in read_shell(texts["megatron"])
    # DeepSpeed by itself, plain accelerate, and torchtitan without shards, run torch's autocast.
    assert listed == {"fsdp2", "megatron", *(("accelerate", "torchtitan") if stage else ())}
    assert not any("leaves that alone" in text for text in texts.values())


def test_predicted_figures_are_labelled_as_ours():
    prediction = Prediction(
        peak_bytes=2**30, step_time_s=0.5, by_category_bytes={}, exposed_communication_s=0.0, peak_position=""
    )
    text = export_plan(plan_of(3, prediction=prediction, budget_bytes=2**31), "megatron").text

    assert (
        "Predicted for memadvisor's engine, not for this one: peak 1.00 GiB a rank, step 500 ms, budget 2.00 GiB."
        in text
    )


def test_a_uniform_plan_of_stage_3_loses_nothing_in_accelerate():
    plan = plan_of(3, 3, gather_depth=1, overlap=True)
    plan = dataclasses.replace(plan, units=tuple(dataclasses.replace(u, recompute=True) for u in plan.units))

    exported = export_plan(plan, "accelerate")

    assert [difference.wanted for difference in exported.differences] == ["1 unit gathered ahead"]
    assert read_yaml(exported.text)["fsdp_config"]["fsdp_reshard_after_forward"] is True


@pytest.mark.parametrize(("budget_bytes", "reshards"), [(150, False), (149, True)])
def test_shards_beside_whole_parameters_must_fit_the_budget(budget_bytes, reshards):
    """FSDP2 shards what stage 2 has whole: 100 bytes at the peak become 50 more on each of two ranks."""
    prediction = Prediction(
        peak_bytes=100,
        step_time_s=0.5,
        by_category_bytes={"parameter": 100},
        exposed_communication_s=0.0,
        peak_position="",
    )
    plan = plan_of(2, 2, prediction=prediction, budget_bytes=budget_bytes)

    exported = export_plan(plan, "fsdp2")

    assert [unit[1] for unit in settings_of(exported.text)["MODELS"][""]] == [reshards] * 2
    assert not any(remark.startswith("NOT THE PLAN'S MEMORY") for remark in exported.remarks)
    assert value_after(
        read_shell(export_plan(plan, "torchtitan").text), "--parallelism.fsdp_reshard_after_forward"
    ) == ("always" if reshards else "never")


def test_deepspeed_has_zeropp_by_its_names():
    changes = {"secondary_ranks": 2, "compression": Compression(gather_bits=8, reduce_bits=4)}
    zero = json.loads(export_plan(plan_of(3, 3, num_ranks=4, **changes), "deepspeed").text)[
        "zero_optimization"
    ]

    assert (
        zero["zero_hpz_partition_size"],
        zero["zero_quantized_weights"],
        zero["zero_quantized_gradients"],
    ) == (
        2,
        True,
        True,
    )


def test_all_on_disk_is_nvme_in_deepspeed_and_accelerate():
    away = units(3, 3, parameter_tier="disk", optimizer_tier="disk")
    plan = Plan(num_ranks=1, zero_stage=3, policy="chosen", units=away, disk_directory="/data/it's \u00e9")
    assert is_valid(plan)

    zero = json.loads(export_plan(plan, "deepspeed").text)["zero_optimization"]
    config = read_yaml(export_plan(plan, "accelerate").text)["deepspeed_config"]

    assert (
        zero["offload_param"]
        == zero["offload_optimizer"]
        == {"device": "nvme", "nvme_path": "/data/it's \u00e9"}
    )
    assert config["offload_param_device"] == config["offload_optimizer_device"] == "nvme"
    nowhere = export_plan(dataclasses.replace(plan, disk_directory=None), "deepspeed")
    assert any(remark.startswith("- nvme_path") for remark in nowhere.remarks)
    assert not any("some units" in difference.wanted for difference in nowhere.differences)


def test_megatron_runs_even_stretches_again_as_uniform_ones():
    plan = plan_of(0, 0, 0, 0, stretches=(("blocks.0", "blocks.1"), ("blocks.2", "blocks.3")))

    exported = export_plan(plan, "megatron")
    words = read_shell(exported.text)

    assert value_after(words, "--recompute-method") == "uniform"
    assert value_after(words, "--recompute-num-layers") == "2"
    assert not any("again" in difference.wanted for difference in exported.differences)


def test_a_plan_made_by_hand_has_no_units_to_shard():
    plan = Plan(num_ranks=2, zero_stage=3, policy="every-layer")

    with pytest.raises(PlanError, match="names no units"):
        export_plan(plan, "fsdp2")
    assert json.loads(export_plan(plan, "deepspeed").text)["zero_optimization"]["stage"] == 3


def test_an_unknown_target_is_a_users_mistake():
    with pytest.raises(UsageError, match="'horovod'"):
        export_plan(plan_of(3), "horovod")


@given(st.text() | st.sampled_from(NASTY))
def test_quoted_text_stays_text(text):
    assert printable(text).isascii()
    assert printable(text).isprintable()
    assert shlex.split(shell_array("A", [(text,)])) == ["A=(", text, ")"]
    quoted = yaml_scalar(text)
    assert quoted.isascii()
    assert ast.literal_eval(quoted) == text  # Python reads these escapes as YAML does


def test_bash_reads_the_array_and_runs_nothing(tmp_path):
    plan = dataclasses.replace(
        plan_of(3), units=(UnitPlan(name="x\ntouch made", zero_stage=3, recompute=True),)
    )
    text = export_plan(plan, "megatron").text + 'printf "%s\\n" "${MEMADVISOR_ARGS[@]}"\n'

    done = subprocess.run(["bash", "-c", text], cwd=tmp_path, capture_output=True, text=True, check=True)

    assert done.stdout.split() == read_shell(text)
    assert not list(tmp_path.iterdir())

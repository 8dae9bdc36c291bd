"""Exported FSDP2 modules train as DDP does, and hold what the plan says."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from memadvisor.engines.script.live import model_fingerprint
from memadvisor.export.export import export_plan
from memadvisor.plan import Plan, UnitPlan
from memadvisor.plan_checks import check_plan
from memadvisor.precision import Precision
from samples.train_gpt import GPT
from tests.export.test_export import settings_of
from tests.warm_python import warm_python

SCRIPT = Path(__file__).parent / "two_ways.py"
NAMES = ("tok_emb", "pos_emb", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "ln_f")


def plan_of(stage, changes=None, **of_plan):
    """Of a GPT of four blocks whose head is tied to its embedding; `changes` are of blocks."""
    model = GPT(layers=4, dim=32, heads=2, seq=16, dropout=0.1, tied=True)
    units = [UnitPlan(name=name, zero_stage=stage, recompute=False) for name in NAMES]
    units = [replace(unit, **(changes or {})) if "blocks" in unit.name else unit for unit in units]
    plan = Plan(
        fingerprint=model_fingerprint(model),
        num_ranks=2,
        zero_stage=stage,
        policy="chosen",
        units=tuple(units),
        **of_plan,
    )
    check_plan(plan, "it")
    return plan


PLANS = {
    "sharded": plan_of(3, gather_depth=1),
    "recomputed": plan_of(3, {"recompute": True}, gather_depth=2),
    "some outputs kept": plan_of(3, {"recompute": True, "kept": ("aten::addmm#2",), "reshard": False}),
    "whole": plan_of(0, {"recompute": True}),
    "in bf16": plan_of(3, precision=Precision(param_dtype="bfloat16"), gather_depth=1),
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What rank 0 and rank 1 saw, of DDP and of each plan."""
    directory = tmp_path_factory.mktemp("ranks")
    paths = []
    for name, plan in PLANS.items():
        paths.append(directory / f"{name.replace(' ', '_')}.py")
        paths[-1].write_text(export_plan(plan, "fsdp2").text)
    command = [warm_python(), str(SCRIPT)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(directory / "rendezvous"), *map(str, paths)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[2])},
        )
        for rank in range(2)
    ]
    printed = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    return [dict(zip(("ddp", *PLANS), json.loads(text), strict=True)) for text in printed]


@pytest.mark.parametrize("name", ["sharded", "recomputed", "some outputs kept", "whole"])
def test_losses_are_those_of_ddp(seen, name):
    """Bit for bit: the sum of two ranks' gradients has one order, and dropout draws the same numbers again."""
    assert [rank[name]["losses"] for rank in seen] == [rank["ddp"]["losses"] for rank in seen]


def test_16_bits_change_losses_a_little(seen):
    ours, theirs = seen[0]["in bf16"]["losses"], seen[0]["ddp"]["losses"]
    assert ours != theirs
    assert ours == pytest.approx(theirs, rel=0.02)


def test_sharded_ranks_hold_half(seen):
    whole = seen[0]["ddp"]["num_local_parameters"]
    assert seen[0]["sharded"]["num_local_parameters"] == whole / 2
    assert seen[0]["whole"]["num_local_parameters"] == whole


def test_recomputed_units_keep_their_inputs_alone(seen):
    kept = {name: rank["kept_bytes"] for name, rank in seen[0].items()}
    assert kept["recomputed"] < kept["sharded"] / 2
    assert kept["in bf16"] < kept["sharded"]


def test_what_names_reach_python_are_literals():
    plan = replace(plan_of(3), units=(UnitPlan(name='"""\nraise SystemExit', zero_stage=3, recompute=True),))
    text = export_plan(plan, "fsdp2").text

    assert settings_of(text)["MODELS"][""][0][0] == '"""\nraise SystemExit'

"""What a plan, and options, say of forwards under autocast."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given

from memadvisor.api_arguments import autocast_of
from memadvisor.autocast import autocast_loss_text, autocast_text
from memadvisor.cli.main import main
from memadvisor.errors import PlanError, UsageError
from memadvisor.plan import UnitPlan
from memadvisor.plan_checks import check_plan
from memadvisor.plan_file import plan_from_json, plan_to_json
from memadvisor.plan_words import options_text
from memadvisor.precision import Precision
from tests.engines.trainings import make_plan
from tests.export.plans import is_valid, plans


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (make_plan(1, autocast="fp16"), "needs a loss scaler"),
        (make_plan(1, autocast="int8"), "autocast 'int8'"),
        (make_plan(2, 3, autocast="bf16"), "ZeRO stage 3 of all units"),
        (
            make_plan(2, 3, "chosen", (UnitPlan(name="a", zero_stage=3, recompute=False),), autocast="bf16"),
            "ZeRO stage 3 of 'a'",
        ),
        (make_plan(2, 3, precision=Precision(param_dtype="bfloat16"), autocast="bf16"), "param_dtype"),
        (make_plan(2, 1, precision=Precision(optimizer_dtype="float32"), autocast="bf16"), "optimizer_dtype"),
        (make_plan(2, 3, executor="fsdp2", autocast="bf16"), "FSDP2"),
        (
            make_plan(1, 3, parameter_tier="disk", optimizer_tier="disk", autocast="bf16"),
            "parameters on host or disk",
        ),
    ],
)
def test_what_it_cannot_be_done_with_is_refused_in_one_line(plan, message):
    with pytest.raises(PlanError, match=message) as refused:
        check_plan(plan, "This plan")
    assert refused.value.hint and "\n" not in refused.value.one_line()


@given(plans())
def test_a_plan_has_it_wherever_weights_stay_and_comes_back(plan):
    narrow = dataclasses.replace(plan, autocast="bf16")
    stays = all(unit.stage_on(plan.num_ranks) < 3 for unit in plan.units)
    of_float32 = plan.precision.param_dtype is plan.precision.optimizer_dtype is None
    assert is_valid(narrow) == (stays and of_float32)
    if is_valid(narrow):
        assert plan_from_json(json.loads(json.dumps(plan_to_json(narrow))), "plan") == narrow
        assert ", forwards under autocast to bfloat16" in options_text(narrow)
    if plan.autocast is None:
        assert "autocast" not in plan_to_json(plan) and "autocast" not in options_text(plan)


def test_one_rank_has_no_shards_whatever_stage_its_plan_names():
    check_plan(make_plan(1, 3, autocast="bf16"), "This plan")


def test_what_is_lossy_is_said():
    assert "Losses will differ" in autocast_loss_text("bf16") and autocast_text(None) == ""


@pytest.mark.parametrize("value", ["fp16", "", 3, True, ["bf16"]])
def test_a_wrong_value_of_the_python_interface_is_one_line(value):
    with pytest.raises(UsageError, match="autocast is") as refused:
        autocast_of(value)
    assert "use bf16" in refused.value.hint
    assert autocast_of("bf16") == "bf16" and autocast_of(None) is None


@pytest.mark.parametrize(
    ("value", "why"), [("fp16", "loss scaler"), ("int8", "'int8' is not done; use bf16")]
)
@pytest.mark.parametrize("words", [["run", "script.py"], ["advise", "somewhere", "--memory", "1GiB"]])
def test_a_wrong_option_is_one_line(words, value, why, capsys):
    with pytest.raises(SystemExit) as ended:
        main([words[0], f"--autocast={value}", *words[1:]])
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


def test_a_plan_file_excludes_the_option(tmp_path, capsys):
    (script := tmp_path / "script.py").write_text("")
    assert main(["run", "--plan", str(tmp_path / "plan.json"), "--autocast", "bf16", str(script)]) == 2
    assert "--plan excludes --autocast" in capsys.readouterr().err

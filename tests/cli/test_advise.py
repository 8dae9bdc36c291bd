"""`memadvisor advise`: stable JSON, exit codes, a plan file, and names of the user's program shown as they are."""

import dataclasses
import json

import pytest

from memadvisor.analyzers.script_changes.change import ScriptChange
from memadvisor.cli.main import main
from memadvisor.plan_file import load_plan
from memadvisor.planning.advise import advise
from tests.make_run import make_run, write_run


@pytest.fixture
def run_path(tmp_path):
    return str(write_run(make_run(), tmp_path / "run"))


def test_json_has_the_stable_keys(run_path, capsys):
    assert main(["advise", run_path, "--memory", "3700000", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)

    assert value["budget_bytes"] == 3_700_000
    assert value["smallest_budget_bytes"] < 3_700_000
    keys = "rank_order fits predicted_peak_bytes predicted_step_time_s p_oom zero_stage recompute offload"
    for order, plan in enumerate(value["plans"], start=1):
        assert set(keys.split()) | {"micro_batch_size", "grad_accum", "layout", "why"} <= set(plan)
        assert (plan["rank_order"], plan["layout"]["data_parallel"], plan["p_oom"]) == (order, 2, None)


def test_a_budget_may_be_a_share_of_the_runs_highest_traced_peak(run_path, tmp_path, capsys):
    peaks = [rank.traced_step.peak_allocated_bytes for rank in make_run().ranks]
    assert main(["advise", run_path, "--memory", "62.5%", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["budget_bytes"] == max(peaks) * 5 // 8

    untraced = write_run(make_run(traced_step=None), tmp_path / "untraced")
    assert main(["advise", str(untraced), "--memory", "60%"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "Hint: `memadvisor profile --trace-step 2` traces one." in said


def test_without_a_budget_it_says_what_each_would_cost_and_how_a_plan_is_asked_for(
    run_path, tmp_path, capsys
):
    """It refused, and who asked had to know what to ask for."""
    assert main(["advise", run_path]) == 0
    said = capsys.readouterr().out
    assert "What memory buys" in said and "measured, no plan" in said and "within the budget" not in said
    assert f"memadvisor advise {run_path} --memory SIZE -o plan.json" in said

    output = tmp_path / "plan.json"
    for needing in (["-o", str(output)], ["--json"], ["--policy", "sqrt"], ["--micro-batch", "8"]):
        assert main(["advise", run_path, *needing]) == 2
        assert "--memory is missing" in capsys.readouterr().err
    assert not output.exists()


def test_a_plan_that_is_not_written_is_said_to_be_none_yet(run_path, tmp_path, capsys):
    """Who looked at plans without -o was not told how to go on."""
    assert main(["advise", run_path, "--memory", "3700000"]) == 0
    assert "with `-o plan.json` it is" in capsys.readouterr().out

    assert main(["advise", run_path, "--memory", "3700000", "-o", str(tmp_path / "plan.json")]) == 0
    assert "No plan is written" not in capsys.readouterr().out


def test_what_memory_buys_has_the_run_as_it_was_once(tmp_path, capsys):
    """The plan that changes nothing stood below it, with the same peak and time."""
    run = str(write_run(make_run(num_ranks=1), tmp_path / "run"))
    assert main(["advise", run]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    columns = [[cell.strip() for cell in line.strip("│").split("│")] for line in rows]
    measured = next(row for row in columns if row[3] == "measured, no plan")

    assert len(columns) > 1
    assert [row for row in columns if row[:2] == measured[:2]] == [measured]


def test_without_a_budget_and_a_traced_step_it_says_how_one_is_traced(tmp_path, capsys):
    assert main(["advise", str(write_run(make_run(traced_step=None), tmp_path / "untraced"))]) == 2
    assert "Hint: `memadvisor profile --trace-step 2` traces one." in capsys.readouterr().err


def test_a_run_without_a_training_step_is_said_to_be_one(tmp_path, capsys):
    """Its hint was to profile more steps of a script that has none."""
    run = make_run(traced_step=None)
    ranks = tuple(dataclasses.replace(rank, steps=()) for rank in run.ranks)
    stepless = write_run(dataclasses.replace(run, ranks=ranks), tmp_path / "stepless")

    assert main(["advise", str(stepless), "--memory", "1GiB"]) == 2
    assert "No training step was seen in this run" in capsys.readouterr().err


@pytest.mark.parametrize("share", ["0%", "0.0 %", "1e3%", "%", f"{10**30}%"])
def test_a_share_that_is_none_is_named_as_it_was_given(run_path, capsys, share):
    assert main(["advise", run_path, "--memory", share]) == 2
    assert f"{share!r} is no usable share of the run's peak" in capsys.readouterr().err


def test_the_best_plan_is_written_for_its_owner_alone(run_path, tmp_path, capsys):
    output = tmp_path / "plan.json"
    assert main(["advise", run_path, "--memory", "3700000", "-o", str(output)]) == 0

    plan = load_plan(output)
    assert plan.prediction.peak_bytes <= 3_700_000 == plan.budget_bytes
    assert output.stat().st_mode & 0o777 == 0o600
    said = capsys.readouterr().out
    assert "memadvisor run --plan" in said
    assert "More memory than the budget saves" in " ".join(
        said.split()
    )  # no GiB of which this small model could take


def test_what_runs_of_plans_teach_is_said_and_another_machines_run_is_refused(run_path, tmp_path, capsys):
    output = tmp_path / "plan.json"
    assert main(["advise", run_path, "--memory", "1GiB", "-o", str(output)]) == 0
    plan = load_plan(output)
    assert sum(plan.prediction.components_s.values()) == pytest.approx(plan.prediction.step_time_s)
    applied = write_run(make_run(plan=plan), tmp_path / "applied")
    capsys.readouterr()

    assert main(["advise", run_path, "--memory", "1GiB", "--learn", str(applied)]) == 0
    assert "Learnt from 1 run: " in " ".join(capsys.readouterr().out.split())
    assert main(["advise", run_path, "--memory", "1GiB", "--learn", run_path]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_policy_is_shown_beside_the_best_plan_and_written_in_its_place(run_path, tmp_path, capsys):
    output = tmp_path / "plan.json"
    words = ["advise", run_path, "--memory", "1GiB", "--policy", "every-layer", "-o", str(output)]
    assert main(words) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Policy every-layer: " in text and "times that of plan 1" in text
    assert "The plan of policy every-layer is written to" in text
    assert load_plan(output).recomputed_units == ("blocks.0", "blocks.1", "blocks.2")

    assert main([*words[:6], "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["policy"]["name"] == "every-layer" and value["policy"]["fits"]
    assert value["policy"]["predicted_step_time_s"] > value["plans"][0]["predicted_step_time_s"]


def test_nothing_fits_says_the_smallest_budget_writes_nothing_and_exits_1(run_path, tmp_path, capsys):
    output = tmp_path / "plan.json"
    assert main(["advise", run_path, "--memory", "1000", "-o", str(output)]) == 1

    assert not output.exists()
    text = capsys.readouterr().out
    text = " ".join(text.split())
    assert text.startswith("Budget 1000 B a rank, 2 ranks: nothing fits. Measured without a plan: ")
    assert "smallest budget that would is" in text
    assert "micro-batches as they are" not in text


@pytest.mark.parametrize(("saved_bytes", "is_said"), [(5, True), (0, False), (None, False)])
def test_where_nothing_fits_and_an_update_has_temporaries_a_fused_one_is_named(
    run_path, capsys, monkeypatch, saved_bytes, is_said
):
    change = ScriptChange(kind="fused_updates", seen="", change="", peak_saved_bytes=saved_bytes)

    def advised(*arguments, **options):
        return dataclasses.replace(advise(*arguments, **options), script_changes=(change,))

    monkeypatch.setattr("memadvisor.cli.advise.advise", advised)
    assert main(["advise", run_path, "--memory", "1000"]) == 1
    assert ("With --fused-updates it may be less." in " ".join(capsys.readouterr().out.split())) == is_said


def test_the_smallest_budget_of_another_micro_batch_is_said_to_be_one(run_path, capsys, monkeypatch):
    """Else the script would not fit where the line says that it does."""

    def advised(*arguments, **options):
        found = advise(*arguments, **options)
        return dataclasses.replace(found, smallest_budget_bytes=found.smallest_unchanged_bytes - 5)

    monkeypatch.setattr("memadvisor.cli.advise.advise", advised)
    assert main(["advise", run_path, "--memory", "1000"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    unchanged = advise(make_run(), memory_bytes=1000).smallest_unchanged_bytes
    assert f"({unchanged - 5} bytes), of a plan with smaller micro-batches; with" in text
    assert text.endswith(f"({unchanged} bytes).")


def one_rank_traced(directory, collectives=None, **process):
    """The path of a run of two ranks, of which the second has no traced step."""
    run = make_run(num_ranks=2)
    own = [
        dataclasses.replace(
            rank,
            process=dataclasses.replace(rank.process, **process),
            collectives=rank.collectives if collectives is None else collectives,
        )
        for rank in run.ranks
    ]
    alone = dataclasses.replace(own[1], steps=tuple(s for s in own[1].steps if s is not own[1].traced_step))
    return str(write_run(dataclasses.replace(run, ranks=(own[0], alone)), directory))


def test_ranks_that_differ_without_data_parallelism_are_told_so_and_not_to_measure_collectives(
    tmp_path, capsys
):
    """A learner among actors, a pipeline by hand: no plan would come of measured collectives, unless asked for by --gpus."""
    path = one_rank_traced(tmp_path / "learner", collectives=(), has_ddp=False)

    assert main(["advise", path, "--memory", "1GiB"]) == 2
    error = capsys.readouterr().err
    assert "No step of rank 1 was traced" in error and "no plan of several ranks applies" in error
    assert "calibrate" not in error and error.count("\n") == 1
    assert main(["advise", path, "--memory", "1GiB", "--gpus", "2"]) == 2
    assert "calibrate" in capsys.readouterr().err


def test_ranks_that_differ_and_keep_their_own_data_parallelism_are_not_sent_back_to_the_same_command(
    tmp_path, capsys
):
    """As torchrec's, whose ranks have other tables: the hint was to leave out options that were not there."""
    option = "parameters that DistributedDataParallel ignores"
    path = one_rank_traced(tmp_path / "tables", has_ddp=True, ddp_option=option)

    assert main(["advise", path, "--memory", "1GiB"]) == 2
    error = capsys.readouterr().err
    assert "No step of rank 1 was traced" in error and "no plan of several ranks applies" in error
    assert "without other options" not in error


def test_a_rank_without_a_record_is_named_where_times_of_collectives_are_asked_for(tmp_path, capsys):
    """Each rank's record has its own part of a collective. That nobody had measured collectives was all that was said."""
    run = make_run(num_ranks=3)
    path = str(write_run(dataclasses.replace(run, ranks=run.ranks[:1]), tmp_path / "run"))

    assert main(["advise", path, "--memory", "1GiB"]) == 2
    error = capsys.readouterr().err
    assert "Nothing is known of ranks 1, 2 of 3" in error and "rank1.*.journal" in error
    assert error.count("\n") == 1


def test_a_rank_without_a_record_is_no_fault_of_a_script_whose_parallelism_is_its_own(tmp_path, capsys):
    run = make_run(num_ranks=2)
    rank = run.ranks[0]
    own = dataclasses.replace(rank, process=dataclasses.replace(rank.process, has_ddp=False))
    path = str(write_run(dataclasses.replace(run, ranks=(own,)), tmp_path / "run"))

    assert main(["advise", path, "--memory", "1GiB"]) == 2
    error = capsys.readouterr().err
    assert "Nothing is known of rank 1 of 2" in error and "rank1.*.journal" in error
    assert "parallelism is its own" not in error and error.count("\n") == 1


def test_stages_of_a_pipeline_by_hand_get_no_plans_of_data_parallel_ranks(tmp_path, capsys):
    """Ranks that train other models, each in groups of its own: plans of ZeRO among all of them were written, which no run could
    take, whatever the script wraps its model in."""
    run = make_run(num_ranks=2)
    first, second = (
        dataclasses.replace(rank, process=dataclasses.replace(rank.process, has_ddp=False))
        for rank in run.ranks
    )
    last = second.parameters[-1]
    second = dataclasses.replace(
        second, parameters=tuple(p for p in second.parameters if p.unit != last.unit)
    )
    path = str(write_run(dataclasses.replace(run, ranks=(first, second)), tmp_path / "run"))

    assert main(["advise", path, "--memory", "1GiB", "-o", str(tmp_path / "plan.json")]) == 2
    error = capsys.readouterr().err
    assert "Rank 1 has other units" in error and "no plan of several ranks applies" in error
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--memory", "10GBB"], "10GBB"),
        (["--memory", "1GiB", "--gpus", "0"], "--gpus 0"),
        (["--memory", "1GiB", "--hardware", "B9000"], "B9000"),
        (["--memory", "1GiB", "-o", "/nowhere/plan.json"], "/nowhere/plan.json"),
        (["--memory", "1GiB", "--policy", "often"], "no policy 'often'"),
        (["--memory", "1000", "--policy", "sqrt"], "The policy sqrt needs"),
        (["--memory", "1GiB", "--optimizer-bits", "8"], "calibrate"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(run_path, capsys, words, message):
    assert main(["advise", run_path, *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_directory_that_is_no_run_is_one_line_and_exit_code_2(tmp_path, capsys):
    assert main(["advise", str(tmp_path), "--memory", "1GiB"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_names_of_the_users_program_are_shown_as_they_are(tmp_path, capsys):
    """A unit called `[red]x` with an escape character is printed, not obeyed."""
    run = make_run(num_ranks=1)
    name = "[red]x[/0]\x1b[31m"

    def renamed(rows):
        return tuple(dataclasses.replace(row, unit=name) if row.unit == "blocks.0" else row for row in rows)

    rank = run.ranks[0]
    rank = dataclasses.replace(
        rank,
        units=tuple(dataclasses.replace(u, name=name) if u.name == "blocks.0" else u for u in rank.units),
        **{
            table: renamed(getattr(rank, table))
            for table in ("storages", "saved", "spans", "parameters", "modules")
        },
    )
    path = write_run(dataclasses.replace(run, ranks=(rank,)), tmp_path / "run")
    budget = run.ranks[0].traced_step.peak_allocated_bytes - 100_000
    main(["advise", str(path), "--memory", str(budget)])
    text = "".join(capsys.readouterr().out.split())

    assert "[red]x[/0]\\x1b[31m" in text
    assert "\x1b[31m" not in text


def test_a_precision_is_asked_for_and_restricts_the_stages(run_path, tmp_path, capsys):
    output = tmp_path / "plan.json"
    words = ["advise", run_path, "--memory", "3700000", "--json", "-o", str(output)]
    assert main([*words, "--param-dtype", "bf16"]) == 0
    value = json.loads(capsys.readouterr().out)

    assert {unit["zero_stage"] for plan in value["plans"] for unit in plan["units"]} == {3}
    assert value["plans"][0]["precision"] == {
        "param_dtype": "bfloat16",
        "reduce_dtype": None,
        "optimizer_dtype": None,
    }
    assert " on 2 ranks, computes in bfloat16" in value["plans"][0]["why"]
    assert value["notes"][0].startswith("Every plan is lossy: modules compute in bfloat16")
    assert load_plan(output).precision.param_dtype == "bfloat16"

    assert main([*words, "--reduce-dtype", "fp16"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert {unit["zero_stage"] for plan in value["plans"] for unit in plan["units"]} == {2, 3}


def test_compression_is_asked_for_restricts_the_stages_and_sends_less(run_path, capsys):
    words = ["advise", run_path, "--memory", "3700000", "--json"]
    assert main(words) == 0
    plain = json.loads(capsys.readouterr().out)
    assert main([*words, "--reduce-bits", "8"]) == 0
    value = json.loads(capsys.readouterr().out)

    assert {unit["zero_stage"] for plan in value["plans"] for unit in plan["units"]} == {2, 3}
    uncompressed = dict.fromkeys(
        ("gather_bits", "reduce_bits", "all_reduce_bits", "all_reduce_top", "all_reduce_rank")
    )
    sent = {plan["zero_stage"]: plan["predicted_sent_bytes"] for plan in reversed(plain["plans"])}
    for plan in value["plans"]:
        assert plan["compression"] == {**uncompressed, "reduce_bits": 8}
        assert plan["predicted_sent_bytes"] < sent[plan["zero_stage"]]
        assert ", reduces in 8 bits" in plan["why"]
    assert value["notes"][0].startswith("Every plan is lossy: gradients are rounded to 8 bits")
    assert all(plan["compression"] == uncompressed for plan in plain["plans"])
    assert main([*words, "--all-reduce-bits", "1"]) in (0, 1)
    value = json.loads(capsys.readouterr().out)
    assert {unit["zero_stage"] for plan in value["plans"] for unit in plan["units"]} == {0, 1}
    assert all(plan["predicted_sent_bytes"] < sent[plan["zero_stage"]] for plan in value["plans"])
    assert main([*words, "--all-reduce-bits", "1", "--param-dtype", "bf16"]) == 2
    assert "both this precision and this compression" in capsys.readouterr().err

    assert main(["advise", run_path, "--memory", "1GiB", "--gpus", "1", "--reduce-dtype", "bf16"]) == 2
    assert "one rank has none" in capsys.readouterr().err

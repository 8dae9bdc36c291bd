"""`memadvisor export`: text on stdout or in a private file, remarks on stderr, mistakes in one line."""

import json
import stat

import pytest

from memadvisor.cli.main import main
from memadvisor.export.export import TARGETS
from memadvisor.plan import Plan, UnitPlan
from memadvisor.plan_file import save_plan


@pytest.fixture
def path(tmp_path):
    units = tuple(UnitPlan(name=f"blocks.{i}", zero_stage=3, recompute=i == 0) for i in range(3))
    save_plan(Plan(num_ranks=2, zero_stage=3, policy="chosen", units=units), tmp_path / "plan.json")
    return tmp_path / "plan.json"


@pytest.mark.parametrize("target", TARGETS)
def test_output_is_the_text_alone_for_its_owner_alone(path, target, capsys):
    out = path.parent / "out"

    assert main(["export", str(path), "--to", target]) == 0
    printed = capsys.readouterr().out
    assert main(["export", str(path), "--to", target, "-o", str(out)]) == 0

    assert out.read_text() == printed
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert sorted(p.name for p in path.parent.iterdir()) == ["out", "plan.json"]


def test_json_has_its_remarks_on_stderr(path, capsys):
    main(["export", str(path), "--to", "deepspeed"])

    captured = capsys.readouterr()
    assert json.loads(captured.out)["zero_optimization"]["stage"] == 3
    assert "blocks.0 recomputed: nothing by itself" in captured.err
    assert "NOT THE PLAN'S MEMORY" in captured.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--to", "horovod"], "'horovod' is no engine"),
        (["--to", "fsdp2", "-o", "/nowhere/at/all"], "cannot be written"),
        ([], "--to"),
    ],
)
def test_mistakes_are_one_line(path, words, says, capsys):
    try:
        code = main(["export", str(path), *words])
    except SystemExit as exit_:
        code = exit_.code

    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert says in captured.err
    assert captured.err.count("\n") == 1


def test_what_is_no_plan_is_one_line(tmp_path, capsys):
    (tmp_path / "plan.json").write_text("[]")

    assert main(["export", str(tmp_path / "plan.json"), "--to", "deepspeed"]) == 2
    assert "is not a plan" in capsys.readouterr().err

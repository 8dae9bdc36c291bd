import dataclasses
import io
import json

import pytest
from rich.console import Console

from memadvisor.analyzers.analysis import analyze
from memadvisor.analyzers.run_difference import run_difference
from memadvisor.cli.diff_sections import sections
from memadvisor.cli.main import main
from memadvisor.cli.printing import print_sections
from memadvisor.run.records import TABLES
from tests.analyzers.test_comparison import PLAN
from tests.make_run import make_run, write_run
from tests.report.hostile import hostile_run


def shown(before, after, width=110):
    """What a pipe would get, each run of spaces as one."""
    file = io.StringIO()
    found = run_difference(analyze(before), analyze(after))
    print_sections(sections(found, width), Console(file=file, width=width))
    assert max(map(len, file.getvalue().splitlines())) <= width
    return " ".join(file.getvalue().split())


def test_the_terminal_says_what_changed(tmp_path, capsys):
    """Of one block more: 4 bytes for each of 49 152 parameters, 8 ms forward and 16 backward, 8 calls of mm."""
    runs = [make_run(plan=PLAN), make_run(num_blocks=4)]
    directories = [write_run(run, tmp_path / str(number)) for number, run in enumerate(runs)]
    assert main(["diff", *map(str, directories)]) == 0

    captured = capsys.readouterr()
    out = " ".join(captured.out.split())
    for words in (
        "the runs differ in number of parameters, so that what follows compares different work",
        "plan for 2 ranks, policy none, ZeRO stage 0 -> none",
        "all figures are measured",
        "Model states when the optimizer step begins, rank 0",
        "parameter 832 KiB 1.00 MiB +192 KiB +23.1 %",
        "median step 102 ms 126 ms +24.0 ms +23.5 %",
        "too few steps to tell a difference from noise (Mann-Whitney, 95 %, on 3 and 3 steps",
        "MFU not recorded not recorded -",
        "blocks.3.mlp.up no module 128 KiB only after",
        "mm 26 34",
    ):
        assert words in out, words
    assert "\x1b" not in captured.out


def test_json_has_before_after_and_the_difference(tmp_path, capsys):
    runs = [make_run(num_steps=13), make_run(num_steps=13, block_s=0.009)]
    directories = [write_run(run, tmp_path / str(number)) for number, run in enumerate(runs)]
    assert main(["diff", *map(str, directories), "--json"]) == 0

    value = json.loads(capsys.readouterr().out)
    assert (value["format"], value["kind"], value["settings"]) == (1, "measured", [])
    time = value["ranks"][1]["step_time"]
    assert time["median_s"]["difference"] == pytest.approx(0.009)
    assert time["test"]["is_significant"]
    assert value["ranks"][0]["peak"]["allocated_bytes"]["difference"] == 0
    assert value["ranks"][0]["mfu"] == dict.fromkeys(("before", "after", "difference", "change_fraction"))


def test_a_run_and_itself_are_the_same():
    words = shown(make_run(num_steps=13), make_run(num_steps=13))

    assert "What differs nothing of script" in words
    assert "not significant: within the steps' own noise: same" in words
    assert "the same calls of the same length" in words
    assert "+" not in words.replace("2.13.0+cpu", "")


def test_a_longer_step_is_said_to_be_more_than_noise():
    words = shown(make_run(num_steps=13), make_run(num_steps=13, block_s=0.009))

    assert "longer by more than the steps' own noise: +9.00 ms, between +9.00 ms and +9.00 ms" in words


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ({}, {"num_ranks": 1}, "only before rank 1 is not in synthetic-run"),
        ({"num_ranks": 1}, {"num_ranks": 3}, "only after ranks 1, 2 are not in synthetic-run"),
        ({"missing_ranks": (0,)}, {"missing_ranks": (1,)}, "no rank is recorded in both runs"),
        ({}, {"exit_code": None}, "no ending: killed, or still running"),
        ({}, {"problems": ("rank0.journal: torn",)}, "problem rank0.journal: torn"),
        ({}, {"traced_step": None}, "3.87 MiB not recorded -"),
        ({}, {"num_steps": 0}, "102 ms not recorded -"),
        ({"num_steps": 0}, {"num_steps": 0}, "Memory not recorded in either run"),
        (
            {},
            {"device": "cuda:0", "device_name": "NVIDIA H200"},
            "the runs differ in device, device name, so that",
        ),
    ],
)
@pytest.mark.parametrize("width", [40, 80, 200])
def test_runs_of_any_kind_are_compared_with_what_is_known(before, after, words, width):
    text = shown(make_run(**before), make_run(**after), width)

    if width >= 80:
        assert words in text


@pytest.mark.parametrize("table", TABLES)
def test_a_run_that_lost_a_table_is_compared_without_it(table):
    run = make_run(plan=PLAN)
    lost = dataclasses.replace(
        run, ranks=tuple(dataclasses.replace(rank, **{table: ()}) for rank in run.ranks)
    )

    assert "train_gpt.py" in shown(run, lost)
    assert "train_gpt.py" in shown(lost, run)


def test_names_from_the_users_program_are_shown_as_they_are():
    text = shown(hostile_run(), make_run())

    assert "layers[/0]<b>%{y}</b>&amp;" in text
    assert "\x1b" not in text


@pytest.mark.parametrize(
    "arguments", [["{run}"], ["{run}", "no/such/run"], ["{run}", "{run}", "--peak-tflops", "-1"]]
)
def test_a_users_mistake_is_one_line_and_code_2(arguments, tmp_path, capsys):
    run = write_run(make_run(), tmp_path / "run")
    try:
        code = main(["diff", *(a.format(run=run) for a in arguments)])
    except SystemExit as end:
        code = end.code

    captured = capsys.readouterr()
    assert (code, captured.out, len(captured.err.splitlines())) == (2, "", 1)
    assert captured.err.startswith("memadvisor diff: ")


def test_a_page_is_written_and_its_path_alone_printed(tmp_path, capsys):
    directories = [write_run(make_run(num_blocks=n), tmp_path / str(n)) for n in (1, 2)]
    page = tmp_path / "diff.html"
    assert main(["diff", *map(str, directories), "-o", str(page)]) == 0

    assert capsys.readouterr().out == f"{page}\n"
    assert "different work" in page.read_text()


def test_a_page_and_json_are_not_asked_for_together(tmp_path, capsys):
    directory = write_run(make_run(num_blocks=1), tmp_path / "run")
    with pytest.raises(SystemExit) as ended:
        main(["diff", str(directory), str(directory), "--json", "-o", str(tmp_path / "diff.html")])

    assert ended.value.code == 2
    assert "not allowed with" in capsys.readouterr().err
    assert not (tmp_path / "diff.html").exists()


def test_shares_of_a_step_differ_by_points():
    out = shown(make_run(num_steps=8), make_run(num_steps=8, rank_delay_s=0.01))

    assert "points" in out.partition("exposed, of the step")[2].partition("Kept for")[0]

import dataclasses
import io
import json
import os
import subprocess
import sys

import pytest
from rich.console import Console

from memadvisor.analyzers.analysis import analyze
from memadvisor.analyzers.script_changes.change import ScriptChange
from memadvisor.cli.main import main
from memadvisor.cli.show import _short_peak, print_analysis, print_summary
from memadvisor.errors import UsageError
from memadvisor.run.documents import Note
from memadvisor.run.records import TABLES
from tests.analyzers.test_comparison import PLAN
from tests.make_run import make_run, stopped, write_run
from tests.report.rendered import rendered


@pytest.fixture
def run_directory(tmp_path):
    return write_run(make_run(plan=PLAN), tmp_path / "run")


def shown(run, width=110, printer=None):
    """What a pipe would get."""
    file = io.StringIO()
    console = Console(file=file, width=width)
    (printer or print_analysis)(analyze(run), console)
    return file.getvalue()


def test_json_is_one_object_and_nothing_else(run_directory, capsys):
    assert main(["show", str(run_directory), "--json"]) == 0

    captured = capsys.readouterr()
    assert json.loads(captured.out)["ranks"][0]["peak"]["allocated_bytes"] == 4_052_872
    assert captured.err == ""


def test_the_summary_answers_each_question(run_directory, capsys):
    """Figures worked out by hand: 16 bytes for each of 212 992 parameters, steps of 102 ms."""
    assert main(["show", str(run_directory)]) == 0

    out = capsys.readouterr().out
    for words in (
        "train_gpt.py --blocks 3",
        "Peak memory  3.87 MiB  in backward of blocks.2",
        "unexplained",
        "16.00 B each; theory: ZeRO stage 0 on 2 ranks",
        "Step time  102 ms",
        "MFU not recorded: no peak FLOP/s of float32 known for synthetic processor",
        "Communication  832 KiB in 5 operations",
        "spread of step time 0.0 %",
        "+23.4 %",
        "the budget of 4.29 MiB held",
    ):
        assert words in out, words
    assert "\x1b" not in out


def test_a_given_peak_makes_mfu(run_directory, capsys):
    """143 278 080 FLOPs in 102 ms against 1e10 FLOP/s are 14.0 %."""
    assert main(["show", str(run_directory), "--peak-tflops", "0.01"]) == 0

    out = capsys.readouterr().out
    assert "MFU 14.0 %" in out
    assert "10.0 GFLOP/s in float32 (synthetic processor, given)" in out


def test_named_hardware_makes_mfu_and_says_it_is_a_datasheet(run_directory, capsys):
    assert main(["show", str(run_directory), "--hardware", "H200", "--json"]) == 0

    used = json.loads(capsys.readouterr().out)["ranks"][0]["utilization"]
    assert used["hardware_kind"] == "datasheet"
    assert used["mfu"] == pytest.approx(143_278_080 / 0.102 / used["peak_flops_per_s"])


def test_a_device_that_the_catalogue_knows_needs_no_option(tmp_path, capsys):
    run = make_run(device="cuda:0", device_name="NVIDIA H200")
    assert main(["show", str(write_run(run, tmp_path / "run")), "--json"]) == 0

    assert json.loads(capsys.readouterr().out)["ranks"][0]["utilization"]["hardware_kind"] == "datasheet"


@pytest.mark.parametrize(
    "arguments",
    [
        ["no/such/run"],
        ["{run}", "--peak-tflops", "fast"],
        ["{run}", "--peak-tflops", "-1"],
        ["{run}", "--peak-tflops", "inf"],
        ["{run}", "--hardware", "abacus"],
    ],
)
def test_a_users_mistake_is_one_line_and_code_2(arguments, run_directory, capsys):
    assert main(["show", *(a.format(run=run_directory) for a in arguments)]) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert captured.err.startswith("memadvisor show: ")


def test_a_hint_tells_how_to_write_the_peak(run_directory):
    from memadvisor.cli.show import choose_hardware

    with pytest.raises(UsageError) as raised:
        choose_hardware(make_run(), None, "fast")
    assert "989" in raised.value.one_line()


HOSTILE = "layers[/0][red]x\x1b[31m<script>"


def test_names_from_the_users_program_are_shown_as_they_are():
    """No markup is read and no control character reaches the terminal."""
    run = make_run(problems=(HOSTILE,), notes=(Note(level="warning", text=HOSTILE, time_s=None),))

    for text in (shown(run), shown(run, printer=print_summary)):
        assert text.count("layers[/0][red]x[31m<script>") == 2
        assert "\x1b" not in text


INCOMPLETE = [
    {"num_steps": 0, "exit_code": None},
    {"num_steps": 0, "exit_code": 1, "exception": "ValueError"},
    {"num_steps": 1, "traced_step": None},
    {"traced_step": None, "missing_ranks": (1,)},
    {"num_steps": 4, "traced_step": 3},
    {"num_steps": 1, "traced_step": 0},
]


@pytest.mark.parametrize("changes", INCOMPLETE)
@pytest.mark.parametrize("width", [40, 80, 200])
def test_incomplete_runs_are_shown_with_what_is_known(changes, width):
    run = make_run(**changes)

    assert "not recorded" in shown(run, width)
    assert max(map(len, shown(run, width).splitlines())) <= width


@pytest.mark.parametrize("table", TABLES)
def test_a_run_that_lost_a_table_is_shown_without_it(table):
    run = make_run(plan=PLAN)
    run = dataclasses.replace(
        run, ranks=tuple(dataclasses.replace(rank, **{table: ()}) for rank in run.ranks)
    )

    assert "train_gpt.py" in shown(run)
    assert ("the traced step's record is lost" in " ".join(shown(run).split())) == (table == "storages")


def test_of_a_lost_trace_nothing_is_said_that_only_a_trace_shows(tmp_path, capsys):
    """That no rank communicated, that the script wastes nothing or that no step was traced would be made up."""
    run = lost_trace()
    directory = str(write_run(run, tmp_path / "run"))
    said = " ".join(shown(run).split())
    page = rendered(analyze(run))
    steps = page.partition("What to do next")[2].partition("</ol>")[0]

    assert "Communication not recorded: the traced step's record is lost" in said
    assert "Utilization FLOPs not recorded: the traced step's record is lost" in said
    assert "<li>The traced step&#x27;s record is lost" in steps and "profile the script again" in steps
    for untrue in ("None found", "had no optimizer step", "no collective ran", "more steps"):
        assert untrue not in page
    assert main(["check", directory, "--max-peak", "1GiB", "--max-unexplained", "1%"]) == 1
    assert "no step was traced" not in capsys.readouterr().out
    assert main(["advise", directory, "--memory", "1GiB"]) == 2
    assert "The traced step's record is lost" in capsys.readouterr().err


def lost_trace():
    """As damage in the middle leaves a run: its steps are there, and nothing of the traced one."""
    run = make_run(num_ranks=1)
    lost = dict.fromkeys(("storages", "residuals", "saved", "operators", "collectives", "module_calls"), ())
    rank = dataclasses.replace(run.ranks[0], **lost)
    return dataclasses.replace(run, ranks=(rank,), problems=("rank0.journal: checksum mismatch",))


def test_a_killed_run_and_one_that_raised_say_so():
    run = make_run(exit_code=None, num_ranks=2)
    dead, alive = (dataclasses.replace(run.ranks[0], is_alive=each) for each in (False, True))
    of = lambda *ranks: shown(dataclasses.replace(run, ranks=ranks))  # noqa: E731
    other = run.ranks[1]

    assert "no ending: killed, or still running" in shown(run)
    assert "ended without a word (killed?), last record 20" in of(dead, other)
    assert "still running" in of(alive, dataclasses.replace(other, is_alive=True))
    assert "no ending: killed, or still running" in of(alive, other)
    assert "not recorded to its end" in of(*(stopped(rank) for rank in run.ranks))
    assert "unfinished rank 0: not recorded to its end; 8 steps" in of(stopped(alive), other)
    assert "exit code 1 (ValueError)" in shown(make_run(exit_code=1, exception="ValueError"))
    without_one = shown(make_run(missing_ranks=(1,)))
    assert "missing rank 1: no record" in without_one
    assert "exit code 0 on the ranks that left a record" in without_one


def test_the_closing_summary_is_short():
    text = shown(make_run(), printer=print_summary)

    assert len(text.splitlines()) <= 12
    for words in ("peak", "states", "step", "tokens/s", "exposed"):
        assert words in text


def test_the_closing_summary_says_what_to_change_and_what_that_saves():
    """It said how much was held, and left what to do about it to other commands."""
    analysis = analyze(make_run(num_ranks=1))
    peak_bytes = analysis.ranks[0].peak.allocated_bytes
    change = ScriptChange(
        kind="stale_gradients", seen="Seen.", change="Do.", peak_saved_bytes=peak_bytes // 2
    )
    rank = dataclasses.replace(analysis.ranks[0], script_changes=(change,))
    console = Console(width=110, record=True, file=io.StringIO())
    print_summary(dataclasses.replace(analysis, ranks=(rank,)), console)
    said = " ".join(console.export_text().split())

    assert f"each by itself: {change.saved_in_words}: `zero_grad` before the forward" in said


def test_the_closing_summary_says_where_there_is_nothing_worth_changing():
    """It said nothing then, as of a run that nobody had looked into."""
    run = make_run(num_ranks=1)
    rank = dataclasses.replace(analyze(run).ranks[0], checkpointing=None, script_changes=())
    analysis = dataclasses.replace(analyze(run), ranks=(rank,))
    file = io.StringIO()
    print_summary(analysis, Console(file=file, width=110))

    assert "change       none was found that saves 5.0 % of the peak or of a step" in file.getvalue()


def test_what_makes_a_step_long_is_in_the_closing_summary():
    """Communication that nothing hides, and operators that are over as soon as they have begun."""
    run = make_run(num_ranks=2)
    analysis = analyze(run)
    step_s = run.ranks[0].traced_step.duration_s
    traffic = dataclasses.replace(analysis.ranks[0].communication, exposed_s=0.4 * step_s)
    ranks = tuple(dataclasses.replace(rank, communication=traffic) for rank in analysis.ranks)
    said = " ".join(_summed_up(dataclasses.replace(analysis, ranks=ranks)).split())

    assert "slow Communication without compute beside it takes 40.0 % of the traced step" in said
    assert "`run --all-reduce-bits 8` sends fewer bytes (lossy)" in said

    run = make_run(num_ranks=1)
    [rank] = run.ranks
    median_s = analyze(run).ranks[0].step_time.median_s
    for each_s, is_said in ((5e-6, True), (50e-6, False)):
        many = int(median_s / each_s / len(rank.operators)) + 1
        short = dataclasses.replace(rank, operators=rank.operators * many)
        said = " ".join(_summed_up(analyze(dataclasses.replace(run, ranks=(short,)))).split())
        assert ("A larger micro-batch gives each more to do" in said) == is_said


def test_what_the_script_holds_beside_its_training_is_named_where_it_is_much():
    """A data set in memory was most of a peak, and all that was said to change was the model."""
    run = make_run(num_ranks=1)
    [rank] = run.ranks
    size_bytes = analyze(run).ranks[0].peak.allocated_bytes
    own = dataclasses.replace(
        rank.storages[0],
        storage_id=10**6,
        category="other",
        module="",
        unit="",
        size_bytes=size_bytes,
        birth_s=rank.traced_step.start_s,
        death_s=None,
        dtype="float32",
        shape="[8, 2048, 2048]",
        phase="baseline",
    )
    steps = tuple(
        dataclasses.replace(step, peak_allocated_bytes=2 * size_bytes) if step.traced else step
        for step in rank.steps
    )
    held = dataclasses.replace(rank, storages=(*rank.storages, own), steps=steps)
    analysis = analyze(dataclasses.replace(run, ranks=(held,)))

    for said in (" ".join(_summed_up(analysis).split()), rendered(analysis)):
        assert "50.7 % of the peak is other, tensors that the script holds beside the training" in said
        assert "(float32 [8, 2048, 2048])" in said
    assert "is other" not in _summed_up(analyze(run))


def _summed_up(analysis):
    file = io.StringIO()
    print_summary(analysis, Console(file=file, width=110))
    return file.getvalue()


def test_a_unit_that_is_called_by_a_number_alone_is_called_a_module_too():
    """`backward of 0, rank 0` was where a plain nn.Sequential peaked."""
    run = make_run(num_ranks=1)
    analysis = analyze(run)
    at = lambda unit: dataclasses.replace(analysis.ranks[0].peak, position=f"backward of {unit}")  # noqa: E731
    for unit, said in (("0", "module 0"), ("2.1", "module 2.1"), ("blocks.2", "blocks.2"), ("2.up", "2.up")):
        rank = dataclasses.replace(analysis.ranks[0], peak=at(unit))
        found = dataclasses.replace(analysis, ranks=(rank,))
        assert f" in backward of {said}:" in _summed_up(found)
        assert f" in backward of {said}; " in rendered(found)


def test_what_the_closing_summary_leaves_unnamed_of_the_peak_is_less_than_what_it_names():
    """Four categories of a fifth each once left "all else" the largest of them."""
    analysis = analyze(make_run())
    rank = analysis.ranks[0]
    sizes = dict.fromkeys(("activation", "optimizer_state", "parameter", "gradient", "communication"), 20)
    peak = dataclasses.replace(rank.peak, by_category_bytes={**sizes, "input": 2, "other": 1})
    analysis = dataclasses.replace(analysis, ranks=(dataclasses.replace(rank, peak=peak),))

    assert "communication 20 B, all else 3 B" in _short_peak(analysis).text.plain


def test_the_straggler_is_named():
    assert "the others wait most for rank 2" in shown(make_run(num_ranks=3, rank_delay_s=0.001))


def test_what_of_the_ranks_is_of_the_traced_step_is_said():
    """Beside the step's own time, which is a median of others and may be less than what a traced one computes."""
    said = " ".join(shown(make_run(num_ranks=2)).split())

    assert "compute and waits are of the traced step" in said


def test_ranks_that_took_unequal_numbers_of_steps_are_not_said_to_have_taken_the_firsts():
    """As under torch's Join, where ranks have inputs of uneven length."""
    run = make_run(num_ranks=2)
    short = dataclasses.replace(run.ranks[0], steps=run.ranks[0].steps[:-3])
    uneven = dataclasses.replace(run, ranks=(short, run.ranks[1]))

    assert "| 8 steps |" in shown(run)
    assert "| 5 to 8 steps |" in shown(uneven)
    assert "5 to 8 steps" in rendered(analyze(uneven))


def test_what_all_ranks_process_is_called_so_where_there_are_several():
    of_one, of_two = (" ".join(shown(make_run(num_ranks=n)).split()) for n in (1, 2))

    assert "k tokens/s over all ranks" in of_two
    assert "k tokens/s;" in of_one and "tokens/s over all ranks" not in of_one


def test_many_units_and_ranks_stay_within_a_few_screens():
    text = shown(make_run(num_ranks=20, num_blocks=60, num_steps=5))

    assert len(text.splitlines()) < 120
    assert "4 more" in text


def test_a_reader_that_stops_early_is_no_error(run_directory):
    """As `memadvisor show RUN --json | head -1` does."""
    command = [sys.executable, "-m", "memadvisor", "show", str(run_directory), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        errors = process.stderr.read()
        code = process.wait(timeout=60)

    assert (code, errors) == (0, b"")


def test_an_output_that_knows_only_ascii_gets_question_marks_for_bars(run_directory):
    command = [sys.executable, "-m", "memadvisor", "show", str(run_directory)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "FORCE_COLOR": "1"}
    done = subprocess.run(command, capture_output=True, timeout=60, env=environment, check=False)

    assert (done.returncode, done.stderr) == (0, b"")
    assert b"Peak memory  3.87 MiB" in done.stdout
    assert b"\x1b" not in done.stdout


def test_an_allocators_peak_without_a_traced_step_is_shown_alone():
    """CUDA keeps a peak in every step."""
    run = make_run(traced_step=None, device="cuda:0", num_ranks=1)
    rank = run.ranks[0]
    steps = tuple(dataclasses.replace(step, peak_allocated_bytes=3 * 2**20) for step in rank.steps)
    run = dataclasses.replace(run, ranks=(dataclasses.replace(rank, steps=steps),))

    for text in (shown(run), shown(run, printer=print_summary)):
        assert "3.00 MiB by the allocator; its breakdown is not recorded: no traced step" in text


def test_a_higher_peak_in_another_step_is_named():
    run = make_run(device="cuda:0", num_ranks=1)
    rank = run.ranks[0]
    steps = (dataclasses.replace(rank.steps[0], peak_allocated_bytes=5 * 2**20), *rank.steps[1:])
    run = dataclasses.replace(run, ranks=(dataclasses.replace(rank, steps=steps),))

    for text in (shown(run), shown(run, printer=print_summary)):
        assert "had a higher peak, the highest 5.00 MiB in step 0" in " ".join(text.split())


def test_a_run_of_two_steps_says_what_its_time_is_of_and_how_one_is_traced():
    """Both are warm-up."""
    run = make_run(num_ranks=1, traced_step=None, num_steps=2)
    whole, closing = " ".join(shown(run).split()), " ".join(shown(run, printer=print_summary).split())

    for text in (whole, closing, rendered(analyze(run))):
        assert "of step 1, a warm-up step: no step was steady" in text
        assert "1 steady step" not in text
        assert "--trace-step 1" in text

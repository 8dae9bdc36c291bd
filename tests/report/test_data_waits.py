"""How every view speaks of waiting for data, of runs whose waits are known.

A step of the synthetic run takes 95 ms and what is outside its phases: 100 ms with 5 of that.
"""

import dataclasses
import io
import json
import re

import pytest
from rich.console import Console

from memadvisor.analyzers.analysis import analysis_to_json, analyze
from memadvisor.analyzers.run_difference import run_difference
from memadvisor.cli.diff_json import difference_to_json
from memadvisor.cli.diff_sections import sections
from memadvisor.cli.printing import print_sections
from memadvisor.cli.show import print_analysis, print_summary
from memadvisor.report.data_waits import NOT_RECORDED, waits_in_words, workers_in_words
from memadvisor.run.loader_records import DataWait, LoaderInfo
from memadvisor.run.store import load_run
from tests.make_run import make_run, write_run
from tests.report.rendered import rendered
from tests.tui.test_app import drive, screen_text

LONG, SHORT = 0.105, 0.005  # outside the phases: of a step of 200 ms, and of one of 100


def waiting(wait_s, outside_s=LONG, workers=(0,), num_ranks=1, later_s=0.0, more=()):
    """Every step waits so long, for as many loaders; rank r by `later_s` r longer."""
    run = make_run(num_ranks=num_ranks, outside_s=outside_s, num_steps=12)
    loaders = tuple(
        LoaderInfo(number, count, 2 if count else None, False, False, 4)
        for number, count in enumerate(workers)
    )
    ranks = []
    for number, rank in enumerate(run.ranks):
        each_s = (wait_s + number * later_s) / len(workers)
        waits = [
            DataWait(step.index, loader.loader, "outside", False, 1, each_s, each_s, 0, 0.0)
            for step in rank.steps
            for loader in loaders
        ]
        ranks.append(dataclasses.replace(rank, data_loaders=loaders, data_waits=(*waits, *more)))
    return dataclasses.replace(run, ranks=tuple(ranks))


def facts(run):
    result = analyze(run).ranks[0]
    return waits_in_words(result.step_time, result.data_waits)


def printed(found, printer, width=110):
    file = io.StringIO()
    printer(found, Console(file=file, width=width))
    return " ".join(file.getvalue().split())


def shown(run):
    return printed(analyze(run), print_analysis)


def closing(run):
    return printed(analyze(run), print_summary)


def next_steps(run):
    page = rendered(analyze(run))
    return page[page.index("What to do next") :].partition("</ol>")[0]


def test_the_wait_its_share_and_the_workers_are_said():
    assert facts(waiting(0.05)) == ["waiting for the DataLoader 50.0 ms, 25.0 % of a step (0 workers)"]


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        ((1,), "1 worker"),
        ((0, 4), "2 of them, 0 and 4 workers"),
        ((2, 2), "2 of them, 2 workers each"),
        ((0, 1, 2, 3), "4 of them, 0 to 3 workers"),
    ],
)
def test_loaders_and_workers_are_counted(workers, words):
    waits = analyze(waiting(0.05, workers=workers)).ranks[0].data_waits

    assert workers_in_words(waits) == words


def test_what_is_not_the_usual_wait_is_told_apart():
    """An epoch that begins, a validation, a closure, a device that had work meanwhile."""
    begun = [DataWait(step, 0, "outside", False, 1, 2.0, 2.0, 1, 2.0) for step in (5, 9)]
    validated = DataWait(6, 0, "outside", True, 12, 0.25, 0.25, 0, 0.0)
    inside = [DataWait(step, 0, "optimizer", False, 1, 0.01, 0.01, 0, 0.0) for step in range(12)]
    hidden = [DataWait(step, 0, "outside", False, 0, 0.0, 0.03, 0, 0.0) for step in range(12)]

    assert facts(waiting(0.01, more=(*begun, validated, *inside, *hidden)))[1:] == [
        "the first batch of a pass over the data took 2.00 s (up to 2.00 s), in 2 steps",
        "the script itself waited 40.0 ms for its batches, most of it while the device still had work",
        "10.0 ms of waiting is inside the other phases",
        "evaluations waited 250 ms for 12 batches in 1 step, part of outside",
    ]


def test_a_run_without_a_loader_says_that_it_was_not_recorded():
    assert facts(make_run()) == [NOT_RECORDED]
    assert NOT_RECORDED in shown(make_run())
    assert "DataLoader" not in closing(make_run())


def test_show_and_the_page_say_it():
    words = "waiting for the DataLoader 50.0 ms, 25.0 % of a step (0 workers)"

    assert words in shown(waiting(0.05))
    assert words in rendered(analyze(waiting(0.05)))


@pytest.mark.parametrize("has_loader", [True, False])
def test_the_overview_says_it(tmp_path, has_loader):
    run = waiting(0.05) if has_loader else make_run(num_ranks=1)
    directory = write_run(run, tmp_path / "run")
    said = []

    async def scenario(app, pilot):
        said.append(screen_text(app))

    drive(directory, scenario, size=(120, 60))
    fact = "waiting for the DataLoader 50.0 ms, 25.0 % of a step (0 workers)" if has_loader else NOT_RECORDED
    assert re.search(rf"data +{re.escape(fact)}", said[0])


@pytest.mark.parametrize(("wait_s", "is_said"), [(0.03, True), (0.005, False)])
def test_the_closing_lines_say_it_where_it_is_worth_one(wait_s, is_said):
    assert ("data waiting for the DataLoader" in closing(waiting(wait_s))) == is_said


def test_the_closing_line_is_of_the_rank_that_waits_longest():
    run = waiting(0.03, num_ranks=3, later_s=0.01)

    assert "data waiting for the DataLoader 50.0 ms" in closing(run)
    assert "(0 workers) of rank 2" in closing(run)


def test_what_to_do_next_knows_the_wait_from_the_rest():
    assert "25.0 % of a step (50.0 ms) is waiting for the DataLoader (0 workers)" in next_steps(waiting(0.05))
    rest = next_steps(waiting(0.05))
    assert "27.5 % of a step (55.0 ms) is outside forward, backward and optimizer and not waiting" in rest
    assert "look at logging, metrics and copies to the device" in rest
    assert "is outside" not in next_steps(waiting(LONG))
    assert "waiting for the DataLoader" not in next_steps(waiting(0.0))
    assert "52.5 % of a step (105 ms) is outside forward, backward and optimizer: look at data loading" in (
        next_steps(make_run(num_ranks=1, outside_s=LONG, num_steps=12))
    )


def test_what_to_do_next_names_evaluations_where_they_are_a_part_of_what_is_outside():
    """Data loading and logging were named alone, of a script that evaluates every other step."""
    run = make_run(num_ranks=1, outside_s=LONG, num_steps=12)
    (rank,) = run.ranks
    step = rank.steps[-1]
    around = next(span for span in rank.spans if span.step == step.index and span.kind == "forward")
    call = dataclasses.replace(around, kind="evaluation", start_s=step.start_s, end_s=step.start_s + 0.05)
    rank = dataclasses.replace(rank, spans=(*rank.spans, call))

    said = next_steps(dataclasses.replace(run, ranks=(rank,)))

    assert "look at evaluations (50.0 ms in 1 timed step), data loading and logging" in said


def test_json_has_the_wait_and_the_loaders():
    (rank,) = json.loads(json.dumps(analysis_to_json(analyze(waiting(0.05, workers=(3,))))))["ranks"]

    assert rank["data_wait_s"] == pytest.approx(0.05)
    assert rank["data_wait_fraction"] == pytest.approx(0.25)
    assert rank["data_waits"]["thread_s"] == pytest.approx(0.05)
    (loader,) = rank["data_waits"]["loaders"]
    assert (loader["num_workers"], loader["prefetch_factor"], loader["batch_size"]) == (3, 2, 4)
    assert (loader["num_batches"], loader["num_evaluation_batches"]) == (11, 0)
    without = analysis_to_json(analyze(make_run()))["ranks"][0]
    assert without["data_wait_s"] is without["data_wait_fraction"] is without["data_waits"] is None


def test_a_difference_has_it_as_part_of_outside():
    found = run_difference(analyze(waiting(0.05)), analyze(waiting(0.001, outside_s=SHORT)))
    lines = printed(found, lambda each, console: print_sections(sections(each, 110), console))

    assert "outside 105 ms 5.00 ms -100 ms -95.2 % waiting for data 50.0 ms 1.00 ms" in lines
    change = difference_to_json(found)["ranks"][0]["step_time"]["data_wait_s"]
    assert change["difference"] == pytest.approx(-0.049)
    neither = run_difference(analyze(make_run()), analyze(make_run()))
    assert "waiting for data" not in printed(
        neither, lambda each, console: print_sections(sections(each, 110), console)
    )


def test_what_was_written_is_read(tmp_path):
    run = waiting(0.05, workers=(0, 2))
    read = load_run(write_run(run, tmp_path / "run"))

    assert read.ranks[0].data_waits == run.ranks[0].data_waits
    assert read.ranks[0].data_loaders == run.ranks[0].data_loaders

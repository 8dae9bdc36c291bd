import asyncio
import dataclasses
import html
import re
import shutil
from pathlib import Path

import pytest
from textual.widgets import DataTable, Input, Static, TabbedContent

from memadvisor.analyzers.analysis import analyze
from memadvisor.hardware.hardware import Hardware
from memadvisor.plan import LaneInterval, Plan, Prediction, UnitPlan
from memadvisor.run.documents import Note
from memadvisor.run.journal import JournalWriter
from memadvisor.run.records import Span
from memadvisor.run.store import write_manifest
from memadvisor.tui.app import RunApp
from memadvisor.tui.chart import MemoryChart
from memadvisor.tui.help import HelpScreen
from memadvisor.tui.modules import ModulesPane
from memadvisor.tui.pane import Pane
from memadvisor.tui.table import SearchTable
from memadvisor.units import format_bytes, format_seconds
from tests.make_run import make_run, write_run

TABS = ("overview", "memory", "modules", "activations", "steps", "communication", "plan", "notes")
HOSTILE = ("layers[/0]", "[red]x", "\x1b[31mred", "[/]", "<script>", "\u202eevil", "a\nb")
PLAN = Plan(
    num_ranks=2,
    zero_stage=2,
    policy="chosen",
    units=(UnitPlan(name="blocks.0", zero_stage=2, recompute=True),),
    prediction=Prediction(
        peak_bytes=4_000_000,
        step_time_s=0.1,
        by_category_bytes={"parameter": 1_000_000},
        exposed_communication_s=0.0,
        peak_position="backward of blocks.0",
    ),
    budget_bytes=5_000_000,
    why="it fits [not markup]",
)


def drive(directory, scenario, size=(80, 24), **options):
    """Run the application on a directory, and `scenario(app, pilot)` once it has read what is there."""

    async def run():
        app = RunApp(Path(directory), **options)
        app.animation_level = "none"
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: app.snapshot is not None or app.return_value is not None)
            await settle(app, pilot)
            await scenario(app, pilot)
        return app

    return asyncio.run(run())


async def until(pilot, condition):
    for _ in range(1000):
        if condition():
            return
        await pilot.pause(0.02)
    raise AssertionError("it never came true")


async def settle(app, pilot):
    """Until all widgets stand where they stood a moment ago.

    Textual's own pause ends when the process gets little CPU time, as on a loaded machine it does in the middle.
    """
    before = None
    for _ in range(200):
        await pilot.pause(0.02)
        now = [(widget, widget.region, widget.scroll_offset) for widget in app.screen.walk_children()]
        if now == before:
            return
        before = now
    raise AssertionError("it never came to rest")


def screen_text(app):
    """What stands on the screen, line by line, read back from the picture of it."""
    rows = {}
    for y, text in re.findall(
        r'<text class="[^"]*" x="[^"]*" y="([^"]*)"[^>]*>([^<]*)</text>', app.export_screenshot()
    ):
        rows[float(y)] = rows.get(float(y), "") + html.unescape(text).replace("\xa0", " ")
    return "\n".join(rows[y].rstrip() for y in sorted(rows))


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory):
    return write_run(make_run(plan=PLAN), tmp_path_factory.mktemp("runs") / "run")


@pytest.mark.parametrize("size", [(80, 24), (200, 60), (20, 6)])
def test_every_tab_opens_by_its_number(run_directory, size):
    async def scenario(app, pilot):
        for number, name in enumerate(TABS, 1):
            await pilot.press(str(number))
            await settle(app, pilot)
            assert app.query_one(TabbedContent).active == name
            assert app.query_one(TabbedContent).active_pane.query_one(Pane).view is not None
            assert screen_text(app).strip()

    drive(run_directory, scenario, size)


@pytest.mark.parametrize(
    ("key", "phrases"),
    [
        ("1", ["Peak memory", "unexplained", "optimizer state", "3.87 MiB", "102 ms", "finished", "16.00 B"]),
        ("2", ["peak", "forward", "backward", "3.87 MiB", "backward of blocks.2"]),
        ("3", ["25 modules", "(model)", "embedding", "Block"]),
        ("4", ["1.38 MiB", "head", "mm"]),
        ("5", ["8 steps", "1 traced (*, slow)", "102 ms"]),
        (
            "6",
            [
                "all_reduce",
                "exposed",
                "832 KiB",
                "MiB/s",
                "Spread",
                "transfer",
                "blocks.2",
                "reference",
                "shared",
            ],
        ),
        ("7", ["ZeRO stage 2", "it fits [not markup]", "predicted", "measured", "recomputed", "held"]),
        ("8", ["train_gpt.py --blocks 3", "synthetic processor", "2.13.0"]),
    ],
)
def test_each_tab_says_what_it_is_for(run_directory, key, phrases):
    async def scenario(app, pilot):
        await pilot.press(key)
        await settle(app, pilot)
        text = screen_text(app)
        for phrase in phrases:
            assert phrase in text

    drive(run_directory, scenario, (140, 50))


def test_the_peaks_parts_on_the_screen_are_the_analyzers(run_directory):
    async def scenario(app, pilot):
        peak = app.view.result.peak
        sizes = [*peak.by_category_bytes.values(), peak.unexplained_bytes]
        assert sum(sizes) == peak.allocated_bytes

    drive(run_directory, scenario)


def rows_of(app, name):
    table = app.query_one(f"#communication-{name}", DataTable)
    return [[cell.plain for cell in table.get_row_at(row)] for row in range(table.row_count)]


def test_groups_units_and_clocks_are_the_analyzers(tmp_path):
    """Two groups, one of them nameless; the second rank's machine has a clock that is 5 s ahead."""
    run = make_run(num_ranks=2, rank_delay_s=0.002)

    def changed(number, rank):
        ahead_s = 5.0 * number
        collectives = [
            dataclasses.replace(
                c, group=("", "mesh [tp]")[i % 2], issue_s=c.issue_s + ahead_s, end_s=c.end_s + ahead_s
            )
            for i, c in enumerate(rank.collectives)
        ]
        operators = [
            dataclasses.replace(o, start_s=o.start_s + ahead_s, end_s=o.end_s + ahead_s)
            for o in rank.operators
        ]
        steps = [
            dataclasses.replace(s, start_s=s.start_s + ahead_s, end_s=s.end_s + ahead_s) for s in rank.steps
        ]
        process = dataclasses.replace(rank.process, host=f"node{number}")
        return dataclasses.replace(
            rank,
            collectives=tuple(collectives),
            operators=tuple(operators),
            steps=tuple(steps),
            process=process,
        )

    run = dataclasses.replace(run, ranks=tuple(changed(i, rank) for i, rank in enumerate(run.ranks)))
    directory = write_run(run, tmp_path / "run")

    async def scenario(app, pilot):
        await pilot.press("6")
        await settle(app, pilot)
        traffic = app.view.result.communication
        groups, units, ranks = (rows_of(app, name) for name in ("groups", "units", "ranks"))
        assert [row[0] for row in groups] == [share.name or "unnamed" for share in traffic.groups]
        assert [row[0] for row in units] == [share.name for share in traffic.units]
        for row, share in zip([*groups, *units], [*traffic.groups, *traffic.units], strict=True):
            seconds = (share.time_s, share.exposed_s, share.waiting_s, share.transfer_s)
            assert row[1:] == [format_bytes(share.bytes), str(share.num_calls), *map(format_seconds, seconds)]
        assert {"unnamed", "mesh [tp]"} == {row[0] for row in groups}
        assert ranks[0][6] == "reference"
        assert ranks[1][6].startswith("+5.00 s \u00b1 ")
        said = " ".join(screen_text(app).split())
        assert "Compute and waits are of the traced step" in said
        assert "clocks are up to 5.00 s apart" in said

    drive(directory, scenario, (140, 60))


def test_what_there_is_one_of_alone_has_no_table(run_directory):
    async def scenario(app, pilot):
        await pilot.press("6")
        await settle(app, pilot)
        assert not app.query_one("#communication-groups").display
        assert app.query_one("#communication-units").display

    drive(run_directory, scenario, (140, 60))


def test_the_ranks_below_the_tables_are_reached_by_tab_on_a_small_screen(run_directory):
    async def scenario(app, pilot):
        await pilot.press("6")
        # Tables are laid out after the tab is there, and until then what follows them stands higher.
        await until(
            pilot, lambda: "made wait" not in screen_text(app) and "collectives of" in screen_text(app)
        )
        await pilot.press("tab", "tab")
        await until(pilot, lambda: "made wait" in screen_text(app))

    drive(run_directory, scenario, (100, 16))


def test_utilization_stands_on_the_hardware_that_was_named(run_directory):
    hardware = Hardware(
        name="abacus",
        kind="given",
        source="a test",
        memory_bytes=None,
        memory_bandwidth_bytes_per_s=None,
        peak_flops_per_s={"float32": 1e12},
    )

    async def scenario(app, pilot):
        assert app.view.result.utilization.mfu is not None
        assert "on abacus (given)" in screen_text(app)

    drive(run_directory, scenario, (140, 50), hardware=hardware)


def test_brackets_switch_the_rank_and_come_round(run_directory):
    async def scenario(app, pilot):
        ranks = []
        for key in ("]", "]", "["):
            await pilot.press(key)
            await settle(app, pilot)
            ranks.append(app.view.rank.process.rank)
        assert ranks == [1, 0, 1]
        assert "rank 1 of 2" in screen_text(app)

    drive(run_directory, scenario)


def test_the_cursor_walks_over_time_and_finds_the_peak_again(run_directory):
    async def scenario(app, pilot):
        await pilot.press("2")
        await settle(app, pilot)
        chart = app.query_one(MemoryChart)
        assert app.focused is chart
        peak_s = app.view.result.peak.time_s
        assert chart.cursor_s == peak_s
        await pilot.press("left")
        earlier_s = chart.cursor_s
        await pilot.press("home")
        assert chart.cursor_s < earlier_s < peak_s
        times_s = []
        for _ in range(30):
            await pilot.press("right")
            times_s.append(chart.cursor_s)
        assert times_s == sorted(set(times_s)), "each press moves on"
        await pilot.press("plus", "plus", "p")
        assert chart.cursor_s == peak_s
        assert chart.window_s[0] < peak_s < chart.window_s[1]
        await pilot.press("0")
        assert chart.window_s == (0.0, chart.end_s)

    drive(run_directory, scenario)


def test_what_is_listed_under_the_cursor_is_alive_there(run_directory):
    async def scenario(app, pilot):
        await pilot.press("2", "home")
        await settle(app, pilot)
        step = app.view.rank.traced_step
        born_before = {str(s.storage_id) for s in app.view.rank.storages if s.birth_s <= step.start_s}
        table = app.query_one("#memory-alive", DataTable)
        assert {key.value for key in table.rows} == born_before
        categories = {table.get_row_at(row)[1].plain for row in range(table.row_count)}
        assert {"parameter", "optimizer state"} <= categories  # in words, as in the line above them

    drive(run_directory, scenario)


def test_a_search_narrows_modules_and_escape_ends_it(run_directory):
    async def scenario(app, pilot):
        await pilot.press("3")
        await settle(app, pilot)
        table = app.query_one("#modules-list", SearchTable).table
        whole = table.row_count
        await pilot.press("slash", *"2.mlp up", "enter")
        await settle(app, pilot)
        assert [key.value for key in table.rows] == ["module blocks.2.mlp.up"]
        assert app.focused is table
        await pilot.press("escape")
        await settle(app, pilot)
        assert table.row_count == whole

    drive(run_directory, scenario)


def test_digits_and_q_belong_to_the_search_while_it_is_open(run_directory):
    async def scenario(app, pilot):
        await pilot.press("4", "slash", *"q1")
        await settle(app, pilot)
        assert app.query_one("#activations-list", SearchTable).query_one(Input).value == "q1"
        assert app.query_one(TabbedContent).active == "activations"

    drive(run_directory, scenario)


def test_enter_unfolds_a_unit_and_folds_it_again(run_directory):
    async def scenario(app, pilot):
        await pilot.press("3", "down", "down")
        await settle(app, pilot)
        table = app.query_one("#modules-list", SearchTable).table
        folded = table.row_count
        await pilot.press("enter")
        await settle(app, pilot)
        assert table.row_count == folded + 6
        assert table.cursor_row == 2, "the cursor stays on its module"
        await pilot.press("enter")
        await settle(app, pilot)
        assert table.row_count == folded

    drive(run_directory, scenario)


def test_sorting_goes_round_the_columns(run_directory):
    async def scenario(app, pilot):
        await pilot.press("3", "s")
        await settle(app, pilot)
        table = app.query_one("#modules-list", SearchTable).table
        names = [key.value for key in table.rows]
        tree = app.query_one(ModulesPane)._tree(app.view)
        by_peak = sorted(tree.children, key=lambda node: -node.peak_bytes)
        assert [n for n in names if n in {f"module {c.name}" for c in tree.children}] == [
            f"module {c.name}" for c in by_peak
        ]

    drive(run_directory, scenario)


def test_help_opens_and_closes_and_q_quits(run_directory):
    async def scenario(app, pilot):
        await pilot.press("question_mark")
        await settle(app, pilot)
        assert isinstance(app.screen, HelpScreen)
        assert "previous and next rank" in screen_text(app)
        await pilot.press("escape")
        await settle(app, pilot)
        assert not isinstance(app.screen, HelpScreen)
        await pilot.press("q")

    assert drive(run_directory, scenario).return_code == 0


def hostile_run():
    run = make_run(
        notes=tuple(Note(level="warning", text=name, time_s=None) for name in HOSTILE), problems=HOSTILE
    )
    names = {f"blocks.{i}": name for i, name in enumerate(HOSTILE[:3])}

    def renamed(row):
        changes = {}
        for field in dataclasses.fields(row):
            value = getattr(row, field.name)
            if isinstance(value, str) and field.name in (
                "module",
                "unit",
                "name",
                "operator",
                "shape",
                "type_name",
            ):
                for old, new in names.items():
                    value = value.replace(old, new)
                changes[field.name] = value.replace("aten::", "[/aten]").replace("Linear", "[b]Linear\x1b[0m")
        return dataclasses.replace(row, **changes)

    tables = ("modules", "units", "parameters", "storages", "saved", "operators", "spans")
    ranks = tuple(
        dataclasses.replace(rank, **{t: tuple(map(renamed, getattr(rank, t))) for t in tables})
        for rank in run.ranks
    )
    manifest = dataclasses.replace(run.manifest, script="[red]\x1b]0;x\x07.py", arguments=HOSTILE)
    return dataclasses.replace(run, ranks=ranks, manifest=manifest)


def test_hostile_names_are_shown_as_they_stand_on_every_tab(tmp_path):
    directory = write_run(hostile_run(), tmp_path / "[bold]run")

    async def scenario(app, pilot):
        seen = ""
        for key in "12345678":
            await pilot.press(key)
            await settle(app, pilot)
            seen += screen_text(app)
        await pilot.press("3", "slash", *"layers[/0]")
        await settle(app, pilot)
        seen += screen_text(app)
        for phrase in ("layers[/0]", "[red]x", "[31mred", "[/aten]mm", "[b]Linear"):
            assert phrase in seen
        assert not {"\x1b", "\x07", "\u202e"} & set(seen)

    drive(directory, scenario, (160, 60))


def journal_of(directory):
    [path] = Path(directory).glob("rank0*.journal")
    return path


def begin(run, directory, num_steps):
    """Write rank 0 as the recorder would before the traced step; returns its open journal, to go on."""
    directory.mkdir()
    write_manifest(directory, run.manifest)
    rank = run.ranks[0]
    writer = JournalWriter(directory / "rank0.pid1.journal")
    writer.write_document("process", dataclasses.asdict(rank.process))
    for table in ("modules", "units", "parameters"):
        writer.write_rows(table, getattr(rank, table))
    writer.write_rows("steps", rank.steps[:num_steps])
    return writer


def test_new_steps_and_the_traced_one_appear_while_the_run_grows(tmp_path):
    rank = make_run(num_ranks=1).ranks[0]
    writer = begin(make_run(num_ranks=1), tmp_path / "run", num_steps=2)

    async def scenario(app, pilot):
        assert "step 1 " in screen_text(app)
        await pilot.press("2")
        await settle(app, pilot)
        assert "No traced step yet" in screen_text(app)
        for table in ("storages", "saved", "operators", "residuals", "optimizer_states", "spans"):
            writer.write_rows(table, getattr(rank, table))
        writer.write_rows("steps", rank.steps[2:])
        await until(pilot, lambda: "■ activation" in screen_text(app))
        assert "step 7" in screen_text(app)
        await pilot.press("5")
        await until(pilot, lambda: "8 steps" in screen_text(app))
        writer.write_document("ending", dataclasses.asdict(rank.ending))
        await until(pilot, lambda: "finished" in screen_text(app))

    drive(tmp_path / "run", scenario)


def test_the_reader_keeps_the_row_while_the_run_grows(tmp_path):
    rank = make_run(num_ranks=1).ranks[0]
    writer = begin(make_run(num_ranks=1), tmp_path / "run", num_steps=6)

    async def scenario(app, pilot):
        await pilot.press("5", "down", "down")
        await settle(app, pilot)
        table = app.query_one("#steps-table", DataTable)
        assert (table.row_count, table.cursor_row) == (6, 2)  # the newest is on top: step 3
        writer.write_rows("steps", rank.steps[6:])
        await until(pilot, lambda: table.row_count == 8)
        assert table.cursor_row == 4

    drive(tmp_path / "run", scenario)


def test_a_run_that_has_only_begun_is_waited_for(tmp_path):
    run = make_run(num_ranks=1)
    directory = write_run(dataclasses.replace(run, ranks=()), tmp_path / "run")

    async def scenario(app, pilot):
        assert "waiting for the first flush" in screen_text(app)
        await pilot.press("3", "]", "2")  # nothing to switch to, and nothing breaks
        write_run(run, directory)
        await until(pilot, lambda: app.view is not None)
        await settle(app, pilot)
        assert "finished" in screen_text(app)

    drive(directory, scenario)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_ranks": 1, "traced_step": None},
        {"num_steps": 0},
        {"num_steps": 1, "exit_code": None},
        {"num_ranks": 3, "missing_ranks": (0, 2)},
        {"exit_code": 1, "exception": "RuntimeError"},
        {"unexplained_bytes": -100_000},
    ],
)
def test_incomplete_runs_show_what_they_have_on_every_tab(tmp_path, changes):
    directory = write_run(make_run(**changes), tmp_path / "run")

    async def scenario(app, pilot):
        for key in "12345678":
            await pilot.press(key, "left")
            await settle(app, pilot)
            assert screen_text(app).strip()

    drive(directory, scenario)


def test_rows_that_stand_twice_break_no_table(tmp_path):
    run = make_run(num_ranks=1)
    rank = run.ranks[0]
    twice = {t: getattr(rank, t) * 2 for t in ("steps", "storages", "modules", "saved")}
    run = dataclasses.replace(run, ranks=(dataclasses.replace(rank, **twice),))

    async def scenario(app, pilot):
        for key in "12345678":
            await pilot.press(key)
            await settle(app, pilot)
        assert app.query_one("#steps-table", DataTable).row_count == 16

    drive(write_run(run, tmp_path / "run"), scenario)


def test_the_moment_of_the_peak_is_named_as_the_overview_names_it(tmp_path):
    """The overview had the model itself, and the chart no unit."""
    run = make_run(num_ranks=1)
    rank = run.ranks[0]
    peak = analyze(run).ranks[0].peak
    step = rank.traced_step
    at_s = step.start_s + peak.time_s
    around = [
        Span(step.index, kind, "", 0, at_s - early_s, at_s + 1e-3)
        for kind, early_s in (("backward", 2e-3), ("unit_backward", 1e-3))
    ]
    run = dataclasses.replace(run, ranks=(dataclasses.replace(rank, spans=tuple(around)),))
    assert analyze(run).ranks[0].peak.position == "backward of the model itself"

    async def scenario(app, pilot):
        await pilot.press("2")
        await settle(app, pilot)
        assert ", backward of the model itself" in screen_text(app)
        table = app.query_one("#memory-alive", DataTable)
        found = [table.get_row_at(row) for row in range(table.row_count)]
        assert "(model)" not in {row[2].plain for row in found if row[3].plain == "before the step"}

    drive(write_run(run, tmp_path / "run"), scenario)


def test_missing_ranks_are_named(tmp_path):
    directory = write_run(make_run(num_ranks=3, missing_ranks=(0, 2)), tmp_path / "run")

    async def scenario(app, pilot):
        assert "2 ranks missing" in screen_text(app)
        await pilot.press("8")
        await settle(app, pilot)
        assert "nothing readable from ranks 0, 2" in screen_text(app)

    drive(directory, scenario)


def test_a_truncated_journal_shows_what_was_whole(tmp_path):
    directory = write_run(make_run(num_ranks=1), tmp_path / "run")
    data = journal_of(directory).read_bytes()
    journal_of(directory).write_bytes(data[: len(data) * 2 // 3])

    async def scenario(app, pilot):
        for key in "12345678":
            await pilot.press(key)
            await settle(app, pilot)
        assert app.view is not None

    drive(directory, scenario)


def test_a_directory_that_vanishes_keeps_what_was_read(tmp_path):
    directory = write_run(make_run(), tmp_path / "run")

    async def scenario(app, pilot):
        shutil.rmtree(directory)
        await until(pilot, lambda: app.watcher.is_gone)
        await until(pilot, lambda: "is gone" in screen_text(app))
        assert app.view is not None

    drive(directory, scenario)


def test_a_directory_that_is_no_run_ends_the_application_with_the_error(tmp_path):
    async def scenario(app, pilot):
        pass

    assert "is not a run" in str(drive(tmp_path, scenario).return_value)


def test_resizing_redraws_every_tab(run_directory):
    async def scenario(app, pilot):
        for key in "126":
            await pilot.press(key)
            for size in ((200, 60), (40, 10), (80, 24)):
                await pilot.resize_terminal(*size)
                await settle(app, pilot)
                assert screen_text(app).strip()
        await pilot.resize_terminal(200, 60)
        await pilot.press("2")
        await settle(app, pilot)
        assert app.query_one(MemoryChart).size.width > 150

    drive(run_directory, scenario)


def test_the_headline_says_which_script_and_how_it_stands(run_directory):
    async def scenario(app, pilot):
        headline = screen_text(app).splitlines()[0]
        assert "finished" in headline and "train_gpt.py" in headline and "step 7" in headline
        assert app.query_one("#waiting", Static).display is False

    drive(run_directory, scenario)


def test_the_plans_lanes_stand_on_one_axis_with_what_was_measured(tmp_path):
    timeline = (
        LaneInterval("compute", "forward of blocks.0", 0.0, 0.05),
        LaneInterval("compute", "backward of blocks.0", 0.05, 0.1),
        LaneInterval("disk", "prefetch of blocks.0", 0.0, 0.05),
    )
    run = make_run(plan=dataclasses.replace(PLAN, timeline=timeline))

    async def scenario(app, pilot):
        await pilot.press("7")
        await settle(app, pilot)
        text = screen_text(app)
        assert "Step: predicted 100 ms, measured 102 ms (2.0 % too short)" in text
        rows = {line.strip().partition("  ")[0]: line for line in text.splitlines()}
        predicted = rows["compute, predicted: 100 ms"]
        measured = next(line for head, line in rows.items() if head.startswith("compute, step 5: 102 ms"))
        assert predicted.count("▒") == pytest.approx(measured.count("█") * 100 / 102, abs=1.5)
        assert any("not measured" in line for head, line in rows.items() if head.startswith("disk, measured"))

    drive(write_run(run, tmp_path / "run"), scenario, (140, 70))


def test_the_plans_lanes_are_reached_by_tab_on_a_small_screen(tmp_path):
    timeline = (LaneInterval("compute", "forward of blocks.0", 0.0, 0.05),)
    run = make_run(plan=dataclasses.replace(PLAN, timeline=timeline))

    async def scenario(app, pilot):
        await pilot.press("7")
        await settle(app, pilot)
        assert "▒" not in screen_text(app)
        await pilot.press("tab")
        await settle(app, pilot)
        assert "compute, predicted: 50.0 ms" in screen_text(app)

    drive(write_run(run, tmp_path / "run"), scenario, (80, 24))

"""A run that ended early says why: what held the memory, or which warning there is, and never that something is to come."""

import dataclasses

import pytest

from memadvisor.run.allocator_records import LiveStorage, OutOfMemory
from memadvisor.run.documents import Ending, Note
from memadvisor.units import MIB
from tests.cli.test_show import lost_trace
from tests.make_run import make_run, write_run
from tests.tui.test_app import TABS, drive, screen_text, settle

WARNING = "No training step was seen: a model was called, with no backward pass and no step of an optimizer."
OUT_OF_MEMORY = OutOfMemory(
    event=0,
    time_s=1.0,
    step=0,
    phase="forward",
    module="blocks.2",
    unit="blocks.2",
    micro_batch=0,
    operator="aten::add",
    requested_bytes=2 * MIB,
    allocated_bytes=9 * MIB,
    reserved_bytes=None,
    limit_bytes=10 * MIB,
    limit="--memory-limit",
    basis="operators",
)
HELD = (("blocks.0.mlp", "activation", 6 * MIB), ("", "parameter", 2 * MIB))


def ended_before_a_step(exit_code, **changes):
    """One rank whose script has ended, and no step before that."""
    run = make_run(num_ranks=1, traced_step=None, num_steps=1)
    ending = Ending(exit_code=exit_code, exception="OutOfMemoryError" if exit_code else None, time_s=2.0)
    rank = dataclasses.replace(run.ranks[0], steps=(), spans=(), storages=(), ending=ending, **changes)
    return dataclasses.replace(run, ranks=(rank,))


@pytest.fixture(scope="module")
def out_of_memory(tmp_path_factory):
    alive = tuple(
        LiveStorage(
            event=0,
            size_bytes=size_bytes,
            num_storages=1,
            category=category,
            module=module,
            unit="",
            phase="forward",
            operator="aten::mm",
            dtype="float32",
            shape="",
        )
        for module, category, size_bytes in HELD
    )
    run = ended_before_a_step(1, out_of_memory=(OUT_OF_MEMORY,), live_storages=alive)
    return write_run(run, tmp_path_factory.mktemp("runs") / "out-of-memory")


@pytest.fixture(scope="module")
def without_a_step(tmp_path_factory):
    run = ended_before_a_step(0, notes=(Note(level="warning", text=WARNING, time_s=None),))
    return write_run(run, tmp_path_factory.mktemp("runs") / "without-a-step")


def said_under(directory, size=(80, 40)):
    """The words of every tab, on one line each."""
    said = {}

    async def scenario(app, pilot):
        for number, name in enumerate(TABS, 1):
            await pilot.press(str(number))
            await settle(app, pilot)
            said[name] = " ".join(screen_text(app).split())

    drive(directory, scenario, size)
    return said


def test_where_memory_ran_out_what_was_asked_and_what_held_the_rest_stand_first(out_of_memory):
    said = said_under(out_of_memory)["overview"]

    assert "in forward of blocks.2 (aten::add), step 0: asked for 2.00 MiB" in said
    assert "with 9.00 MiB allocated of 10.0 MiB (--memory-limit)" in said
    assert "held by activation 6.00 MiB, parameter 2.00 MiB, unexplained 1.00 MiB" in said
    assert "6.00 MiB activation blocks.0.mlp 2.00 MiB parameter (model)" in said
    assert "next profile it with a micro-batch that fits" in said
    assert said.index("Out of memory") < said.index("Peak memory")
    assert "Overview says where" not in said  # here it does


@pytest.mark.parametrize("tab", ["memory", "activations", "steps", "communication"])
def test_what_a_run_without_memory_has_not_recorded_points_to_where_that_stands(out_of_memory, tab):
    assert "It ran out of memory: Overview says where, and what held it." in said_under(out_of_memory)[tab]


def test_a_finished_run_without_a_step_says_why_under_every_tab_that_lacks_it(without_a_step):
    said = said_under(without_a_step)

    for tab in ("overview", "memory", "activations", "steps", "communication"):
        assert "No training step was seen: a model was called" in said[tab]


def test_nothing_is_still_to_come_of_a_run_that_has_ended(without_a_step, out_of_memory):
    for directory in (without_a_step, out_of_memory):
        for text in said_under(directory).values():
            assert " yet" not in text and "come with the traced step" not in text


def test_who_waits_is_not_known_where_a_ranks_record_is_missing(tmp_path):
    """The others' collectives cannot be held against it, and nobody was said to hold them up."""
    said = said_under(write_run(make_run(num_ranks=3, missing_ranks=(1,)), tmp_path / "run"))["communication"]

    assert "Ranks: Who waits for whom is not recorded." in said


def test_of_a_lost_trace_each_tab_says_so(tmp_path):
    """Memory and Activations were empty, and Communication said that there was none."""
    said = said_under(write_run(lost_trace(), tmp_path / "run"))

    for tab in ("overview", "memory", "activations", "communication"):
        assert "The traced step's record is lost" in said[tab]


def test_of_a_damaged_run_nobody_says_that_its_traced_step_was_not_there(tmp_path):
    directory = write_run(ended_before_a_step(0), tmp_path / "run")
    [journal] = directory.glob("*.journal")
    data = bytearray(journal.read_bytes())
    data[len(data) // 2] ^= 0xFF
    journal.write_bytes(bytes(data))

    said = said_under(directory)["memory"]
    assert "No traced step is in what can be read of this run" in said
    assert "ended before a step was traced" not in said

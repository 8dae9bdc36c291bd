"""What is said first to change: what saves most, whether a checkpoint does it or a line of the script."""

import re
from pathlib import Path

import memadvisor.analyzers.script_changes.found as found
from memadvisor.analyzers.checkpointing import Checkpointing
from memadvisor.analyzers.first_changes import _IN_SHORT, first_changes
from memadvisor.analyzers.script_changes.change import LESS_PRECISION, ScriptChange
from tests.make_checkpointing import PEAK_BYTES, checkpointed

MIB = 2**20


def change(kind, saved_bytes=None, step_saved_s=None, effect=""):
    return ScriptChange(
        kind=kind, seen="Seen.", change="Do.", peak_saved_bytes=saved_bytes, step_saved_s=step_saved_s, effect=effect
    )  # fmt: skip


def first(rows, *changes, step_time_s=1.0):
    table = Checkpointing(peak_bytes=PEAK_BYTES, rows=tuple(rows), num_left_out=0)
    return first_changes(table, changes, PEAK_BYTES, step_time_s)


def test_checkpoints_and_changes_of_the_script_are_ranked_together_and_lossy_ones_last():
    said = first(
        [checkpointed("blocks.0", 40 * MIB, 0.25)],
        change("autocast", 80 * MIB, effect=LESS_PRECISION),
        change("stale_gradients", 50 * MIB),
        change("fused_updates", step_saved_s=0.1),
    )

    assert [each.saved_in_words for each in said] == [
        "peak -50.0 MiB",
        "peak -40.0 MiB, step +250 ms",
        "step -100 ms",
        "peak -80.0 MiB",
    ]
    assert said[1].in_words == "checkpoint blocks.0 (Block)"
    assert said[3].in_words == f"compute in bfloat16: `--autocast bf16` (results: {LESS_PRECISION})"


def test_what_saves_little_or_nothing_that_is_known_is_not_among_the_first():
    assert first([checkpointed("blocks.0", 4 * MIB)], change("growth"), change("bucket_views", 4 * MIB)) == ()


def test_each_change_with_a_prediction_has_a_few_words():
    folder = Path(found.__file__).parent
    for path in folder.glob("*.py"):
        text = path.read_text()
        kind = re.search(r'kind="(\w+)"', text)
        if kind is not None and ("peak_saved_bytes=" in text or "step_saved_s=" in text):
            assert kind.group(1) in _IN_SHORT

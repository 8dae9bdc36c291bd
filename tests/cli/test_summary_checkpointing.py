"""The lines of `show` about checkpointing."""

import dataclasses
import io

from rich.console import Console

from memadvisor.analyzers.checkpointing import Checkpointing
from memadvisor.cli.summary_checkpointing import checkpointing, label
from tests.make_checkpointing import PEAK_BYTES, checkpointed

MIB = 2**20


def test_only_what_pays_is_shown_and_names_are_no_markup():
    rows = (
        checkpointed("[red]all", 50 * MIB, 0.01),
        checkpointed("dearer", 40 * MIB, 0.02),
        checkpointed("cheap", 30 * MIB, 0.001),
        checkpointed("slight", 1 * MIB, 0.0001),
    )
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(checkpointing(Checkpointing(peak_bytes=PEAK_BYTES, rows=rows, num_left_out=0), 100))
    text = console.export_text()

    assert "[red]all" in text and "-50.0 MiB" in text and "cheap" in text
    assert "dearer" not in text and "slight" not in text


def test_figures_stand_whole_where_the_line_is_too_long():
    place = "backward of model.decoder.layers.11"
    rows = (
        dataclasses.replace(checkpointed("model.encoder.layers.3", 50 * MIB, 0.011), peak_position=place),
    )
    console = Console(width=60, record=True, file=io.StringIO())
    console.print(checkpointing(Checkpointing(peak_bytes=PEAK_BYTES, rows=rows, num_left_out=0), 60))

    assert {"-50.0", "MiB", "50.0", "%", "+11.0", "ms"} <= set(console.export_text().split())


def test_a_long_class_gives_way_to_the_modules_name():
    """Its end alone was left of `model2.blocks.*`."""
    long = dataclasses.replace(checkpointed("model2.blocks.0", 1, 0.1), type_name="TransformerEncoderLayer")

    assert label(long, 33) == "model2.blocks.0 (TransformerE...)"
    assert label(long, 60) == "model2.blocks.0 (TransformerEncoderLayer)"

"""A pipeline's step in the terminal: a row for each device, time from left to right.

A piece of work is its name and dashes for as long as it lasts: `F3--` the forward of micro-batch 3, `B3-----` its
backward; of several chunks on a device, `F3b` is the second one's. Where a device waits there are dots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console
from rich.text import Text

from memadvisor.cost.pipelines import Ending, Kind, PipelineTimes, Played
from memadvisor.units import format_bytes, format_fraction, format_seconds

STYLES = {Kind.F: "blue", Kind.B: "magenta", Kind.W: "green", Kind.BW: "magenta"}
MAX_ROWS = 48
LETTERS = "abcdefghijklmnopqrstuvwxyz"
_ENDINGS = {
    Ending.FLUSH: "",
    Ending.POST_VALIDATED: " where devices do not wait for each other between steps ({makespan} where they do)",
    Ending.NEVER_EMPTY: " in the steady state ({makespan} drawn, from empty to empty)",
}


def print_pipeline(times: PipelineTimes, console: Console) -> None:
    """Draw what fits into the console's width. `times` needs its timeline."""
    for line in pipeline_lines(times, console.width):
        console.print(line)


def pipeline_lines(times: PipelineTimes, width: int) -> list[Text]:
    """A title, the drawing, whose rows are at most `width` wide, and its legend."""
    assert times.timeline is not None, "simulate with timeline=True"
    rows = {
        device: list(pieces) for device, pieces in groupby(times.timeline, key=lambda piece: piece.device)
    }
    head = len(f"device {times.num_devices - 1}  ")
    names = _Names(times.chunks, any(piece.kind is Kind.W for piece in times.timeline))
    column_s = _column_s(times, names)
    lines = [Text(_title(times), style="bold")]
    shown = _shown(times.num_devices)
    for place, device in enumerate(shown):
        if place and device != shown[place - 1] + 1:
            lines.append(Text(f"({device - shown[place - 1] - 1} devices more)", style="dim"))
        line = Text(f"device {device}".ljust(head), style="dim")
        lines.append(line.append_text(_row(rows[device], names, times.makespan_s, column_s, width - head)))
    return lines + [Text(line) for line in _legend(times, (width - head) * column_s)]


def _shown(num_devices: int) -> Sequence[int]:
    if num_devices <= MAX_ROWS:
        return range(num_devices)
    return [*range(MAX_ROWS // 2), *range(num_devices - MAX_ROWS // 2, num_devices)]


@dataclass(frozen=True, slots=True)
class _Names:
    chunks: tuple[tuple[int, ...], ...]  # by device
    is_split: bool  # whether some backward is two pieces

    def of(self, piece: Played) -> str:
        held = self.chunks[piece.device]
        letter = LETTERS[held.index(piece.chunk) % len(LETTERS)] if len(held) > 1 else ""
        kind = "B" if piece.kind is Kind.BW and not self.is_split else piece.kind.name
        return f"{kind}{piece.microbatch}{letter}"


def _column_s(times: PipelineTimes, names: _Names) -> float:
    """A column's seconds, so that the shortest piece has room for its name and a dash."""
    pieces = [piece for piece in times.timeline or () if piece.end_s > piece.start_s]
    shortest_s = min((piece.end_s - piece.start_s for piece in pieces), default=1.0)
    return shortest_s / (1 + max((len(names.of(piece)) for piece in pieces), default=1))


def _row(pieces: Sequence[Played], names: _Names, makespan_s: float, column_s: float, width: int) -> Text:
    row = Text()
    for piece in pieces:
        start, end = round(piece.start_s / column_s), round(piece.end_s / column_s)
        if start >= width:
            break
        row.append("." * (start - len(row)), style="dim")
        # Alternating brightness keeps neighbours apart that dashes alone would join.
        style = STYLES[piece.kind] + (" bold" if piece.microbatch % 2 else "")
        row.append(names.of(piece).ljust(end - start, "-")[: max(0, end - len(row))], style=style)
    row.append("." * (round(makespan_s / column_s) - len(row)), style="dim")
    row.truncate(max(0, width))
    return row


def _title(times: PipelineTimes) -> str:
    return (
        f"{times.schedule}, {times.num_devices} devices, {times.num_microbatches} micro-batches "
        "(predicted: simulated with transfers)"
    )


def _legend(times: PipelineTimes, drawn_s: float) -> list[str]:
    kinds = {piece.kind for piece in times.timeline or ()}
    names = ["F forward"]
    if Kind.W in kinds:
        names += ["B input gradient", "W weight gradient"] + (["BW both"] if Kind.BW in kinds else [])
    else:
        names.append("B backward")
    if max(len(held) for held in times.chunks) > 1:
        names.append("a, b, ... a device's chunks")
    lines = [", ".join([*names, "number: micro-batch", "... waiting"])]
    if drawn_s < times.makespan_s:
        lines.append(
            f"Cut to the width: the first {format_seconds(drawn_s)} of {format_seconds(times.makespan_s)}; "
            "all of it with -o FILE.html."
        )
    ending = _ENDINGS[times.ending].format(makespan=format_seconds(times.makespan_s))
    lines.append(
        f"forwards and backwards of a step {format_seconds(times.step_s)}{ending}, of which devices wait {format_fraction(times.bubble_share)} "
        "on average"
    )
    held = f"most in flight by device: {_most(times.peak_in_flight)} micro-batches"
    if any(times.peak_held_bytes):
        held += f", {format_bytes(max(times.peak_held_bytes))} of activations on the fullest"
    if times.weight_copies > 1:
        held += f"; {times.weight_copies} copies of the weights"
    if times.weight_versions > 1:
        held += f"; {times.weight_versions} versions of the weights"
    return [*lines, held]


def _most(counts: Sequence[int]) -> str:
    if len(counts) <= 16:
        return " ".join(map(str, counts))
    return f"{min(counts)} to {max(counts)}"

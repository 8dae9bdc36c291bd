"""`memadvisor calibrate`: measure this machine, print the figures, keep them as a hardware file."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memadvisor.cli.printing import stdout_console
from memadvisor.hardware.hardware import CollectiveCurve, Hardware, LinkPiece, TierBandwidth
from memadvisor.hardware.load import save_hardware
from memadvisor.run.files import check_output, working_directory
from memadvisor.units import counted, format_bytes, format_count, format_fraction, format_seconds


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", metavar="FILE", help="write the figures to this hardware file")
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="processes for the collectives (default: all devices, 2 on CPU)",
    )
    parser.add_argument(
        "--disk",
        type=Path,
        metavar="DIR",
        help="measure the disk of this directory (default: of the working directory, where runs go)",
    )


def run(arguments: argparse.Namespace) -> int:
    here = working_directory()
    if arguments.output is not None:
        check_output(arguments.output, hint="name a file in a writable directory.")
    # torch takes seconds to import
    from memadvisor.calibrate.calibrate import calibrate
    from memadvisor.engines.engine_cost import measure_engine_cost
    from memadvisor.engines.paging_cost import measure_paging_cost

    hardware = calibrate(arguments.ranks, directory=arguments.disk or here)
    if hardware.collectives:
        num_ranks = hardware.collectives[0].num_ranks
        hardware = replace(hardware, engine=measure_engine_cost(num_ranks))
    if hardware.disk is not None:
        hardware = replace(hardware, paging=measure_paging_cost())
    _print(hardware)
    if arguments.output is not None:
        save_hardware(hardware, arguments.output)
        stdout_console().print(Text(f"Written to {arguments.output}"))
    return 0


def _print(hardware: Hardware) -> None:
    console = stdout_console()
    console.print(Text(f"{hardware.name} ({hardware.kind}: {hardware.source})"))
    for dtype, rate in hardware.peak_flops_per_s.items():
        console.print(
            Text(f"  {dtype} matrix product  {format_count(rate, 'FLOP/s')}{_shapes(hardware, dtype)}")
        )
    bandwidth = hardware.memory_bandwidth_bytes_per_s
    console.print(Text(f"  memory copy  {format_bytes(bandwidth)}/s, read and write counted"))
    cache = None if hardware.page_cache is None else hardware.page_cache.bandwidth
    for name, tier, both in (
        ("disk", hardware.disk, hardware.disk_both_ways),
        ("page cache", cache, hardware.page_cache_both_ways),
        ("pinned memory", hardware.host, hardware.host_both_ways),
    ):
        if tier is not None:
            together = "" if both is None else f"; at the same time {_rates(both)}"
            console.print(Text(f"  {name}  {_rates(tier)}{together}"))
    if hardware.optimizers:
        rates = (
            f"{row.implementation} {format_count(row.elements_per_s, 'elements/s')}"
            for row in hardware.optimizers
        )
        console.print(Text(f"  {hardware.optimizers[0].optimizer}  {', '.join(rates)}"))
    if hardware.coder is not None:
        read, write = (
            f"{format_bytes(rate)}/s"
            for rate in (hardware.coder.read_bytes_per_s, hardware.coder.write_bytes_per_s)
        )
        console.print(Text(f"  8-bit optimizer state  decoded {read}, coded {write}"))
    if hardware.overlap is not None:
        compute, collective = hardware.overlap.compute, hardware.overlap.collective
        text = f"  at the same time  compute takes {compute:.2f} times as long, collectives {collective:.2f} times"
        console.print(Text(text))
        late_s, spread = hardware.overlap.late_s, hardware.overlap.spread
        if late_s is not None and spread is not None:
            text = f"messages are {format_seconds(late_s)} late, the slowest rank takes {format_fraction(spread)} longer"
            console.print(Text(f"  while ranks compute  {text}"))
    if (engine := hardware.engine) is not None:
        each = (
            f"{format_seconds(engine.gradient_s)} a gradient, {format_seconds(engine.collective_s)} a collective "
            f"(other threads {format_seconds(engine.lane_s)}), "
            f"{format_seconds(engine.piece_s)} a parameter that is updated in pieces, "
            f"{format_seconds(engine.shown_s)} one that is gathered"
        )
        console.print(Text(f"  the engine itself, beyond DDP  {each}"))
    if (paging := hardware.paging) is not None:
        each = (
            f"{format_seconds(paging.transfer_s)} a transfer, {format_seconds(paging.shown_s)} a parameter that is read, "
            f"{format_seconds(paging.update_s)} one that is updated, {format_seconds(paging.moved_s)} an activation"
        )
        console.print(Text(f"  the engine itself, from disk  {each}"))
    if hardware.collectives:
        _print_collectives(hardware, console)


def _print_collectives(hardware: Hardware, console: Console) -> None:
    num_ranks = hardware.collectives[0].num_ranks
    table = Table(title=f"Collectives among {counted(num_ranks, 'rank')}", title_justify="left")
    table.add_column("message", justify="right")
    curves = (*hardware.collectives, *hardware.alternatives)
    for curve in curves:
        table.add_column(_heading(curve), justify="right")
    for position, size_bytes in enumerate(hardware.collectives[0].sizes_bytes):
        durations = [format_seconds(curve.durations_s[position]) for curve in curves]
        table.add_row(format_bytes(size_bytes), *durations)
    console.print(table)
    for curve in curves:
        if curve.pieces:
            console.print(Text(f"  {_heading(curve)}: {'; '.join(map(_piece, curve.pieces))}"))


def _heading(curve: CollectiveCurve) -> str:
    return f"{curve.operation}{f' by {curve.algorithm}' if curve.algorithm is not None else ''}"


def _rates(tier: TierBandwidth) -> str:
    return f"read {format_bytes(tier.read_bytes_per_s)}/s, written {format_bytes(tier.write_bytes_per_s)}/s"


def _shapes(hardware: Hardware, dtype: str) -> str:
    """The slowest shape that was tried beside the best: what small and flat products fall to."""
    rates = [rate for rate in hardware.matmuls if rate.dtype == dtype]
    if not rates:
        return ""
    worst = min(rates, key=lambda rate: rate.flops_per_s)
    shape = f"{worst.rows} x {worst.depth} x {worst.columns}"
    return f" at best of {len(rates)} shapes, {format_count(worst.flops_per_s, 'FLOP/s')} at {shape}"


def _piece(piece: LinkPiece) -> str:
    """Of a message from so many bytes on."""
    rate = f"{format_seconds(piece.alpha_s)} + bytes / {format_bytes(piece.bytes_per_s)}/s"
    return f"from {format_bytes(piece.from_bytes)} {rate} (within {100 * piece.residual_fraction:.0f} %)"

"""Sequences of a step and of a microbatch, and the pipeline's schedule, as options of `memadvisor estimate` say them."""

from __future__ import annotations

import argparse
import sys

from memadvisor.cost.pipelines.schedules import canonical_name
from memadvisor.errors import UsageError
from memadvisor.schedule_names import V_SHAPED
from memadvisor.software_traits import Preset
from memadvisor.units import parse_count


def read_batch_tokens(arguments: argparse.Namespace) -> None:
    """Sequences of a step, from its tokens; what is no whole sequence is left out, and that is said."""
    if arguments.batch_tokens is None:
        return
    if arguments.batch is not None or arguments.seq is None or arguments.table or arguments.largest:
        raise UsageError(
            "--batch-tokens is --batch in tokens of sequences of --seq.",
            hint="give it with --seq, in place of --batch, without --table and --largest.",
        )
    tokens, seq_len = parse_count(arguments.batch_tokens), positive("seq", arguments.seq)
    words = f"--batch-tokens {arguments.batch_tokens} is {tokens / seq_len:.6g} sequences of {seq_len}"
    if tokens < seq_len:
        raise UsageError(f"{words}.", hint=f"it is at least one, {seq_len}.")
    arguments.batch = tokens // seq_len
    if tokens % seq_len:
        print(
            f"memadvisor estimate: {words}: {arguments.batch} are taken, and replicas part these evenly.",
            file=sys.stderr,
        )


def batch_of(arguments: argparse.Namespace, data: int) -> tuple[int, int, bool]:
    """Micro-batch size, number of microbatches, and whether the first is open."""
    size = None if arguments.micro_batch is None else positive("micro-batch", arguments.micro_batch)
    if arguments.batch is None:
        return size or 1, degree_of(arguments, "pp"), False
    whole = data * (size or 1)
    if positive("batch", arguments.batch) % whole:
        raise UsageError(
            f"--batch {arguments.batch} is no multiple of {data} replicas"
            + (f" x micro-batch {size}." if size is not None else "."),
            hint=f"it is a multiple of {whole}.",
        )
    return size or 1, arguments.batch // whole, size is None


def degree_of(arguments: argparse.Namespace, name: str) -> int:
    value = getattr(arguments, name)
    return 1 if value is None else positive(name.replace("_", "-"), value)


def schedule_of(arguments: argparse.Namespace, preset: Preset, layers_of_stage: int) -> tuple[str, int]:
    """The pipeline's schedule, and parts of the model on each device."""
    if arguments.schedule:
        schedule = canonical_name(arguments.schedule)
    else:
        schedule = "interleaved" if (arguments.chunks or 1) > 1 else "1f1b"
    if arguments.chunks is not None:
        return schedule, arguments.chunks
    if schedule in ("interleaved", "breadth-first"):
        return schedule, preset.chunks_of(max(1, layers_of_stage))
    return schedule, 2 if schedule in V_SHAPED else 1


def recompute_share(arguments: argparse.Namespace, layers_of_part: float) -> float:
    """Of the layers of a part of the model on a pipeline rank, which --recompute-layers counts."""
    if arguments.recompute_layers is None:
        return 1.0
    if arguments.recompute != "full":
        raise UsageError(
            f"--recompute-layers goes with --recompute full, not {arguments.recompute}.",
            hint="leave one out.",
        )
    return min(1.0, positive("recompute-layers", arguments.recompute_layers) / layers_of_part)


def positive(name: str, value: int) -> int:
    if value < 1 or value > 2**40:
        hint = "it is at least 1." if value < 1 else "look for a digit too many."
        raise UsageError(f"--{name} is {value}.", hint=hint)
    return value

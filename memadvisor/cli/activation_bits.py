"""The options that round activations to a few bits until their backward, and what they mean."""

from __future__ import annotations

import argparse
from typing import Any

from memadvisor.activation_bits import BITS
from memadvisor.cli.offload import unit_names
from memadvisor.errors import UsageError

FLAGS = ("compress_activations", "compress_units")


def add_rounding_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--compress-activations",
        type=int,
        choices=BITS,
        help="keep what autograd keeps of blocks in so many bits an element between their forward and their backward "
        "(lossy)",
    )
    parser.add_argument(
        "--compress-units",
        metavar="NAMES",
        help="with --compress-activations: of these units alone, as in blocks.0,blocks.1 or 'blocks.*'",
    )


def rounding_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields of a plan made by hand. Raises UsageError."""
    bits, names = arguments.compress_activations, arguments.compress_units
    if bits is None:
        if names is not None:
            raise UsageError(
                "--compress-units needs --compress-activations.", hint="say to how many bits: 8, 4 or 2."
            )
        return {}
    return {"activation_bits": bits, "compressed_units": unit_names(names)}

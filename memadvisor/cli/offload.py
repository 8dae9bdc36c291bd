"""The options that put optimizer state and activations elsewhere while nobody needs them, and what they mean."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from memadvisor.errors import UsageError
from memadvisor.plan import Plan

FLAGS = ("offload_optimizer", "offload_parameters", "offload_activations", "offload_units", "delayed_update")


def add_offload_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--offload-optimizer",
        choices=("host", "disk"),
        help="where the optimizer's state lies between updates: a GPU's host memory, or a file without a name in the run's directory",
    )
    parser.add_argument(
        "--delayed-update",
        action="store_true",
        default=None,
        help="with --offload-optimizer, on one rank: do each update one step late, under the next step; losses differ",
    )
    parser.add_argument(
        "--offload-parameters",
        choices=("host", "disk"),
        help="on one rank: where parameters, gradients and the optimizer's state lie between their uses",
    )
    parser.add_argument(
        "--offload-activations",
        metavar="host|disk[:DIR]",
        help="put what autograd keeps of blocks there between their forward and their backward: a GPU's host memory, or a "
        "file without a name in DIR (default: in the run's directory)",
    )
    parser.add_argument(
        "--offload-units",
        metavar="NAMES",
        help="with --offload-activations: of these units alone, as in blocks.0,blocks.1 or 'blocks.*'",
    )


def offload_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields of a plan made by hand. Raises UsageError."""
    value, names = arguments.offload_activations, arguments.offload_units
    parameters = arguments.offload_parameters or "device"
    states = arguments.offload_optimizer or parameters
    fields = {"optimizer_tier": states, "parameter_tier": parameters}
    if value is None:
        if names is not None:
            raise UsageError("--offload-units needs --offload-activations.", hint="say where: host or disk.")
        return fields
    tier, colon, directory = value.partition(":")
    if tier not in ("host", "disk") or (tier == "host" and colon) or (colon and not directory):
        raise UsageError(
            f"--offload-activations {value} names no tier.", hint="it is host, disk, or disk:DIRECTORY."
        )
    return {
        **fields,
        "activation_tier": tier,
        "activation_units": unit_names(names),
        "disk_directory": str(Path(directory).resolve()) if directory else None,
    }


def unit_names(value: str | None) -> tuple[str, ...]:
    """What an option names, with commas between them; nothing where it is not given."""
    return () if value is None else tuple(name.strip() for name in value.split(","))


def with_disk_directory(plan: Plan, directory: Path) -> Plan:
    """Where a plan names no directory for the disk tier, the run's own: the user has chosen its disk."""
    if (
        "disk" not in plan.optimizer_tiers | plan.activation_tiers | plan.parameter_tiers
        or plan.disk_directory is not None
    ):
        return plan
    return replace(plan, disk_directory=str(directory.resolve()))

"""What is known of the machine that plans are for: how long collectives and transfers take there, how they go, and how its
allocator is set."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memadvisor.analyzers.fragmentation import allocator_settings
from memadvisor.analyzers.observed_collectives import observed_collectives
from memadvisor.cost.allocator_settings import AllocatorSettings
from memadvisor.cost.collectives import (
    CollectiveTimes,
    Observation,
    times_from_curves,
    times_from_observations,
    times_of_sizes,
)
from memadvisor.cost.step import CapturedStep
from memadvisor.cost.transfers import TransferTimes, transfer_times, with_sheet
from memadvisor.errors import UsageError
from memadvisor.executors import Algorithm
from memadvisor.hardware.cluster import Link
from memadvisor.hardware.clusters import links_of
from memadvisor.hardware.hardware import Hardware
from memadvisor.hardware.load import named_hardware
from memadvisor.planning.algorithms import choose_algorithms
from memadvisor.planning.lost_ranks import lost_ranks_hint, lost_ranks_text
from memadvisor.planning.paging import paged_bytes
from memadvisor.run.run import Run


class UnknownCollectivesError(UsageError):
    """A plan of several ranks is asked for, and nobody measured how long their collectives take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """`times`: None for one rank. `settings`: of a CUDA device's allocator, where plans are for one. `transfers`: to other
    tiers, of optimizer state and activations; `paged_transfers`: of parameters and gradients too."""

    times: CollectiveTimes | None
    settings: AllocatorSettings | None
    transfers: TransferTimes | None
    paged_transfers: TransferTimes | None
    algorithms: tuple[Algorithm, ...]


def machine_for(run: Run, step: CapturedStep, num_ranks: int, hardware: Hardware | None) -> Machine:
    """From what was measured, else from the run. Raises UsageError where nothing is known of collectives that are needed."""
    moved_bytes = num_ranks * _movable_bytes(step)
    return Machine(
        times=_collective_times(run, num_ranks, hardware, step),
        settings=allocator_settings(run.ranks[0]) if _is_for_cuda(step, hardware) else None,
        transfers=transfers_of(run, hardware, moved_bytes),
        paged_transfers=transfers_of(run, hardware, moved_bytes + num_ranks * paged_bytes(step)),
        algorithms=choose_algorithms(hardware, num_ranks),
    )


def transfers_of(run: Run, hardware: Hardware | None, kept_bytes: int) -> TransferTimes | None:
    """What was measured (`kept_bytes`: on the disk at one time), and of a known GPU the way to its host by its data sheet."""
    return with_sheet(transfer_times(hardware, kept_bytes), _host_link(run, hardware))


def _host_link(run: Run, hardware: Hardware | None) -> Link | None:
    """Of a GPU to its host, by the data sheet of the one that is named, else of the run's own; None on a CPU, and of GPUs that
    are not in the catalogue."""
    process = run.ranks[0].process
    if not process.device.startswith("cuda"):
        return None
    device = (hardware and named_hardware(hardware.name)) or named_hardware(process.device_name)
    links = None if device is None else links_of(device)
    return None if links is None else links.host


def _movable_bytes(step: CapturedStep) -> int:
    """The most that one rank can have on another tier at one time: its optimizer state, and what a micro-batch saves."""
    saved: dict[int | None, int] = {}
    for storages in step.saved:
        saved[storages.micro_batch] = saved.get(storages.micro_batch, 0) + storages.size_bytes
    return sum(s.optimizer_bytes for s in step.states.values()) + max(saved.values(), default=0)


def _is_for_cuda(step: CapturedStep, hardware: Hardware | None) -> bool:
    """The run's own device, or a GPU that the plan is meant for."""
    return step.device.startswith("cuda") or (
        hardware is not None and named_hardware(hardware.name) is not None
    )


def _collective_times(
    run: Run, num_ranks: int, hardware: Hardware | None, step: CapturedStep
) -> CollectiveTimes | None:
    """Measured curves of `hardware`, else what the run's own collectives tell; None for one rank."""
    if num_ranks == 1:
        return None
    if hardware is not None:
        times = times_from_curves(
            hardware.collectives,
            num_ranks,
            hardware.source,
            hardware.overlap,
            hardware.alternatives,
            hardware.engine,
        )
        if times is not None:
            return times
    if step.shard_groups:
        times = times_of_sizes(
            _like_ours(observed_collectives(run), step), "the traced step's own collectives"
        )
    else:
        times = times_from_observations(observed_collectives(run), "the traced step's own collectives")
    if times is not None:
        return times
    if run.missing_ranks:
        raise UnknownCollectivesError(
            f"Nothing is known of {lost_ranks_text(run)}, and how long collectives take is told by the records of all ranks that "
            "take part, so no step time can be predicted.",
            hint=f"{lost_ranks_hint(run)}; or measure times with `memadvisor calibrate --ranks {num_ranks} -o hardware.json`, and "
            "pass --hardware hardware.json.",
        )
    device = named_hardware(run.ranks[0].process.device_name)
    by_sheet = (
        "" if device is None else f" Or ask for layouts by data sheets: --gpus {num_ranks}x{device.name}."
    )
    raise UnknownCollectivesError(
        f"Nothing is known of how long collectives among {num_ranks} ranks take, so no step time can be predicted.",
        hint=f"measure them with `memadvisor calibrate --ranks {num_ranks} -o hardware.json`, "
        f"and pass --hardware hardware.json.{by_sheet}",
    )


def _like_ours(observations: tuple[Observation, ...], step: CapturedStep) -> tuple[Observation, ...]:
    """Of the ranks that FSDP2 shares among, or sums over; on a CPU ours take the place of the backend's: a reduction to shards
    sends what a gather sends, and sums it.

    How long ours take is not known from the backend's, which are slower; its gathers stand for both. Sums across groups of
    ranks are the backend's.
    """
    groups = {(op, g.num_ranks) for g in step.shard_groups for op in ("all_gather", "reduce_scatter")}
    groups |= {("all_gather", g.forward_ranks) for g in step.shard_groups if g.forward_ranks}
    groups |= {("all_reduce", group.num_replicas) for group in step.shard_groups}
    observations = tuple(row for row in observations if (row.operation, row.num_ranks) in groups)
    if step.device != "cpu":
        return observations
    gathers = [row for row in observations if row.operation == "all_gather"]
    ours = [replace(row, operation=name) for row in gathers for name in ("all_gather", "reduce_scatter")]
    return (*ours, *(row for row in observations if row.operation == "all_reduce"))

"""What a pipeline's work costs, and what comes out of playing it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memadvisor.cost.pipelines.work import Ending, Kind
from memadvisor.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCosts:
    """One microbatch on one chunk of the model.

    A schedule that does not split the backward takes input_backward_s + weight_backward_s for it, in one piece.
    `activation_bytes` are held from the forward's start until the input gradient's piece ends;
    `weight_activation_bytes` of them until the weight gradients' piece ends, where that is a piece of its own.
    """

    forward_s: float
    input_backward_s: float
    weight_backward_s: float
    activation_bytes: int = 0
    weight_activation_bytes: int = 0

    def seconds(self, kind: Kind) -> float:
        split_s = self.input_backward_s, self.weight_backward_s
        return (self.forward_s, *split_s, sum(split_s))[kind]

    def held_bytes(self, kind: Kind) -> int:
        """By how much a piece of this kind changes what the device holds."""
        all_bytes, late_bytes = self.activation_bytes, self.weight_activation_bytes
        return (all_bytes, late_bytes - all_bytes, -late_bytes, -all_bytes)[kind]


@dataclass(frozen=True, slots=True)
class Played:
    """One piece of work of a timeline: when its computing began and ended, in seconds from the step's start."""

    device: int
    kind: Kind
    chunk: int
    microbatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimes:
    """One step of a pipeline, simulated.

    `makespan_s` is from the first piece's start to the last one's end; `step_s` is the time between two steps that
    follow each other, which is the makespan where steps end in a flush (`ending`; see `Ending` for the others).
    Everything by device: `busy_s` computing, `span_s` from its first piece to the end of its last,
    `peak_held_bytes` of activations, `peak_in_flight` the most microbatches of any of its chunks that had begun
    their forward and not ended the piece that makes the input gradient (a device's chunks counted apart; under
    BPipe those held here, whoever began them), `chunks` of the model that it holds the weights of.
    """

    schedule: str
    num_devices: int
    num_microbatches: int
    makespan_s: float
    step_s: float
    ending: Ending
    busy_s: tuple[float, ...]
    span_s: tuple[float, ...]
    peak_held_bytes: tuple[int, ...]
    peak_in_flight: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]
    weight_copies: int
    weight_versions: int
    timeline: tuple[Played, ...] | None = None

    @property
    def bubble_share(self) -> float:
        """Share of the devices' time in a step (`step_s` times their number) in which they do not compute."""
        return 1 - sum(self.busy_s) / (self.step_s * self.num_devices) if self.step_s else 0.0

    @property
    def bubble_s(self) -> float:
        """Time of a step in which a device does not compute, on average over devices."""
        return self.step_s - sum(self.busy_s) / self.num_devices


def check_costs(costs: Sequence[ChunkCosts]) -> None:
    """Raise UsageError for times or bytes that cannot be."""
    for chunk, cost in enumerate(costs):
        times = (cost.forward_s, cost.input_backward_s, cost.weight_backward_s)
        if not all(0 <= time < float("inf") for time in times):
            raise UsageError(f"Chunk {chunk} of the pipeline has times {times} s, which cannot be.")
        if not 0 <= cost.weight_activation_bytes <= cost.activation_bytes:
            raise UsageError(
                f"Chunk {chunk} of the pipeline holds {cost.activation_bytes} bytes of activations, of which "
                f"{cost.weight_activation_bytes} for its weights' gradients, which cannot be."
            )


def link_seconds(transfer_s: float | Sequence[float], num_devices: int) -> list[float]:
    """Seconds over link d, between device d and device d+1, and last between the last and the first.

    One number stands for all links; without the last link, which only looped placements use, it is as the slowest.
    """
    if not isinstance(transfer_s, Sequence):
        links = [float(transfer_s)] * max(1, num_devices)
    else:
        links = [float(time) for time in transfer_s]
        if len(links) == num_devices - 1:
            links.append(max(links, default=0.0))
    if len(links) != max(1, num_devices):
        raise UsageError(
            f"{len(links)} transfer times were given for a pipeline of {num_devices} devices.",
            hint=f"give one for all, {num_devices - 1} between neighbours, or {num_devices} with the way back.",
        )
    if not all(0 <= time < float("inf") for time in links):
        raise UsageError(f"Transfer times {links} s between the devices of a pipeline cannot be.")
    return links

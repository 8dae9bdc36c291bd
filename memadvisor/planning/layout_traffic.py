"""Seconds of a layout's step that go to gradients, parameters and the optimizer, for every way of holding states.

Each way is priced when it is first asked for, by the cost model's own functions: what travels once for all orders of a
pipeline's work and wherever the optimizer is, what the optimizer takes once for all numbers of microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from memadvisor.cost.layouts.data_parallel import (
    microbatch_traffic,
    optimizer_seconds,
    replica_groups,
    step_traffic,
)
from memadvisor.cost.layouts.memory import StageContents, StageParameters, stage_parameters
from memadvisor.layout import TrainingStep
from memadvisor.planning.layout_shares import Contents, Share, whole_model
from memadvisor.planning.layout_space import Split, States
from memadvisor.planning.layout_works import Floats, Ints, Pair, WorkPrices

# Of devices that may be the busiest; None where chunks may lie otherwise, and the mean device is what all must be through with.
Shares = tuple[Share, ...] | None


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of one pipeline, with a row for each way of holding states.

    `once` (ways x shares x 3): seconds once a step (reductions, gathers, update). `of_chunks` (ways x 2 each): of each
    microbatch's forward and backward, where parameters are gathered, which `gathers` says.
    """

    is_priced: npt.NDArray[np.bool_]
    gathers: npt.NDArray[np.bool_]
    once: Floats
    of_chunks: Mapping[Contents, Floats]


# Reductions and gathers once a step for each share; those of each microbatch for each chunk.
_Network = tuple[list[Pair], list[Pair]]


class TrafficPrices:
    """For one question; what repeats is kept."""

    def __init__(self, prices: WorkPrices) -> None:
        self.prices = prices
        self.question = prices.question
        host = prices.question.cluster.host
        self._host_bytes_per_s = None if host is None else host.bytes_per_s
        self._counts: dict[tuple[Contents, int, int], StageParameters] = {}
        self._traffic: dict[Hashable, Traffic] = {}
        self._networks: dict[Hashable, _Network] = {}
        self._updates: dict[Hashable, list[float]] = {}

    def of(
        self,
        split: Split,
        schedule: str,
        chunks: int,
        shares: Shares,
        times: int,
        ways: tuple[States, ...],
        columns: Ints,
        step_of: Callable[[States], TrainingStep],
    ) -> Traffic:
        """Priced for those of `ways` that `columns` names. `times`: microbatches. `step_of`: any step of this split, these
        chunks and microbatches that holds its states so."""
        pipeline = (split, schedule, chunks, shares is None)
        traffic = self._traffic.get((pipeline, times))
        if traffic is None:
            traffic = self._traffic[pipeline, times] = _unpriced(ways, shares)
        for column in columns[~traffic.is_priced[columns]].tolist():
            held = ways[column]
            several = times if shares is None or self._each_tells(held) else 1
            states = (pipeline, held.zero_stage, held.shard)
            network, update = (*states, held.zeropp, several), (*states, held.offload_optimizer)
            if network not in self._networks:
                self._networks[network] = self._network(step_of(held), shares, list(traffic.of_chunks))
            if update not in self._updates:
                self._updates[update] = self._update(step_of(held), shares)
            once, of_chunks = self._networks[network]
            traffic.once[column, :, :2] = once
            traffic.once[column, :, 2] = self._updates[update]
            # Nothing of chunks where nothing is gathered.
            for chunk, seconds in zip(traffic.of_chunks, of_chunks, strict=False):
                traffic.of_chunks[chunk][column] = seconds
            traffic.is_priced[column] = True
        return traffic

    def _each_tells(self, held: States) -> bool:
        """The number of microbatches changes what travels once a step, or for each of them."""
        software = self.question.software
        defers = software.defers_reduction or software.whole_in_pipelines
        return held.zero_stage == 2 or (held.zero_stage == 3 and defers)

    def _network(self, step: TrainingStep, shares: Shares, chunks: list[Contents]) -> _Network:
        groups = replica_groups(step.layout, self.prices.group, self._host_bytes_per_s)
        if shares is None:
            each_s = sum(microbatch_traffic(step, self._mean_parameters(step), groups))
            return [(0.0, step.layout.num_microbatches * each_s)], []
        once = [step_traffic(step, self._parameters(share.whole, step), groups) for share in shares]
        if step.layout.zero_stage < 3:
            return once, []
        return once, [microbatch_traffic(step, self._parameters(chunk, step), groups) for chunk in chunks]

    def _update(self, step: TrainingStep, shares: Shares) -> list[float]:
        if shares is None:
            counts = [self._mean_parameters(step)]
        else:
            counts = [self._parameters(share.whole, step) for share in shares]
        return [
            optimizer_seconds(step, count, self.prices.device, self._host_bytes_per_s) for count in counts
        ]

    def _mean_parameters(self, step: TrainingStep) -> StageParameters:
        whole, stages = self._parameters(whole_model(self.question.model), step), step.layout.pipeline
        trained = None if whole.trained is None else _part(whole.trained, stages)
        return replace(_part(whole, stages), trained=trained)

    def _parameters(self, contents: Contents, step: TrainingStep) -> StageParameters:
        """Of one rank that holds this of the model."""
        key = (contents, step.layout.tensor, step.layout.expert)
        if key not in self._counts:
            layers = [
                (layer,) * count for layer, count in zip(self.prices.kinds, contents.layers, strict=True)
            ]
            held = StageContents(layers=sum(layers, ()), embeddings=contents.embedding, heads=contents.head)
            self._counts[key] = stage_parameters(self.question.model, step, held)
        return self._counts[key]


def _part(whole: StageParameters, stages: int) -> StageParameters:
    return replace(
        whole, shared=whole.shared / stages, experts=whole.experts / stages, ends=whole.ends / stages, tensors=0,
        units=whole.units / stages, expert_units=whole.expert_units / stages,
    )  # fmt: skip


def _unpriced(ways: tuple[States, ...], shares: Shares) -> Traffic:
    met = [chunk for _, chunk in shares[0].chain] if shares else []
    return Traffic(
        is_priced=np.zeros(len(ways), dtype=bool),
        gathers=np.array([held.zero_stage == 3 for held in ways]),
        once=np.zeros((len(ways), 1 if shares is None else len(shares), 3)),
        of_chunks={chunk: np.zeros((len(ways), 2)) for chunk in met},
    )

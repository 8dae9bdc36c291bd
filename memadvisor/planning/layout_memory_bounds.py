"""Bytes that no layout can do without, from a part of its description.

A device holds its states, and the microbatches that its schedule has in flight. Held against `estimate_step` in
tests/planning/test_layout_bounds.py; for most layouts the bound is the estimate itself.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from memadvisor.cost.layouts.adapters import adapter_parameters
from memadvisor.cost.layouts.chance import chance_beyond, memory_sigma
from memadvisor.cost.layouts.holding_code import resident_share, shards_masters
from memadvisor.cost.layouts.memory import StageParameters
from memadvisor.layout import Layout
from memadvisor.planning.layout_shares import Share, deal_shares, whole_model
from memadvisor.planning.layout_space import Split, States
from memadvisor.planning.layout_time_bounds import LOOPED
from memadvisor.planning.layout_works import Floats, Ints, WorkPrices, Works

_ALL_IN_FLIGHT = ("gpipe", "breadth-first")


class MemoryBounds:
    """For one question."""

    def __init__(self, prices: WorkPrices) -> None:
        self.prices = prices
        self.question = prices.question
        self.coefficients = prices.coefficients

    @cached_property
    def largest_safe_peak_bytes(self) -> float:
        """The largest peak whose chance of running out of memory is accepted, by bisection."""
        low, high = 1.0, 2.0 * self.prices.device.memory_bytes
        for _ in range(60):
            middle = (low + high) / 2
            if self._chance(middle) < self.question.max_p_oom:
                low = middle
            else:
                high = middle
        return high

    def _chance(self, peak_bytes: float) -> float:
        """The least of all shares of states in such a peak: of the smallest spread where it fits, else of the largest."""
        known = self.coefficients
        is_alone = self.question.cluster.num_accelerators == 1  # without communicators
        left_bytes = self.prices.device.memory_bytes - (
            known.driver_bytes if is_alone else known.context_bytes
        )
        return min(
            chance_beyond(peak_bytes, left_bytes, memory_sigma(states, known)) for states in (0.0, 1.0)
        )

    def peak_bytes(self, work_bytes: Floats, state_bytes: Floats) -> Floats:
        """Of the worst device: rows of works (rows x devices) x ways of holding states (ways x devices)."""
        worst: Floats = (work_bytes[:, None, :] + state_bytes[None, :, :]).max(axis=2)
        return worst * self.coefficients.allocator_share + self.coefficients.allocator_fixed_bytes

    def work_bytes(self, split: Split, works: Works, schedule: str, chunks: int) -> Floats:
        """What microbatches take, for each row and for each device that may be the fullest."""
        if schedule not in LOOPED:  # chunks may lie otherwise
            return np.zeros((len(works.rows), 1))
        columns = [
            self._of_share(share, works, split.pipeline, schedule, chunks)
            for share in self._shares(split.pipeline, chunks)
        ]
        return np.stack(columns, axis=1)

    def _of_share(self, share: Share, works: Works, num_stages: int, schedule: str, chunks: int) -> Floats:
        layers = np.array(share.whole.layers, dtype=float)
        has = layers > 0
        passes = passes_in_flight(schedule, share.device, num_stages, works.num_microbatches, chunks)
        kept: Floats = works.kept_bytes @ layers + works.tower_bytes * share.whole.embedding
        if chunks == 1 or schedule in _ALL_IN_FLIGHT:
            kept = kept * passes / chunks
        elif has.any():
            # Where chunks are not held equally often, the smallest may be those held most.
            kept = kept + share.fewest * (passes - chunks) * works.kept_bytes[:, has].min(axis=1)
        head = works.head_bytes * share.whole.head
        working = sum((held * has).max(axis=1) for held in (works.again_bytes, works.backward_bytes))
        # The simulation rounds activations to bytes.
        found: Floats = kept - chunks * num_stages + np.maximum(head, working)
        return found

    def state_bytes(self, split: Split, ways: tuple[States, ...], schedule: str, chunks: int) -> Floats:
        """For each way and for each device that may be the fullest."""
        model, kinds = self.question.model, self.prices.kinds
        tied = split.pipeline == 1 and model.tied_embeddings
        parts = [
            *(
                (model.shared_layer_parameters(layer), model.expert_layer_parameters(layer))
                for layer in kinds
            ),
            (model.embedding_parameters() - model.frozen_tower_parameters(), 0),
            (0 if tied else model.head_parameters(), 0),
        ]
        tensor, expert = split.tensor, split.expert
        shared = np.array([shared / tensor for shared, _ in parts])
        experts = np.array([experts / tensor / expert for _, experts in parts])
        states = self._bytes_of(split, ways, shared, experts)
        tower = model.frozen_tower_parameters() / tensor
        if self.question.software.lora is not None:
            own_ends = shared[-2:] - np.array(
                [(model.tower_parameters() / tensor if tower == 0 else 0.0), 0.0]
            )
            states += self._adapter_bytes(split, ways, own_ends)
        elif tower:
            is_sharded = _stages(ways)[:, 0] == 3
            ranks = np.where(is_sharded, _shard_ranks(split, ways)[:, 0], 1)
            states[:, -2] += tower * self.question.software.parameter_bytes / ranks
        if schedule not in LOOPED:  # the mean device's layers are in memory anyhow
            whole = np.array(whole_model(model).layers, dtype=float)
            mean: Floats = states[:, :-2] @ whole / split.pipeline
            return mean[:, None]
        shares = self._shares(split.pipeline, chunks)
        held = np.array([share.whole.numbers() for share in shares], dtype=float)
        # Experts that no other replica holds are whole where they are.
        parted = np.where(_shard_ranks(split, ways) // expert > 1, experts, 0.0)
        gathered = self._gathered_bytes(split, ways, (shared + parted)[:, :-2])
        at_once = np.where(held[None, :, :-2] > 0, gathered[:, None, :], 0.0).max(axis=2)
        found: Floats = states @ held.T + at_once
        if self.question.software.keeps_ends and split.pipeline == 1:
            found += self._kept_ends_bytes(split, ways, shared[-2:].sum() + tower)
        return found

    def _kept_ends_bytes(self, split: Split, ways: tuple[States, ...], ends: float) -> Floats:
        """The embedding and the head, which stay gathered, where all of the model is on each device (ways x 1)."""
        software = self.question.software
        size = software.parameter_bytes if software.lora is None else software.lora.end_bytes
        return np.where((_stages(ways) == 3) & (_shard_ranks(split, ways) > 1), ends * size, 0.0)

    def _bytes_of(self, split: Split, ways: tuple[States, ...], shared: Floats, experts: Floats) -> Floats:
        """Of parameters, their gradients and their optimizer's state (ways x parts), by ZeRO stage. Frozen ones have no
        more than themselves."""
        software, lora = self.question.software, self.question.software.lora
        if lora is None:
            sizes = (software.parameter_bytes, software.gradient_bytes, software.optimizer_bytes)
            return self._held_bytes(split, ways, (shared, experts), sizes)
        layer_bytes = self._held_bytes(split, ways, (shared, experts), (lora.matrix_bytes, 0.0, 0.0))
        end_bytes = self._held_bytes(split, ways, (shared, experts), (lora.end_bytes, 0.0, 0.0))
        found: Floats = np.where(self._is_end(), end_bytes, layer_bytes)
        return found

    def _adapter_bytes(self, split: Split, ways: tuple[States, ...], ends: Floats) -> Floats:
        """Of what is trained beside frozen parameters (ways x parts): adapters of each kind of layer, and copies of the ends."""
        model, software = self.question.model, self.question.software
        lora = software.lora
        assert lora is not None
        pairs = [adapter_parameters(model, lora, layer, split.tensor) for layer in self.prices.kinds]
        trained_ends = ends if lora.trains_ends else np.zeros(2)
        shared = np.array([*(pair[0] for pair in pairs), *trained_ends])
        experts = np.array([*(pair[1] / split.expert for pair in pairs), 0.0, 0.0])
        own = (software.parameter_bytes, software.gradient_bytes, software.optimizer_bytes)
        layers = self._held_bytes(split, ways, (shared, experts), own)
        narrow = software.parameter_bytes == 4 and lora.end_bytes == 2
        at_ends = self._held_bytes(
            split, ways, (shared, experts), (own[0] / 2, own[1] / 2, own[2] / 2) if narrow else own
        )
        found: Floats = np.where(self._is_end(), at_ends, layers)
        return found

    def _is_end(self) -> npt.NDArray[np.bool_]:
        """Of the parts of the model, the last two: all kinds of layer, and both ends."""
        return np.arange(len(self.prices.kinds) + 2) >= len(self.prices.kinds)

    def _held_bytes(
        self,
        split: Split,
        ways: tuple[States, ...],
        parts: tuple[Floats, Floats],
        sizes: tuple[float, float, float],
    ) -> Floats:
        """`parts`: what all tokens pass and what experts are; `sizes`: of a parameter, its gradient and its optimizer's state."""
        software, (shared, experts) = self.question.software, parts
        stage, ranks = _stages(ways), _shard_ranks(split, ways)
        part = shared / ranks + experts / np.maximum(1, ranks // split.expert)
        on_host = np.array([[held.offload_optimizer] for held in ways])
        optimizer_bytes = np.where(on_host, 0, sizes[2] * resident_share(software))
        # Of a single microbatch gradients may come as activations go.
        may_be_late = software.updates_in_backward or (software.lets_gradients_go and split.pipeline == 1)
        gradients_too = (on_host & (stage >= 2) & software.offload_gradients) | may_be_late
        gradient_bytes = np.where(gradients_too, 0, sizes[1])
        found = np.zeros(part.shape)
        for size, sharded_from in (
            (sizes[0], 3), (gradient_bytes, 2), (optimizer_bytes, 1)
        ):  # fmt: skip
            found += size * np.where(stage >= sharded_from, part, shared + experts)
        if shards_masters(software):  # of stage 3 there is none in two bytes beside the optimizer's
            found -= np.where(stage == 3, sizes[0] * part, 0.0)
        if self.question.zeropp:
            found += sizes[0] * self._second_copy(split, ways, shared, experts)
        return found

    def _second_copy(self, split: Split, ways: tuple[States, ...], shared: Floats, experts: Floats) -> Floats:
        """Parameters that hpZ holds twice (ways x parts)."""
        found = np.zeros((len(ways), len(shared)))
        for row, held in enumerate(ways):
            if "hpz" not in held.zeropp:
                continue
            layout = Layout(
                data=split.data,
                context=split.context,
                expert=split.expert,
                zero_stage=held.zero_stage,
                shard=held.shard,
                **held.zeropp_fields(self.question.cluster, split),
            )
            one, other = (
                StageParameters(shared=1.0 - which, experts=which, widest_layer=0.0).secondary(layout)
                for which in (0.0, 1.0)
            )
            found[row] = shared * one + experts * other
        return found

    def _gathered_bytes(self, split: Split, ways: tuple[States, ...], parameters: Floats) -> Floats:
        """Two layers' parameters and one's gradients, where they are sharded (ways x kinds of layer)."""
        software, lora = self.question.software, self.question.software.lora
        is_sharded = (_stages(ways) == 3) & (_shard_ranks(split, ways) > 1)
        if lora is None:
            whole = parameters * (2.0 * software.parameter_bytes + software.reduce_bytes)
        else:
            pairs = [
                adapter_parameters(self.question.model, lora, layer, split.tensor)
                for layer in self.prices.kinds
            ]
            own, parted = (
                np.array([pair[which] for pair in pairs]) / (split.expert if which else 1) for which in (0, 1)
            )
            trained = own + np.where(_shard_ranks(split, ways) // split.expert > 1, parted, 0.0)
            whole = parameters * 2.0 * lora.matrix_bytes + trained * software.reduce_bytes
        return np.where(is_sharded, whole, 0.0)

    def _shares(self, num_stages: int, chunks: int) -> tuple[Share, ...]:
        return deal_shares(self.question.model, self.question.software, num_stages, chunks)[1]


def passes_in_flight(
    schedule: str, device: int, num_stages: int, num_microbatches: Ints, chunks: int
) -> Ints:
    """Microbatches times chunks that a device has in flight, at least: for looped chunks Narayanan et al. 2021,
    arXiv:2104.04473, section 2.2."""
    if num_stages == 1:
        return np.ones_like(num_microbatches)
    if schedule in _ALL_IN_FLIGHT:
        return num_microbatches * chunks
    if chunks == 1:
        return np.minimum(num_stages - device, num_microbatches)
    return np.minimum(
        2 * (num_stages - device - 1) + (chunks - 1) * num_stages + 1, num_microbatches * chunks
    )


def _stages(ways: tuple[States, ...]) -> Ints:
    return np.array([[held.zero_stage] for held in ways])


def _shard_ranks(split: Split, ways: tuple[States, ...]) -> Ints:
    return np.array([[(split.data if held.shard is None else held.shard) * split.context] for held in ways])

"""What no layout can beat, from a part of its description: seconds and bytes that the cost model never goes below.

Time: the busiest device of a pipeline works for all its microbatches, and where it runs whole backwards it begins after
the first forwards of the chunks before its first, and ends before their last backwards. Parameters may have to be
gathered, states are updated. Memory: a device holds its states, and the microbatches that its schedule has in flight.
Proven against `estimate_step` in tests/planning/test_layout_bounds.py. For most layouts the bound of memory is the estimate
itself, and that of time lacks what is not hidden of collectives once a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from memadvisor.cost.layouts.chance import chance_beyond, memory_sigma
from memadvisor.cost.layouts.coefficients import FITTED, Coefficients
from memadvisor.cost.layouts.data_parallel import (
    exposed_step_seconds,
    hidden_seconds,
    microbatch_traffic,
    optimizer_seconds,
    replica_groups,
    step_traffic,
)
from memadvisor.cost.layouts.kernels import device_of
from memadvisor.cost.layouts.layer_work import embedding_work, head_work, layer_groups, layer_work
from memadvisor.cost.layouts.links import Group, group_of
from memadvisor.cost.layouts.memory import StageParameters
from memadvisor.cost.layouts.saved import head_saved_bytes, layer_backward_bytes, layer_saved_bytes
from memadvisor.layout import Layout, TrainingStep
from memadvisor.planning.layout_shares import Share, Shares, deal_shares
from memadvisor.planning.layout_space import DeviceWork, LayoutQuestion, Split, States, make_layout

# Schedules whose device d has the chunks d, d + p, ... and runs backwards in one piece.
_LOOPED = ("gpipe", "1f1b", "interleaved", "breadth-first")
_ALL_IN_FLIGHT = ("gpipe", "breadth-first")
# Sums of the same parts in another order are rounded otherwise: what is equal may come out as more.
_ROUNDED = 1 - 1e-12


@dataclass(frozen=True, slots=True)
class _Seconds:
    """One microbatch of layers of each kind and of the ends: (forward, backward)."""

    dense: tuple[float, float]
    sparse: tuple[float, float]
    embedding: tuple[float, float]
    head: tuple[float, float]

    def of(self, share: Share) -> tuple[float, float]:
        """Of a device."""
        forward_s, backward_s = (
            share.dense * self.dense[way]
            + share.sparse * self.sparse[way]
            + share.embedding * self.embedding[way]
            + share.head * self.head[way]
            for way in (0, 1)
        )
        return forward_s, backward_s

    def before(self, share: Share) -> float:
        """Of the chunks before its first one."""
        return (
            share.dense_before * sum(self.dense)
            + share.sparse_before * sum(self.sparse)
            + share.embedding_before * sum(self.embedding)
        )


@dataclass(frozen=True, slots=True)
class _Bytes:
    """Of one microbatch: kept by a layer of each kind, held while it runs again, by a layer's backward, and the head's."""

    dense: float
    sparse: float
    dense_again: float
    sparse_again: float
    backward: float
    head: float


@dataclass(frozen=True, slots=True)
class _StateBytes:
    """Of layers of each kind and of the ends; `_gathered` while a layer's parameters are whole."""

    dense: float
    sparse: float
    embedding: float
    head: float
    dense_gathered: float
    sparse_gathered: float


class LayoutBounds:
    """Bounds for one question; what repeats is kept."""

    def __init__(self, question: LayoutQuestion, coefficients: Coefficients = FITTED) -> None:
        self.question = question
        self.coefficients = coefficients
        self.device = device_of(question.cluster.accelerator, question.software.compute_dtype, coefficients)
        model = question.model
        self._num_sparse = sum(model.is_second_kind(layer) for layer in range(model.n_layers))
        self._groups: dict[tuple[int, int], Group] = {}
        self._shares: dict[tuple[int, int], Shares] = {}
        self._seconds: dict[tuple[DeviceWork, bool], _Seconds] = {}
        self._saved: dict[DeviceWork, _Bytes] = {}
        self._state_bytes: dict[tuple[Split, States], _StateBytes] = {}

    @cached_property
    def largest_safe_peak_bytes(self) -> float:
        """The largest peak whose chance of running out of memory is accepted, by bisection."""
        low, high = 1.0, 2.0 * self.device.memory_bytes
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
        left_bytes = self.device.memory_bytes - known.context_bytes
        return min(
            chance_beyond(peak_bytes, left_bytes, memory_sigma(states, known)) for states in (0.0, 1.0)
        )

    def can_be_dealt(self, num_stages: int, chunks: int) -> bool:
        """Whether the model's layers fill so many stages."""
        return bool(self._device_shares(num_stages, chunks)[0])

    def pipeline_seconds(
        self, work: DeviceWork, num_stages: int, num_microbatches: int, schedule: str, chunks: int
    ) -> float:
        """Of a step's forwards and backwards."""
        each = self._work_seconds(work, num_microbatches > 1)
        if schedule not in _LOOPED:
            return _ROUNDED * num_microbatches * sum(each.of(self._whole())) / num_stages
        return _ROUNDED * max(
            each.before(share) + num_microbatches * sum(each.of(share))
            for share in self._device_shares(num_stages, chunks)[0]
        )

    def step_seconds(
        self, pipeline_s: float, work: DeviceWork, split: Split, schedule: str, chunks: int, held: States
    ) -> float:
        """Of the whole step; `pipeline_s` is a bound of its forwards and backwards without gathers."""
        num_microbatches = self.question.batch_sequences // split.data // work.micro_batch_size
        step = self.question.step(make_layout(self.question, split, work, schedule, chunks, held))
        known, host = self.coefficients, self.question.cluster.host
        host_bytes_per_s = None if host is None else host.bytes_per_s
        groups = replica_groups(step.layout, self._group, host_bytes_per_s)
        if schedule not in _LOOPED:
            count = self._parameters(self._whole(), split, 1.0 / split.pipeline)
            gathers_s = num_microbatches * sum(microbatch_traffic(step, count, groups))
            optimizer_s = optimizer_seconds(step, count, self.device, host_bytes_per_s)
            return _ROUNDED * (max(pipeline_s, gathers_s) + optimizer_s + known.step_fixed_s)
        each = self._work_seconds(work, num_microbatches > 1)
        exposed_s = optimizer_s = 0.0
        for share in self._device_shares(split.pipeline, chunks)[0]:
            count = self._parameters(share, split, 1.0)
            forward_s, backward_s = each.of(share)
            if held.zero_stage == 3:
                gather_s, reduce_s = microbatch_traffic(step, count, groups)
                forward_s = hidden_seconds(forward_s, gather_s, known.overlap_slowdown)
                backward_s = hidden_seconds(backward_s, reduce_s, known.overlap_slowdown)
                pipeline_s = max(pipeline_s, each.before(share) + num_microbatches * (forward_s + backward_s))
            else:  # with gathers, what a chunk's leave uncovered is not known here
                reduce_s, gather_s = step_traffic(step, count, groups)
                exposed_s = max(
                    exposed_s, exposed_step_seconds(step, reduce_s, gather_s, backward_s, forward_s, known)
                )
            optimizer_s = max(optimizer_s, optimizer_seconds(step, count, self.device, host_bytes_per_s))
        return _ROUNDED * (pipeline_s + exposed_s + optimizer_s + known.step_fixed_s)

    def _whole(self) -> Share:
        """All of the model."""
        sparse = self._num_sparse
        dense = self.question.model.n_layers - sparse
        return Share(
            device=0, dense=dense, sparse=sparse, embedding=1, head=1, fewest=dense + sparse,
            dense_before=0, sparse_before=0, embedding_before=0,
        )  # fmt: skip

    def _parameters(self, share: Share, split: Split, part: float) -> StageParameters:
        """Of a device with this share of the model, or with `part` of it."""
        model = self.question.model
        dense, sparse = self._kinds()
        shared = share.dense * model.shared_layer_parameters(dense)
        shared += share.sparse * model.shared_layer_parameters(sparse)
        tied = share.embedding and share.head and model.tied_embeddings
        shared += share.embedding * model.embedding_parameters()
        shared += 0 if tied else share.head * model.head_parameters()
        experts = share.sparse * model.expert_layer_parameters(sparse)
        part /= split.tensor
        return StageParameters(shared=shared * part, experts=experts * part / split.expert, widest_layer=0.0)

    def peak_bytes(
        self, work: DeviceWork, split: Split, num_microbatches: int, schedule: str, chunks: int, held: States
    ) -> float:
        """Of the worst device."""
        state, saved = self._held_bytes(split, held), self._saved_bytes(work)
        if schedule not in _LOOPED:  # chunks may lie otherwise: the mean device's layers are in memory anyhow
            whole = self._whole()
            mean = (whole.dense * state.dense + whole.sparse * state.sparse) / split.pipeline
            return mean * self.coefficients.allocator_share + self.coefficients.allocator_fixed_bytes
        return max(
            self._device_bytes(share, state, saved, split.pipeline, num_microbatches, schedule, chunks)
            for share in self._device_shares(split.pipeline, chunks)[1]
        )

    def _device_bytes(
        self,
        share: Share,
        state: _StateBytes,
        saved: _Bytes,
        num_stages: int,
        num_microbatches: int,
        schedule: str,
        chunks: int,
    ) -> float:
        known = self.coefficients
        layers = share.dense + share.sparse
        # Where chunks are not held equally often, the smallest may be those held most.
        passes = passes_in_flight(schedule, share.device, num_stages, num_microbatches, chunks)
        dense, sparse = share.dense, share.sparse
        kept = dense * saved.dense + sparse * saved.sparse
        if chunks == 1 or schedule in _ALL_IN_FLIGHT:
            kept *= passes / chunks
        elif layers:
            least = min(saved.dense, saved.sparse) if dense and sparse else kept / layers
            kept += share.fewest * (passes - chunks) * least
        states = (
            dense * state.dense + sparse * state.sparse
            + share.embedding * state.embedding + share.head * state.head
        )  # fmt: skip
        buffers = max(state.dense_gathered if dense else 0.0, state.sparse_gathered if sparse else 0.0)
        buffers += max(saved.dense_again if dense else 0.0, saved.sparse_again if sparse else 0.0)
        head = saved.head if share.head else 0.0
        buffers += max(0.0, saved.backward - head) if layers else 0.0
        # The simulation rounds activations to bytes.
        tensors = states + kept - chunks * num_stages + head + buffers
        return tensors * known.allocator_share + known.allocator_fixed_bytes

    def _group(self, size: int, stride: int) -> Group:
        key = (size, stride)
        if key not in self._groups:
            self._groups[key] = group_of(self.question.cluster, size, stride, self.coefficients)
        return self._groups[key]

    def _device_shares(self, num_stages: int, chunks: int) -> Shares:
        """None where the layers cannot be dealt out."""
        key = (num_stages, chunks)
        if key not in self._shares:
            self._shares[key] = deal_shares(self.question.model, self.question.software, num_stages, chunks)
        return self._shares[key]

    def _alone(self, work: DeviceWork, several: bool) -> TrainingStep:
        """The step of one stage that has all layers."""
        return self.question.step(
            Layout(
                data=work.expert,
                tensor=work.tensor,
                context=work.context,
                expert=work.expert,
                sequence_parallel=work.sequence_parallel,
                context_kind=work.context_kind,
                micro_batch_size=work.micro_batch_size,
                num_microbatches=2 if several else 1,
                recompute=work.recompute,
            )
        )

    def _work_seconds(self, work: DeviceWork, several: bool) -> _Seconds:
        """`several`: microbatches to a step."""
        key = (work, several)
        if key not in self._seconds:
            model, step = self.question.model, self._alone(work, several)
            groups = layer_groups(step.layout, self._group, pipeline_crosses_nodes=False)
            ends = [part(model, step, self.device, groups) for part in (embedding_work, head_work)]
            kinds = [layer_work(model, step, layer, self.device, groups) for layer in self._kinds()]
            self._seconds[key] = _Seconds(*((part.forward_s, part.backward_s) for part in (*kinds, *ends)))
        return self._seconds[key]

    def _kinds(self) -> tuple[int, int]:
        """A dense layer and a sparse one, as far as there are any."""
        last = self.question.model.n_layers - 1
        return (0 if self._num_sparse <= last else last), last

    def _saved_bytes(self, work: DeviceWork) -> _Bytes:
        if work not in self._saved:
            model, step = self.question.model, self._alone(work, False)
            again = (0.0, 0.0)
            if work.recompute == "full":
                plain = DeviceWork(
                    work.tensor, work.context, work.expert, work.sequence_parallel, work.context_kind,
                    work.micro_batch_size, "none",
                )  # fmt: skip
                dense, sparse = self._kinds()
                alone = self._alone(plain, False)
                again = (layer_saved_bytes(model, alone, dense), layer_saved_bytes(model, alone, sparse))
            dense_kept, sparse_kept = (layer_saved_bytes(model, step, layer) for layer in self._kinds())
            self._saved[work] = _Bytes(
                dense_kept, sparse_kept, *again,
                layer_backward_bytes(model, step, self._kinds()), head_saved_bytes(model, step),
            )  # fmt: skip
        return self._saved[work]

    def _held_bytes(self, split: Split, held: States) -> _StateBytes:
        key = (split, held)
        if key not in self._state_bytes:
            model, tensor = self.question.model, split.tensor
            layers, gathered = [], []
            for layer in self._kinds():
                shared = model.shared_layer_parameters(layer) / tensor
                experts = model.expert_layer_parameters(layer) / tensor / split.expert
                layers.append(self._bytes_of(split, held, shared, experts))
                whole = experts if _shard_ranks(split, held) // split.expert > 1 else 0.0
                gathered.append(self._gathered_bytes(split, held, shared + whole))
            tied = split.pipeline == 1 and model.tied_embeddings
            ends = model.embedding_parameters(), 0 if tied else model.head_parameters()
            table, head = (self._bytes_of(split, held, count / tensor, 0.0) for count in ends)
            self._state_bytes[key] = _StateBytes(layers[0], layers[1], table, head, gathered[0], gathered[1])
        return self._state_bytes[key]

    def _gathered_bytes(self, split: Split, held: States, parameters: float) -> float:
        """Two layers' parameters and one's gradients, where they are sharded."""
        if held.zero_stage < 3 or _shard_ranks(split, held) == 1:
            return 0.0
        software = self.question.software
        return parameters * (2.0 * software.parameter_bytes + software.reduce_bytes)

    def _bytes_of(self, split: Split, held: States, shared: float, experts: float) -> float:
        """Of parameters, their gradients and their optimizer's state, by ZeRO stage."""
        software, ranks = self.question.software, _shard_ranks(split, held)
        whole = shared + experts
        part = shared / ranks + experts / max(1, ranks // split.expert)
        optimizer_bytes = 0 if held.offload_optimizer else software.optimizer_bytes
        to_host = held.offload_optimizer and held.zero_stage >= 2 and software.offload_gradients
        gradient_bytes = 0 if to_host else software.gradient_bytes
        each = (software.parameter_bytes, 3), (gradient_bytes, 2), (optimizer_bytes, 1)
        return sum(size * (part if held.zero_stage >= stage else whole) for size, stage in each)


def passes_in_flight(schedule: str, device: int, num_stages: int, num_microbatches: int, chunks: int) -> int:
    """Microbatches times chunks that a device has in flight, at least: for looped chunks Narayanan et al. 2021,
    arXiv:2104.04473, section 2.2."""
    if num_stages == 1:
        return 1
    if schedule in _ALL_IN_FLIGHT:
        return num_microbatches * chunks
    if chunks == 1:
        return min(num_stages - device, num_microbatches)
    return min(2 * (num_stages - device - 1) + (chunks - 1) * num_stages + 1, num_microbatches * chunks)


def _shard_ranks(split: Split, held: States) -> int:
    return (split.data if held.shard is None else held.shard) * split.context

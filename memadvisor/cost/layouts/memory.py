"""What one rank of a pipeline stage holds at its peak, by component.

States: Rajbhandari et al. 2020 (arXiv:1910.02054), section 3, with the bytes that the software keeps of a parameter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from memadvisor.architecture import Architecture
from memadvisor.cost.layouts.adapters import adapter_parameters
from memadvisor.cost.layouts.coefficients import Coefficients
from memadvisor.cost.layouts.grouped_updates import (
    group_cached_bytes,
    group_update_bytes,
    held_update_bytes,
    joined_cached_bytes,
)
from memadvisor.cost.layouts.holding_code import (
    gradients_come_late,
    gradients_go_at_once,
    held_graph_bytes,
    parts_in_group,
    resident_share,
    shards_masters,
)
from memadvisor.cost.layouts.passing_layers import ahead_bytes, moving_bytes
from memadvisor.cost.layouts.rank_memory import StageMemory
from memadvisor.cost.layouts.root_unit import root_gradient_bytes, root_reduction_bytes
from memadvisor.cost.layouts.saved import head_saved_bytes, layer_backward_bytes
from memadvisor.cost.layouts.saved_autocast import only_matrices
from memadvisor.cost.layouts.second_run import second_run_bytes, working_layer_bytes
from memadvisor.layout import Layout, TrainingStep
from memadvisor.software_traits import Software


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContents:
    """Layers that a device holds, by their numbers (a layer of which it holds two copies stands twice), and how often it
    has the ends of the model."""

    layers: tuple[int, ...]
    embeddings: int
    heads: int


def device_contents(chunks: tuple[int, ...], layers: tuple[int, ...]) -> StageContents:
    """What a device with these chunks of the model holds; `layers` has the number of layers of each chunk."""
    starts = list(accumulate(layers, initial=0))
    return StageContents(
        layers=tuple(layer for chunk in chunks for layer in range(starts[chunk], starts[chunk + 1])),
        embeddings=chunks.count(0),
        heads=chunks.count(len(layers) - 1),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParameters:
    """Parameters of one rank: `shared` are the same on all data-parallel ranks, `experts` on every `expert`th alone.
    `widest_layer`: what of a layer ZeRO stage 3 gathers, at most. `tensors`: how many they are. `units`: in how many
    pieces stage 3 gathers them, each layer, the embedding and the head one (FSDP's wrapping of blocks); `expert_units`:
    of those with experts. Of a mean device they are fractions. `ends`: of `shared`, the embedding's and the head's.
    `frozen`: of the ends, those of a tower of images without gradients and state. `trained`: what is trained beside all
    of these, which are frozen then."""

    shared: float
    experts: float
    widest_layer: float
    tensors: int = 0
    units: float = 1.0
    expert_units: float = 1.0
    ends: float = 0.0
    frozen: float = 0.0
    trained: StageParameters | None = None

    @property
    def updated(self) -> StageParameters:
        if self.trained is not None:
            return self.trained
        if not self.frozen:
            return self
        return replace(self, shared=self.shared - self.frozen, ends=self.ends - self.frozen, frozen=0.0)

    @property
    def all(self) -> float:
        return self.shared + self.experts

    def sharded(self, layout: Layout) -> float:
        """One rank's part of what the ZeRO stage shards: experts among the replicas that hold the same ones."""
        return self.shared / layout.shard_ranks + self.experts / layout.expert_shard_ranks

    def secondary(self, layout: Layout) -> float:
        """One rank's part of the second copy that hpZ keeps of what is gathered (arXiv:2306.10209, section 3.2)."""
        if layout.secondary_shard is None:
            return 0.0
        shared = self.shared / layout.secondary_shard if layout.shard_ranks > 1 else 0.0
        experts = self.experts / layout.expert_secondary_ranks if layout.expert_shard_ranks > 1 else 0.0
        return shared + experts


# Of a layer: queries, keys and values as one, their projection, gate and up as one, down, and two norms.
_TENSORS = 6


def stage_parameters(model: Architecture, step: TrainingStep, contents: StageContents) -> StageParameters:
    """Parameters that one rank of this stage computes with, tensor and expert parallelism applied."""
    layout = step.layout
    tensor = layout.weight_ranks
    # Of each kind of layer one is counted.
    each = [
        (
            count,
            model.shared_layer_parameters(layer) / tensor,
            model.expert_layer_parameters(layer) / tensor / layout.expert,
        )
        for count, layer in model.kinds_among(contents.layers).values()
    ]
    shared = sum(count * shared for count, shared, _ in each)
    experts = sum(count * experts for count, _, experts in each)
    tied = min(contents.embeddings, contents.heads) if model.tied_embeddings else 0
    ends = (
        contents.embeddings * model.embedding_parameters() + (contents.heads - tied) * model.head_parameters()
    )
    gathered = _gathers_experts(layout)
    widest = max((shared + experts * gathered for _, shared, experts in each), default=0.0)
    tensors = _TENSORS * len(contents.layers) + contents.embeddings + 2 * contents.heads
    return StageParameters(
        shared=shared + ends / tensor,
        experts=experts,
        ends=ends / tensor,
        frozen=contents.embeddings * model.frozen_tower_parameters() / tensor,
        trained=_trained(
            model, step, contents, (ends - contents.embeddings * model.tower_parameters()) / tensor
        ),
        widest_layer=widest,
        tensors=tensors,
        units=len(contents.layers) + contents.embeddings + contents.heads - tied,
        expert_units=sum(count for count, _, experts in each if experts),
    )


def _gathers_experts(layout: Layout) -> bool:
    """Experts that no other replica holds are whole where they are."""
    return layout.expert_shard_ranks > 1 or layout.offload_parameters


def _trained(
    model: Architecture, step: TrainingStep, contents: StageContents, ends: float
) -> StageParameters | None:
    """What is trained beside frozen parameters, on one rank: adapters, and copies of the `ends` where these are too."""
    lora = step.software.lora
    if lora is None:
        return None
    sizes = []
    for count, layer in model.kinds_among(contents.layers).values():
        shared, experts = adapter_parameters(model, lora, layer, step.layout.tensor)
        sizes.append((count, shared, experts / step.layout.expert))
    ends = ends if lora.trains_ends else 0.0
    return StageParameters(
        shared=sum(count * shared for count, shared, _ in sizes) + ends,
        experts=sum(count * experts for count, _, experts in sizes),
        ends=ends,
        widest_layer=max(
            (shared + experts * _gathers_experts(step.layout) for _, shared, experts in sizes), default=0.0
        ),
        tensors=2 * len(lora.targets) * len(contents.layers),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterBytes:
    """Of a parameter of a layer, and of one of the ends."""

    layer: float
    end: float

    def of(self, count: StageParameters, layout: Layout, *, is_sharded: bool) -> float:
        """On one rank."""
        whole = count.sharded(layout) if is_sharded else count.all
        ends = count.ends / (layout.shard_ranks if is_sharded else 1)
        return (whole - ends) * self.layer + ends * self.end

    def of_secondary(self, count: StageParameters, layout: Layout) -> float:
        """Of hpZ's copy."""
        copied = layout.secondary_shard is not None and layout.shard_ranks > 1
        ends = count.ends / (layout.secondary_shard or 1) if copied else 0.0
        return (count.secondary(layout) - ends) * self.layer + ends * self.end


def frozen_bytes(software: Software) -> ParameterBytes:
    """Of a parameter that is not trained; nothing where all are."""
    lora = software.lora
    if lora is None:
        return ParameterBytes(layer=0.0, end=0.0)
    return ParameterBytes(layer=lora.matrix_bytes, end=lora.end_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Of a trained parameter: itself, its gradient as it is accumulated, its optimizer's state."""

    parameter: ParameterBytes
    gradient: ParameterBytes
    optimizer: ParameterBytes


def state_bytes(software: Software) -> StateBytes:
    """As the software has it. Copies of the ends of a base in 16 bits are in these too, with their gradients and moments, where
    adapters are in fp32 (peft's modules_to_save, which copies)."""
    lora = software.lora
    halves = lora is not None and software.parameter_bytes == 4 and lora.end_bytes == 2
    parameter, gradient, optimizer = (
        ParameterBytes(layer=size, end=size / 2 if halves else size)
        for size in (software.parameter_bytes, software.gradient_bytes, software.optimizer_bytes)
    )
    return StateBytes(parameter=parameter, gradient=gradient, optimizer=optimizer)


def stage_memory(
    model: Architecture,
    step: TrainingStep,
    contents: StageContents,
    held_activation_bytes: float,
    coefficients: Coefficients,
) -> StageMemory:
    """`held_activation_bytes`: what the schedule holds of its microbatches at the peak, the logits' own bytes not among it."""
    layout = step.layout
    count = stage_parameters(model, step, contents)
    parameter_bytes, gradient_bytes, optimizer_bytes = _held_states(step, count)
    activation_bytes = held_activation_bytes
    if layout.offload_activations:
        moving = min(held_activation_bytes, moving_bytes(model, step, contents.layers))
        activation_bytes = moving + (held_activation_bytes - moving) * (1.0 - layout.offload_activations)
    head_bytes = head_saved_bytes(model, step) if contents.heads else 0.0
    # A layer runs again, and its backward begins, when that of the head is through.
    working = second_run_bytes(model, step, contents.layers)
    working += layer_backward_bytes(model, step, contents.layers)
    working += root_gradient_bytes(step, contents.heads * model.head_parameters())
    buffer_bytes = (
        _collective_buffers(step, count)
        + autocast_copies_bytes(model, step, contents)
        + narrow_copies_bytes(model, step, contents)
        + max(0.0, working - head_bytes)
        + ahead_bytes(model, step)
        + held_graph_bytes(model, step, contents.layers)
    )
    # Activations are gone when the optimizer updates.
    gone_bytes = activation_bytes + max(head_bytes, working)
    own = count.updated.sharded(layout)
    update_bytes = _lists_bytes(step, count.updated) + group_update_bytes(step, own)
    update_bytes += held_update_bytes(step, own, gradient_bytes)
    if gradients_come_late(step):
        at_work = working_layer_bytes(model, step, contents.layers, held_activation_bytes)
        at_work += root_gradient_bytes(step, contents.heads * model.head_parameters())
        last = max(at_work, update_bytes, root_reduction_bytes(step, count.updated.ends))
        gradient_bytes = max(0.0, gradient_bytes + last - gone_bytes)
    else:
        buffer_bytes += max(0.0, update_bytes - gone_bytes)
    tensors = (
        parameter_bytes + gradient_bytes + optimizer_bytes + activation_bytes + head_bytes + buffer_bytes
    )  # fmt: skip
    return StageMemory(
        parameter_bytes=parameter_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=optimizer_bytes,
        activation_bytes=activation_bytes,
        head_bytes=head_bytes,
        buffer_bytes=buffer_bytes,
        allocator_bytes=tensors * (coefficients.allocator_share - 1) + coefficients.allocator_fixed_bytes,
        context_bytes=coefficients.driver_bytes + coefficients.communicator_bytes * _communicators(layout),
        cached_bytes=group_cached_bytes(model, step, own, gone_bytes, has_logits=contents.heads > 0)
        + joined_cached_bytes(step, own, gradient_bytes),
    )


def _communicators(layout: Layout) -> int:
    """Groups that a rank talks to, of more than itself; where shards are shared by a part of the replicas, the others too."""
    groups = (layout.tensor, layout.pipeline, layout.context, layout.expert, layout.data)
    return sum(size > 1 for size in groups) + (1 < layout.shard_ranks < layout.data)


_MASTER_BYTES = 4.0


def _held_states(step: TrainingStep, count: StageParameters) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and optimizer state on one rank's device."""
    layout, software = step.layout, step.software
    stage, updated = layout.zero_stage, count.updated
    each, frozen = state_bytes(software), frozen_bytes(software)
    held_bytes = each.parameter.of(updated, layout, is_sharded=stage == 3)
    if stage == 3 and shards_masters(software):
        held_bytes = _MASTER_BYTES * updated.sharded(layout)
    held_bytes += each.parameter.of_secondary(updated, layout)
    if count.trained is not None:
        held_bytes += frozen.of(count, layout, is_sharded=stage == 3) + frozen.of_secondary(count, layout)
    elif count.frozen:
        held_bytes += software.parameter_bytes * count.frozen / (layout.shard_ranks if stage == 3 else 1)
    parameter_bytes = 0.0 if layout.offload_parameters else held_bytes
    gradient_bytes = each.gradient.of(updated, layout, is_sharded=stage >= 2)
    if stage == 2:
        gradient_bytes += parts_in_group(step) * each.gradient.of(updated, layout, is_sharded=False)
    if step.defers_reduction:
        # FSDP sums what it has not reduced in the dtype of the reduction.
        gradient_bytes = updated.all * max(software.gradient_bytes, software.reduce_bytes)
    if layout.offload_optimizer and stage >= 2 and software.offload_gradients:
        gradient_bytes = 0.0
    if gradients_go_at_once(step):  # with the buffer's, one layer's, the ends' where they are more
        gradient_bytes = min(gradient_bytes, each.gradient.end * updated.ends)
    optimizer_bytes = 0.0
    if not layout.offload_optimizer:
        optimizer_bytes = each.optimizer.of(updated, layout, is_sharded=stage >= 1)
        optimizer_bytes *= resident_share(software)
        if stage == 3 and shards_masters(software):
            optimizer_bytes -= _MASTER_BYTES * updated.sharded(layout)
    return parameter_bytes, gradient_bytes, optimizer_bytes


def _lists_bytes(step: TrainingStep, updated: StageParameters) -> float:
    """What an update over lists of tensors holds beside the states: one more of each parameter's size, the denominator of Adam
    (docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html, foreach: about sizeof(params) more peak memory)."""
    layout, software = step.layout, step.software
    if not software.updates_lists or layout.offload_optimizer:
        return 0.0
    return state_bytes(software).parameter.of(updated, layout, is_sharded=layout.zero_stage >= 1)


def autocast_copies_bytes(model: Architecture, step: TrainingStep, contents: StageContents) -> float:
    """Of the matrices that products read, in two bytes, on one rank: all of them at once where the backward begins. Quantised
    ones have their copies for one product at a time."""
    lora = step.software.lora
    if not step.software.autocast or (lora is not None and lora.is_quantized):
        return 0.0
    return 2.0 * stage_parameters(only_matrices(model), step, replace(contents, embeddings=0)).all


def narrow_copies_bytes(model: Architecture, step: TrainingStep, contents: StageContents) -> float:
    """Of the layers' matrices, on one rank, the casts of fewer than 16 bits that are kept beside them from the first microbatch on;
    less than nothing where one cast is all that there is in place of 16 bits."""
    software = step.software
    copies = software.narrow_copy_bytes
    if not software.transposes and (copies or (software.gathers_narrow and step.layout.zero_stage < 3)):
        copies -= 1.0
    if not software.is_narrow or not copies:
        return 0.0
    layers = replace(contents, embeddings=0, heads=0)
    return copies * stage_parameters(only_matrices(model), step, layers).all


def _collective_buffers(step: TrainingStep, count: StageParameters) -> float:
    """What ZeRO holds beside the states: parameters gathered (from their shards or the host), and the bucket of gradients on
    their way.

    Stage 3 has the layer that computes and the next one, or, where it does not give up what comes up again soon
    (DeepSpeed's stage3_max_reuse_distance), at the turn from forward to backward the last half of that many; in a pipeline
    of torch's own all of them.
    """
    layout, software = step.layout, step.software
    bucket = software.reduce_bucket_elements * software.gradient_bytes if layout.zero_stage else 0.0
    if not layout.zero_stage and layout.shard_ranks > 1:
        bucket += software.bucket_copy_bytes * count.updated.all
    if layout.zero_stage in (1, 2):
        bucket += software.update_gradient_bytes * count.updated.sharded(layout)
    if layout.zero_stage < 3 or (layout.shard_ranks == 1 and not layout.offload_parameters):
        return bucket
    gathered = max(2.0 * count.widest_layer, min(software.reuse_parameters / 2, count.all))
    size = software.parameter_bytes if software.lora is None else software.lora.matrix_bytes
    end_size = software.parameter_bytes if software.lora is None else software.lora.end_bytes
    ends_bytes = count.ends * end_size * software.keeps_ends
    if step.keeps_gathered:
        gathered, ends_bytes = count.all, 0.0
    return bucket + gathered * size + ends_bytes + count.updated.widest_layer * software.reduce_bytes

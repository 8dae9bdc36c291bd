"""What one rank of a pipeline stage holds at its peak, by component.

States: Rajbhandari et al. 2020 (arXiv:1910.02054), section 3, with the bytes that the software keeps of a parameter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from memadvisor.architecture import Architecture
from memadvisor.cost.layouts.coefficients import Coefficients
from memadvisor.cost.layouts.saved import head_saved_bytes, layer_saved_bytes
from memadvisor.layout import TrainingStep


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes on one rank. `allocator_bytes`: what the caching allocator holds beyond its tensors. `context_bytes` are the
    driver's and the communicators', which no allocator of torch sees; they are not in `allocated_bytes` or `peak_bytes`.
    """

    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    activation_bytes: float
    head_bytes: float
    buffer_bytes: float
    allocator_bytes: float
    context_bytes: float

    @property
    def peak_bytes(self) -> float:
        return (
            self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes
            + self.head_bytes + self.buffer_bytes + self.allocator_bytes
        )  # fmt: skip

    @property
    def total_bytes(self) -> float:
        return self.peak_bytes + self.context_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContents:
    """Layers of each of a device's chunks (by their numbers), and whether the ends of the model are among them."""

    chunks: tuple[tuple[int, ...], ...]
    has_embedding: bool
    has_head: bool


def stage_contents(device: int, layers: tuple[int, ...], pipeline: int) -> StageContents:
    """What device `device` of `pipeline` holds, chunks dealt out in turn."""
    starts = [sum(layers[:chunk]) for chunk in range(len(layers))]
    mine = range(device, len(layers), pipeline)
    return StageContents(
        chunks=tuple(tuple(range(starts[chunk], starts[chunk] + layers[chunk])) for chunk in mine),
        has_embedding=device == 0,
        has_head=len(layers) - 1 in mine,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParameters:
    """Parameters of one rank: `shared` are the same on all data-parallel ranks, `experts` on every `expert`th alone."""

    shared: float
    experts: float
    widest_layer: float

    @property
    def all(self) -> float:
        return self.shared + self.experts


def stage_parameters(model: Architecture, step: TrainingStep, contents: StageContents) -> StageParameters:
    """Parameters that one rank of this stage computes with, tensor and expert parallelism applied."""
    layout = step.layout
    layers = [layer for chunk in contents.chunks for layer in chunk]
    tensor = layout.tensor
    shared = sum(model.shared_layer_parameters(layer) for layer in layers) / tensor
    experts = sum(model.expert_layer_parameters(layer) for layer in layers) / tensor / layout.expert
    both_tied = contents.has_embedding and contents.has_head and model.tied_embeddings
    ends = (model.embedding_parameters() if contents.has_embedding else 0) + (
        model.head_parameters() if contents.has_head and not both_tied else 0
    )
    widest = max(
        [model.shared_layer_parameters(layer) / tensor + model.expert_layer_parameters(layer) / tensor / layout.expert
         for layer in layers] or [0.0]
    )  # fmt: skip
    return StageParameters(shared=shared + ends / tensor, experts=experts, widest_layer=widest)


def stage_memory(
    model: Architecture,
    step: TrainingStep,
    contents: StageContents,
    in_flight: float,
    copies: int,
    coefficients: Coefficients,
) -> StageMemory:
    """`in_flight`: how many microbatches' activations are held at the peak, counted in passes through a chunk of average
    length. `copies`: of the weights (2 where a schedule runs the model in both directions)."""
    layout, software = step.layout, step.software
    count = stage_parameters(model, step, contents)
    parameters = copies * count.all
    shard = layout.shard_ranks
    expert_shard = max(1, shard // layout.expert)
    sharded = copies * (count.shared / shard + count.experts / expert_shard)
    held = sharded if layout.zero_stage == 3 else parameters
    gradients = sharded if layout.zero_stage >= 2 else parameters
    optimized = sharded if layout.zero_stage >= 1 else parameters
    gathered = 0.0
    if layout.zero_stage == 3 and shard > 1:
        gathered = count.widest_layer * (2.0 * software.parameter_bytes + software.reduce_bytes)
    layers = [layer for chunk in contents.chunks for layer in chunk]
    saved = sum(layer_saved_bytes(model, step, layer) for layer in layers)
    if len(contents.chunks) > 1:
        saved /= len(contents.chunks)
    activations = saved * in_flight * (1.0 - layout.offload_activations)
    working = _recomputed_layer(model, step, layers)
    head = head_saved_bytes(model, step) if contents.has_head else 0.0
    tensors = (
        held * software.parameter_bytes * (0.0 if layout.offload_parameters else 1.0)
        + gradients * software.gradient_bytes
        + (0.0 if layout.offload_optimizer else optimized * software.optimizer_bytes)
        + activations + head + gathered + working
    )  # fmt: skip
    return StageMemory(
        parameter_bytes=held * software.parameter_bytes * (0.0 if layout.offload_parameters else 1.0),
        gradient_bytes=gradients * software.gradient_bytes,
        optimizer_bytes=0.0 if layout.offload_optimizer else optimized * software.optimizer_bytes,
        activation_bytes=activations,
        head_bytes=head,
        buffer_bytes=gathered + working,
        allocator_bytes=tensors * (coefficients.allocator_share - 1.0) + coefficients.allocator_fixed_bytes,
        context_bytes=coefficients.context_bytes,
    )


def _recomputed_layer(model: Architecture, step: TrainingStep, layers: list[int]) -> float:
    """A layer that runs again holds what it would have kept, until its backward is through."""
    if step.layout.recompute != "full" or not layers:
        return 0.0
    plain = replace(step, layout=replace(step.layout, recompute="none"))
    return max(layer_saved_bytes(model, plain, layer) for layer in {layers[0], layers[-1]})

"""What a rank holds of layers that are just at work: on their way to the host and back, or asked for ahead."""

from __future__ import annotations

from memadvisor.architecture import Architecture
from memadvisor.cost.layouts.saved import layer_saved_bytes
from memadvisor.layout import TrainingStep

# What activations go to the host by is on the device four times over: computed forward, on its way out, on its way back,
# and in its backward.
_MOVING = 4


def moving_bytes(model: Architecture, step: TrainingStep, layers: tuple[int, ...]) -> float:
    """Where activations go to the host."""
    return _MOVING * _moved_at_once(model, step, layers)


def _moved_at_once(model: Architecture, step: TrainingStep, layers: tuple[int, ...]) -> float:
    """What goes to the host in one piece: a microbatch's activations of a chunk in a pipeline, else of a layer."""
    if not layers:
        return 0.0
    saved = [
        (count, layer_saved_bytes(model, step, layer)) for count, layer in model.kinds_among(layers).values()
    ]
    if step.layout.pipeline > 1:
        return sum(count * kept for count, kept in saved) / step.layout.chunks
    return max(kept for _, kept in saved)


def ahead_bytes(model: Architecture, step: TrainingStep) -> float:
    """Results of collectives that other streams still hold when the host asks for the next ones."""
    layout = step.layout
    if layout.pipeline > 1:
        return 0.0
    elsewhere = 1.0 - 1.0 / layout.stream_ranks
    return step.software.ahead_bytes * step.microbatch_tokens * model.hidden * elsewhere

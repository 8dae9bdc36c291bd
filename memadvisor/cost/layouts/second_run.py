"""What a layer holds that runs again, wholly or in part, while its backward is under way.

It has again what it would have kept if nothing of it ran twice. What it kept is there beside that where it is another tensor, and
counts once where it is the same: the checkpoint's input is the norm's, whatever made it; what is kept of operators is handed out
when the second run comes to them (torch/utils/checkpoint.py, _checkpoint_without_reentrant_generator, _CachedTorchDispatchMode).
tests/cost/layouts/test_second_run.py counts the storages of each.
"""

from __future__ import annotations

from dataclasses import replace

from memadvisor.architecture import Architecture
from memadvisor.cost.layouts.operators import unread_kept_bytes
from memadvisor.cost.layouts.saved import (
    copies_input,
    layer_backward_bytes,
    layer_saved_bytes,
    layer_tokens,
    plain_saved_bytes,
)
from memadvisor.layout import TrainingStep


def second_run_bytes(model: Architecture, step: TrainingStep, layers: tuple[int, ...]) -> float:
    """Beyond what each layer keeps, at most: of the layers one at a time runs again."""
    if step.layout.recompute == "none" or not layers:
        return 0.0
    again = replace(step, layout=replace(step.layout, recompute_share=1.0))
    return max(_of_layer(model, again, layer) for _, layer in model.kinds_among(layers).values())


def working_layer_bytes(
    model: Architecture, step: TrainingStep, layers: tuple[int, ...], held_activation_bytes: float
) -> float:
    """All that a layer holds while its backward is under way and those behind it are through, at most; what it has kept is among
    the activations that are held."""
    return max(
        (
            min(layer_saved_bytes(model, step, layer), held_activation_bytes)
            + second_run_bytes(model, step, (layer,))
            + layer_backward_bytes(model, step, (layer,))
            for _, layer in model.kinds_among(layers).values()
        ),
        default=0.0,
    )


def _of_layer(model: Architecture, step: TrainingStep, layer: int) -> float:
    plain, kept = plain_saved_bytes(model, step, layer), layer_saved_bytes(model, step, layer)
    return max(0.0, plain + _beside_bytes(model, step, layer) - kept)


def _beside_bytes(model: Architecture, step: TrainingStep, layer: int) -> float:
    """What is there that would not be if nothing ran again."""
    layout, software, tokens = step.layout, step.software, layer_tokens(model, step, layer)
    stream = tokens * model.hidden / layout.stream_ranks
    stream *= 4.0 if software.autocast else software.element_bytes
    if step.repeats_operators:
        found = unread_kept_bytes(model, step, layer, tokens) * software.element_bytes / 2
    elif layout.recompute == "full":
        found = 0.0 if software.stops_early else stream  # its result, which the first run has given on
    else:
        return 0.0
    return found + (stream if copies_input(model, step) else 0.0)

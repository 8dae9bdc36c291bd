"""Which layers each pipeline stage holds."""

from __future__ import annotations

import math

from memadvisor.architecture import Architecture
from memadvisor.errors import UsageError
from memadvisor.layout import Layout, Software


def stage_layers(
    model: Architecture, layout: Layout, software: Software, head_in_layers: float
) -> tuple[int, ...]:
    """Layers of each chunk in the model's order; chunk c lies on device c modulo the number of devices.

    `head_in_layers`: what the head costs, in layers. Balanced: the split whose dearest stage is cheapest, the head counted
    on the last. Raises UsageError where there are more stages than layers to give them.
    """
    stages = layout.pipeline * layout.chunks
    if layout.stage_layers is not None:
        if len(layout.stage_layers) != stages or sum(layout.stage_layers) != model.n_layers:
            raise UsageError(
                f"{layout.stage_layers} does not deal {model.n_layers} layers out to {stages} stages.",
                hint="give one number of layers for each stage.",
            )
        return layout.stage_layers
    if stages > model.n_layers + 2:
        raise UsageError(
            f"{model.n_layers} layers do not fill {stages} pipeline stages.",
            hint="use fewer stages or chunks.",
        )
    if stages == 1:
        return (model.n_layers,)
    if not software.balanced_stages:
        return _even(model.n_layers, stages)
    most = model.n_layers // stages
    costs = [
        (max(math.ceil((model.n_layers - last) / (stages - 1)), last + head_in_layers), -last)
        for last in range(most + 1)
    ]
    last = -min(costs)[1]
    return (*_even(model.n_layers - last, stages - 1), last)


def _even(layers: int, stages: int) -> tuple[int, ...]:
    """As equal as can be. One layer over what divides goes to the stages in the middle first: the ends have the embedding
    and the head."""
    each, over = divmod(layers, stages)
    if over == 0:
        return (each,) * stages
    order = sorted(
        range(stages), key=lambda stage: (stage == stages - 1, stage == 0 and over < stages - 1, stage)
    )
    given = set(order[:over])
    return tuple(each + (stage in given) for stage in range(stages))

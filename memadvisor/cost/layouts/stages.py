"""Which layers each pipeline stage holds."""

from __future__ import annotations

import math

from memadvisor.architecture import Architecture
from memadvisor.errors import UsageError
from memadvisor.layout import Layout
from memadvisor.software_traits import Software


def stage_layers(model: Architecture, layout: Layout, software: Software) -> tuple[int, ...]:
    """Layers of each chunk in the model's order; chunk c lies on device c modulo the number of devices.

    Raises UsageError where there are more stages than layers to give them.
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
    if software.stage_rule == "even":
        return _even(model.n_layers, stages)
    deal = _running if software.stage_rule == "running" else _balanced
    # What the head costs, in layers.
    head_in_layers = model.head_parameters() / _usual_layer(model)
    dealt = deal(model.n_layers, stages, head_in_layers)
    empty = dealt[:-1].count(0)
    if empty > 1:  # one can have the embedding, or the last norm
        raise UsageError(
            f"{model.n_layers} layers and the head leave {empty} of {stages} pipeline stages empty.",
            hint="use fewer stages or chunks.",
        )
    return dealt


def _usual_layer(model: Architecture) -> float:
    """Parameters of most layers, which are as the last one is; of layers that differ throughout their mean."""
    if model.layer_pattern or (model.experts is not None and model.experts.every > 1):
        kinds = model.kinds().values()
        return sum(count * model.layer_parameters(layer) for count, layer in kinds) / model.n_layers
    return float(model.layer_parameters(model.n_layers - 1))


def _balanced(layers: int, stages: int, head_in_layers: float) -> tuple[int, ...]:
    """The dearest stage is as cheap as can be, the head counted on the last one; of the others the first ones have one more
    where they do not come out even. Where both ends are left without a layer, they have the embedding and the head alone, as in
    Llama 3's training (arXiv:2407.21783, section 3.3.2).
    """
    costs = [
        (max(math.ceil((layers - last) / (stages - 1)), last + head_in_layers), -last)
        for last in range(layers // stages + 1)
    ]
    last = -min(costs)[1]
    each, over = divmod(layers - last, stages - 1)
    if (each, over) == (0, stages - 2):  # one is left without a layer: the first, which has the embedding
        return (0, *([1] * over), last)
    return (*(each + (stage < over) for stage in range(stages - 1)), last)


def _running(layers: int, stages: int, head_in_layers: float) -> tuple[int, ...]:
    """Stages take layers until what was dealt out so far passes their share of the whole, as nanotron's do
    (https://github.com/huggingface/nanotron, src/nanotron/models/base.py, build_model). The head is on the last stage,
    whatever it holds beside it.
    """
    share = (layers + head_in_layers) / stages
    dealt = [0] * stages
    stage = 0
    for layer in range(1, layers + 1):
        dealt[stage] += 1
        if layer > share * (stage + 1):
            stage += 1
    return tuple(dealt)


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

"""What a rank holds for the way its training code is written: a graph whose loss the loop still has, gradients that are let go at
once or with each update, shards that are the master copies, and state that the driver moves away."""

from __future__ import annotations

from memadvisor.architecture import Architecture
from memadvisor.cost.layouts.adapters import kept_inputs_bytes
from memadvisor.cost.layouts.saved import layer_tokens
from memadvisor.cost.pipelines.groups import passes_beside
from memadvisor.layout import TrainingStep
from memadvisor.software_traits import Software


def held_graph_bytes(model: Architecture, step: TrainingStep, layers: tuple[int, ...]) -> float:
    """Of the microbatch before, while the next one's forward runs.

    Its backward lets go what autograd saved. What an autograd function keeps as an attribute of its context, as
    bitsandbytes' products did (adapters.py), goes with the graph, and the graph with the loss: where the loop still has
    that in a variable, inputs of two microbatches are there when the second one's loss is made.
    """
    software, layout = step.software, step.layout
    if not software.holds_loss or layout.recompute == "full":
        return 0.0
    return sum(
        count * kept_inputs_bytes(model, step, layer, layer_tokens(model, step, layer))
        for count, layer in model.kinds_among(layers).values()
    )


def gradients_come_late(step: TrainingStep) -> bool:
    """Whether a rank's gradients come as its activations go: of a single microbatch, no gradient is there when the backward
    begins, and no activation when it ends (docs.pytorch.org, torch.optim.Optimizer.zero_grad: set_to_none)."""
    layout = step.layout
    return step.software.lets_gradients_go and layout.num_microbatches == 1 and layout.pipeline == 1


def gradients_go_at_once(step: TrainingStep) -> bool:
    """Whether no more than one parameter's gradient is there at once: it cannot be added to over several microbatches
    (docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html)."""
    return step.software.updates_in_backward and step.layout.num_microbatches == 1


def parts_in_group(step: TrainingStep) -> float:
    """Of a looped pipeline device's parameters under ZeRO stage 2, those with whole gradients: of the part that a group of
    microbatches is passing, and of the one before it, which is being reduced."""
    layout = step.layout
    group = passes_beside(layout.schedule, layout.chunks, layout.pipeline, layout.num_microbatches)
    return min(2.0 / layout.chunks, 1.0) if group > 1 else 0.0


def resident_share(software: Software) -> float:
    """Of the optimizer's state, what is on the device whether there is room or not (Dettmers et al. 2023, arXiv:2305.14314,
    section 3, paged optimizers). What the driver moves meanwhile takes time that is not counted."""
    return 1.0 - software.paged_bytes / software.optimizer_bytes if software.paged_bytes else 1.0


def shards_masters(software: Software) -> bool:
    """Whether shards of ZeRO stage 3 are the master copies themselves."""
    return software.casts_shards and software.parameter_bytes == 2 and software.lora is None

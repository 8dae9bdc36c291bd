"""What a vision tower before a language model takes and keeps, for one microbatch on the rank of the first stage.

Its layers are an encoder's, over the patches of one image each, and priced as any layer is; what is around them (patches'
projection, what leads into the language model) is one product of as many parameters over the tokens that come out. Tensor
parallel ranks part it as they part the language model. A frozen tower runs forward alone and keeps nothing, for nothing
before it has a gradient either.
"""

from __future__ import annotations

from dataclasses import fields, replace

from memadvisor.architecture import Architecture, VisionTower
from memadvisor.cost.layouts.kernels import Device, matmul_seconds
from memadvisor.cost.layouts.layer_work import Groups, Work, layer_work
from memadvisor.cost.layouts.saved import layer_saved_bytes
from memadvisor.layout import TrainingStep

_FIELDS = tuple(field.name for field in fields(Work))


def tower_step(tower: VisionTower, step: TrainingStep) -> TrainingStep:
    """The same step as the tower has it: each image is a sequence of patches."""
    layout = replace(
        step.layout,
        micro_batch_size=step.layout.micro_batch_size * tower.images,
        expert=1,
        expert_imbalance=1.0,
        sequence_parallel=False,
    )
    return replace(
        step,
        layout=layout,
        seq_len=tower.patches,
        target_len=None,
        software=replace(step.software, lora=None, sample_len=None),
    )


def tower_work(model: Architecture, step: TrainingStep, device: Device, groups: Groups) -> Work:
    """Nothing without images."""
    tower = model.tower
    if tower is None or not tower.images:
        return Work(**dict.fromkeys(_FIELDS, 0.0))
    own = tower_step(tower, step)
    one = layer_work(
        tower.stack, replace(own, software=replace(own.software, launch_share=0.0)), 0, device, groups
    )
    rows = own.layout.micro_batch_size * tower.patches / tower.merged
    around_s = matmul_seconds(device, rows, tower.around / model.hidden / step.layout.tensor, model.hidden)
    layers = {name: tower.stack.n_layers * getattr(one, name) for name in _FIELDS}
    # A step begins with the tower: the device waits for its launches. Its backward is the last, and the host far ahead of it.
    waited_s = (
        tower.stack.n_layers * layer_work(tower.stack, own, 0, device, groups).forward_s - layers["forward_s"]
    )
    if tower.is_trained:
        times = {"forward_s": 1, "backward_s": 2, "weight_s": 1, "matmul_s": 3}
        found = {name: layers[name] + times.get(name, 0) * around_s for name in _FIELDS}
    else:
        # Of products and what moves between them the forward's third, of attention two of seven, of collectives half.
        shares = {"matmul_s": 1 / 3, "attention_s": 2 / 7, "collective_s": 1 / 2, "forward_s": 1.0}
        found = {name: layers[name] * shares.get(name, 0.0) for name in _FIELDS}
        found["stream_s"] = (
            layers["forward_s"] - found["matmul_s"] - found["attention_s"] - found["collective_s"]
        )
        found = {
            **found,
            "matmul_s": found["matmul_s"] + around_s,
            "forward_s": found["forward_s"] + around_s,
        }
    return Work(**{**found, "forward_s": found["forward_s"] + waited_s, "host_s": found["host_s"] + waited_s})


def tower_saved_bytes(model: Architecture, step: TrainingStep) -> float:
    """What its layers keep of one microbatch, and the input and the inner columns of what merges patches."""
    tower = model.tower
    if tower is None or not tower.images or not tower.is_trained:
        return 0.0
    own = tower_step(tower, step)
    merging = 2.0 * 3.0 * own.layout.micro_batch_size * tower.patches * tower.stack.hidden
    return tower.stack.n_layers * layer_saved_bytes(tower.stack, own, 0) + merging


def tower_flops(model: Architecture, step: TrainingStep) -> float:
    """Of a step's forward over all images."""
    tower = model.tower
    if tower is None or not tower.images:
        return 0.0
    images = step.global_batch_sequences * tower.images
    layers = tower.stack.num_parameters() * tower.patches + tower.around * tower.patches / tower.merged
    pairs = 2.0 * tower.patches**2 * tower.stack.hidden * tower.stack.n_layers
    return 2.0 * images * (layers + pairs)

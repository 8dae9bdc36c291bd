"""The code of an exported FSDP2 module: what it does with the settings above it. torch 2.6 and later."""

CODE = '''
import hashlib
from collections import Counter
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def apply(model, mesh, name=next(iter(MODELS))):
    """Shard a bare model (not one inside DistributedDataParallel) over a mesh of one dimension, and return it.

    Call it on the device that trains, before the optimizer is made. `name`: which of MODELS it is.
    """
    if mesh.ndim != 1 or mesh.size() != NUM_RANKS:
        raise ValueError(f"the plan is for a mesh of {NUM_RANKS} ranks in one dimension, and this one is {mesh}")
    if FINGERPRINTS.get(name) not in (None, fingerprint(model)):
        raise ValueError("the plan is for another model: its parameters have other names, shapes or dtypes")
    units = MODELS[name]
    _recompute(model, units)
    param_dtype = _with_masters(model) if HAS_MASTERS else _dtype(PARAM_DTYPE)
    if SHARD_RANKS < NUM_RANKS:
        ranks = mesh.mesh.reshape(-1, SHARD_RANKS)
        mesh = DeviceMesh(mesh.device_type, ranks, mesh_dim_names=("replicate", "shard"))
    precision = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=_dtype(REDUCE_DTYPE))
    shared = _shared(model)
    order, root = [], {}
    for unit, reshards, _, _, on_host in units:
        module = model.get_submodule(unit)
        moves = on_host and mesh.device_type != "cpu"
        settings = {
            "mesh": mesh,
            "reshard_after_forward": reshards,
            "mp_policy": precision,
            "offload_policy": CPUOffloadPolicy() if moves else OffloadPolicy(),
        }
        if module is model:
            root = settings
        elif _can_be_a_group(module, shared):
            order.append((unit, module, settings))
    for _, module, settings in sorted(order, key=lambda each: -each[0].count(".")):  # inner ones first
        fully_shard(module, **settings)
    fully_shard(model, **(root or {"mesh": mesh, "mp_policy": precision}))
    _look_ahead([module for _, module, _ in order])
    return model


def fingerprint(model):
    """As memadvisor.plan.fingerprint has it: of names, shapes and dtypes of the model's parameters."""
    named = model.named_parameters(remove_duplicate=False)
    lines = sorted(f"{name}\\t{list(p.shape)}\\t{str(p.dtype).removeprefix('torch.')}" for name, p in named)
    return hashlib.sha256("\\n".join(lines).encode()).hexdigest()[:16]


def _dtype(name):
    return None if name is None else getattr(torch, name)


def _with_masters(model):
    """Parameters of 16 bits become float32, and are computed with as they were."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    halves = dtypes & {torch.bfloat16, torch.float16}
    if len(halves) != 1 or len(dtypes) != 1:
        raise ValueError(f"float32 masters need a model of one dtype of 16 bits, and this one has {sorted(map(str, dtypes))}")
    model.float()
    return halves.pop()


def _shared(model):
    """Parameters that modules share: FSDP2 wants them in one group, which is that of the whole model."""
    holders = Counter(id(p) for _, module in model.named_modules() for p in module.parameters(recurse=False))
    return {parameter for parameter, number in holders.items() if number > 1}


def _can_be_a_group(module, shared):
    """FSDP2 gathers before a forward of the module's own: containers have none. What is shared is left to the model."""
    containers = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)
    parameters = list(module.parameters())
    return not isinstance(module, containers) and bool(parameters) and not {id(p) for p in parameters} & shared


def _look_ahead(modules):
    """Each gathers the next GATHER_DEPTH ones; in the backward a module that names itself gathers none ahead."""
    for place, module in enumerate(modules):
        module.set_modules_to_forward_prefetch(modules[place + 1 : place + 1 + GATHER_DEPTH])
        before = modules[max(0, place - GATHER_DEPTH) : place][::-1]
        module.set_modules_to_backward_prefetch(before or [module])


def _recompute(model, units):
    for unit, _, runs_again, kept, _ in units:
        if runs_again:
            module = model.get_submodule(unit)
            options = {"context_fn": partial(_contexts, frozenset(kept))} if kept else {}
            module.forward = partial(_forward, module.forward, options)


def _forward(forward, options, *args, **kwargs):
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)


def _contexts(kept):
    """Outputs of operators that are kept, by name ("aten::addmm") or by name and number of the call ("aten::addmm#1")."""
    calls = {False: Counter(), True: Counter()}  # of the first run, and of the second

    def policy(context, operator, *args, **kwargs):
        name = getattr(getattr(operator, "_schema", None), "name", "")
        number = calls[context.is_recompute][name]
        calls[context.is_recompute][name] += 1
        is_kept = name in kept or f"{name}#{number}" in kept
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
'''

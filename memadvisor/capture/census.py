"""Who is alive at a boundary: parameters, gradients, optimizer state, and every other tensor Python can reach."""

from __future__ import annotations

import gc
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from memadvisor.capture.allocator import DeviceBlock, workspace_sizes
from memadvisor.capture.cpu_account import CpuAccount
from memadvisor.capture.ddp_buckets import buckets_among
from memadvisor.capture.ledger import Resident
from memadvisor.capture.masters import masters
from memadvisor.capture.models import Models
from memadvisor.capture.tensor_storage import (
    describe,
    is_on,
    is_shared,
    plain_tensors,
    sparse_parts,
    storage_address,
)
from memadvisor.capture.truth import is_profiler_free
from memadvisor.capture.wrapped_states import wrapped_states
from memadvisor.run.children import children_of
from memadvisor.run.living import living, one_look, outermost_modules
from memadvisor.run.records import OptimizerState, Parameter

Labelled = tuple[torch.Tensor, str, str]  # tensor, category, unit
_GUESSED = ("weight_copy", "other")  # of what anybody may have let go meanwhile
_USED_BYTES = 4  # of one parameter in DDP's notes of which are used
_BUCKET_SIZES = ("rebuilt_bucket_sizes", "bucket_sizes")  # the first from the second step on


def known_tensors(
    models: Models,
    optimizers: Iterable[torch.optim.Optimizer],
    sources: Iterable[Callable[[], Iterable[Labelled]]],
) -> Iterator[Labelled]:
    """Tensors whose category is certain, engines' own buffers first. Where no optimizer of torch's has stepped, what
    dictionaries have under parameters is state of the script's own, and what is wrapped as they are."""
    for source in sources:
        yield from source()
    units: dict[int, str] = {}
    for _, unit, parameter in models.parameters():
        units[id(parameter)] = unit
        yield parameter, "parameter", unit
        if parameter.grad is not None:
            yield parameter.grad, "gradient", unit
    stepped = list(optimizers)
    own = [parameter for *_, parameter in models.parameters()]
    # Their gradients are the script's own copies, which no plan's step makes anew.
    for copy in masters(own, stepped):
        yield copy, "optimizer_state", ""
    for optimizer in stepped:
        for owner, state in optimizer.state.items():
            for tensor in state_tensors(state):
                yield tensor, "optimizer_state", units.get(id(owner), "")
    if not stepped:
        for tensor, owner in wrapped_states(own):
            yield tensor, "optimizer_state", units[id(owner)]
        for owner, state in kept_by_parameters(own):
            for tensor in state_tensors(state):
                yield tensor, "optimizer_state", units[id(owner)]
    for buffer in models.buffers():
        yield buffer, "other", ""


def kept_by_parameters(parameters: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, object]]:
    """What dictionaries that Python's garbage collector knows have under a parameter as key. Keys are told apart by what they
    are: a look-up compares a parameter with the number that another dictionary has it under, its id, element by element."""
    known = {id(each) for each in parameters}
    for holder in gc.get_referrers(*parameters) if parameters else ():
        if isinstance(holder, dict):
            yield from ((key, kept) for key, kept in tuple(dict.items(holder)) if id(key) in known)


def state_tensors(state: object) -> Iterator[torch.Tensor]:
    """Tensors inside an optimizer's state of one parameter, however nested."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from state_tensors(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from state_tensors(value)


def residents(
    known: Iterable[Labelled],
    device: torch.device,
    cpu: CpuAccount | None = None,
    given: Mapping[int, DeviceBlock] = MappingProxyType({}),
) -> list[Resident]:
    """Every storage of the allocator's on `device` that Python can reach, once; the first label wins. `given` are the
    allocator's live blocks there.

    A storage that cannot be resized is numpy's or another library's, or the allocator's and was shown to
    numpy; one that is shared between processes never is the allocator's. The CPU allocator's account tells.
    """
    found: dict[int, Resident] = {}
    # A subclass may do anything when it is asked something: the script's own work, or an engine's collective.
    with torch._C.DisableTorchFunctionSubclass(), one_look():
        held = list(held_by_modules())
        holders = {id(tensor): holder for tensor, holder in held}
        for tensor, category, unit in known:
            holder = holders.get(id(tensor), "") if category == "weight_copy" else ""
            for plain in plain_tensors(tensor):
                _take(plain, category, unit, device, found, given, cpu, holder)
        for tensor, holder in held:
            _take(tensor, "other", "", device, found, given, cpu, holder)
        for tensor in living(torch.Tensor):
            _take(tensor, "other", "", device, found, given, cpu)
            if (gradient := _gradient_of_a_leaf(tensor)) is not None:
                _take(gradient, "other", "", device, found, given, cpu)
    for address, (size_bytes, operator) in cublas_workspaces(device, found, given).items():
        found[address] = Resident(address, size_bytes, "other", "", "", "", operator=operator)
    if cpu is None or not is_profiler_free() or _sum_bytes(found.values()) <= cpu.allocated_bytes():
        return list(found.values())
    # What another thread let go meanwhile, or Python could not see when the account was opened.
    return [
        each
        for each in found.values()
        if each.category not in _GUESSED or cpu.holds(each.address, each.size_bytes)
    ]


def _sum_bytes(blocks: Iterable[Resident]) -> int:
    return sum(block.size_bytes for block in blocks)


def _take(
    tensor: torch.Tensor,
    category: str,
    unit: str,
    device: torch.device,
    found: dict[int, Resident],
    given: Mapping[int, DeviceBlock],
    cpu: CpuAccount | None,
    holder: str = "",
) -> None:
    try:
        if not is_on(tensor, device):
            return
        if tensor.layout != torch.strided:
            for part in sparse_parts(tensor):
                _take(part, category, unit, device, found, given, cpu, holder)
            return
        address = storage_address(tensor)
        if not address or address in found:
            return
        storage = tensor.untyped_storage()
        size_bytes = storage.nbytes()
        if device.type == "cpu" and (not storage.resizable() or is_shared(tensor)):
            if cpu is None or not cpu.holds(address, size_bytes):
                return
        elif not storage.resizable():
            size_bytes = given[address].size_bytes if address in given else 0
        if not size_bytes:
            return
    except Exception:
        return  # a half-made or exotic tensor; its bytes show up as unexplained
    if address in given:  # CUDA's caching allocator hands out more than is asked; the CPU's exactly that
        size_bytes = given[address].size_bytes
    found[address] = Resident(address, size_bytes, category, unit, *describe(tensor), holder=holder)


def _gradient_of_a_leaf(tensor: torch.Tensor) -> torch.Tensor | None:
    """Python's garbage collector does not know one that nobody has asked for: of a batch that a penalty is for."""
    try:
        return tensor.grad if tensor.is_leaf and tensor.requires_grad else None
    except Exception:
        return None  # a half-made or exotic tensor


def held_by_modules() -> Iterator[tuple[torch.Tensor, str]]:
    """Parameters and buffers of all modules that live, and the class of the outermost one around each: weights that are
    averaged, or of a network that no step calls. Asked past the modules' own methods, which may run anything."""
    seen: set[int] = set()
    for outermost in outermost_modules(torch.nn.Module):
        left = [outermost]
        while left:
            module = left.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            inside = vars(module)
            for tensors in (inside.get("_parameters", {}), inside.get("_buffers", {})):
                for tensor in tensors.values():
                    if isinstance(tensor, torch.Tensor):
                        yield tensor, f"({type(outermost).__name__})"
            left += children_of(module)


def cublas_workspaces(
    device: torch.device, found: Container[int], given: Mapping[int, DeviceBlock]
) -> dict[int, tuple[int, str]]:
    """Bytes and operator of what nobody has `found`, and is as large as torch makes cuBLAS's workspaces, by address."""
    unnamed = {address: block for address, block in given.items() if address not in found}
    sizes = workspace_sizes(device) if unnamed else {}
    return {
        address: (block.size_bytes, sizes[block.requested_bytes])
        for address, block in unnamed.items()
        if block.requested_bytes in sizes
    }


def resident_buckets(
    given: Mapping[int, DeviceBlock], known: Iterable[Resident], sizes: Sequence[int]
) -> list[Resident]:
    """Of the allocator's live blocks that nobody has named, those that are as large as DDP's buckets."""
    named = {each.address for each in known}
    unnamed = {a: block.requested_bytes for a, block in given.items() if a not in named}
    return [
        Resident(address, given[address].size_bytes, "communication", "", "", "")
        for address in buckets_among(unnamed, sizes)
    ]


def bucket_sizes(device: torch.device) -> tuple[list[int], list[int]]:
    """Bytes of the buckets that DDP holds on `device`, as it tells for torch's own statistics: after the forward that
    follows the one in which it has made them anew, and not before.

    And of where it notes whether this rank has used each parameter, if not all need be: once on a CPU, and once on the
    device, for the other ranks.
    """
    sizes: list[int] = []
    notes: list[int] = []
    has_group = dist.is_available() and dist.is_initialized()
    for ddp in living(DistributedDataParallel) if has_group else ():
        try:
            trained = [p for p in ddp.module.parameters() if p.requires_grad]
            if all(is_on(p, device) for p in trained):
                told = ddp._get_ddp_logging_data()
                words = next(told[name] for name in _BUCKET_SIZES if told.get(name))
                sizes += [int(size) for size in words.split(", ")]
                if has_any_order(ddp):
                    notes += [_USED_BYTES * len(trained)] * (2 if device.type == "cpu" else 1)
        except Exception:
            continue  # half-made, or worded otherwise by another torch: what nobody names is unexplained
    return sizes, notes


def has_any_order(ddp: DistributedDataParallel) -> bool:
    """Whether a parameter may have no gradient in a step, or others than the last."""
    return bool(getattr(ddp, "find_unused_parameters", False) or getattr(ddp, "static_graph", False))


def parameter_rows(
    models: Models, updated: Set[int], optimizers: Iterable[torch.optim.Optimizer]
) -> list[Parameter]:
    """Each with whether one of the optimizers has it, and whether it has a gradient now. `updated`: as of
    `Models.parameter_rows`."""
    own = {name: parameter for name, _, parameter in models.parameters()}
    in_groups = {
        id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
    }
    return [
        row
        if (parameter := own.get(row.name)) is None
        else replace(row, in_optimizer=id(parameter) in in_groups, has_gradient=parameter.grad is not None)
        for row in models.parameter_rows(updated)
    ]


def stranger_note(rows: Iterable[Parameter], optimizers: Iterable[torch.optim.Optimizer]) -> str | None:
    """What to say where all that optimizers have updated is without gradients, and what has them is in none: the model's
    parameters were replaced behind the optimizer's back, as `parallelize_module` does, or are another model's.

    An optimizer of masters (DeepSpeed's) has gradients of those, or a state.
    """
    trained = [row for row in rows if row.requires_grad and row.has_gradient]
    idle = [
        p.grad is None and not optimizer.state.get(p)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    ]
    if not trained or not idle or not all(idle) or any(row.in_optimizer is not False for row in trained):
        return None
    return (
        "No optimizer has a parameter that got a gradient, and those of the model that did are in none: the step updates "
        "nothing. Make the optimizer from the parameters that are trained, behind all that replaces them "
        "(parallelize_module, fully_shard)."
    )


def what_is_elsewhere(models: Models, device: torch.device) -> str | None:
    """What to say of a model that lies on several GPUs of this process."""
    devices = {str(p.device) for *_, p in models.parameters() if p.device.type == "cuda"}
    others = ", ".join(sorted(devices - {str(device)}))
    return f"The model lies on {device} and {others}: memory is that of {device} alone." if others else None


def optimizer_state_rows(models: Models, optimizers: Iterable[torch.optim.Optimizer]) -> list[OptimizerState]:
    """Each tensor of each optimizer's state, masters among them; a parameter that no model knows (a shard) has no name.

    Once, as the outer one's, where an optimizer holds another and shows its state as its own (SAM, Lookahead).
    """
    names = {id(parameter): name for name, _, parameter in models.parameters()}
    rows: list[OptimizerState] = []
    seen: set[tuple[int, str, int]] = set()
    optimizers = list(optimizers)
    copies = {id(copy) for copy in masters([each for *_, each in models.parameters()], optimizers)}
    inner = {id(held) for optimizer in optimizers for held in vars(optimizer).values()}
    for optimizer in sorted(optimizers, key=lambda each: id(each) in inner):
        kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        held = [each for group in optimizer.param_groups for each in group["params"] if id(each) in copies]
        rows += [_state_row("", "master", copy, kind) for copy in held]
        for parameter, state in optimizer.state.items():
            for key, value in state.items() if isinstance(state, dict) else ():
                for tensor in state_tensors(value):
                    place = id(parameter), str(key), id(tensor)
                    if place in seen:
                        continue
                    seen.add(place)
                    rows.append(_state_row(names.get(id(parameter), ""), str(key), tensor, kind))
    return rows


def _state_row(parameter: str, component: str, tensor: torch.Tensor, optimizer: str) -> OptimizerState:
    local = list(plain_tensors(tensor))  # of a DTensor this rank's part alone
    return OptimizerState(
        parameter=parameter,
        component=component,
        dtype=describe(tensor)[0],
        num_elements=sum(part.numel() for part in local),
        size_bytes=sum(part.numel() * part.element_size() for part in local),
        optimizer=optimizer,
    )

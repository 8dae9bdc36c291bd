"""A copy of an optimizer with small tensors in the place of its parameters, to be tried out.

Options and attributes are the optimizer's own, copied. One that holds its parameters, a model or another optimizer
beside its param_groups is not copied: what it does with them could not be seen from its param_groups.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import types
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from memadvisor.engines.sharding.sharded_step import parameters_of

_ALIKE = 2  # parameters of one shape, and groups of one kind: two show what one does to another
_MAX_SHAPES = 3  # of one group
_LEARNING_RATE = 1e-2


class NotCopyable(Exception):
    """Why there is no copy."""


@dataclass(frozen=True, slots=True)
class Stunt:
    """Starts copies of `optimizer` that step copies of `parameters`; `sizes` counts those of each group. `is_put_to_work`: by
    its `train`, as optimizers with modes are that step in one alone, and that a script has not begun to train with."""

    optimizer: torch.optim.Optimizer
    groups: list[dict[str, Any]]
    parameters: list[torch.Tensor]
    sizes: list[int]
    is_built: bool  # by its constructor, since it makes state there
    is_put_to_work: bool

    @property
    def num_parameters(self) -> int:
        return len(self.parameters)

    def start(self) -> tuple[torch.optim.Optimizer, list[torch.nn.Parameter]]:
        parameters = [_parameter_like(parameter) for parameter in self.parameters]
        numbered = iter(parameters)
        groups = [
            {"params": [next(numbered) for _ in range(size)], **_Copier(self.optimizer, None).copy(group)}
            for group, size in zip(self.groups, self.sizes, strict=True)
        ]
        clone = _clone(self.optimizer, groups, self.is_built)
        if self.is_put_to_work:
            clone.train()  # type: ignore[attr-defined]  # not torch's
        return clone, parameters

    @contextlib.contextmanager
    def only(self, optimizer: torch.optim.Optimizer, kept: set[int] | None) -> Iterator[None]:
        """Filter the groups of a copy as a rank's are filtered to what it owns."""
        held, start = [], 0
        for group, size in zip(optimizer.param_groups, self.sizes, strict=True):
            held.append(group["params"])
            group["params"] = [
                p for number, p in enumerate(group["params"], start) if kept is None or number in kept
            ]
            start += size
        yield
        for group, parameters in zip(optimizer.param_groups, held, strict=True):
            group["params"] = parameters


def stunt_of(optimizer: torch.optim.Optimizer) -> Stunt:
    """Raises NotCopyable, or what the optimizer's own step raises on small tensors."""
    kinds: Counter[Any] = Counter()
    groups, parameters, sizes = [], [], []
    generator = torch.Generator().manual_seed(0)
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        kind = tuple((k, v if isinstance(v, (bool, str)) else type(v)) for k, v in options.items())
        kinds[kind] += 1
        if kinds[kind] > _ALIKE:
            continue
        small = [made for like in _kinds_of(group["params"]) for made in _small(like, generator)]
        groups.append({key: _at_work(key, value) for key, value in options.items()})
        parameters += small
        sizes.append(len(small))
    built = (False, True) if optimizer.state else (False,)
    modes = (False, True) if callable(getattr(optimizer, "train", None)) else (False,)
    stunts = [Stunt(optimizer, groups, parameters, sizes, *way) for way in itertools.product(built, modes)]
    return next(stunt for stunt in stunts if _steps(stunt, raises=stunt is stunts[-1]))


def _at_work(option: str, value: Any) -> Any:
    """With a learning rate where a warm-up begins at none: no update would show what it is made of."""
    if option == "capturable":  # only a tensor on the parameters' device may be; the copy's are on the host
        return False
    if option == "lr" and isinstance(value, (int, float, torch.Tensor)) and not value:
        return value + _LEARNING_RATE
    return value


def _steps(stunt: Stunt, raises: bool) -> bool:
    """Whether a copy with empty state can step. Optimizers that make their state when they are built cannot."""
    try:
        optimizer, parameters = stunt.start()
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        type(optimizer).step(optimizer)
    except Exception:
        if raises:
            raise
        return False
    return True


def _kinds_of(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """One parameter of each small shape and dtype."""
    found: dict[Any, torch.Tensor] = {}
    for parameter in parameters:
        found.setdefault((_small_shape(parameter), parameter.dtype), parameter)
    return list(found.values())[:_MAX_SHAPES]


def _small_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Of the same number of dimensions, which are equal, in order, or 1 as the parameter's are."""
    sizes = sorted({size for size in parameter.shape if size > 1})
    return tuple(size if size <= 1 else 3 + sizes.index(size) for size in parameter.shape)


def _small(like: torch.Tensor, generator: torch.Generator) -> list[torch.Tensor]:
    made = []
    for _ in range(_ALIKE):
        tensor = torch.randn(_small_shape(like), generator=generator, device="cpu").to(like.dtype)
        # What a script marks its parameters with, for its optimizer to read.
        marks = {k: v for k, v in vars(like).items() if isinstance(v, (bool, int, float, str))}
        vars(tensor).update(marks)
        made.append(tensor)
    return made


def _parameter_like(tensor: torch.Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(tensor.clone())
    vars(parameter).update(vars(tensor))
    return parameter


def _clone(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], is_built: bool
) -> torch.optim.Optimizer:
    kind = type(optimizer)
    clone = kind(groups) if is_built else object.__new__(kind)  # type: ignore[call-arg]
    if not is_built:
        clone.state = defaultdict(dict)
        clone.param_groups = groups
    copier = _Copier(optimizer, clone)
    for name, value in vars(optimizer).items():
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            vars(clone)[name] = OrderedDict()
        elif name not in ("state", "param_groups", "step"):  # schedulers put a step of their own there
            vars(clone)[name] = copier.copy(value)
    return clone


class _Copier:
    """Copies what an optimizer's attributes and options hold; its own methods become those of `clone`."""

    def __init__(self, optimizer: torch.optim.Optimizer, clone: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer
        self._clone = clone
        self._parameters = {id(parameter) for parameter in parameters_of(optimizer)}
        self._made: dict[int, Any] = {}

    def copy(self, value: Any) -> Any:
        if id(value) not in self._made:
            self._made[id(value)] = self._copy(value)
        return self._made[id(value)]

    def _copy(self, value: Any) -> Any:
        if id(value) in self._parameters:
            raise NotCopyable("it holds parameters beside its param_groups")
        if isinstance(value, torch.Tensor):
            return value.detach().cpu().clone()
        if isinstance(value, torch.Generator):
            return value.clone_state()
        if value is self._optimizer and self._clone is not None:
            return self._clone
        if isinstance(value, (torch.nn.Module, torch.optim.Optimizer, dist.ProcessGroup)):
            raise NotCopyable(f"it holds a {type(value).__name__} of its own")
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self.copy(value.__self__))
        if isinstance(value, types.FunctionType):
            for cell in value.__closure__ or ():
                self._forbid(cell)
            return value
        if isinstance(value, (list, set, frozenset)) or type(value) is tuple:
            return type(value)(self.copy(item) for item in value)
        return self._copy_object(value)

    def _forbid(self, cell: types.CellType) -> None:
        """A function is kept as it is, so it must not reach what a copy may not have."""
        with contextlib.suppress(ValueError):  # an empty cell
            found = cell.cell_contents
            for value in found if isinstance(found, (list, tuple)) else (found,):
                if value is self._optimizer or id(value) in self._parameters:
                    raise NotCopyable("a function that it holds refers to it, or to parameters")

    def _copy_object(self, value: Any) -> Any:
        if isinstance(value, (types.ModuleType, type)):
            return value
        try:
            made = copy.copy(value)
        except Exception:
            return value  # a lock, a file
        if made is value:
            return value
        self._made[id(value)] = made
        if isinstance(made, dict):
            for key in made:
                made[key] = self.copy(made[key])
        for name, inner in getattr(made, "__dict__", {}).items():
            made.__dict__[name] = self.copy(inner)
        return made

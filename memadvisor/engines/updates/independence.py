"""Whether an optimizer updates each parameter by that parameter alone: tried out, not believed.

Before the first update a copy of the optimizer, with the same options, steps small random CPU tensors: all
together, and again with all but one of them filtered out of its groups, as owners do (whole_step.py). Where
values and state come out equal, bit for bit, with gradients of very different sizes and one that is infinite,
whole parameters may be shared out among the ranks.

The script sees nothing of it: random states are put back, printing goes nowhere, hooks are not called, compiled
functions run uncompiled, and communication is refused.
"""

from __future__ import annotations

import contextlib
import random
import sys
import sysconfig
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from memadvisor.engines.sharding.sharded_step import is_elementwise, parameters_of
from memadvisor.engines.updates.plain_code import is_plain
from memadvisor.engines.updates.stunt import NotCopyable, Stunt, stunt_of
from memadvisor.errors import PlanError

_NUM_STEPS = 6
_SCALES = (1.0, 1e3, 1e-3)  # of gradients, in turn: a norm over all parameters must show


class _Coupled(Exception):
    """What was found."""


@dataclass(slots=True)
class _Outcome:
    """Of one run: every parameter after every step, and states and groups after the last."""

    values: list[list[torch.Tensor]] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)
    rest: Any = None


def check_independent(optimizer: torch.optim.Optimizer) -> bool:
    """Raise PlanError where parameters cannot be updated one by one.

    Returns whether the optimizer's step calls a closure once, before it changes anything.
    """
    name = type(optimizer).__name__
    hint = "use --zero 0."
    if isinstance(optimizer, torch.optim.LBFGS):
        raise PlanError(
            f"{name} searches along one line for all parameters, which ZeRO shares out.", hint=hint
        )
    try:
        with _unseen() as mode:
            calls_once = _compare(stunt_of(optimizer))
            if mode.seen:
                raise _Coupled("its step communicates with other ranks by itself")
    except (_Coupled, NotCopyable) as found:
        raise PlanError(f"ZeRO stages 1 to 3 cannot share out {name}: {found}.", hint=hint) from None
    except Exception as error:
        first = str(error).partition("\n")[0][:200]
        raise PlanError(
            f"{name} could not be tried on small tensors, to see whether ZeRO stages 1 to 3 can share it out "
            f"({type(error).__name__}: {first}).",
            hint=hint,
        ) from None
    return calls_once


def why_not_shared_out(optimizer: torch.optim.Optimizer) -> str | None:
    """What check_independent would say, for whoever only looks on; None where nothing is said against it, or it is not tried.

    It runs a copy's step. Classes of the script's own are left alone if their code may do something elsewhere (a count, a
    file), which would show (plain_code.py). Those of installed packages do nothing of the kind that is known.
    """
    plain = all(type(each) in (torch.Tensor, torch.nn.Parameter) for each in parameters_of(optimizer))
    if is_elementwise(optimizer) or not plain:
        return None
    if not _is_installed(type(optimizer)) and not is_plain(optimizer):
        return None
    try:
        check_independent(optimizer)
    except PlanError as error:
        return str(error.args[0])
    return None


def _is_installed(kind: type) -> bool:
    """Whether all code that the class inherits lies where packages are installed."""
    places = [Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")]
    files = [getattr(sys.modules.get(base.__module__), "__file__", None) for base in kind.__mro__[:-1]]
    torchs = Path(torch.__file__).resolve().parent
    return all(
        file is not None and any(Path(file).resolve().is_relative_to(place) for place in (*places, torchs))
        for file in files
    )


def _compare(stunt: Stunt) -> bool:
    together = _run(stunt, _gradients(stunt), None)
    for index in range(stunt.num_parameters):
        _check_alone(stunt, together, _gradients(stunt), index)
    _check_rest(together, _alone(stunt, _gradients(stunt), {-1}))
    _check_infinity(stunt)
    _check_modes(stunt)
    return _calls_closure_once(stunt)


def _gradients(stunt: Stunt, num_steps: int = _NUM_STEPS) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        [
            torch.randn(p.shape, generator=generator, device="cpu").to(p.dtype)
            * _SCALES[(step + index) % len(_SCALES)]
            for index, p in enumerate(stunt.parameters)
        ]
        for step in range(num_steps)
    ]


def _run(stunt: Stunt, gradients: list[list[torch.Tensor]], kept: set[int] | None) -> _Outcome:
    """Steps with the parameters `kept` in the groups, all where it is None."""
    _seed()
    outcome = _Outcome()
    optimizer, parameters = stunt.start()
    for of_step in gradients:
        for parameter, gradient in zip(parameters, of_step, strict=True):
            parameter.grad = gradient.clone()
        with stunt.only(optimizer, kept):
            type(optimizer).step(optimizer)  # the class's: a scheduler wraps the script's own
        outcome.values.append([parameter.detach().clone() for parameter in parameters])
    outcome.states = [optimizer.state.get(parameter) for parameter in parameters]
    others = {k: v for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor)}
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    outcome.rest = (others, options)
    return outcome


def _alone(stunt: Stunt, gradients: list[list[torch.Tensor]], kept: set[int]) -> _Outcome:
    try:
        return _run(stunt, gradients, kept)
    except Exception as error:
        first = str(error).partition("\n")[0][:100]
        raise _Coupled(
            f"its step fails where a rank has no parameter of a group ({type(error).__name__}: {first})"
        ) from None


def _check_alone(stunt: Stunt, together: _Outcome, gradients: list[list[torch.Tensor]], index: int) -> None:
    alone = _alone(stunt, gradients, {index})
    for both, single in zip(together.values, alone.values, strict=True):
        if not _same(both[index], single[index]):
            raise _Coupled("it updates a parameter by more than that parameter's own gradient and state")
        others = [value for other, value in enumerate(single) if other != index]
        starts = [value for other, value in enumerate(stunt.parameters) if other != index]
        if not _same(others, starts):
            raise _Coupled("it updates parameters that its param_groups do not hold")
    if not _same(together.states[index], alone.states[index]):
        raise _Coupled("what it keeps for a parameter depends on other parameters")
    _check_rest(together, alone)


def _check_rest(together: _Outcome, alone: _Outcome) -> None:
    if not _same(together.rest, alone.rest):
        raise _Coupled("what it keeps for a whole group depends on which parameters are in it")


def _check_infinity(stunt: Stunt) -> None:
    """An infinite gradient is its own parameter's matter, and no reason to leave others as they are."""
    gradients = _gradients(stunt, 3)
    gradients[1][0].fill_(float("inf"))
    try:
        together = _run(stunt, gradients, None)
    except Exception:
        return  # such a training ends in the same way on any number of ranks
    for index in range(1, stunt.num_parameters):
        _check_alone(stunt, together, gradients, index)


def _check_modes(stunt: Stunt) -> None:
    """Schedule-free optimizers put averages in the place of parameters between their steps, out of states that owners alone
    have: other ranks' parameters stayed as they were, and the ranks trained apart."""
    optimizer, parameters = stunt.start()
    for of_step in _gradients(stunt, 2):  # an average begins as what the first has made
        for parameter, gradient in zip(parameters, of_step, strict=True):
            parameter.grad = gradient
        type(optimizer).step(optimizer)
    for name in ("eval", "train"):
        before = [parameter.detach().clone() for parameter in parameters]
        change: Any = getattr(optimizer, name, None)
        with contextlib.suppress(TypeError):  # no mode, but something with arguments
            change() if callable(change) else None
        if not _same(before, [parameter.detach() for parameter in parameters]):
            raise _Coupled(f"its {name}() changes parameters outside of its step")


def _calls_closure_once(stunt: Stunt) -> bool:
    optimizer, parameters = stunt.start()
    calls = []

    def closure() -> float:
        calls.append(_same(parameters, stunt.parameters))
        return 1.0

    for parameter, gradient in zip(parameters, _gradients(stunt, 1)[0], strict=True):
        parameter.grad = gradient
    with contextlib.suppress(Exception):  # it takes none
        type(optimizer).step(optimizer, closure)
    return calls == [True]


def _same(a: Any, b: Any) -> bool:
    """Bit for bit, also NaN."""
    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype:
            return False
        first, second = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b))
        return torch.equal(first, second)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if callable(a):
        return True
    if hasattr(a, "__dict__"):
        return _same(vars(a), vars(b))
    return bool(a == b) or (a != a and b != b)


# ---- what the script must not notice -----------------------------------------------------------


class _Listening(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stops collectives, which other ranks would have to take part in."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch, untyped
        self.seen = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else torch.compile would be off from here on

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.seen = True
            raise _Coupled("its step communicates with other ranks by itself")
        return func(*args, **(kwargs or {}))


class _Muted:
    """Standard output or error, but for what this thread writes: others of the script's may print meanwhile."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._thread else int(self._stream.write(text))

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """catch_warnings would have the script's be shown once more, of which each is shown once."""
    rule = ("ignore", None, Warning, None, 0)
    filters: Any = warnings.filters
    filters.insert(0, rule)
    try:
        yield
    finally:
        filters[:] = [each for each in filters if each is not rule]


@contextlib.contextmanager
def _unseen() -> Iterator[_Listening]:
    mode = _Listening()
    cuda = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with contextlib.ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        if "numpy" in sys.modules:
            state = sys.modules["numpy"].random
            stack.callback(state.set_state, state.get_state())
        stack.enter_context(torch.random.fork_rng(devices=cuda))
        stack.enter_context(contextlib.redirect_stdout(_Muted(sys.stdout)))
        stack.enter_context(contextlib.redirect_stderr(_Muted(sys.stderr)))
        stack.enter_context(_without_warnings())
        stack.enter_context(_without_global_hooks())
        if "torch._dynamo" in sys.modules:
            # Small shapes in a compiled function would make it recompile, and its sizes dynamic.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(mode)
        yield mode


def _seed() -> None:
    torch.default_generator.manual_seed(0)  # torch.manual_seed would seed devices that are not started yet
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


@contextlib.contextmanager
def _without_global_hooks() -> Iterator[None]:
    tables: list[Any] = [
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    ]
    before = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.update(hooks)

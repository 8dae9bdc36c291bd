"""Updates that are one step late: that of a step is done while the next step's forward and backward run.

The one-step delayed parameter update of ZeRO-Offload (arXiv:2101.06840, section 5.2), for optimizer state that lies on
another tier, on one process and a CPU. It changes what is learnt: gradients are those of parameters that lack the update
before. When the script calls `step`,

- what the update of the call before has made of the parameters is copied into them, once it is over;
- the gradients are the engine's from then on (`p.grad` is None, as after `zero_grad`), and the update with them begins in
  a thread of its own, with the options that the groups have at that moment, unit by unit (paged_step.py).

The update never touches the parameters, which the next forward and backward read: a unit's gradients are copied into
scratch as large as the largest unit's, its parameters into the gradients' memory, and there they are updated. So beside
the two buffers of state, memory holds the gradients' bytes once more than without delay, all the time, and the scratch.

A state dict of a model or an optimizer has the update that is under way in it: it is waited for, and copied. So has the
model that the plan is taken off. Who changes a parameter between two steps would lose that, and is stopped.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from memadvisor.engines.lanes.thread_lane import ThreadLane, ThreadTicket
from memadvisor.engines.sharding.unit_step import LabelAs
from memadvisor.engines.updates.paged_step import Kept, LabelState, Optimizer, PagedStep, Parameters
from memadvisor.errors import PlanError
from memadvisor.schedule import Action

_ALIGNMENT_BYTES = 64  # of a gradient in scratch, as the allocator aligns it
DELAY_LOSS_TEXT = (
    "each update of parameters whose optimizer state lies elsewhere is done one step late. Losses will differ from those "
    "without it."
)


class DelayedUpdates:
    """Those of one optimizer's parameters in one model, of which one update at most is under way."""

    def __init__(self) -> None:
        self._lane = ThreadLane(survives=True)
        self._stand_ins: dict[int, torch.nn.Parameter] = {}  # by id of the parameter
        self._pending: _Pending | None = None
        self.waited_s = 0.0  # for the last update that was waited for

    def settle(self) -> None:
        """Have the update that is under way in the parameters."""
        pending, self._pending = self._pending, None
        if pending is not None:
            start_s = time.perf_counter()
            try:
                pending.ticket.wait()
            finally:
                self.waited_s = time.perf_counter() - start_s
            pending.apply()

    def labelled_tensors(self) -> Iterator[tuple[torch.Tensor, str, str]]:
        """What the update that is under way holds: (tensor, category, unit)."""
        if self._pending is not None:
            yield from self._pending.labelled_tensors()

    def begin(
        self,
        optimizer: Optimizer,
        members: Mapping[str, Parameters],
        kept: Kept,
        actions: Iterable[Action],
        label: LabelState,
        label_as: LabelAs,
    ) -> None:
        """Begin an update, with the gradients and options of this moment; the one before has been settled."""
        if getattr(optimizer, "grad_scale", None) is not None:
            raise PlanError(
                "A delayed update takes gradients as they are, and a GradScaler has this optimizer unscale them in its "
                "step.",
                hint="leave out --delayed-update, or call scaler.unscale_(optimizer) before the step.",
            )
        pending = _Pending(optimizer, members, self._stand_ins, label_as)
        step = PagedStep(
            pending.shadow, pending.members, kept, lambda parameter: None, label, label_as, pending.prepare
        )
        pending.buffers = step.make_buffers()
        pending.ticket = self._lane.submit(lambda: step.play(actions))
        self._pending = pending


class _Pending:
    """One update: an optimizer of its own over stand-ins for the parameters, whose state is the script's optimizer's."""

    ticket: ThreadTicket

    def __init__(
        self,
        optimizer: Optimizer,
        members: Mapping[str, Parameters],
        stand_ins: dict[int, torch.nn.Parameter],
        label_as: LabelAs,
    ) -> None:
        self.buffers: list[torch.Tensor] = []  # of state: they stay as long as the update may run
        self._parameters = {unit: list(parameters) for unit, parameters in members.items()}
        for parameter in (p for parameters in members.values() for p in parameters):
            if id(parameter) not in stand_ins:
                stand_ins[id(parameter)] = torch.nn.Parameter(parameter.new_empty(0))
        self._stand_ins = stand_ins
        self.members = {
            unit: [stand_ins[id(p)] for p in parameters] for unit, parameters in self._parameters.items()
        }
        self.shadow = _shadow_of(optimizer, stand_ins)
        self._gradients: dict[int, torch.Tensor] = {}
        self._values: dict[
            int, torch.Tensor
        ] = {}  # where the update is made: in a gradient's memory, as a rule
        self._versions: dict[int, int] = {}
        for parameter in (p for parameters in self._parameters.values() for p in parameters):
            self._take(parameter)
        self._scratch = self._make_scratch(label_as)

    def _take(self, parameter: torch.nn.Parameter) -> None:
        stand_in = self._stand_ins[id(parameter)]
        stand_in.data, stand_in.grad = parameter.data, None
        self._versions[id(parameter)] = parameter._version
        if parameter.grad is not None:
            gradient: torch.Tensor = parameter.grad
            if gradient.layout is not torch.strided:
                raise PlanError(
                    "A delayed update has no sparse gradients.", hint="leave out --delayed-update."
                )
            parameter.grad = None
            is_ours = _is_ours(gradient, parameter)
            self._gradients[id(parameter)] = gradient if is_ours else gradient.clone()
            self._values[id(parameter)] = gradient if is_ours else torch.empty_like(parameter.detach())

    def _make_scratch(self, label_as: LabelAs) -> torch.Tensor:
        """Bytes for the gradients of any one unit."""
        sizes = [
            sum(
                _aligned(found.nbytes)
                for p in parameters
                if (found := self._gradients.get(id(p))) is not None
            )
            for parameters in self._parameters.values()
        ]
        device = next(p.device for parameters in self._parameters.values() for p in parameters)
        scratch = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=device)
        label_as(scratch, "gradient", "")
        return scratch

    def labelled_tensors(self) -> Iterator[tuple[torch.Tensor, str, str]]:
        yield from ((buffer, "optimizer_state", "") for buffer in self.buffers)
        yield self._scratch, "gradient", ""
        for unit, parameters in self._parameters.items():
            yield from ((self._values[id(p)], "gradient", unit) for p in parameters if id(p) in self._values)

    def prepare(self, unit: str) -> None:
        """Before a unit's update, in the thread of the update: gradients into scratch, values to where they were."""
        start = 0
        for parameter in self._parameters[unit]:
            gradient, stand_in = self._gradients.get(id(parameter)), self._stand_ins[id(parameter)]
            if gradient is None:
                continue
            values = self._values[id(parameter)]
            if values is gradient:
                own = self._scratch[start : start + gradient.nbytes].view(gradient.dtype)
                start += _aligned(gradient.nbytes)
                gradient = own.as_strided(gradient.size(), gradient.stride())
                gradient.copy_(values)
            values.copy_(parameter.detach())
            stand_in.grad = None  # it may be of another shape than these
            stand_in.data = values
            stand_in.grad = gradient

    def apply(self) -> None:
        """Copy what the update has made into the parameters. Raises RuntimeError where one was changed meanwhile."""
        with torch.no_grad():
            for unit, parameters in self._parameters.items():
                for parameter in parameters:
                    stand_in = self._stand_ins[id(parameter)]
                    if id(parameter) in self._gradients:
                        if parameter._version != self._versions[id(parameter)]:
                            raise RuntimeError(
                                f"A parameter of unit {unit!r} was changed while its delayed update was under way: one of "
                                "the two would be lost. Run without --delayed-update."
                            )
                        parameter.copy_(stand_in)
                    stand_in.grad, stand_in.data = None, parameter.data
        self._gradients.clear()
        self._values.clear()


def _shadow_of(optimizer: Optimizer, stand_ins: Mapping[int, torch.nn.Parameter]) -> Any:
    """An optimizer like it, with its options as they are now, over the stand-ins; what it keeps of each is the same
    object as the original keeps of the parameter."""
    shadow = object.__new__(type(optimizer))
    shadow.__dict__.update(vars(optimizer))
    shadow.param_groups = []
    shadow.state = type(optimizer.state)(dict)
    for group in optimizer.param_groups:
        own = [p for p in group["params"] if id(p) in stand_ins]
        options = {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        shadow.param_groups.append({**options, "params": [stand_ins[id(p)] for p in own]})
        for parameter in (p for p in own if p.grad is not None or p in optimizer.state):
            shadow.state[stand_ins[id(parameter)]] = optimizer.state[parameter]
    return shadow


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _is_ours(gradient: torch.Tensor, parameter: torch.nn.Parameter) -> bool:
    """Whether nobody else holds a gradient that has been taken, and values of the parameter fit into its memory."""
    alike = gradient.dtype == parameter.dtype and gradient.stride() == parameter.stride()
    # Held by the caller, here, and by the call that counts; its storage by it, and by what asks for that.
    return (
        alike
        and sys.getrefcount(gradient) <= 3
        and torch._C._storage_Use_Count(gradient.untyped_storage()._cdata) <= 2
    )

"""The script's models with their losses in chunks (chunked_tensor.py): which layer of each, and for how long.

The forward of the layer's class is wrapped, not the module: nothing of ours is copied or pickled with the model. What
torch.compile compiles is left as it is. A layer is left alone in calls that this is not for: with fewer rows than a chunk,
or with tensors of a kind of their own.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memadvisor.chunked_loss import ChunkedLoss, usual_rows
from memadvisor.cuda_graphs import is_capturing
from memadvisor.engines.losses.chunked_layer import chunked_linear
from memadvisor.engines.losses.expressions import Product
from memadvisor.engines.script.live import LiveModel
from memadvisor.engines.script.undo import Undo
from memadvisor.engines.updates.closures import just_before_update
from memadvisor.errors import PlanError
from memadvisor.never_compiled import called_by_python
from memadvisor.policies import blocks_of
from memadvisor.run.cut import innermost
from memadvisor.schedule import Schedule

Note = Callable[[str, str], None]


class ChunkedLosses:
    """From construction until `undo` runs. Modules are held weakly."""

    def __init__(self, chunked: ChunkedLoss, note: Note, undo: Undo) -> None:
        self._chunked = chunked
        self._note = note
        self._undo = undo
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self._products: weakref.WeakSet[Product] = weakref.WeakSet()
        self._wrapped: set[type] = set()
        self._told: set[str] = set()
        self._stepped: set[int] = set()  # addresses of weights that an optimizer of torch's updates
        undo.add(self._names.clear)
        undo.add(register_optimizer_step_pre_hook(called_by_python(self._before_step)).remove)

    def attach(self, model: LiveModel, schedule: Schedule) -> None:
        """Raises PlanError for a model without such a layer, or where its weights are not there until the loss."""
        name, layer = self._layer_of(model)
        users = model.uses.get(id(layer), ())
        elsewhere = [
            unit.name
            for unit in schedule.units
            if unit.name in users and unit.stage_on(schedule.num_ranks) == 3
        ]
        if elsewhere:
            raise PlanError(
                f"The plan takes parameters of unit {elsewhere[0]!r} back after its forward, and the output of {name!r}, which is made "
                "in chunks, needs them until the loss.",
                hint="have this unit on ZeRO stage 2 or lower, as a plan of `memadvisor advise --chunked-loss` has it, and its "
                "parameters on the device; or leave out --chunked-loss.",
            )
        self._names[layer] = name
        self._wrap(type(layer))

    def _layer_of(self, model: LiveModel) -> tuple[str, torch.nn.Linear]:
        """That which the plan names, else the widest outside of the model's blocks."""
        root = model.root
        layers = {
            name: module
            for name, module in root.named_modules(prefix=model.name)
            if isinstance(module, torch.nn.Linear) and module.out_features > 1
        }
        wanted = self._chunked.layer
        if wanted is not None and wanted not in layers:
            raise PlanError(
                f"The plan makes the output of {wanted!r} in chunks, and {type(root).__name__} has no linear layer of this name.",
                hint="make a plan of this model's run with `memadvisor advise --chunked-loss`.",
            )
        blocks = blocks_of(model.rows)
        outside = [name for name in layers if innermost(name, blocks) is None]
        if wanted is None and not outside:
            raise PlanError(
                f"{type(root).__name__} has no torch.nn.Linear outside of its blocks, whose output --chunked-loss could make in chunks.",
                hint="leave it out.",
            )
        name = wanted or max(outside, key=lambda name: layers[name].out_features)
        layer = layers[name]
        if type(layer).forward is not torch.nn.Linear.forward and type(layer) not in self._wrapped:
            raise PlanError(
                f"{name!r} is a {type(layer).__name__}, whose forward is its own, and --chunked-loss is for that of torch.nn.Linear.",
                hint="leave it out.",
            )
        return name, layer

    def _wrap(self, kind: type) -> None:
        if kind in self._wrapped:
            return
        self._wrapped.add(kind)
        original: Callable[..., Any] = kind.forward  # type: ignore[attr-defined]
        this = weakref.ref(self)

        @functools.wraps(original)
        def forward(module: Any, input: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(module, input)
            losses = this()
            name = losses._names.get(module) if losses is not None else None
            rows = None if losses is None or name is None else losses._rows_of_chunk(module, input, name)
            if losses is None or rows is None:
                return original(module, input)
            return losses._run(module, input, name, rows)

        self._undo.replace(kind, "forward", forward)

    def _rows_of_chunk(self, module: torch.nn.Linear, hidden: Any, name: str) -> int | None:
        """None for a call that this is not for. Nor is it for one without gradients: weights may be others by the time that
        the scores are used, and no backward says so."""
        is_plain = type(hidden) is torch.Tensor and hidden.dim() >= 2 and hidden.is_floating_point()
        if not is_plain or not torch.is_grad_enabled():
            return None
        parameters = [module.weight] if module.bias is None else [module.weight, module.bias]
        if hidden.is_inference() or any(type(each) is not torch.nn.Parameter for each in parameters):
            return None  # what is no parameter now may be gone after the forward, as FullyShardedDataParallel's are
        if is_capturing() or torch._C._get_tracing_state() is not None or _is_transformed():
            return None
        num_rows = hidden.shape[:-1].numel()
        rows = self._chunked.rows or usual_rows(num_rows, module.in_features, module.out_features)
        if num_rows > rows:
            return rows
        self._tell(f"{name!r} is called with {num_rows} rows, and a chunk has {rows}: it runs as it is then")
        return None

    def _run(
        self, module: torch.nn.Linear, hidden: torch.Tensor, name: str | None, rows: int
    ) -> torch.Tensor:
        def told(operator: str) -> None:
            self._tell(
                f"the script needs what {name!r} returns as a whole ({operator}), and it is made for that"
            )

        keep, done = self._products.add, self._backward_done
        return chunked_linear(hidden, module.weight, module.bias, rows, told, keep, done)

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._note("warning", f"of the plan's chunked loss: {text}")

    # ---- updates -----------------------------------------------------------------------------

    def _backward_done(self, product: Product) -> None:
        """Of weights that no optimizer of torch's has stepped yet: nobody says when they change."""
        if product.weight.data_ptr() not in self._stepped:
            self._keep_weights([product])

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        of_layers = {id(parameter) for layer in self._names for parameter in layer.parameters()}
        for group in optimizer.param_groups if of_layers else ():
            self._stepped |= {each.data_ptr() for each in group["params"] if id(each) in of_layers}
        return just_before_update(args, kwargs, lambda: self._keep_weights(list(self._products)))

    def _keep_weights(self, products: Sequence[Product]) -> None:
        """Scores that the script still holds are those of before the update, should it ask for them."""
        copies: dict[int, torch.Tensor] = {}
        updated = {parameter.data_ptr() for layer in self._names for parameter in layer.parameters()}
        for product in products:
            product.keep_weights(updated, copies)


def _is_transformed() -> bool:
    """Whether torch.func transforms what is called now, and its tensors are not what they seem, or torch.jit.trace watches it."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch._C._is_tracing()

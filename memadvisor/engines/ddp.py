"""The script's DistributedDataParallel stays; only its C++ Reducer is replaced by our executor.

Everything else of DDP goes on as it is: the check of shapes, the broadcast of initial parameters and
buffers, the broadcast of buffers before a forward, moving inputs, no_sync, state_dict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from memadvisor.engines.script.undo import Undo
from memadvisor.engines.sharding.executor import Executor
from memadvisor.errors import PlanError
from memadvisor.run.cut import is_around_a_list
from memadvisor.run.ddp_options import options_left_to_ddp

# (wrapper, whether ranks may use different parameters) -> the executor; None leaves DDP alone.
Wrap = Callable[[DistributedDataParallel, bool], Executor | None]


def check_spans(num_ranks: int, planned_ranks: int) -> None:
    """Raise PlanError where a DDP has some of the planned ranks alone, and the script has no others."""
    if num_ranks < planned_ranks == dist.get_world_size():
        raise PlanError(
            f"The script has DistributedDataParallel over {num_ranks} of its {planned_ranks} ranks, as pipelines beside each "
            "other have, and a plan made by hand is for DDP over all ranks.",
            hint="profile the script, and make a plan that says what each rank recomputes with `memadvisor advise`.",
        )


class StandIn:
    """What DDP calls where its Reducer was. It also owns the executor."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    def prepare_for_forward(self) -> None: ...

    def prepare_for_backward(self, outputs: list[torch.Tensor]) -> None: ...

    def _rebuild_buckets(self) -> bool:
        return False

    def _set_static_graph(self) -> None: ...

    def _delay_all_reduce(self) -> None: ...

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None: ...

    def _remove_autograd_hooks(self) -> None: ...

    def _check_reducer_finalized(self) -> None: ...


class Retired(StandIn):
    """What a wrapper has whose model the script has wrapped in another one since."""

    def prepare_for_forward(self) -> None:
        raise PlanError(
            "The script trains through a DistributedDataParallel whose model it has wrapped in another one since.",
            hint="run without a plan.",
        )


class StandInLogger:
    """What DDP calls where its Logger was."""

    def set_runtime_stats_and_log(self) -> None: ...

    def set_error_and_log(self, text: str) -> None: ...

    def _set_static_graph(self) -> None: ...

    def _get_ddp_logging_data(self) -> Any:
        return type("LoggingData", (), {"strs_map": {}, "ints_map": {}})()


def has_ddp(module: torch.nn.Module) -> bool:
    """Whether a module is, or holds, the script's wrapper."""
    return any(isinstance(inner, DistributedDataParallel) for inner in module.modules())


def patch(wrap: Wrap, undo: Undo) -> None:
    """Let every DDP that the script builds from now on run our executor."""
    original: Any = DistributedDataParallel._ddp_init_helper

    def init_helper(
        self: DistributedDataParallel, parameters: Any, sparse: Any, names: Any, static_graph: bool
    ) -> None:
        if not replace_reducer(self, wrap, static_graph):
            original(self, parameters, sparse, names, static_graph)

    undo.replace(DistributedDataParallel, "_ddp_init_helper", init_helper)
    for name, what in (
        ("register_comm_hook", "communication hooks"),
        ("_register_builtin_comm_hook", "communication hooks"),
        ("join_hook", "joining with uneven inputs"),
    ):
        undo.replace(DistributedDataParallel, name, _declining(name, what))


def replace_reducer(ddp: Any, wrap: Wrap, static_graph: bool) -> bool:
    """Put an executor in the Reducer's place; False where `wrap` leaves this DDP alone."""
    _check_options(ddp)
    executor = wrap(ddp, bool(ddp.find_unused_parameters or static_graph))
    if executor is None:
        return False
    ddp.reducer = StandIn(executor)
    ddp.logger = StandInLogger()
    ddp._passing_sync_batchnorm_handle(ddp.module)
    return True


def retire(wrappers: Iterable[Any], executor: Executor) -> None:
    """The model gets another wrapper; the one that it has, if the script still has that, is not to be used."""
    for wrapper in wrappers:
        if isinstance(wrapper.reducer, StandIn) and wrapper.reducer.executor is executor:
            wrapper.reducer = Retired(executor)


def restore_reducer(ddp: Any) -> None:
    """Give DDP a Reducer of its own again. All ranks take part."""
    parameters, sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()


def _check_options(ddp: DistributedDataParallel) -> None:
    if is_around_a_list(ddp):
        raise PlanError(
            "The script's DistributedDataParallel is around a list of parameters, as torch's composable `replicate` makes it, and "
            "never sees a call of the model: no plan of ZeRO applies.",
            hint="wrap the model in torch.nn.parallel.DistributedDataParallel, or let `memadvisor advise RUN --memory SIZE`, without "
            "other options, choose what all ranks recompute alike.",
        )
    what = options_left_to_ddp(ddp)
    if what is not None:
        raise PlanError(
            f"The script has {what}, which this engine does not do.",
            hint="let `memadvisor advise RUN --memory SIZE`, without other options, choose what all ranks recompute alike.",
        )


def _declining(name: str, what: str) -> Callable[..., Any]:
    original = getattr(DistributedDataParallel, name)

    def declining(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.reducer, StandIn):
            raise PlanError(f"This engine does not do {what} of DDP.", hint="run without a plan.")
        return original(self, *args, **kwargs)

    return declining

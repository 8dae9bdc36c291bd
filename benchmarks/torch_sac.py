"""torch's own planner of recomputation, `torch.distributed._tools.sac_ilp`, on a CPU: what it decides and does.

It is driven as its own test drives it (pytorch's test/distributed/_tools/test_sac_ilp.py): memory of each module from
MemTracker, seconds and bytes of each operator from RuntimeEstimator and SACEstimator under fake tensors, one programme
over the modules (`sac_milp`: of which the forward runs again, and what share of its bytes is not kept), one over the
operators of each of these (`get_optimal_checkpointing_policy_per_module`). What is kept is then given to
`torch.utils.checkpoint`'s selective contexts, operator by operator. Two things are not as there:

- Its cost model asks a CUDA device for its peaks, so seconds are those of its benchmark of operators, whose CUDA events
  are replaced by CPU seconds of the thread. All else of it is torch's code, solver and limits as they are.
- MemTracker follows real tensors, which it can: fake ones have no workspace of oneDNN (two thirds of the LSTM's peak).

It needs pulp and pwlf, which nothing else here does.
"""

from __future__ import annotations

import copy
import importlib.util
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from unittest import mock

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

MODE = "operator-level-benchmark"


@dataclass(frozen=True)
class TorchPlan:
    """What sac_ilp keeps of the modules that it has chosen, and what it predicts of the step."""

    kept: Mapping[
        str, tuple[tuple[str, bool], ...]
    ]  # module -> its operators in order, and which results are kept
    peak_bytes: int
    step_time_ratio: float  # to the plain step's, both as its benchmark of operators has them


def missing_packages() -> list[str]:
    return [name for name in ("pulp", "pwlf") if importlib.util.find_spec(name) is None]


class CpuEvent:
    """In place of torch.cuda.Event: CPU seconds of this thread."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at_s = 0.0

    def record(self, stream: object = None) -> None:
        self.at_s = time.thread_time()

    def elapsed_time(self, end: CpuEvent) -> float:
        return 1e3 * (end.at_s - self.at_s)


def plans_of_torch(
    make, batch_of, loss_of, budgets_bytes: Mapping[int, int], among: Collection[str] | None = None
) -> dict[int, TorchPlan | str]:
    """For each budget what it decides, or why there is nothing to run. `make()` is a new model, `batch_of(model)` its
    inputs and classes, `loss_of(model, inputs, classes)` its loss; `among` are the only modules it may choose."""
    from torch.distributed._tools.ilp_utils import get_peak_memory_runtime_baseline, parse_module_info
    from torch.distributed._tools.sac_ilp import sac_milp

    try:
        info, estimator = measured(make, batch_of, loss_of)
        graph = parse_module_info(info)
    except Exception as error:  # whatever it cannot do with a model is what the table is to say
        return dict.fromkeys(budgets_bytes, f"raises {type(error).__name__}: {error}")
    root = graph.nodes[0]["fqn"]
    ac_units = None if among is None else [f"{root}.{name}" for name in among]
    _, plain_ms = get_peak_memory_runtime_baseline(graph)
    found: dict[int, TorchPlan | str] = {}
    for percent, budget_bytes in budgets_bytes.items():
        discarded, extra_ms, peak_bytes = sac_milp(graph, budget_bytes / 2**30, ac_units=ac_units)
        if peak_bytes < 0:
            found[percent] = "finds nothing that fits"
        elif not discarded:
            found[percent] = f"recomputes nothing (predicts {peak_bytes} bytes)"
        else:
            try:
                kept = {
                    name.removeprefix(f"{root}."): kept_operators(estimator.sac_mod_stats[name], share)
                    for name, share in discarded.items()
                }
            except ValueError as error:
                found[percent] = str(error)
            else:
                found[percent] = TorchPlan(kept, peak_bytes, 1 + extra_ms / plain_ms)
    return found


def kept_operators(stats, discarded_fraction: float) -> tuple[tuple[str, bool], ...]:
    """Which results a module keeps, in the order of its operators.

    What writes into tensors from outside (a batch norm's counter, 8 bytes) must be kept, so where all is to be
    discarded the programme finds nothing; it is then given these bytes.
    """
    from torch.distributed._tools.sac_ilp import get_optimal_checkpointing_policy_per_module

    outside = {operator for operator, parent in stats.inplace_ops if operator == parent}
    outside |= set(stats.rand_ops if stats.force_store_random else ())
    least = sum(stats.memory[operator] for operator in outside) / (sum(stats.memory) or 1)
    kept = get_optimal_checkpointing_policy_per_module(stats, min(1, max(1 - discarded_fraction, least)))
    if not kept:
        raise ValueError(f"no operators found to keep for {discarded_fraction:.0%} discarded")
    return tuple((name, bool(keep)) for name, keep in zip(stats.func_names, kept, strict=True))


def measured(make, batch_of, loss_of):
    """What its programme is made of: module stats, and the estimator that knows each module's operators."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.ilp_utils import aggregate_stats
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator
    from torch.distributed._tools.sac_estimator import SACEstimator

    followed = make()
    tracker = tracked(followed, batch_of, loss_of)
    clock = mock.patch.multiple(
        torch.cuda, Event=CpuEvent, current_stream=lambda: None, synchronize=lambda: None
    )
    batch = batch_of(followed)
    with FakeTensorMode() as fake, clock:
        model = make()
        x, target = map(fake.from_tensor, batch)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        runtime, operators = RuntimeEstimator(), SACEstimator()
        with runtime(MODE):
            loss_of(model, x, target).backward()
            optimizer.step()
            optimizer.zero_grad()
        with operators(MODE):
            loss = loss_of(model, x, target)
        loss.backward()
        return aggregate_stats(followed, tracker, runtime, operators, torch.device("cpu")), operators


def tracked(model: nn.Module, batch_of, loss_of):
    """Memory of each module in the second of two steps."""
    from torch.distributed._tools.mem_tracker import MemTracker, _ModState

    x, target = batch_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    tracker = MemTracker()
    tracker.track_external(model, optimizer, x, target)
    with tracker:
        for step in range(2):
            loss_of(model, x, target).backward()
            after_backward = tracker.get_tracker_snapshot("current")
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                tracker.reset_mod_stats()
    # The hook behind a backward is not called for modules whose inputs need no gradient.
    for stats in tracker.memory_tracking.values():
        stats.snapshots.setdefault(_ModState.POST_BW, [copy.deepcopy(after_backward)])
    return tracker


class Selected(nn.Module):
    """A module that keeps results of some operators of its forward, which its second run takes."""

    def __init__(self, inner: nn.Module, operators: tuple[tuple[str, bool], ...]) -> None:
        super().__init__()
        self.inner = inner
        self._operators = operators

    def forward(self, *args, **kwargs):
        # What is written into in place is kept together with what writes, so the check for that is off.
        return checkpoint(
            self.inner,
            *args,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(keeps(self._operators), True),
            **kwargs,
        )


def keeps(operators: tuple[tuple[str, bool], ...]) -> Callable[..., CheckpointPolicy]:
    """The policy of one forward, whose operators must be those that were planned."""
    from torch.distributed._tools.sac_estimator import OPS_TO_ALWAYS_SKIP

    planned = {again: iter(operators) for again in (False, True)}  # until torch 2.13 the second run asks anew

    def policy(context, operator, *args, **kwargs) -> CheckpointPolicy:
        if operator in OPS_TO_ALWAYS_SKIP:
            return CheckpointPolicy.PREFER_RECOMPUTE
        name, keep = next(planned[context.is_recompute])
        called = operator.overloadpacket.__name__
        if called != name:
            raise RuntimeError(f"{called} runs where {name} was planned")
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def put_in(plan: TorchPlan, model: nn.Module) -> None:
    for name, operators in plan.kept.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, Selected(model.get_submodule(name), operators))

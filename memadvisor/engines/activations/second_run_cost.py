"""What recomputing takes on this machine beside the forward itself, measured in the training's own process."""

from __future__ import annotations

import contextlib
import time
from statistics import median

import torch

from memadvisor.engines.activations.kept import KeptOutputs
from memadvisor.engines.activations.second_run import run_keeping_arguments

_ROUNDS = 20
_FEW, _MANY = 2, 26  # tensors that the measured forward saves
_PASSED_BYTES = 2**21  # passed over before each walk, as a training's operators do: its caches are cold


def measure_second_runs() -> tuple[float, float, float]:
    """Seconds of a call, of each tensor that it saves, and of each operator that a mode sees, as those do of which
    outputs are kept. Takes 30 to 80 ms, draws no random numbers, calls no module.

    A forward of n operators, each of which saves one tensor, is walked plainly and run again by the engine; what the
    latter takes longer, less the forward, is call_s + n * tensor_s. Two values of n; medians, in seconds of this
    thread's CPU: what others on the machine take is in the steps' times. With a mode in both runs, n operators take
    2 n * operator_s more.
    """
    passed = torch.zeros(_PASSED_BYTES // 4, device="cpu", dtype=torch.float32)
    extra_s = []
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        for num_saved in (_FEW, _MANY):
            again_s = [_walk(num_saved, passed, again=True)[0] for _ in range(_ROUNDS)]
            plain_s, forward_s = zip(
                *(_walk(num_saved, passed, again=False) for _ in range(_ROUNDS)), strict=True
            )
            extra_s.append(median(again_s) - median(plain_s) - median(forward_s))
        kept_s = [_walk(_MANY, passed, again=True, keeps=True)[0] for _ in range(_ROUNDS)]
    few_s, many_s = extra_s
    tensor_s = max(0.0, (many_s - few_s) / (_MANY - _FEW))
    operator_s = max(0.0, (median(kept_s) - median(again_s)) / (2 * _MANY))
    return max(0.0, few_s - _FEW * tensor_s), tensor_s, operator_s


def _walk(num_saved: int, passed: torch.Tensor, *, again: bool, keeps: bool = False) -> tuple[float, float]:
    """Seconds of a forward and its backward, and of the forward alone."""
    x = torch.ones(64, device="cpu", requires_grad=True)

    def forward(y: torch.Tensor) -> torch.Tensor:
        for _ in range(num_saved):
            y = y.sin()
        return y

    passed.add_(1.0)
    start_s = time.thread_time()
    kept = KeptOutputs(("none has this name",), lambda missing: None) if keeps else None
    y = run_keeping_arguments("", forward, (x,), {}, contextlib.nullcontext, kept) if again else forward(x)
    forward_s = time.thread_time() - start_s
    # Not torch.autograd.backward: recorders and engines listen there for the script's own.
    torch.autograd.Variable._execution_engine.run_backward(
        (y,), (torch.ones(64, device="cpu"),), False, False, (x,), False, accumulate_grad=False
    )
    return time.thread_time() - start_s, forward_s

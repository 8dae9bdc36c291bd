"""A captured model as a chain of units, each with what it took and held: the second source of the cost of layouts.

`analyzers/captured_units.py` makes it of a run. Times are measured ones of the steady steps; bytes are the traced step's,
exact for the micro-batch that was recorded and scaled linearly to others.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A unit's forward or backward of one micro-batch as recorded: measured seconds, and what its operators did.

    `moved_bytes`: the least that they read and write; None where the run does not have it.
    """

    seconds: float
    flops: int
    moved_bytes: int | None
    num_operators: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedUnit:
    """One unit, with the code of the model around it that runs after it (the first one's before it, too).

    `elements` are of parameters, tied ones with their first unit. `saved_bytes`: what autograd keeps of one micro-batch for
    it and nothing before it in the chain; `again_bytes` of them come back when it is recomputed, which takes
    `recompute_s`. `working_bytes`: the most that a piece of it holds beyond what was there when it began.
    `cut_bytes`: what passes to the rest of the chain behind it, for one micro-batch; None where the chain cannot be cut
    there, and `no_cut` says why.
    """

    name: str
    forward: Pass
    backward: Pass
    recompute_s: float
    elements: int
    optimizer_bytes: int
    saved_bytes: int
    again_bytes: int
    working_bytes: int
    cut_bytes: int | None
    no_cut: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedModel:
    """All units in the order of execution, and the step around them. `batch_samples`: of a step, over all ranks.

    `optimizer_s`: the optimizer step. `outside_s`: of a step, in no micro-batch (loading data, logging). `other_bytes`:
    there when the step begins, and no states. `model_flops`: of a sample. `parameter_bytes`: of an element. `dtype`: of
    its products.
    """

    units: tuple[CapturedUnit, ...]
    device_name: str
    on_cpu: bool
    dtype: str | None
    parameter_bytes: int
    micro_batch_size: int
    num_micro_batches: int
    batch_samples: int
    optimizer_s: float
    outside_s: float
    step_time_s: float
    other_bytes: int
    model_flops: float

    @property
    def elements(self) -> int:
        return sum(unit.elements for unit in self.units)

    @property
    def rank_samples(self) -> int:
        """Of one step on one rank, as recorded."""
        return self.micro_batch_size * self.num_micro_batches

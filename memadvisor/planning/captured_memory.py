"""What a rank holds at its peak in a layout of a captured model.

Without a pipeline the traced step itself is played with the layout's ZeRO stage, recomputation and micro-batch
(cost/simulate.py, as for the plans of `advise`): exact for the micro-batch that was recorded, and linear in it
otherwise. A pipeline's stage has no traced step of its own; its components are added up (Rajbhandari et al. 2020,
arXiv:1910.02054, section 3): states of its units, what they keep for each microbatch in flight, the most that one of them
works with, and a message in and out.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from fractions import Fraction

from memadvisor.analyzers.segments import RecordedStep
from memadvisor.cost.captured_units import CapturedModel, CapturedUnit
from memadvisor.cost.collectives import CollectiveTimes
from memadvisor.cost.layouts.captured import CapturedLayout, stage_parameters_of, stages_of
from memadvisor.cost.layouts.captured_times import Target
from memadvisor.cost.layouts.chance import safe_peak_bytes
from memadvisor.cost.layouts.rank_memory import StageMemory
from memadvisor.cost.pipelines.costs import PipelineTimes
from memadvisor.cost.simulate import simulate
from memadvisor.cost.simulation import Simulation
from memadvisor.cost.step import Bytes, CapturedStep
from memadvisor.layout import Layout
from memadvisor.plan import Plan, Prediction, UnitPlan
from memadvisor.planning.recompute import choose_recomputed
from memadvisor.write_schedule import write_schedule

# Memory alone is asked for; no order of events hangs on how long collectives take.
_NO_TIME = CollectiveTimes(kind="fitted", source="", curves={}, alpha_s=0.0, beta_bytes_per_s=math.inf)


class CapturedMemory:
    """Peaks of layouts of one run on one target; what was simulated is kept. `plain`: `recorded` as it was."""

    def __init__(
        self, recorded: RecordedStep, plain: CapturedStep, model: CapturedModel, target: Target
    ) -> None:
        self.plain, self.model, self.target = plain, model, target
        self._recorded = recorded
        self._steps: dict[tuple[int, bool], CapturedStep] = {}
        self._played: dict[tuple[object, ...], Simulation] = {}

    @property
    def recomputable(self) -> frozenset[str]:
        return frozenset(self.plain.recomputable)

    def safe_tensor_bytes(self, layout: Layout, max_p_oom: float) -> float:
        """The most bytes of tensors whose chance of running out of memory is accepted, on the mean stage."""
        known = self.target.coefficients
        whole = CapturedLayout(layout=layout, recomputed=frozenset(), stage_units=())
        states_bytes = self.stage(self.model.units, whole, 0).states_bytes / layout.pipeline
        room = self.target.device.memory_bytes - known.context_bytes
        peak = safe_peak_bytes(states_bytes, room, max_p_oom, known)
        return (peak - known.allocator_fixed_bytes) / known.allocator_share

    def fewest_recomputed(self, layout: Layout, room_bytes: float) -> frozenset[str] | None:
        """The units of least added time whose recomputation makes a layout without a pipeline fit; None for none."""
        step = self._step(layout)
        choice = choose_recomputed(
            step, lambda units: self._play(layout, units), int(room_bytes), polish=False
        )
        return None if choice is None else choice.recomputed

    def plan(self, chosen: CapturedLayout) -> tuple[Plan, Prediction]:
        """What `run --plan` would do for a layout without a pipeline, and what is predicted of its memory."""
        step = self._step(chosen.layout)
        plan = plan_of(chosen.layout, chosen.recomputed, step)
        return plan, self._play(chosen.layout, chosen.recomputed).prediction()

    def worst(self, chosen: CapturedLayout, pipeline: PipelineTimes) -> StageMemory:
        """Of the fullest device."""
        if chosen.layout.pipeline == 1:
            peak = self._play(chosen.layout, chosen.recomputed).peak.by_category_bytes
            return self._as_memory(peak)
        stages = stages_of(self.model, chosen.stage_units)
        held = [
            self.stage(units, chosen, in_flight)
            for units, in_flight in zip(stages, pipeline.peak_in_flight, strict=True)
        ]
        return max(held, key=lambda memory: memory.total_bytes)

    def stage(
        self, units: Collection[CapturedUnit], chosen: CapturedLayout, num_in_flight: int
    ) -> StageMemory:
        layout, model = chosen.layout, self.model
        count = stage_parameters_of(units)
        sharded = count.sharded(layout)
        held, gradients, optimized = (
            sharded if layout.zero_stage >= stage else count.all for stage in (3, 2, 1)
        )
        share = layout.micro_batch_size / model.micro_batch_size
        size = model.parameter_bytes
        gathered = (
            3.0 * count.widest_layer * size if layout.zero_stage == 3 and layout.shard_ranks > 1 else 0.0
        )
        optimizer_bytes = sum(unit.optimizer_bytes for unit in units) * optimized / max(1.0, count.all)
        saved = sum(saved_bytes(unit, chosen.recomputed) for unit in units)
        working = max((working_bytes(unit, chosen.recomputed) for unit in units), default=0)
        message = max((unit.cut_bytes or 0) for unit in units)
        return self._memory(
            parameter_bytes=held * size,
            gradient_bytes=gradients * size,
            optimizer_bytes=optimizer_bytes,
            activation_bytes=num_in_flight * saved * share + model.other_bytes,
            buffer_bytes=gathered + (working + 2 * message) * share,
        )

    def _as_memory(self, by_category: Bytes) -> StageMemory:
        known = ("parameter", "gradient", "optimizer_state", "communication")
        states = {name: float(by_category.get(name, 0)) for name in known}
        return self._memory(
            parameter_bytes=states["parameter"],
            gradient_bytes=states["gradient"],
            optimizer_bytes=states["optimizer_state"],
            activation_bytes=float(sum(by_category.values())) - sum(states.values()),
            buffer_bytes=states["communication"],
        )

    def _memory(
        self,
        *,
        parameter_bytes: float,
        gradient_bytes: float,
        optimizer_bytes: float,
        activation_bytes: float,
        buffer_bytes: float,
    ) -> StageMemory:
        known = self.target.coefficients
        tensors = parameter_bytes + gradient_bytes + optimizer_bytes + activation_bytes + buffer_bytes
        return StageMemory(
            parameter_bytes=parameter_bytes,
            gradient_bytes=gradient_bytes,
            optimizer_bytes=optimizer_bytes,
            activation_bytes=activation_bytes,
            head_bytes=0.0,
            buffer_bytes=buffer_bytes,
            allocator_bytes=tensors * (known.allocator_share - 1) + known.allocator_fixed_bytes,
            context_bytes=known.context_bytes,
        )

    def _step(self, layout: Layout) -> CapturedStep:
        """The traced step with the layout's micro-batch, played more than once where gradients are accumulated."""
        accumulates = layout.num_microbatches > self.plain.num_micro_batches
        key = (layout.micro_batch_size, accumulates)
        if key not in self._steps:
            divisor = Fraction(self.model.micro_batch_size, layout.micro_batch_size)
            step = self.plain if divisor == 1 else self._recorded.captured(divisor)
            self._steps[key] = replace(step, repeats=2 if accumulates else 1)
        return self._steps[key]

    def _play(self, layout: Layout, recomputed: frozenset[str]) -> Simulation:
        step = self._step(layout)
        key = (id(step), layout.data, layout.zero_stage, layout.shard, recomputed)
        if key not in self._played:
            plan = plan_of(layout, recomputed, step)
            self._played[key] = simulate(step, write_schedule(plan, step.units), _NO_TIME)
        return self._played[key]


def plan_of(layout: Layout, recomputed: frozenset[str], step: CapturedStep) -> Plan:
    """What `run --plan` would do for a layout without a pipeline: collectives overlap, and units are gathered one ahead."""
    stage = layout.zero_stage if layout.data > 1 else 0
    return Plan(
        num_ranks=layout.data,
        zero_stage=stage,
        policy="chosen",
        units=tuple(
            UnitPlan(name=unit.name, zero_stage=stage, recompute=unit.name in recomputed)
            for unit in step.units
        ),
        micro_batch_size=layout.micro_batch_size,
        grad_accum=layout.num_microbatches,
        overlap=stage > 0,
        gather_depth=1 if stage == 3 else 0,
        shard_ranks=None if stage == 0 else layout.shard,
    )


def saved_bytes(unit: CapturedUnit, recomputed: Collection[str]) -> int:
    """Of the recorded micro-batch, until its backward."""
    return unit.saved_bytes - (unit.again_bytes if unit.name in recomputed else 0)


def working_bytes(unit: CapturedUnit, recomputed: Collection[str]) -> int:
    """In its forward or backward, beyond what is kept; a unit that runs again has what it would have kept."""
    return unit.working_bytes + (unit.again_bytes if unit.name in recomputed else 0)

"""One way for all units alike: what is shared or lies elsewhere, and what runs ahead or behind."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from memadvisor.cost.step import CapturedStep
from memadvisor.plan import UnitPlan
from memadvisor.planning.arrangement import Arrangement
from memadvisor.planning.stretches import Nested

_unit_plan = lru_cache(maxsize=1 << 12)(UnitPlan)  # a search asks for the same ones thousands of times


@dataclass(frozen=True, slots=True)
class Way:
    """behind: as of an arrangement. tier: where optimizer state lies. pages: whether parameters and gradients lie there too. secondary_ranks: see Plan.
    by_unit: whether the optimizer step updates units one after another."""

    stage: int
    reshard: bool
    behind: int
    depth: int
    shard_ranks: int | None = None
    early: bool = False
    tier: str = "device"
    pages: bool = False
    secondary_ranks: int | None = None
    by_unit: bool = False

    def arranged(self, step: CapturedStep, nested: Nested, activation_tier: str) -> Arrangement:
        """With units that run again or keep activations elsewhere, as `nested` says."""
        kept, parts, kept_calls = dict(nested.kept), dict(nested.parts), dict(nested.kept_calls)
        units = tuple(
            _unit_plan(
                name=unit.name,
                zero_stage=self.stage,
                recompute=unit.name in nested.alone,
                reshard=self.reshard,
                optimizer_tier=self.tier,
                parameter_tier=self.tier if self.pages else "device",
                kept=kept.get(unit.name, ()),
                parts=parts.get(unit.name, ()),
                kept_calls=kept_calls.get(unit.name, ()),
                activation_tier=activation_tier if unit.name in nested.away else "device",
            )
            for unit in step.units
        )
        return Arrangement(
            units,
            self.behind,
            self.depth,
            self.shard_ranks,
            self.early,
            nested.stretches,
            self.secondary_ranks,
            self.by_unit,
        )

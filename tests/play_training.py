"""Plays a small GPT's training for tests/make_run.py, and writes down what capture would see of it."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from memadvisor.plan import Plan
from memadvisor.run.documents import Ending, Note, ProcessInfo
from memadvisor.run.records import (
    Collective,
    Counter,
    Module,
    Operator,
    OptimizerState,
    Parameter,
    Residual,
    Saved,
    Span,
    Step,
    Storage,
    Unit,
)
from memadvisor.run.run import RankRun
from tests.play_step import ITEM, StepPlayer


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What `make_run` may be told. Times are of a timed step; a traced one takes TRACED_SLOWDOWN as long.

    By default a step of one rank takes 0.1 s. With several, ALL_REDUCE_S more is exposed before the optimizer
    step; rank r begins each step `rank_delay_s` r times late, and the others wait for it there.
    """

    num_ranks: int = 2
    num_blocks: int = 3
    num_steps: int = 8
    traced_step: int | None = 3
    num_micro_batches: int = 1
    hidden: int = 64
    vocabulary: int = 512
    sequence: int = 32
    micro_batch_size: int = 4
    embedding_s: float = 0.001
    block_s: float = 0.008
    head_s: float = 0.004
    optimizer_s: float = 0.008
    outside_s: float = 0.005
    rank_delay_s: float = 0.0
    recompute: tuple[str, ...] = ()
    unexplained_bytes: int = 4096
    device: str = "cpu"
    device_name: str = "synthetic processor"
    start_s: float = 100.0
    plan: Plan | None = None
    missing_ranks: tuple[int, ...] = ()
    problems: tuple[str, ...] = ()
    exit_code: int | None = 0  # None: killed, no ending
    exception: str | None = None
    notes: tuple[Note, ...] = ()
    path: Path = Path("synthetic-run")


@dataclass(frozen=True)
class _Layer:
    """A module with one weight matrix, and the operator that multiplies by it."""

    module: str
    unit: str
    type_name: str
    shape: tuple[int, int]

    @property
    def num_elements(self) -> int:
        return self.shape[0] * self.shape[1]


class Recorder:
    """Plays the training of one rank and writes down what capture would see."""

    def __init__(self, settings: Settings, rank: int) -> None:
        self.settings = settings
        self.rank = rank
        h, v = settings.hidden, settings.vocabulary
        self.blocks = tuple(f"blocks.{i}" for i in range(settings.num_blocks))
        self.units = ("embedding", *self.blocks, "head")
        self.layers = [_Layer("embedding", "embedding", "Embedding", (v, h))]
        for block in self.blocks:
            self.layers += [
                _Layer(f"{block}.attention.qkv", block, "Linear", (3 * h, h)),
                _Layer(f"{block}.attention.out", block, "Linear", (h, h)),
                _Layer(f"{block}.mlp.up", block, "Linear", (4 * h, h)),
                _Layer(f"{block}.mlp.down", block, "Linear", (h, 4 * h)),
            ]
        self.layers.append(_Layer("head", "head", "Linear", (v, h)))
        self.tokens = settings.micro_batch_size * settings.sequence
        self.spans: list[Span] = []
        self.storages: list[Storage] = []
        self.saved: list[Saved] = []
        self.operators: list[Operator] = []
        self.collectives: list[Collective] = []
        self.residuals: list[Residual] = []
        self.counters: list[Counter] = []

    def record(self) -> RankRun:
        settings = self.settings
        steps = []
        start_s = settings.start_s
        for index in range(settings.num_steps):
            steps.append(self._step(index, start_s))
            start_s = steps[-1].end_s
        return RankRun(
            process=self._process(),
            modules=self._modules(),
            units=tuple(self._unit(name) for name in self.units),
            parameters=tuple(self._parameter(layer) for layer in self.layers),
            optimizer_states=tuple(self._optimizer_states()) if self._is_traced else (),
            steps=tuple(steps),
            spans=tuple(self.spans),
            storages=tuple(self.storages),
            residuals=tuple(self.residuals),
            saved=tuple(self.saved),
            operators=tuple(self.operators),
            collectives=tuple(self.collectives),
            counters=tuple(self.counters),
            notes=settings.notes,
            ending=None
            if settings.exit_code is None
            else Ending(exit_code=settings.exit_code, exception=settings.exception, time_s=start_s),
        )

    @property
    def _is_traced(self) -> bool:
        traced = self.settings.traced_step
        return traced is not None and traced < self.settings.num_steps

    def _process(self) -> ProcessInfo:
        settings = self.settings
        return ProcessInfo(
            rank=self.rank,
            world_size=settings.num_ranks,
            local_rank=self.rank,
            pid=4000 + self.rank,
            host="node0",
            device=settings.device,
            device_name=settings.device_name,
            device_memory_bytes=8 * 2**30,
            num_threads=2,
            unix_offset_s=1.7e9,
            start_s=settings.start_s - 1,
            torch_version="2.13.0",
            python_version="3.11.9",
        )

    def _modules(self) -> tuple[Module, ...]:
        modules = [
            Module(name="", type_name="GPT", unit=""),
            Module(name="blocks", type_name="ModuleList", unit=""),
        ]
        for block in self.blocks:
            modules += [
                Module(name=block, type_name="Block", unit=block),
                Module(name=f"{block}.attention", type_name="Attention", unit=block),
                Module(name=f"{block}.mlp", type_name="MLP", unit=block),
            ]
        modules += [Module(name=x.module, type_name=x.type_name, unit=x.unit) for x in self.layers]
        return tuple(modules)

    def _unit(self, name: str) -> Unit:
        num_parameters = sum(layer.num_elements for layer in self.layers if layer.unit == name)
        return Unit(
            name=name,
            type_name={"embedding": "Embedding", "head": "Linear"}.get(name, "Block"),
            is_block=name in self.blocks,
            num_parameters=num_parameters,
            parameter_bytes=ITEM * num_parameters,
            trainable_bytes=ITEM * num_parameters,
        )

    def _parameter(self, layer: _Layer) -> Parameter:
        return Parameter(
            name=f"{layer.module}.weight",
            unit=layer.unit,
            shape=str(layer.shape),
            dtype="float32",
            num_elements=layer.num_elements,
            size_bytes=ITEM * layer.num_elements,
            requires_grad=True,
            tied_to="",
        )

    def _optimizer_states(self) -> list[OptimizerState]:
        return [
            OptimizerState(
                parameter=f"{layer.module}.weight",
                component=component,
                dtype="float32",
                num_elements=1 if component == "step" else layer.num_elements,
                size_bytes=ITEM * (1 if component == "step" else layer.num_elements),
            )
            for layer in self.layers
            for component in ("step", "exp_avg", "exp_avg_sq")
        ]

    def _step(self, index: int, start_s: float) -> Step:
        settings = self.settings
        traced = index == settings.traced_step
        player = StepPlayer(self, index, start_s, traced=traced)
        end_s = player.play()
        peak_bytes = self._peak_bytes(start_s, end_s) if traced else None
        num_samples = settings.num_micro_batches * settings.micro_batch_size
        self.counters.append(
            Counter(
                time_s=end_s,
                allocated_bytes=None,
                reserved_bytes=None,
                resident_bytes=300 * 2**20,
                device_used_bytes=None,
                device_utilization=None,
            )
        )
        return Step(
            index=index,
            start_s=start_s,
            end_s=end_s,
            traced=traced,
            num_micro_batches=settings.num_micro_batches,
            num_samples=num_samples,
            num_tokens=num_samples * settings.sequence,
            allocated_bytes=self._live_bytes([end_s])[0] if traced else None,
            peak_allocated_bytes=peak_bytes,
            peak_reserved_bytes=None,
            recorder_s=0.01 * (end_s - start_s),
        )

    def _live_bytes(self, times_s: list[float]) -> list[int]:
        """What is alive at each of these moments, and of what has no label what was last known."""
        ours = [s for s in self.storages if s.device == self.settings.device]
        changes = [(s.birth_s, s.size_bytes) for s in ours]
        changes += [(s.death_s, -s.size_bytes) for s in ours if s.death_s is not None]
        before = 0
        for residual in self.residuals:
            changes.append((residual.time_s, residual.unexplained_bytes - before))
            before = residual.unexplained_bytes
        changes.sort()
        moments_s = [time_s for time_s, _ in changes]
        sums = list(accumulate((change for _, change in changes), initial=0))
        return [sums[bisect_right(moments_s, time_s)] for time_s in times_s]

    def _peak_bytes(self, start_s: float, end_s: float) -> int:
        times = {start_s, *(s.birth_s for s in self.storages), *(r.time_s for r in self.residuals)}
        return max(self._live_bytes([time_s for time_s in times if start_s <= time_s <= end_s]))

"""A synthetic run of a small GPT, worked out from a few numbers, for tests of everything that reads runs.

Each rank trains an embedding, some blocks and a head in float32 with AdamW under data parallelism. One step
is traced. The allocator's peak is summed by brute force, so that tests may compare an analyzer with it.
Change anything by keyword, or with `dataclasses.replace` on the frozen result.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from memadvisor.plan import Plan, plan_to_json
from memadvisor.run.files import write_private_file
from memadvisor.run.journal import JournalWriter
from memadvisor.run.records import (
    TABLES,
    Collective,
    Counter,
    Ending,
    Module,
    Note,
    Operator,
    OptimizerState,
    Parameter,
    ProcessInfo,
    Residual,
    Saved,
    Span,
    Step,
    Storage,
    Unit,
)
from memadvisor.run.run import Manifest, RankRun, Run
from memadvisor.run.store import write_manifest

ITEM = 4  # bytes of a float32
TRACED_SLOWDOWN = 3.0
ALL_REDUCE_S = 0.002


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


def make_run(**changes: object) -> Run:
    """A whole run in memory. Keywords are the fields of `Settings`."""
    settings = Settings(**changes)  # type: ignore[arg-type]
    present = [rank for rank in range(settings.num_ranks) if rank not in settings.missing_ranks]
    return Run(
        path=settings.path,
        manifest=Manifest(
            format=(1, 0),
            memadvisor_version="0.1.0",
            created_unix_s=1.7e9 + settings.start_s,
            world_size=settings.num_ranks,
            script="train_gpt.py",
            arguments=("--blocks", str(settings.num_blocks)),
        ),
        ranks=tuple(_Recorder(settings, rank).record() for rank in present),
        missing_ranks=settings.missing_ranks,
        problems=settings.problems,
        plan=settings.plan,
    )


def write_run(run: Run, directory: Path) -> Path:
    """Write a run as capture would, so that `load_run(directory)` gives it back; returns `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    write_manifest(directory, run.manifest)
    if run.plan is not None:
        write_private_file(directory / "plan.json", json.dumps(plan_to_json(run.plan)))
    for rank in run.ranks:
        writer = JournalWriter(directory / f"rank{rank.process.rank}.pid{rank.process.pid}.journal")
        writer.write_document("process", dataclasses.asdict(rank.process))
        for table in TABLES:
            writer.write_rows(table, getattr(rank, table))
        for note in rank.notes:
            writer.write_document("note", dataclasses.asdict(note))
        if rank.ending is not None:
            writer.write_document("ending", dataclasses.asdict(rank.ending))
        writer.close()
    return directory


def storage(**changes: object) -> Storage:
    """One storage, alive from 0 s on the processor; for tests that build their own."""
    fields: dict[str, object] = {
        "storage_id": 0,
        "birth_s": 0.0,
        "death_s": None,
        "size_bytes": 100,
        "category": "activation",
        "dtype": "float32",
        "shape": "(25,)",
        "module": "",
        "unit": "",
        "phase": "forward",
        "micro_batch": 0,
        "operator": "aten::mm",
        "device": "cpu",
        "last_use_s": None,
        "last_forward_use_s": None,
    }
    return Storage(**{**fields, **changes})  # type: ignore[arg-type]


def step(**changes: object) -> Step:
    """One timed step of 0.1 s; for tests that build their own."""
    fields: dict[str, object] = {
        "index": 0,
        "start_s": 0.0,
        "end_s": 0.1,
        "traced": False,
        "num_micro_batches": 1,
        "num_samples": None,
        "num_tokens": None,
        "allocated_bytes": None,
        "peak_allocated_bytes": None,
        "peak_reserved_bytes": None,
        "recorder_s": None,
    }
    return Step(**{**fields, **changes})  # type: ignore[arg-type]


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


class _Recorder:
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
        player = _StepPlayer(self, index, start_s, traced=traced)
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
            allocated_bytes=self._live_bytes(end_s) if traced else None,
            peak_allocated_bytes=peak_bytes,
            peak_reserved_bytes=None,
            recorder_s=0.01 * (end_s - start_s),
        )

    def _live_bytes(self, time_s: float) -> int:
        explained = sum(
            s.size_bytes
            for s in self.storages
            if s.device == self.settings.device
            and s.birth_s <= time_s
            and (s.death_s is None or time_s < s.death_s)
        )
        residuals = [r.unexplained_bytes for r in self.residuals if r.time_s <= time_s]
        return explained + (residuals[-1] if residuals else 0)

    def _peak_bytes(self, start_s: float, end_s: float) -> int:
        times = {start_s, *(s.birth_s for s in self.storages), *(r.time_s for r in self.residuals)}
        return max(self._live_bytes(time_s) for time_s in times if start_s <= time_s <= end_s)


class _StepPlayer:
    """Plays one step; only a traced one leaves storages, operators and collectives behind."""

    def __init__(self, recorder: _Recorder, index: int, start_s: float, *, traced: bool) -> None:
        self.recorder = recorder
        self.settings = recorder.settings
        self.index = index
        self.start_s = start_s
        self.now_s = start_s
        self.traced = traced
        self.scale = TRACED_SLOWDOWN if traced else 1.0
        self.alive: dict[str, Storage] = {}  # not dead yet, by a name of ours
        self.kept: dict[tuple[int, str], list[str]] = {}  # names saved by (micro-batch, unit)
        self.waiting: dict[str, int] = {}  # name -> index in recorder.saved

    def play(self) -> float:
        settings, recorder = self.settings, self.recorder
        if self.traced:
            self._baseline()
        self._advance(settings.outside_s + settings.rank_delay_s * recorder.rank)
        self._free("old gradients")
        for micro_batch in range(settings.num_micro_batches):
            self._micro_batch(micro_batch)
        if settings.num_ranks > 1:
            self._advance(settings.rank_delay_s * (settings.num_ranks - 1 - recorder.rank))
            self.now_s += ALL_REDUCE_S
        optimizer_start_s = self.now_s
        self._operator("aten::_fused_adamw_", "", "", "optimizer", settings.optimizer_s, 0, 0)
        self._span("optimizer", "", settings.num_micro_batches - 1, optimizer_start_s)
        if self.traced:
            recorder.storages += self.alive.values()
            recorder.storages.sort(key=lambda row: row.storage_id)
        return self.now_s

    def _baseline(self) -> None:
        settings, recorder = self.settings, self.recorder
        recorder.residuals.append(Residual(self.start_s, settings.unexplained_bytes))
        for layer in recorder.layers:
            size = ITEM * layer.num_elements
            shape = str(layer.shape)
            for category, copies in (("parameter", 1), ("optimizer_state", 2)):
                for copy in range(copies):
                    key = f"{category}{copy} {layer.module}"
                    self._born(key, size, category, layer.module, layer.unit, "baseline", shape=shape)
            self._born(f"step {layer.module}", ITEM, "optimizer_state", layer.module, layer.unit, "baseline")
        total = ITEM * sum(layer.num_elements for layer in recorder.layers)
        self._born("old gradients", total, "gradient", "", "", "baseline")
        self._born("dataset", 50_000, "other", "", "", "baseline", dtype="int64")
        if settings.num_ranks > 1:
            self._born("bucket", total // 4, "communication", "", "", "baseline")
        if settings.device != "cpu":  # a pinned batch on the host: another device's bytes
            self._born("pinned", 7777, "input", "", "", "baseline", device="cpu", dtype="int64")

    def _micro_batch(self, micro_batch: int) -> None:
        settings, recorder = self.settings, self.recorder
        tokens, h, v = recorder.tokens, settings.hidden, settings.vocabulary
        self._born("batch", 8 * tokens, "input", "", "", "outside", micro_batch, dtype="int64")
        forward_start_s = self.now_s
        for unit in recorder.units:
            unit_start_s = self.now_s
            if unit in settings.recompute:
                self._run_layers(unit, micro_batch, "forward", keep=False)
                self._keep(f"{unit} input {micro_batch}", ITEM * tokens * h, unit, unit, micro_batch)
            else:
                self._run_layers(unit, micro_batch, "forward", keep=True)
            self._span("unit_forward", unit, micro_batch, unit_start_s)
        self._keep(f"log-probabilities {micro_batch}", ITEM * tokens * v, "", "", micro_batch)
        self._span("forward", "", micro_batch, forward_start_s)
        backward_start_s = self.now_s
        self._release(micro_batch, "")
        for unit in reversed(recorder.units):
            if unit in settings.recompute:
                unit_start_s = self.now_s
                self._run_layers(unit, micro_batch, "recompute", keep=True)
                self._span("unit_recompute", unit, micro_batch, unit_start_s)
            unit_start_s = self.now_s
            self._unit_backward(unit, micro_batch)
            self._span("unit_backward", unit, micro_batch, unit_start_s)
        self._span("backward", "", micro_batch, backward_start_s)
        self._free("batch")

    def _run_layers(self, unit: str, micro_batch: int, phase: str, *, keep: bool) -> None:
        """The forward of a unit: each layer's output is kept for the backward, or dies with the unit."""
        recorder = self.recorder
        layers = [layer for layer in recorder.layers if layer.unit == unit]
        for layer in layers:
            flops = 2 * recorder.tokens * layer.num_elements if layer.type_name == "Linear" else 0
            operator = "aten::mm" if layer.type_name == "Linear" else "aten::embedding"
            duration_s = self._forward_s(unit) / (len(layers) + len(layers) // 4)
            model_flops = 0 if phase == "recompute" else flops
            self._operator(operator, layer.module, unit, phase, duration_s, flops, model_flops)
            name = f"{layer.module} {phase} {micro_batch}"
            size = ITEM * recorder.tokens * layer.shape[1 if layer.type_name == "Embedding" else 0]
            if keep:
                self._keep(name, size, layer.module, unit, micro_batch, phase, operator)
            else:
                self._born(name, size, "temporary", layer.module, unit, phase, micro_batch, operator=operator)
                self._free(name)
            if layer.module.endswith("qkv"):
                self._attention(unit, phase, duration_s, factor=1)

    def _attention(self, unit: str, phase: str, duration_s: float, *, factor: int) -> None:
        """Causal attention that computes the full square: the model needs T(T+1)/2 pairs of it."""
        s = self.settings
        executed = factor * 4 * s.micro_batch_size * s.hidden * s.sequence**2
        needed = factor * 2 * s.micro_batch_size * s.hidden * s.sequence * (s.sequence + 1)
        name = "aten::_scaled_dot_product_flash_attention_for_cpu"
        needed = 0 if phase == "recompute" else needed
        self._operator(name, f"{unit}.attention", unit, phase, duration_s, executed, needed)

    def _unit_backward(self, unit: str, micro_batch: int) -> None:
        settings, recorder = self.settings, self.recorder
        layers = [layer for layer in recorder.layers if layer.unit == unit]
        temporary = f"gradient of the output of {unit} {micro_batch}"
        size = ITEM * recorder.tokens * settings.hidden
        self._born(temporary, size, "temporary", unit, unit, "backward", micro_batch)
        for layer in reversed(layers):
            flops = 4 * recorder.tokens * layer.num_elements if layer.type_name == "Linear" else 0
            operator = "aten::mm" if layer.type_name == "Linear" else "aten::embedding_dense_backward"
            duration_s = 2 * self._forward_s(unit) / (len(layers) + len(layers) // 4)
            self._operator(operator, layer.module, unit, "backward", duration_s, flops, flops)
            if layer.module.endswith("qkv"):
                self._attention(unit, "backward", duration_s, factor=2)
            if micro_batch == 0:
                name = f"gradient {layer.module}"
                shape = str(layer.shape)
                bytes_ = ITEM * layer.num_elements
                self._born(name, bytes_, "gradient", layer.module, unit, "backward", micro_batch, shape=shape)
        self._free(temporary)
        self._release(micro_batch, unit)
        if settings.num_ranks > 1 and micro_batch == settings.num_micro_batches - 1:
            self._all_reduce(unit)

    def _all_reduce(self, unit: str) -> None:
        """Issued when the unit's backward ends; all ranks end together, ALL_REDUCE_S after the last has issued."""
        if not self.traced:
            return
        settings, recorder = self.settings, self.recorder
        last_delay_s = settings.rank_delay_s * (settings.num_ranks - 1)
        own_delay_s = settings.rank_delay_s * recorder.rank
        end_s = self.now_s + (last_delay_s - own_delay_s) * self.scale + ALL_REDUCE_S
        recorder.collectives.append(
            Collective(
                step=self.index,
                operation="all_reduce",
                group="default",
                group_size=settings.num_ranks,
                sequence=len(recorder.collectives),
                size_bytes=recorder._unit(unit).parameter_bytes,
                dtype="float32",
                phase="backward",
                unit=unit,
                asynchronous=True,
                issue_s=self.now_s,
                end_s=end_s,
                wait_start_s=None,
                wait_end_s=None,
            )
        )

    def _forward_s(self, unit: str) -> float:
        settings = self.settings
        return {"embedding": settings.embedding_s, "head": settings.head_s}.get(unit, settings.block_s)

    def _advance(self, duration_s: float) -> None:
        self.now_s += duration_s * self.scale

    def _operator(
        self, name: str, module: str, unit: str, phase: str, duration_s: float, executed: int, needed: int
    ) -> None:
        start_s = self.now_s
        self._advance(duration_s)
        if self.traced:
            row = Operator(name, module, unit, phase, start_s, self.now_s, executed, needed)
            self.recorder.operators.append(row)

    def _span(self, kind: str, unit: str, micro_batch: int, start_s: float) -> None:
        self.recorder.spans.append(Span(self.index, kind, unit, micro_batch, start_s, self.now_s))

    def _keep(
        self,
        name: str,
        size: int,
        module: str,
        unit: str,
        micro_batch: int,
        phase: str = "forward",
        operator: str = "aten::_log_softmax",
    ) -> None:
        self._born(name, size, "activation", module, unit, phase, micro_batch, operator=operator)
        if not self.traced:
            return
        self.kept.setdefault((micro_batch, unit), []).append(name)
        row = self.alive[name]
        self.waiting[name] = len(self.recorder.saved)
        self.recorder.saved.append(
            Saved(row.storage_id, module, unit, micro_batch, size, row.shape, self.now_s, None, None)
        )

    def _release(self, micro_batch: int, unit: str) -> None:
        for name in self.kept.pop((micro_batch, unit), []):
            position = self.waiting.pop(name)
            saved = self.recorder.saved[position]
            self.recorder.saved[position] = dataclasses.replace(
                saved, unpacked_s=self.now_s, released_s=self.now_s
            )
            self._free(name)

    def _born(
        self,
        name: str,
        size: int,
        category: str,
        module: str,
        unit: str,
        phase: str,
        micro_batch: int = 0,
        *,
        dtype: str = "float32",
        shape: str | None = None,
        operator: str = "",
        device: str | None = None,
    ) -> None:
        if not self.traced:
            return
        itemsize = 8 if dtype == "int64" else ITEM
        self.alive[name] = Storage(
            storage_id=len(self.alive) + len(self.recorder.storages),
            birth_s=self.now_s,
            death_s=None,
            size_bytes=size,
            category=category,
            dtype=dtype,
            shape=shape or f"({size // itemsize},)",
            module=module,
            unit=unit,
            phase=phase,
            micro_batch=micro_batch,
            operator=operator,
            device=device or self.settings.device,
            last_use_s=None,
            last_forward_use_s=None,
        )

    def _free(self, name: str) -> None:
        if self.traced:
            row = self.alive.pop(name)
            self.recorder.storages.append(dataclasses.replace(row, death_s=self.now_s, last_use_s=self.now_s))

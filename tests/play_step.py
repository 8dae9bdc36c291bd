"""Plays one step of the training in tests/play_training.py."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from memadvisor.run.records import (
    Collective,
    Operator,
    Residual,
    Saved,
    Span,
    Storage,
)

if TYPE_CHECKING:
    from tests.play_training import Recorder

ITEM = 4  # bytes of a float32
NUM_HEADS = 4
TRACED_SLOWDOWN = 3.0
ALL_REDUCE_S = 0.002


class StepPlayer:
    """Plays one step; only a traced one leaves storages, operators and collectives behind."""

    def __init__(self, recorder: Recorder, index: int, start_s: float, *, traced: bool) -> None:
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
            factors = [[recorder.tokens, layer.shape[1]], [layer.shape[1], layer.shape[0]]] if flops else None
            self._operator(operator, layer.module, unit, phase, duration_s, flops, model_flops, factors)
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
        shape = [s.micro_batch_size, NUM_HEADS, s.sequence, s.hidden // NUM_HEADS]
        self._operator(name, f"{unit}.attention", unit, phase, duration_s, executed, needed, [shape] * 3)

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
        self,
        name: str,
        module: str,
        unit: str,
        phase: str,
        duration_s: float,
        executed: int,
        needed: int,
        shapes: list[list[int]] | None = None,
    ) -> None:
        """Reads and writes a byte for each 10 FLOPs, and 1,000 besides."""
        start_s = self.now_s
        self._advance(duration_s)
        if self.traced:
            text = None if shapes is None else str(shapes)
            read, written = executed // 20 + 1000, executed // 20
            row = Operator(
                name,
                module,
                unit,
                phase,
                start_s,
                self.now_s,
                executed,
                needed,
                text,
                read,
                written,
                None,
                False,
            )
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

"""Seconds and bytes of one microbatch for every way of working on it, as arrays: what bounds of layouts begin with."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from memadvisor.cost.layouts.coefficients import Coefficients
from memadvisor.cost.layouts.end_work import embedding_work, head_work
from memadvisor.cost.layouts.kernels import device_of
from memadvisor.cost.layouts.layer_work import layer_groups, layer_work, recompute_seconds
from memadvisor.cost.layouts.links import Group, group_of
from memadvisor.cost.layouts.saved import head_saved_bytes, layer_backward_bytes, layer_saved_bytes
from memadvisor.cost.layouts.second_run import second_run_bytes
from memadvisor.cost.layouts.vision_work import tower_saved_bytes, tower_work
from memadvisor.layout import Layout, TrainingStep
from memadvisor.planning.layout_space import DeviceWork, LayoutQuestion, Split, works

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Pair = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Works:
    """Of one split, a row for each. Seconds (rows x kinds of layer and two x 2): of a layer of each kind, of the embedding and
    of the head; forward and backward, nothing gathered. Bytes: kept by a layer of each kind (rows x kinds), held while it
    runs again and by its backward (rows x kinds each), by the head; kept by a tower of images.
    """

    rows: tuple[DeviceWork, ...]
    num_microbatches: Ints
    seconds: Floats
    kept_bytes: Floats
    again_bytes: Floats
    backward_bytes: Floats
    head_bytes: Floats
    tower_bytes: Floats

    def at(self, rows: list[int]) -> Works:
        """These rows of it."""
        if len(rows) == len(self.rows):
            return self
        return Works(
            rows=tuple(self.rows[row] for row in rows),
            num_microbatches=self.num_microbatches[rows],
            seconds=self.seconds[rows],
            kept_bytes=self.kept_bytes[rows],
            again_bytes=self.again_bytes[rows],
            backward_bytes=self.backward_bytes[rows],
            head_bytes=self.head_bytes[rows],
            tower_bytes=self.tower_bytes[rows],
        )


class WorkPrices:
    """Prices works of one question; what repeats is kept."""

    def __init__(self, question: LayoutQuestion, coefficients: Coefficients) -> None:
        self.question = question
        self.coefficients = coefficients
        self.device = device_of(question.cluster.accelerator, question.software.compute_dtype, coefficients)
        # One layer of each kind.
        self.kinds = tuple(layer for _, layer in question.model.kinds().values())
        # Seconds of layers, without recomputation in the key; of the ends; bytes.
        self._groups: dict[tuple[int, int], Group] = {}
        self._layers: dict[tuple[object, ...], dict[str, Pair]] = {}
        self._ends: dict[tuple[int, int, int, bool, str], tuple[Pair, Pair]] = {}
        self._bytes: dict[tuple[object, ...], tuple[float, ...]] = {}

    def of(self, split: Split) -> Works:
        question = self.question
        rows = tuple(works(question, split))
        each = question.batch_sequences // split.data
        num_microbatches = [each // work.micro_batch_size for work in rows]
        crosses = split.pipeline > 1 and question.cluster.num_nodes > 1
        seconds = [
            self._work_seconds(work, count > 1, crosses)
            for work, count in zip(rows, num_microbatches, strict=True)
        ]
        held, kinds = np.array([self._work_bytes(work) for work in rows]), len(self.kinds)
        return Works(
            rows=rows,
            num_microbatches=np.array(num_microbatches),
            seconds=np.array(seconds),
            kept_bytes=held[:, :kinds],
            again_bytes=held[:, kinds : 2 * kinds],
            backward_bytes=held[:, 2 * kinds : 3 * kinds],
            head_bytes=held[:, -2],
            tower_bytes=held[:, -1],
        )

    def group(self, size: int, stride: int) -> Group:
        key = (size, stride)
        if key not in self._groups:
            self._groups[key] = group_of(self.question.cluster, size, stride, self.coefficients)
        return self._groups[key]

    def _work_seconds(self, work: DeviceWork, several: bool, crosses: bool) -> tuple[Pair, ...]:
        """`several`: microbatches to a step. `crosses`: the pipeline's messages cross nodes."""
        layers = (self._layer_seconds(layer, work, several, crosses) for layer in self.kinds)
        return *layers, *self._end_seconds(work, several)

    def _layer_seconds(self, layer: int, work: DeviceWork, several: bool, crosses: bool) -> Pair:
        """How experts are shared out is nothing to a dense layer."""
        if work.expert > 1 and not self.question.model.has_experts(layer):
            work = replace(work, expert=1)
        key = (
            layer, work.tensor, work.context, work.expert, work.sequence_parallel, work.context_kind,
            work.micro_batch_size, several, crosses,
        )  # fmt: skip
        if key not in self._layers:
            self._layers[key] = self._price_layer(layer, work, several, crosses)
        return self._layers[key][work.recompute]

    def _price_layer(self, layer: int, work: DeviceWork, several: bool, crosses: bool) -> dict[str, Pair]:
        """Under every kind of recomputation, which changes nothing but what the backward runs again."""
        model, device = self.question.model, self.device
        plain = self._alone(work, "none", several, crosses)
        groups = layer_groups(plain.layout, self.group, crosses)
        one = layer_work(model, plain, layer, device, groups)
        found = {}
        for how in self.question.recompute:
            step = plain if how == "none" else self._alone(work, how, several, crosses)
            again_s = recompute_seconds(model, step, layer, device, groups, one.forward_s)
            found[how] = one.forward_s, one.backward_s + again_s
        return found

    def _end_seconds(self, work: DeviceWork, several: bool) -> tuple[Pair, Pair]:
        """Embedding and head, which differ neither in experts nor in what is run again, but for a tower of images."""
        model = self.question.model
        recompute = "none" if model.tower is None else work.recompute
        key = (work.tensor, work.context, work.micro_batch_size, several, recompute)
        if key not in self._ends:
            step = self._alone(work, recompute, several, False)
            groups = layer_groups(step.layout, self.group, False)
            table, tower, head = (
                part(model, step, self.device, groups) for part in (embedding_work, tower_work, head_work)
            )
            first = table.forward_s + tower.forward_s, table.backward_s + tower.backward_s
            self._ends[key] = first, (head.forward_s, head.backward_s)
        return self._ends[key]

    def _work_bytes(self, work: DeviceWork) -> tuple[float, ...]:
        """How contexts meet does not change them."""
        key = (
            work.tensor,
            work.context,
            work.expert,
            work.sequence_parallel,
            work.micro_batch_size,
            work.recompute,
        )
        if key not in self._bytes:
            model, step = self.question.model, self._alone(work, work.recompute, False, False)
            again = [second_run_bytes(model, step, (layer,)) for layer in self.kinds]
            kept = [layer_saved_bytes(model, step, layer) for layer in self.kinds]
            backward = [layer_backward_bytes(model, step, (layer,)) for layer in self.kinds]
            ends = head_saved_bytes(model, step), tower_saved_bytes(model, step)
            self._bytes[key] = (*kept, *again, *backward, *ends)
        return self._bytes[key]

    def _alone(self, work: DeviceWork, recompute: str, several: bool, crosses: bool) -> TrainingStep:
        """The step of one stage that has all layers."""
        return self.question.step(
            Layout(
                data=work.expert,
                tensor=work.tensor,
                pipeline=2 if crosses else 1,
                context=work.context,
                expert=work.expert,
                sequence_parallel=work.sequence_parallel,
                context_kind=work.context_kind,
                micro_batch_size=work.micro_batch_size,
                num_microbatches=2 if several else 1,
                recompute=recompute,
            )
        )

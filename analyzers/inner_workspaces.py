"""How much of what a layer's operator makes for itself goes with the samples that it is given: oneDNN's copies in a layout of
its own, whose channels are filled up to whole blocks, and the workspaces of recurrent layers. Weights are copied so too.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Set
from dataclasses import dataclass
from itertools import product
from math import prod

from memadvisor.run.records import Operator, Storage
from memadvisor.run.run import RankRun

INSIDE = "inside "  # how the operator of a storage begins that no operator handed out
CONVOLUTION, CONVOLUTION_BACKWARD = "aten::convolution", "aten::convolution_backward"
FLOAT_BYTES = 4
# Parts of operators that the trace has as one.
_PARTS = {"aten::_slow_conv2d_backward": CONVOLUTION_BACKWARD}
_LSTM = ("aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward")
_LSTM_GATES = 4
_BLOCKS = (1, 8, 16)  # channels that oneDNN lays side by side, with none, AVX2 and AVX-512
_ITEM_BYTES = (FLOAT_BYTES, 2)  # of what convolutions work on

Shape = tuple[int, ...]


def is_made_within(row: Storage, operator: str) -> bool:
    """Whether this operator has made it for itself."""
    maker = row.operator.removeprefix(INSIDE)
    return maker != row.operator and _PARTS.get(maker, maker) == operator


def given_and_weight(operator: Operator) -> tuple[Shape, Shape] | None:
    """Shapes of a layer's input and weight; None where they are not all known."""
    given, weight = (tuple(shape) for shape in json.loads(operator.shapes or "")[:2])
    return None if None in given + weight else (given, weight)


@dataclass(frozen=True, slots=True)
class _Layer:
    """An operator, and how large copies of its weights may be, and of what else it is given and gives."""

    operator: Operator
    samples_bytes: frozenset[int]
    weights_bytes: frozenset[int]
    quantum_bytes: (
        int | None
    )  # of a recurrent layer's workspaces, which are so much some times over and a rest

    def of_samples(self, row: Storage) -> int:
        if row.size_bytes in self.weights_bytes:
            return 0
        if row.size_bytes in self.samples_bytes:
            return row.size_bytes
        if self.quantum_bytes is None:
            return 0
        return row.size_bytes - row.size_bytes % self.quantum_bytes


def workspaces(rank: RankRun, shapes: Set[Shape], sizes: Set[int]) -> dict[int, int]:
    """By storage, how many of its bytes go with the samples; of those alone whose operator's shapes tell.

    `shapes`: those that have the batch in them; `sizes`: which dimensions that may be.
    """
    layers = _layers(rank, shapes, sizes)
    starts = [layer.operator.start_s for layer in layers]
    found = {}
    for row in rank.storages:
        is_lstms = row.operator in _LSTM and row.dtype == "uint8"
        if row.phase != "baseline" and (is_lstms or row.operator.startswith(INSIDE)):
            place = bisect_right(starts, row.birth_s) - 1
            if place >= 0 and row.birth_s <= layers[place].operator.end_s:
                found[row.storage_id] = layers[place].of_samples(row)
    return found


def _layers(rank: RankRun, shapes: Set[Shape], sizes: Set[int]) -> list[_Layer]:
    """In order of their start."""
    by_channels: dict[int, list[Shape]] = {}
    for shape in shapes:
        if len(shape) > 2 and shape[0] in sizes:
            by_channels.setdefault(shape[1], []).append(shape)
    layers = []
    known: dict[tuple[str, str], tuple[frozenset[int], frozenset[int], int | None]] = {}
    for operator in rank.operators:
        if operator.shapes is None or operator.name not in (CONVOLUTION, CONVOLUTION_BACKWARD, *_LSTM):
            continue
        key = operator.name, operator.shapes
        if key not in known:
            known[key] = _explained(operator, by_channels)
        layers.append(_Layer(operator, *known[key]))
    return sorted(layers, key=lambda layer: layer.operator.start_s)


def _explained(
    operator: Operator, by_channels: Mapping[int, list[Shape]]
) -> tuple[frozenset[int], frozenset[int], int | None]:
    shapes = given_and_weight(operator)
    if shapes is None:
        return frozenset(), frozenset(), None
    given, weight = shapes
    weights = frozenset(
        item * _filled(weight[0], one) * _filled(weight[1], other) * prod(weight[2:])
        for item, one, other in product(_ITEM_BYTES, _BLOCKS, _BLOCKS)
    )
    if operator.name in _LSTM:
        return frozenset(), weights, FLOAT_BYTES * prod(given[:2]) * (weight[0] // _LSTM_GATES)
    channels = {given[1], weight[0], weight[1]}
    maps = {given, *(shape for number in channels for shape in by_channels.get(number, ()))}
    samples = frozenset(
        item * shape[0] * _filled(shape[1], block) * prod(shape[2:])
        for shape, item, block in product(maps, _ITEM_BYTES, _BLOCKS)
    )
    return samples, weights, None


def _filled(number: int, block: int) -> int:
    return -(-number // block) * block

"""How much of what a layer's operator makes for itself goes with the samples that it is given: oneDNN's copies in a layout of
its own, whose channels are filled up to whole blocks, and the workspaces of recurrent layers. Weights are copied so too.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import product
from math import prod
from operator import attrgetter

from memadvisor.analyzers.shapes import Shape, dimensions, given_and_weight
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
_ITEM_BYTES = (FLOAT_BYTES, 2)  # of what convolutions work on that give no float32
_ALIGNED_BYTES = 128  # which oneDNN adds to its own buffers


def is_made_within(row: Storage, operator: str) -> bool:
    """Whether this operator has made it for itself."""
    maker = row.operator.removeprefix(INSIDE)
    return maker != row.operator and _PARTS.get(maker, maker) == operator


@dataclass(frozen=True, slots=True)
class _Layer:
    """An operator, and how large copies of its weights may be, and of what else it is given and gives."""

    operator: Operator
    samples_bytes: frozenset[int]
    weights_bytes: frozenset[int]
    quantum_bytes: (
        int | None
    )  # of a recurrent layer's workspaces, which are so much some times over and a rest

    def of_samples(self, sizes_bytes: Sequence[int], *, weights_last: bool) -> list[int]:
        """Of workspaces that it made one after another, for one result; with weights_last a gradient of weights or bias."""
        going = [self._of_samples(size) for size in sizes_bytes]
        doubtful = [n for n, size in enumerate(sizes_bytes) if going[n] and size in self.weights_bytes]
        for number in self._weights_among(doubtful, going, weights_last=weights_last):
            going[number] = 0
        return going

    def _weights_among(
        self, doubtful: Sequence[int], going: Sequence[int], *, weights_last: bool
    ) -> Sequence[int]:
        """Of places of workspaces that can be copies of weights and of samples, those that are of weights: all of them, unless
        others are of samples without doubt, so that samples are in a layout of their own here. Then weights are copied once,
        behind what it is given; or last, as the result."""
        certain = [n for n, size in enumerate(going) if size and n not in doubtful]
        if not certain or not doubtful or self.quantum_bytes is not None:
            return doubtful
        if weights_last:
            return [n for n in doubtful if n > certain[-1]]
        is_behind = certain[0] < doubtful[0] or len(doubtful) == 1
        return doubtful[:1] if is_behind else doubtful[1:2]

    def gives_weights(self, results: Sequence[Storage]) -> bool:
        """Whether the first of these, which come behind a workspace, is a gradient of its weights or its bias."""
        given = given_and_weight(self.operator)
        if self.operator.name != CONVOLUTION_BACKWARD or given is None:
            return False
        own = (row for row in results[:1] if row.birth_s <= self.operator.end_s)
        return any(dimensions(row.shape) != given[0] for row in own)

    def _of_samples(self, size_bytes: int) -> int:
        for padded in (0, _ALIGNED_BYTES):
            if size_bytes - padded in self.samples_bytes:
                return size_bytes - padded
        return 0 if self.quantum_bytes is None else size_bytes - size_bytes % self.quantum_bytes


def workspaces(rank: RankRun, shapes: Set[Shape], sizes: Set[int]) -> dict[int, int]:
    """By storage, how many of its bytes go with the samples; of those alone whose operator's shapes tell.

    `shapes`: those that have the batch in them; `sizes`: which dimensions that may be.
    """
    results = sorted(
        (row for row in rank.storages if row.operator in (CONVOLUTION, CONVOLUTION_BACKWARD)),
        key=attrgetter("birth_s"),
    )
    births = [row.birth_s for row in results]
    layers = _layers(rank, shapes, sizes, results)
    starts = [layer.operator.start_s for layer in layers]
    made: dict[tuple[int, int], list[Storage]] = {}  # by the layer, and the results that were there
    for row in rank.storages:
        is_lstms = row.operator in _LSTM and row.dtype == "uint8"
        if row.phase != "baseline" and (is_lstms or row.operator.startswith(INSIDE)):
            place = bisect_right(starts, row.birth_s) - 1
            if place >= 0 and row.birth_s <= layers[place].operator.end_s:
                made.setdefault((place, bisect_right(births, row.birth_s)), []).append(row)
    found: dict[int, int] = {}
    for (place, number), rows in made.items():
        rows.sort(key=attrgetter("birth_s"))
        weights_last = layers[place].gives_weights(results[number : number + 1])
        going = layers[place].of_samples([row.size_bytes for row in rows], weights_last=weights_last)
        found |= {row.storage_id: size for row, size in zip(rows, going, strict=True)}
    return found


def _layers(rank: RankRun, shapes: Set[Shape], sizes: Set[int], results: Sequence[Storage]) -> list[_Layer]:
    """In order of their start. `results`: of convolutions, in order of their birth."""
    by_channels: dict[int, list[Shape]] = {}
    for shape in shapes:
        if len(shape) > 2 and shape[0] in sizes:
            by_channels.setdefault(shape[1], []).append(shape)
    births = [row.birth_s for row in results]
    layers = []
    known: dict[tuple[str, str, tuple[int, ...]], tuple[frozenset[int], frozenset[int], int | None]] = {}
    made: dict[str, list[Shape]] = {}  # by forwards, which come first
    for operator in sorted(rank.operators, key=attrgetter("start_s")):
        if operator.shapes is None or operator.name not in (CONVOLUTION, CONVOLUTION_BACKWARD, *_LSTM):
            continue
        own = results[bisect_left(births, operator.start_s) : bisect_right(births, operator.end_s)]
        item_bytes = (FLOAT_BYTES,) if {row.dtype for row in own} == {"float32"} else _ITEM_BYTES
        key = operator.name, operator.shapes, item_bytes
        if key not in known:
            if operator.name == CONVOLUTION:
                made.setdefault(operator.shapes, [dimensions(row.shape) for row in own])
            known[key] = _explained(operator, by_channels, item_bytes, made.get(operator.shapes, ()))
        layers.append(_Layer(operator, *known[key]))
    return layers


def _explained(
    operator: Operator,
    by_channels: Mapping[int, list[Shape]],
    item_bytes: tuple[int, ...],
    made: Sequence[Shape],
) -> tuple[frozenset[int], frozenset[int], int | None]:
    shapes = given_and_weight(operator)
    if shapes is None:
        return frozenset(), frozenset(), None
    given, weight = shapes
    weights = frozenset(
        item * _filled(weight[0], one) * _filled(weight[1], other) * prod(weight[2:])
        for item, one, other in product(item_bytes, _BLOCKS, _BLOCKS)
    )
    if operator.name in _LSTM:
        return frozenset(), weights, FLOAT_BYTES * prod(given[:2]) * (weight[0] // _LSTM_GATES)
    channels = {given[1], weight[0], weight[1], *(shape[1] for shape in made if len(shape) > 2)}
    maps = {given, *(shape for number in channels for shape in by_channels.get(number, ()))}
    samples = frozenset(
        item * shape[0] * _filled(shape[1], block) * prod(shape[2:])
        for shape, item, block in product(maps, item_bytes, _BLOCKS)
    )
    return samples, weights, None


def _filled(number: int, block: int) -> int:
    return -(-number // block) * block

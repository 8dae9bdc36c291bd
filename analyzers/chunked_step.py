"""The recorded rank as it would be with its loss in chunks (memadvisor/chunked_loss.py): scores as large as a chunk.

What is as wide as the layer's scores goes, from the layer's forward to its backward. In its place stand what a chunk of
rows takes of the same operators where they are run: all of the forward's at the loss, all of both passes' at the layer's
backward. There the layer's product, and what is made of it, take their time once more. Sums over 16-bit chunks are in
float32. Scores that the script still holds in the update are what they are made of: the layer's input and its weights, of
which the update needs a copy then.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from memadvisor.analyzers.first_products import place_at
from memadvisor.analyzers.inner_workspaces import INSIDE
from memadvisor.analyzers.pieces import Piece
from memadvisor.analyzers.shapes import dimensions
from memadvisor.chunked_loss import ChunkedLoss, usual_rows
from memadvisor.errors import UsageError
from memadvisor.policies import blocks_of
from memadvisor.run.records import Operator, Saved, Step, Storage
from memadvisor.run.run import RankRun

_PRODUCTS = ("aten::mm", "aten::addmm")
_BACKWARDS = ("aten::mm", "aten::sum")  # of a product, and of its bias
# Operators that take scores along their classes, as losses do.
_READERS = ("aten::_log_softmax", "aten::_softmax", "aten::logsumexp", "aten::nll_loss_forward")
_STATES = ("parameter", "gradient", "optimizer_state", "communication")
_HALVES = ("float16", "bfloat16")
_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A linear layer whose scores a loss takes: `num_rows` by `num_classes`, of `num_features`."""

    name: str
    num_rows: int
    num_features: int
    num_classes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """A forward of the layer with its loss, and its backward."""

    product: Operator
    begin_s: float  # of the layer's forward
    end_s: float  # of its backward
    backward_s: float  # its start
    scores: tuple[Storage, ...]  # as wide as the layer's, in order of birth


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedStep:
    """A recorded rank's traced step, and the layer whose scores are there `rows` at a time."""

    rank: RankRun
    step: Step
    layer: Layer
    rows: int
    passes: tuple[_Pass, ...]

    @property
    def chunked_loss(self) -> ChunkedLoss:
        return ChunkedLoss(layer=self.layer.name, rows=self.rows)

    @property
    def units(self) -> frozenset[str]:
        """Those whose parameters the layer uses: its own, and that of what its weights are tied to."""
        owners = {row.name: row.unit for row in self.rank.parameters}
        used = [row for row in self.rank.parameters if row.name.rpartition(".")[0] == self.layer.name]
        return frozenset(owners.get(row.tied_to, row.unit) if row.tied_to else row.unit for row in used)

    def without_scores(self) -> RankRun:
        """The rank with what is there in chunks in place of the scores."""
        rank = self.rank
        gone = {row.storage_id for each in self.passes for row in (*each.scores, *_workspaces(rank, each))}
        before = [row for row in rank.storages if row.phase == "baseline" and _is_wide(row, self.layer)]
        gone |= {row.storage_id for row in before}
        numbers = iter(range(max(row.storage_id for row in rank.storages) + 1, 10**12))
        share = self.rows / self.layer.num_rows
        added = [
            row for each in self.passes for row in _chunk_storages(rank, each, self.layer, share, numbers)
        ]
        added += _held(rank, self.step, self.layer, self.passes, before, numbers)
        kept = _lasting(rank, self.layer, self.passes)
        storages = [
            replace(row, death_s=kept.get(row.storage_id, row.death_s))
            for row in rank.storages
            if row.storage_id not in gone
        ]
        return replace(
            rank,
            storages=tuple(sorted([*storages, *added], key=lambda row: row.birth_s)),
            saved=tuple(row for row in rank.saved if row.storage_id not in gone),
        )

    def again_s(self, pieces: Sequence[Piece], durations: Sequence[float]) -> dict[int, float]:
        """By piece, what the backwards of the layer take longer: its product, and what is made of that, once more."""
        found: dict[int, float] = {}
        for each in self.passes:
            place, _ = place_at(pieces, each.backward_s)
            wide = [row for row in each.scores if row.phase != "backward"]
            for row in self.rank.operators:
                if row is not each.product and not (
                    row.phase != "backward" and any(row.start_s <= one.birth_s <= row.end_s for one in wide)
                ):
                    continue
                at, _ = place_at(pieces, row.start_s)
                piece_s = pieces[at].end_s - pieces[at].start_s
                share = min(1.0, (row.end_s - row.start_s) / piece_s) if piece_s > 0 else 0.0
                found[place] = found.get(place, 0.0) + share * durations[at]
        return found


def chunked_step(rank: RankRun, step: Step, chunked: ChunkedLoss) -> ChunkedStep | None:
    """With the layer and the rows that `chunked` leaves open; None where there is nothing that it makes smaller: no loss
    takes the scores, or a chunk holds all of them."""
    layer = _layer_of(rank, chunked.layer)
    if layer is None:
        return None
    rows = chunked.rows or usual_rows(layer.num_rows, layer.num_features, layer.num_classes)
    passes = tuple(_passes(rank, layer)) if rows < layer.num_rows else ()
    return ChunkedStep(rank=rank, step=step, layer=layer, rows=rows, passes=passes) if passes else None


def required_chunked_step(rank: RankRun, step: Step, chunked: ChunkedLoss) -> ChunkedStep:
    """Raises UsageError where there is nothing that it makes smaller."""
    found = chunked_step(rank, step, chunked)
    if found is None:
        raise UsageError(
            "--chunked-loss is for a loss of more rows than a chunk has, of the output of the widest linear layer outside of "
            "the model's blocks, and none was seen in the traced step.",
            hint="leave it out, or give fewer rows: --chunked-loss 64.",
        )
    return found


# ---- what was recorded ---------------------------------------------------------------------------


def _layer_of(rank: RankRun, name: str | None) -> Layer | None:
    """That of this name, else the widest outside of blocks, as the engine chooses; None where no loss takes its scores."""
    blocks = blocks_of(rank.units)
    linear = [row for row in rank.modules if row.type_name.rpartition(".")[2] == "Linear"]
    weights = {
        row.name.rpartition(".")[0]: dimensions(row.shape)
        for row in rank.parameters
        if row.name.endswith(".weight")
    }
    of_linear = {row.name: weights[row.name] for row in linear if len(weights.get(row.name, ())) == 2}
    outside = [row.name for row in linear if row.name in of_linear and row.unit not in blocks]
    name = name or max(outside, key=lambda name: of_linear[name][0], default=None)
    if name not in of_linear:
        return None
    num_classes, num_features = of_linear[name]
    made = [row.written_bytes or 0 for row in _products(rank, name)]
    sizes = [dims for row in _products(rank, name) if (dims := _product_rows(row, num_classes)) is not None]
    if not made or not sizes:
        return None
    layer = Layer(name=name, num_rows=max(sizes), num_features=num_features, num_classes=num_classes)
    is_read = any(
        row.name in _READERS and row.phase != "backward" and (row.read_bytes or 0) >= max(made) / 2
        for row in rank.operators
    )
    return layer if is_read else None


def _products(rank: RankRun, name: str) -> list[Operator]:
    return [
        row
        for row in rank.operators
        if row.module == name and row.phase == "forward" and row.name in _PRODUCTS
    ]


def _product_rows(row: Operator, num_classes: int) -> int | None:
    """Rows of a product's result, by the shapes of what it was given."""
    matrices = [dimensions(text) for text in re.findall(r"\[[\d, ]*\]", row.shapes or "")]
    matrices = [dims for dims in matrices if len(dims) == 2]
    if len(matrices) < 2 or matrices[-1][1] != num_classes:
        return None
    return matrices[-2][0]


def _is_wide(row: Storage, layer: Layer) -> bool:
    """Whether it has as many elements as the scores, or as those of all tokens that have a next one."""
    if row.category in _STATES:
        return False
    dims = dimensions(row.shape)
    if not dims:
        return not row.shape and row.size_bytes in {
            layer.num_rows * layer.num_classes * itemsize for itemsize in (2, 4, 8)
        }
    num_rows, rest = divmod(math.prod(dims), layer.num_classes)
    return not rest and layer.num_classes in dims and layer.num_rows / 2 < num_rows <= layer.num_rows


def _passes(rank: RankRun, layer: Layer) -> Iterator[_Pass]:
    """Each forward of the layer that has a backward."""
    products = _products(rank, layer.name)
    backwards = [
        row
        for row in rank.operators
        if row.module == layer.name and row.phase == "backward" and row.name in _BACKWARDS
    ]
    for number, product in enumerate(products):
        until_s = products[number + 1].start_s if number + 1 < len(products) else math.inf
        own = [row for row in backwards if product.end_s < row.start_s < until_s]
        if not own:
            continue
        begin_s, end_s = min(row.start_s for row in own), max(row.end_s for row in own)
        scores = [
            row for row in rank.storages if product.start_s <= row.birth_s < end_s and _is_wide(row, layer)
        ]
        if scores:
            yield _Pass(
                product=product,
                begin_s=_begin_s(rank, product),
                end_s=end_s,
                backward_s=begin_s,
                scores=tuple(sorted(scores, key=lambda row: row.birth_s)),
            )


def _begin_s(rank: RankRun, product: Operator) -> float:
    """When the layer's call with this product began."""
    calls = [
        row.start_s
        for row in rank.module_calls
        if row.module == product.module and row.phase == product.phase and row.start_s <= product.start_s
    ]
    return max(calls, default=product.start_s)


# ---- what is there instead -----------------------------------------------------------------------


def _chunk_storages(
    rank: RankRun, each: _Pass, layer: Layer, share: float, numbers: Iterator[int]
) -> Iterator[Storage]:
    """A chunk's share of what is there at the fullest moment of the forward, and of the forward and backward together."""
    saved = {row.storage_id for row in rank.saved}
    forward = [row for row in each.scores if row.phase != "backward"]
    in_forward = [(row, row.last_forward_use_s or row.birth_s) for row in forward]
    begin_s = max((row.birth_s for row in forward), default=each.backward_s)
    end_s = max((last_s for _, last_s in in_forward), default=begin_s)
    for row in _fullest(in_forward):
        yield _temporary(next(numbers), row, math.ceil(share * row.size_bytes), begin_s, end_s)
    stays = {row.storage_id for row in each.scores if row.storage_id in saved or row.phase == "backward"}
    in_both = [
        (row, (row.last_use_s if row.storage_id in stays else row.last_forward_use_s) or row.birth_s)
        for row in each.scores
    ]
    made = [
        row
        for row in rank.storages
        if each.backward_s <= row.birth_s <= each.end_s
        and row.module == layer.name
        and row not in each.scores
    ]
    begin_s = max([each.backward_s, *(row.birth_s for row in made)])
    sizes = [math.ceil(share * row.size_bytes) for row in _fullest(in_both)]
    sums = [row for row in made if dimensions(row.shape) in _weight_shapes(layer)]
    if sums and sums[0].dtype in _HALVES:  # summed in float32, beside a chunk's own product
        wide_bytes = _FLOAT32_BYTES * layer.num_classes * layer.num_features
        products = [math.ceil(share * 2 * layer.num_rows * layer.num_classes), wide_bytes]
        sizes = max([*sizes, wide_bytes - sums[0].size_bytes], products, key=sum)
    for size_bytes in sizes:
        yield _temporary(next(numbers), each.scores[-1], size_bytes, begin_s, each.end_s)


def _workspaces(rank: RankRun, each: _Pass) -> list[Storage]:
    """What the backward's products allocate for themselves: a chunk's are smaller than what is there before them."""
    return [
        row
        for row in rank.storages
        if row.module == each.product.module
        and each.backward_s <= row.birth_s <= each.end_s
        and row.operator.startswith(INSIDE)
    ]


def _weight_shapes(layer: Layer) -> tuple[tuple[int, ...], ...]:
    return (layer.num_classes, layer.num_features), (layer.num_features, layer.num_classes)


def _fullest(uses: Sequence[tuple[Storage, float]]) -> list[Storage]:
    """What is there when most is, where each is gone at its last use."""
    moments = [[row for row, last_s in uses if row.birth_s <= at.birth_s <= last_s] for at, _ in uses]
    return max(moments, key=lambda rows: sum(row.size_bytes for row in rows), default=[])


def _temporary(number: int, like: Storage, size_bytes: int, birth_s: float, death_s: float) -> Storage:
    return replace(
        like,
        storage_id=number,
        birth_s=birth_s,
        death_s=death_s,
        size_bytes=size_bytes,
        category="temporary",
        shape="",
        operator="",
        last_use_s=death_s,
        last_forward_use_s=None,
        address=None,
        last_held_s=None,
        accumulated_s=None,
    )


def _inputs(rank: RankRun, layer: Layer, each: _Pass) -> Iterable[Saved]:
    """What the layer's product keeps."""
    return (
        row
        for row in rank.saved
        if row.module == layer.name and each.begin_s <= row.saved_s < each.backward_s
    )


def _lasting(rank: RankRun, layer: Layer, passes: Sequence[_Pass]) -> dict[int, float | None]:
    """New deaths of what scores are made of: those of the scores, where these are later."""
    deaths: dict[int, float | None] = {}
    by_number = {row.storage_id: row for row in rank.storages}
    for each in passes:
        of_scores = [row.death_s for row in each.scores if row.phase != "backward"]
        last_s = None if None in of_scores else max((s for s in of_scores if s is not None), default=0.0)
        for saved in _inputs(rank, layer, each):
            row = by_number.get(saved.storage_id)
            if row is None or row.category in _STATES or row.death_s is None:
                continue
            deaths[row.storage_id] = None if last_s is None else max(row.death_s, last_s)
    return deaths


def _held(
    rank: RankRun,
    step: Step,
    layer: Layer,
    passes: Sequence[_Pass],
    before: Sequence[Storage],
    numbers: Iterator[int],
) -> list[Storage]:
    """What of scores that outlive the update, and of the step before's, is there beside the layer's input."""
    weights = [row for row in rank.storages if row.category == "parameter" and row.module == layer.name]
    by_number = {row.storage_id: row for row in rank.storages}
    inputs = [
        by_number[row.storage_id]
        for each in passes
        for row in _inputs(rank, layer, each)
        if row.storage_id in by_number
    ]
    weights = [row for row in inputs if row.category == "parameter"][:1] or weights[:1]
    hidden = [row for row in inputs if row.category not in _STATES][:1]
    updates = [s.start_s for s in rank.spans if s.step == step.index and s.kind == "optimizer"]
    added = []
    for row in before:
        for one in (*hidden, *weights):
            added.append(
                replace(
                    row, storage_id=next(numbers), size_bytes=one.size_bytes, shape=one.shape, dtype=one.dtype
                )
            )
    first_s = min(updates, default=step.end_s)
    ends = [row.death_s for each in passes for row in each.scores if row.phase != "backward"]
    if weights and any(end_s is None or end_s > first_s for end_s in ends):
        copy = _temporary(next(numbers), weights[0], weights[0].size_bytes, first_s, math.inf)
        latest = None if None in ends else max(end_s for end_s in ends if end_s is not None)
        added.append(replace(copy, death_s=latest, phase="optimizer", unit="", shape=weights[0].shape))
    return added

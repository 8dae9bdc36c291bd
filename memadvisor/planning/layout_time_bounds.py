"""Seconds that no layout can beat, from a part of its description.

The busiest device of a pipeline works for all its microbatches, and where it runs whole backwards it begins after the
first forwards of the chunks before its first, and their messages, and ends before their last backwards. Messages may hold
up its host (cost/layouts/stalls.py). Parameters may have to be gathered, chunk by chunk; states are updated. Held against `estimate_step` in
tests/planning/test_layout_bounds.py. What a bound lacks is waiting inside the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from memadvisor.cost.layouts.data_parallel import (
    exposed_step_seconds,
    hidden_seconds,
    microbatch_traffic,
    optimizer_seconds,
    replica_groups,
    step_traffic,
)
from memadvisor.cost.layouts.links import message_seconds
from memadvisor.cost.layouts.memory import StageContents, StageParameters, stage_parameters
from memadvisor.cost.layouts.stalls import message_stall_s
from memadvisor.layout import TrainingStep
from memadvisor.planning.layout_shares import Contents, Counted, Share, deal_shares, whole_model
from memadvisor.planning.layout_space import DeviceWork, Split, States, make_layout
from memadvisor.planning.layout_works import Floats, Pair, WorkPrices, Works

# Schedules whose device d has the chunks d, d + p, ... and runs backwards in one piece.
LOOPED = ("gpipe", "1f1b", "interleaved", "breadth-first")
# Sums of the same parts in another order are rounded otherwise, and long steps are played in part (pipelines/repeating.py):
# what is equal may come out as more.
_ROUNDED = 1 - 1e-9


@dataclass(frozen=True, slots=True)
class _Traffic:
    """Of one way of holding states: seconds once a step of each share (reductions, gathers, update), and for each
    microbatch of chunks (forward, backward) where parameters are gathered."""

    step: TrainingStep
    once: tuple[tuple[float, float, float], ...]
    of_chunks: Mapping[Contents, Pair] | None


class _Passes:
    """Forward and backward of one microbatch where nothing is gathered, of one row of works and one pipeline's shares.

    All ways of holding states have them in common.
    """

    def __init__(self, works: Works, row: int, shares: tuple[Share, ...]) -> None:
        self.works = works
        self.row = row
        self.shares = shares
        self._seconds: list[list[float]] = works.seconds[row].tolist()
        self._of_chunk: dict[Contents, Pair] = {}
        self.of_shares = [_through(share.chunks, self.of_chunk) for share in shares]

    def of_chunk(self, chunk: Contents) -> Pair:
        if chunk not in self._of_chunk:
            forward_s, backward_s = (
                sum(number * part[way] for number, part in zip(chunk.numbers(), self._seconds, strict=True))
                for way in (0, 1)
            )
            self._of_chunk[chunk] = forward_s, backward_s
        return self._of_chunk[chunk]


def _through(chunks: Counted, of_chunk: Callable[[Contents], Pair]) -> Pair:
    """One microbatch's forward and backward through these."""
    forward_s = backward_s = 0.0
    for times, chunk in chunks:
        forward, backward = of_chunk(chunk)
        forward_s += times * forward
        backward_s += times * backward
    return forward_s, backward_s


class TimeBounds:
    """For one question; what repeats is kept."""

    def __init__(self, prices: WorkPrices) -> None:
        self.prices = prices
        self.question = prices.question
        self.coefficients = prices.coefficients
        self._stall_s = message_stall_s(prices.question.software, prices.question.cluster.num_nodes)
        self._counts: dict[tuple[Contents, int, int], StageParameters] = {}
        self._messages: dict[tuple[int, int, int, int], list[float]] = {}
        self._traffic: dict[tuple[Split, str, int, int, States], _Traffic] = {}
        self._passes: _Passes | None = None  # of the row that was asked for last

    def pipeline_seconds(self, split: Split, works: Works, schedule: str, chunks: int) -> Floats:
        """Of a step's forwards and backwards, for each row of works; nothing is gathered."""
        each, times = works.seconds.sum(axis=2), works.num_microbatches
        if schedule not in LOOPED:
            whole = whole_model(self.question.model).numbers()
            mean: Floats = _ROUNDED * times * (each @ np.array(whole, dtype=float)) / split.pipeline
            return mean
        shares = self._shares(split.pipeline, chunks)
        before = each @ np.array([share.whole_before.numbers() for share in shares], dtype=float).T
        busy = each @ np.array([share.whole.numbers() for share in shares], dtype=float).T
        messages = np.array([self._message_seconds(split, work) for work in works.rows])
        on_the_way = 2 * messages[:, [share.device for share in shares]]
        if self._stall_s:
            before += 2 * self._stall_s * np.array([share.messages_before for share in shares])
            busy += 2 * self._stall_s * np.array([share.messages for share in shares])
        longest: Floats = (before + on_the_way + times[:, None] * busy).max(axis=1)
        return _ROUNDED * longest

    def step_seconds(
        self,
        pipeline_s: float,
        split: Split,
        works: Works,
        row: int,
        schedule: str,
        chunks: int,
        held: States,
    ) -> float:
        """Of the whole step; `pipeline_s` is a bound of its forwards and backwards without gathers."""
        work, times = works.rows[row], int(works.num_microbatches[row])
        traffic = self._traffic_of(split, work, times, schedule, chunks, held)
        known = self.coefficients
        if schedule not in LOOPED:
            ((_, gathers_s, update_s),) = traffic.once
            return _ROUNDED * (max(pipeline_s, gathers_s) + update_s + known.step_fixed_s)
        shares = self._shares(split.pipeline, chunks)
        passes = self._passes_of(works, row, shares)
        gathered = None if traffic.of_chunks is None else self._gathered(passes, traffic.of_chunks)
        messages = self._message_seconds(split, work)
        exposed_s = update_s = 0.0
        for share, once, plain in zip(shares, traffic.once, passes.of_shares, strict=True):
            forward_s, backward_s = plain
            if gathered is not None:
                forward_s, backward_s = _through(share.chunks, gathered.__getitem__)
                before_s = sum(_through(share.before, gathered.__getitem__)) + 2 * messages[share.device]
                pipeline_s = max(pipeline_s, before_s + times * (forward_s + backward_s))
            exposed_s = max(
                exposed_s, exposed_step_seconds(traffic.step, *once[:2], backward_s, forward_s, known)
            )
            update_s = max(update_s, once[2])
        return _ROUNDED * (pipeline_s + exposed_s + update_s + known.step_fixed_s)

    def _passes_of(self, works: Works, row: int, shares: tuple[Share, ...]) -> _Passes:
        last = self._passes
        if last is None or last.works is not works or last.row != row or last.shares is not shares:
            last = self._passes = _Passes(works, row, shares)
        return last

    def _gathered(self, passes: _Passes, traffic: Mapping[Contents, Pair]) -> dict[Contents, Pair]:
        """Forward and backward of each chunk with its gathers and reductions beside them."""
        slowdown = self.coefficients.overlap_slowdown
        found: dict[Contents, Pair] = {}
        for chunk, (gather_s, reduce_s) in traffic.items():
            forward_s, backward_s = passes.of_chunk(chunk)
            found[chunk] = (
                hidden_seconds(forward_s, gather_s, slowdown),
                hidden_seconds(backward_s, reduce_s, slowdown),
            )
        return found

    def _traffic_of(
        self, split: Split, work: DeviceWork, times: int, schedule: str, chunks: int, held: States
    ) -> _Traffic:
        key = (split, schedule, chunks, times, held)
        if key not in self._traffic:
            step = self.question.step(make_layout(self.question, split, work, schedule, chunks, held))
            shares = self._shares(split.pipeline, chunks) if schedule in LOOPED else None
            self._traffic[key] = self._price_traffic(step, shares)
        return self._traffic[key]

    def _price_traffic(self, step: TrainingStep, shares: tuple[Share, ...] | None) -> _Traffic:
        """`shares`: None where chunks may lie otherwise; the mean device is what all must be through with then."""
        host = self.question.cluster.host
        host_bytes_per_s = None if host is None else host.bytes_per_s
        groups = replica_groups(step.layout, self.prices.group, host_bytes_per_s)
        device = self.prices.device
        if shares is None:
            whole, stages = self._parameters(whole_model(self.question.model), step), step.layout.pipeline
            count = replace(
                whole, shared=whole.shared / stages, experts=whole.experts / stages, tensors=0,
                units=whole.units / stages, expert_units=whole.expert_units / stages,
            )  # fmt: skip
            gathers_s = step.layout.num_microbatches * sum(microbatch_traffic(step, count, groups))
            update_s = optimizer_seconds(step, count, device, host_bytes_per_s)
            return _Traffic(step, ((0.0, gathers_s, update_s),), None)
        once = []
        for share in shares:
            count = self._parameters(share.whole, step)
            update_s = optimizer_seconds(step, count, device, host_bytes_per_s)
            once.append((*step_traffic(step, count, groups), update_s))
        of_chunks = None
        if step.layout.zero_stage == 3:
            met = {chunk for share in shares for _, chunk in (*share.chunks, *share.before)}
            of_chunks = {
                chunk: microbatch_traffic(step, self._parameters(chunk, step), groups) for chunk in met
            }
        return _Traffic(step, tuple(once), of_chunks)

    def _parameters(self, contents: Contents, step: TrainingStep) -> StageParameters:
        """Of one rank that holds this of the model."""
        key = (contents, step.layout.tensor, step.layout.expert)
        if key not in self._counts:
            dense, sparse = self.prices.kinds
            layers = (dense,) * contents.dense + (sparse,) * contents.sparse
            held = StageContents(layers=layers, embeddings=contents.embedding, heads=contents.head)
            self._counts[key] = stage_parameters(self.question.model, step, held)
        return self._counts[key]

    def _shares(self, num_stages: int, chunks: int) -> tuple[Share, ...]:
        return deal_shares(self.question.model, self.question.software, num_stages, chunks)[0]

    def _message_seconds(self, split: Split, work: DeviceWork) -> list[float]:
        """From the first device of the pipeline to each."""
        key = (split.tensor, split.context, split.pipeline, work.micro_batch_size)
        if key not in self._messages:
            question = self.question
            length = question.seq_len
            if question.model.encoder_layers:  # a decoder's stages pass the encoder's result on
                length += question.target_len or length
            tokens = work.micro_batch_size * length / split.context
            size_bytes = 2.0 * tokens * question.model.hidden / split.tensor
            stride = split.tensor * split.data * split.context
            links = message_seconds(question.cluster, size_bytes, split.pipeline, stride, self.coefficients)
            self._messages[key] = list(accumulate(links[:-1], initial=0.0))
        return self._messages[key]

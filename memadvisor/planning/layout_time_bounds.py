"""Seconds that no layout can beat, from a part of its description.

The busiest device of a pipeline works for all its microbatches, and where it runs whole backwards it begins after the
first forwards of the chunks before its first, and their messages, and ends before their last backwards. A microbatch goes
through all chunks and back, which takes longer where there are too few microbatches to fill the pipeline. Messages may hold
up a host (cost/layouts/stalls.py). Parameters may have to be gathered, chunk by chunk; states are updated. All ways of
holding states are bounded at once, as arrays. Held against `estimate_step` in tests/planning/test_layout_bounds.py. What
a bound lacks is waiting inside the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import TypeVar

import numpy as np

from memadvisor.cost.layouts.links import message_seconds
from memadvisor.cost.layouts.stalls import message_stall_s
from memadvisor.cost.pipelines.groups import passes_beside
from memadvisor.layout import TrainingStep
from memadvisor.planning.layout_shares import Contents, Counted, Share, deal_shares, whole_model
from memadvisor.planning.layout_space import DeviceWork, Split, States, make_layout
from memadvisor.planning.layout_traffic import Traffic, TrafficPrices
from memadvisor.planning.layout_works import Floats, Ints, Pair, WorkPrices, Works

# Of one layout, or of each of several.
_Seconds = TypeVar("_Seconds", float, Floats)

# Schedules whose device d has the chunks d, d + p, ... and runs backwards in one piece.
LOOPED = ("gpipe", "1f1b", "interleaved", "breadth-first")
# Of these, those whose backwards begin when all microbatches are through.
_ALL_FORWARDS_FIRST = ("gpipe", "breadth-first")
# Sums of the same parts in another order differ by rounding, and long steps are played in part (pipelines/repeating.py):
# what is equal may come out as more.
_ROUNDED = 1 - 1e-9


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
        self.of_shares = [_through(share.chunks, self.of_chunk, 0.0) for share in shares]

    def of_chunk(self, chunk: Contents) -> Pair:
        if chunk not in self._of_chunk:
            forward_s, backward_s = (
                sum(number * part[way] for number, part in zip(chunk.numbers(), self._seconds, strict=True))
                for way in (0, 1)
            )
            self._of_chunk[chunk] = forward_s, backward_s
        return self._of_chunk[chunk]


def _hidden(compute_s: float | Floats, collective_s: Floats, slowdown: float) -> Floats:
    """As `hidden_seconds`, of each."""
    both = np.minimum(compute_s, collective_s)
    found: Floats = np.maximum(compute_s, collective_s) + slowdown * both
    return found


def _bare(collective_s: Floats, pass_s: float | Floats, chunks: int, passes: int) -> Floats:
    """As `bare_seconds`, of each."""
    own_s = pass_s / chunks
    others_s = (chunks - 1) * passes * own_s
    longest: Floats = np.maximum(collective_s / chunks - own_s, collective_s - own_s - others_s)
    return np.maximum(longest, 0.0)


def _through(
    chunks: Counted, of_chunk: Callable[[Contents], tuple[_Seconds, _Seconds]], nothing_s: _Seconds
) -> tuple[_Seconds, _Seconds]:
    """One microbatch's forward and backward through these."""
    forward_s = backward_s = nothing_s
    for times, chunk in chunks:
        forward, backward = of_chunk(chunk)
        forward_s = forward_s + times * forward
        backward_s = backward_s + times * backward
    return forward_s, backward_s


def _chain_seconds(chain: Counted, gathered: Mapping[Contents, tuple[Floats, Floats]], others: int) -> Floats:
    """One microbatch through all chunks and back, and `others` through the longest chunk beside it."""
    numbers, each = [number for number, _ in chain], np.array([sum(gathered[chunk]) for _, chunk in chain])
    found: Floats = numbers @ each + others * each.max(axis=0)
    return found


class TimeBounds:
    """For one question; what repeats is kept."""

    def __init__(self, prices: WorkPrices) -> None:
        self.prices = prices
        self.question = prices.question
        self.coefficients = prices.coefficients
        self._stall_s = message_stall_s(prices.question.software, prices.question.cluster.num_nodes)
        self.traffic = TrafficPrices(prices)
        self._messages: dict[tuple[int, int, int, int], list[float]] = {}
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
        busiest: Floats = (before + on_the_way + times[:, None] * busy).max(axis=1)
        chain = shares[0].chain
        each_chunk = each @ np.array([chunk.numbers() for _, chunk in chain], dtype=float).T
        through = each_chunk @ np.array([number for number, _ in chain], dtype=float)
        through += np.array([self._chain_message_seconds(split, work, chunks) for work in works.rows])
        if schedule in _ALL_FORWARDS_FIRST:
            through += (times - 1) * each_chunk.max(axis=1)
        longest: Floats = _ROUNDED * np.maximum(busiest, through)
        return longest

    def step_seconds(
        self,
        pipeline_s: float,
        split: Split,
        works: Works,
        row: int,
        schedule: str,
        chunks: int,
        ways: tuple[States, ...],
        columns: Ints,
    ) -> Floats:
        """Of the whole step, for those of `ways` that `columns` names; `pipeline_s` is a bound of its forwards and backwards
        without gathers."""
        work, times = works.rows[row], int(works.num_microbatches[row])
        shares = self._shares(split.pipeline, chunks) if schedule in LOOPED else None

        def step_of(held: States) -> TrainingStep:
            return self.question.step(make_layout(self.question, split, work, schedule, chunks, held))

        traffic = self.traffic.of(split, schedule, chunks, shares, times, ways, columns, step_of)
        once, fixed_s = traffic.once[columns], self.coefficients.step_fixed_s
        if shares is None:
            mean: Floats = _ROUNDED * (np.maximum(pipeline_s, once[:, 0, 1]) + once[:, 0, 2] + fixed_s)
            return mean
        passes = self._passes_of(works, row, shares)
        gathers = traffic.gathers[columns]
        gathered = self._gathered(passes, traffic, columns) if gathers.any() else None
        messages_s = [] if gathered is None else self._message_seconds(split, work)
        longest: float | Floats = pipeline_s
        if gathered is not None:
            others = times - 1 if schedule in _ALL_FORWARDS_FIRST else 0
            chain_s = _chain_seconds(shares[0].chain, gathered, others)
            chain_s = chain_s + self._chain_message_seconds(split, work, chunks)
            longest = np.where(gathers, np.maximum(pipeline_s, chain_s), pipeline_s)
        exposed_s = update_s = nothing_s = np.zeros(len(columns))
        num_passes = passes_beside(schedule, chunks, split.pipeline, times)
        beside = (chunks if num_passes > 1 else 1, num_passes)
        for place, (share, plain) in enumerate(zip(shares, passes.of_shares, strict=True)):
            forward_s: float | Floats
            backward_s: float | Floats
            forward_s, backward_s = plain
            if gathered is not None:
                forward_s, backward_s = _through(share.chunks, gathered.__getitem__, nothing_s)
                filling_s, emptying_s = _through(share.before, gathered.__getitem__, nothing_s)
                on_the_way_s = 2 * messages_s[share.device]
                through_s = filling_s + emptying_s + on_the_way_s + times * (forward_s + backward_s)
                longest = np.where(gathers, np.maximum(longest, through_s), longest)
            exposed_s = np.maximum(exposed_s, self._exposed(once[:, place], backward_s, forward_s, beside))
            update_s = np.maximum(update_s, once[:, place, 2])
        found: Floats = _ROUNDED * (longest + exposed_s + update_s + fixed_s)
        return found

    def _exposed(
        self, once: Floats, backward_s: float | Floats, forward_s: float | Floats, beside: tuple[int, int]
    ) -> Floats:
        """As `exposed_step_seconds`, of each."""
        software, slowdown = self.question.software, self.coefficients.overlap_slowdown
        reduce_s, gather_s = once[:, 0], once[:, 1]
        if software.overlap_reduce:
            bare_s = _bare(reduce_s, backward_s, *beside)
            reduce_s = bare_s + slowdown * (reduce_s - bare_s)
        if software.overlap_gather:
            bare_s = _bare(gather_s, forward_s, *beside)
            gather_s = bare_s + slowdown * (gather_s - bare_s)
        return reduce_s + gather_s

    def _passes_of(self, works: Works, row: int, shares: tuple[Share, ...]) -> _Passes:
        last = self._passes
        if last is None or last.works is not works or last.row != row or last.shares is not shares:
            last = self._passes = _Passes(works, row, shares)
        return last

    def _gathered(
        self, passes: _Passes, traffic: Traffic, columns: Ints
    ) -> dict[Contents, tuple[Floats, Floats]]:
        """Forward and backward of each chunk with its gathers and reductions beside them."""
        slowdown = self.coefficients.overlap_slowdown
        found = {}
        for chunk, seconds in traffic.of_chunks.items():
            forward_s, backward_s = passes.of_chunk(chunk)
            found[chunk] = (
                _hidden(forward_s, seconds[columns, 0], slowdown),
                _hidden(backward_s, seconds[columns, 1], slowdown),
            )
        return found

    def _shares(self, num_stages: int, chunks: int) -> tuple[Share, ...]:
        return deal_shares(self.question.model, self.question.software, num_stages, chunks)[0]

    def _chain_message_seconds(self, split: Split, work: DeviceWork, chunks: int) -> float:
        """Of one microbatch's messages through all chunks of the model and back, and of what they hold up."""
        once_around_s = self._message_seconds(split, work)[-1]
        back_to_first_s = self._messages_between(split, work)[-1]
        on_the_way_s = chunks * once_around_s + (chunks - 1) * back_to_first_s
        num_messages = split.pipeline * chunks - 1
        return 2 * (on_the_way_s + 2 * self._stall_s * num_messages)

    def _message_seconds(self, split: Split, work: DeviceWork) -> list[float]:
        """From the first device of the pipeline to each."""
        return list(accumulate(self._messages_between(split, work)[:-1], initial=0.0))

    def _messages_between(self, split: Split, work: DeviceWork) -> list[float]:
        """From each device of the pipeline to the next, and from the last to the first."""
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
            self._messages[key] = links
        return self._messages[key]

"""What each recomputed unit keeps of its operators' outputs: one programme over all units of a step.

Of each unit a curve says how much time is spared by so many bytes kept (units whose operators take and give alike
share one). Units and points of their curves are then chosen together, by a mixed-integer programme that HiGHS solves:
least added time, such that at every position of the step what is alive without recomputation, less what each choice
frees there, is within the budget. What a choice frees is taken from simulations of one unit at a time, so every answer
is simulated, and the programme's budget moved until both agree.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from memadvisor.cost.activations import Activations
from memadvisor.cost.kept import ForwardOperators, KeepableOperator
from memadvisor.cost.moments import Moment
from memadvisor.cost.step import CapturedStep
from memadvisor.cost.stretches import Stretches
from memadvisor.planning.outcomes import Played
from memadvisor.policies import SELECTIVE

Floats = npt.NDArray[np.float64]
Selection = Mapping[str, tuple[str, ...]]  # recomputed units, and what each of them keeps
Evaluate = Callable[[Selection], Played]

_MAX_POINTS = 12  # of a unit's curve
_MAX_CHOICES = 2000  # of a unit, met on the way to its curve
_MAX_SOLUTIONS = 5
_SLACK_FRACTION = 2e-3  # of the budget, left over: not worth another solution
_GAP_FRACTION = 1e-2  # of the added time: a solution is good enough
_ROUGH_GAP_FRACTION = 3e-2
_MAX_NODES = 60
_TOLERANCE = 2e-6  # of the budget: HiGHS takes a bound for kept within half of it


def products_of(step: CapturedStep, unit: str) -> tuple[str, ...]:
    """The operators of a unit's forward that `selective` and `kwai` keep, call by call."""
    return tuple(
        dict.fromkeys(
            operators.operators[place].name
            for position, operators in step.operators.items()
            if step.segments[position].unit == unit
            for place in sorted(operators.places(SELECTIVE))
        )
    )


@dataclass(frozen=True, slots=True)
class Choice:
    """Operators of a unit that stay: seconds that they spare in a step, and bytes of one forward.

    In a programme, less what it takes to keep any.
    """

    seconds: float
    size_bytes: int
    names: tuple[str, ...]


def curve(operators: Sequence[KeepableOperator], max_points: int = _MAX_POINTS) -> list[Choice]:
    """Choices of which none spares as much with less, from nothing to all; at most so many, the best per byte first.

    Operators that draw random numbers are kept all or none: one that runs again needs those before it.
    """
    random = [operator for operator in operators if operator.is_random]
    items = [[operator] for operator in operators if not operator.is_random] + ([random] if random else [])
    choices = [Choice(0.0, 0, ())]
    for item in items:
        seconds, size_bytes = sum(o.seconds for o in item), sum(o.size_bytes for o in item)
        names = tuple(operator.name for operator in item)
        more = [Choice(c.seconds + seconds, c.size_bytes + size_bytes, c.names + names) for c in choices]
        choices = _undominated(choices + more)
        if len(choices) > _MAX_CHOICES:
            choices = _spread(choices, _MAX_CHOICES)
    place = {operator.name: number for number, operator in enumerate(operators)}
    chosen = _spread(choices, max_points)
    return [replace(c, names=tuple(sorted(c.names, key=lambda name: place[name]))) for c in chosen]


def _undominated(choices: list[Choice]) -> list[Choice]:
    choices.sort(key=lambda c: (c.size_bytes, -c.seconds))
    kept: list[Choice] = []
    for choice in choices:
        if not kept or choice.seconds > kept[-1].seconds:
            kept.append(choice)
    return kept


def _spread(choices: list[Choice], number: int) -> list[Choice]:
    """So many of them: those on the convex hull, and between them at even distances."""
    if len(choices) <= number:
        return choices
    hull: list[Choice] = []
    for choice in choices:
        while len(hull) > 1 and _is_below(hull[-2], hull[-1], choice):
            hull.pop()
        hull.append(choice)
    places = [round(step * (len(choices) - 1) / (number - 1)) for step in range(number)]
    if len(hull) > number:
        hull = [hull[round(step * (len(hull) - 1) / (number - 1))] for step in range(number)]
    on_hull = {id(choice) for choice in hull}
    rest = [choices[place] for place in places if id(choices[place]) not in on_hull]
    rest = [rest[k * len(rest) // (number - len(hull))] for k in range(number - len(hull))] if rest else []
    return sorted({c.size_bytes: c for c in (*hull, *rest)}.values(), key=lambda c: c.size_bytes)


def _is_below(first: Choice, middle: Choice, last: Choice) -> bool:
    ahead = (middle.seconds - first.seconds) * (last.size_bytes - first.size_bytes)
    return ahead <= (last.seconds - first.seconds) * (middle.size_bytes - first.size_bytes)


class OperatorSearch:
    """Choices for one step and one way of sharding it, for any budget."""

    def __init__(self, step: CapturedStep, evaluate: Evaluate) -> None:
        self._step = step
        self._evaluate = evaluate
        self._programme: Programme | None = None

    def fastest(self, budget_bytes: int, *, is_rough: bool = False) -> Selection | None:
        """The fastest found whose simulated peak is within the budget; None where none is.

        Rough: the first one found, from a solution that may add somewhat more time than need be.
        """
        if not self._step.operators:
            return None
        if self._programme is None:
            self._programme = Programme(self._step, self._evaluate)
        best: tuple[float, Selection] | None = None
        target_bytes = budget_bytes
        gap_fraction = _ROUGH_GAP_FRACTION if is_rough else _GAP_FRACTION
        for _ in range(_MAX_SOLUTIONS):
            selection = self._programme.solve(target_bytes, gap_fraction)
            if selection is None and best is None:  # to the byte it may fit yet
                selection = self._programme.solve(to_the_byte(target_bytes), gap_fraction)
            if selection is None:
                break
            played = self._evaluate(selection)
            room_bytes = budget_bytes - played.peak_bytes
            if room_bytes >= 0 and (best is None or played.step_time_s < best[0]):
                best = played.step_time_s, selection
            is_full = room_bytes <= _SLACK_FRACTION * budget_bytes
            if room_bytes >= 0 and (is_full or is_rough or not selection):
                break
            target_bytes += room_bytes
        return None if best is None else best[1]


@dataclass(frozen=True, slots=True)
class _Variable:
    """A unit that is recomputed, and keeps this; `seconds`: what that adds to the step."""

    unit: str
    choice: Choice
    seconds: float


class Programme:
    """Rows are moments of the step, and of each unit's runs again; columns are choices of units.

    `_changes`: what a choice adds to the level of a row without any recomputation; less than nothing, as a rule.
    """

    def __init__(self, step: CapturedStep, evaluate: Evaluate) -> None:
        plain = evaluate({})
        self._step = step
        self._segments = np.array([moment.segment for moment in plain.moments])
        levels = np.array([moment.total_bytes for moment in plain.moments], dtype=float)
        self._variables: list[_Variable] = []
        self._first: list[int] = []  # variable of each unit
        columns: list[Floats] = []
        starts: list[Floats] = []  # by variable, changes at the start of each segment
        again: list[
            tuple[int, int, float, list[float]]
        ] = []  # first variable, segment, base, levels by choice
        for unit, choices in _choices(step).items():
            alone = evaluate({unit: ()})
            own = [moment for moment in alone.moments if not _is_again(moment)]
            if len(own) != len(plain.moments):
                continue
            change = np.array([moment.total_bytes for moment in own], dtype=float) - levels
            first = len(columns)
            self._first.append(first)
            activations = Activations(step, Stretches.alone([unit]))
            start = np.array(activations.start_changes(), dtype=float)
            added_s = alone.step_time_s - plain.step_time_s
            for choice in choices:
                self._variables.append(_Variable(unit, choice, max(0.0, added_s - choice.seconds)))
                columns.append(change + self._kept_bytes(unit, choice))
                starts.append(start + self._kept_at_start(unit, choice))
            for moment in alone.moments:
                if _is_again(moment):
                    beside = partial(self._beside_bytes, activations, unit, moment)
                    base = moment.total_bytes - start[moment.segment] - beside(())
                    reached = [beside(choice.names) for choice in choices]
                    again.append((first, moment.segment, float(base), reached))
        changes = np.array(columns).T if columns else np.zeros((len(levels), 0))
        rows = [changes]
        bases = [levels]
        at_start = np.array(starts).T
        for first, segment, base, reached in again:
            changed = at_start[segment].copy()
            changed[first : first + len(reached)] += reached
            rows.append(changed[None])
            bases.append(np.array([base]))
        order = np.argsort([*self._segments, *(segment for _, segment, _, _ in again)], kind="stable")
        self._changes, self._bases = np.concatenate(rows)[order], np.concatenate(bases)[order]

    def _kept_bytes(self, unit: str, choice: Choice) -> Floats:
        """By row, what stays of the operators that a recomputed unit keeps."""
        added = np.zeros(len(self._segments))
        for position, backward, operators in self._passes(unit):
            places = operators.places(choice.names)
            size_bytes = operators.bytes_kept(places)
            added[(self._segments > position) & (self._segments < backward)] += size_bytes
            more = sum(operators.forward_peak(places).values()) - sum(operators.forward_peak(()).values())
            added[self._segments == position] += more
        return added

    def _kept_at_start(self, unit: str, choice: Choice) -> Floats:
        added = np.zeros(len(self._step.segments))
        for position, backward, operators in self._passes(unit):
            added[position + 1 : backward + 1] += operators.bytes_kept(operators.places(choice.names))
        return added

    def _passes(self, unit: str) -> Iterator[tuple[int, int, ForwardOperators]]:
        """The segments of each forward of a unit that can keep something, and of its backward."""
        for position, operators in self._step.operators.items():
            segment = self._step.segments[position]
            if segment.unit == unit:
                last = len(self._step.segments)
                yield position, self._step.backwards.get((unit, segment.pass_number), last), operators

    def _beside_bytes(
        self, activations: Activations, unit: str, moment: Moment, names: tuple[str, ...]
    ) -> float:
        """What a unit's run again adds to the level that its backward begins with."""
        micro_batch = self._step.segments[moment.segment].micro_batch
        position = self._step.forward_at[unit, micro_batch]
        operators = self._step.operators.get(position)
        if operators is None:
            growth = self._step.segments[position].growth
        else:
            growth = operators.growth(operators.places(names))
        return float(sum(activations.beside_again(moment.segment, moment.view, growth).values()))

    def solve(self, budget_bytes: int, gap_fraction: float, max_nodes: int = _MAX_NODES) -> Selection | None:
        """The choice whose levels add up to no more than the budget, and which adds no more time than the least by
        `gap_fraction`, or the best of `max_nodes`; None where there is none."""
        import scipy.optimize  # here alone: it takes half a second, and no training needs it
        import scipy.sparse

        if not self._variables:
            return {} if self._bases.max() <= budget_bytes else None
        most = np.maximum.reduceat(self._changes, self._first, axis=1)
        scale = 1 / budget_bytes
        binding = self._bases + np.maximum(most, 0).sum(axis=1) > budget_bytes
        if not binding.any():
            return {}
        bases, changes = self._bases[binding], self._changes[binding]
        num_rows, num_variables = changes.shape
        # Levels are variables too, each told by what it differs in from the one before it: a unit or two.
        steps = scipy.sparse.csr_array(np.diff(changes, axis=0, prepend=0) * scale)
        link = scipy.sparse.eye_array(num_rows) - scipy.sparse.eye_array(num_rows, k=-1)
        start = np.diff(bases, prepend=0) * scale
        units = np.searchsorted(self._first, np.arange(num_variables), side="right") - 1
        one = scipy.sparse.csr_array((np.ones(num_variables), (units, np.arange(num_variables))))
        seconds = np.array([variable.seconds for variable in self._variables])
        with _stdout_left_alone():
            found = scipy.optimize.milp(
                np.concatenate((seconds / seconds.max(), np.zeros(num_rows))),
                integrality=np.concatenate((np.ones(num_variables), np.zeros(num_rows))),
                bounds=scipy.optimize.Bounds(
                    np.concatenate((np.zeros(num_variables), np.full(num_rows, -np.inf))),
                    np.concatenate((np.ones(num_variables), np.full(num_rows, 1 - _TOLERANCE))),
                ),
                constraints=[
                    scipy.optimize.LinearConstraint(scipy.sparse.hstack((-steps, link)), start, start),
                    scipy.optimize.LinearConstraint(
                        scipy.sparse.hstack((one, scipy.sparse.csr_array((one.shape[0], num_rows)))), ub=1
                    ),
                ],
                options={
                    "mip_rel_gap": gap_fraction,
                    "node_limit": max_nodes,
                },
            )
        if found.x is None:
            return None
        taken = [variable for variable, value in zip(self._variables, found.x, strict=False) if value > 0.5]
        return {variable.unit: variable.choice.names for variable in taken}


def to_the_byte(budget_bytes: int) -> int:
    """A budget of the programme that no choice within `budget_bytes` is over by its rounding."""
    return round(budget_bytes * (1 + 2 * _TOLERANCE)) + 1


@contextlib.contextmanager
def _stdout_left_alone() -> Iterator[None]:
    """HiGHS now and then prints a line of its own, whatever it is told: to stderr, for stdout may be JSON."""
    libc = ctypes.CDLL(None)
    stdout = os.dup(1)
    libc.fflush(None)
    os.dup2(2, 1)
    try:
        yield
    finally:
        libc.fflush(None)
        os.dup2(stdout, 1)
        os.close(stdout)


def _is_again(moment: Moment) -> bool:
    return moment.position.startswith("recomputation of")


def _choices(step: CapturedStep) -> dict[str, list[Choice]]:
    """The curve of each recomputable unit. What it can keep is what all of its forwards can."""
    forwards: dict[str, list[ForwardOperators]] = {}
    for position, operators in step.operators.items():
        forwards.setdefault(step.segments[position].unit or "", []).append(operators)
    known: dict[tuple[KeepableOperator, ...], list[Choice]] = {}
    found = {}
    for unit in step.recomputable:
        all_operators = _of_all(forwards.get(unit, []), step.repeats)
        if all_operators not in known:
            known[all_operators] = curve(all_operators)
        keeping_s = step.repeats * sum(
            run.keeping_s(step.second_run_cost) for (name, _), run in step.second_runs.items() if name == unit
        )
        found[unit] = [
            replace(choice, seconds=choice.seconds - keeping_s) if choice.names else choice
            for choice in known[all_operators]
            if choice.seconds > keeping_s or not choice.names
        ]
    return found


def _of_all(forwards: Sequence[ForwardOperators], repeats: int) -> tuple[KeepableOperator, ...]:
    """Operators that all forwards of a unit can keep, with the seconds of all and the bytes of the largest."""
    if not forwards:
        return ()
    shared = []
    for operator in forwards[0].operators:
        if all(operator.name in other.place_of for other in forwards):
            alike = [other.operators[other.place_of[operator.name]] for other in forwards]
            largest = max(alike, key=lambda one: one.size_bytes)
            seconds = repeats * sum(one.seconds for one in alike)
            is_random = any(one.is_random for one in alike)
            sizes = tuple(replace(s, death_segment=None) for s in largest.storages)  # alike in like units
            shared.append(replace(largest, seconds=seconds, is_random=is_random, storages=sizes))
    return tuple(shared)

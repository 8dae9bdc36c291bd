"""The search for plans: every stage for all units alike, then a stage for each unit, within one budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial

from memadvisor.cost.limit import Limit
from memadvisor.cost.step import CapturedStep
from memadvisor.plan import Plan, Prediction, UnitPlan
from memadvisor.planning.arrangement import (
    MAX_REDUCE_DEPTH,
    Arrangement,
    choose_arrangement,
    kinds_of,
    num_moves,
    proper_divisors,
    space_for,
)
from memadvisor.planning.moved_splits import MovedSplits
from memadvisor.planning.offload import OffloadSearch, offload_choice
from memadvisor.planning.one_way import OneWay
from memadvisor.planning.outcomes import Outcomes
from memadvisor.planning.paging import WAYS, may_page, nearest_tier, starting_bytes, with_fewest_paged
from memadvisor.planning.plays import Plays
from memadvisor.planning.ranked import (
    Kind,
    RankedPlan,
    is_worth_it,
    may_wait_less,
    order,
    with_other,
    worthier,
)
from memadvisor.planning.recompute import Evaluate, smallest_peak
from memadvisor.planning.second_copies import grouped_ways
from memadvisor.planning.several_models import updates_apart
from memadvisor.planning.split_bounds import SplitBounds
from memadvisor.planning.stretches import Nested, Tables
from memadvisor.planning.updates import may_update_by_unit, may_update_early, one_after_another
from memadvisor.planning.way import Way

_MAX_RESERVATIONS = 6  # choices of one kind whose reservation is simulated


class Search:
    """Plans for one step, and what the ones met on the way need."""

    def __init__(self, plays: Plays, near_ranks: int | None = None, *, last_stage: int = 3) -> None:
        self.plays = plays
        self.near_ranks = near_ranks  # that may share second copies
        stages = range(1) if plays.asked.local_sgd is not None else plays.asked.compression.stages
        self.stages = stages[max(0, plays.asked.precision.least_stage - stages[0]) :]
        if plays.asked.autocast is not None:  # which stage 3 cannot have
            last_stage = min(last_stage, 2)
        self.stages = range(self.stages.start, min(self.stages.stop, last_stage + 1))
        self.needs: list[int] = []
        self.needs_unchanged: list[int] = []  # of those that leave the script alone
        self._bounds = SplitBounds(plays.times)
        self._moved_splits = MovedSplits(plays)
        self._splits_further = False
        self._tables: Tables = {}  # of the chain of the recorded step
        self._kinds: list[Kind] = []  # of what leaves the script alone
        self._state_kinds: list[Kind] = []  # the same with optimizer state on another tier
        self._paged_kinds: list[Kind] = []  # and with parameters and gradients there too

    def may_show(self) -> bool:
        """Whether a plan of a step of more micro-batches than those so far may be shown."""
        return self.plays.settings is not None or not self._bounds.beat_all()

    def plans(self, step: CapturedStep, *, splits_further: bool = False) -> list[RankedPlan]:
        """The usual ones; where none fits that leaves the script alone, some whose parameters lie elsewhere too.

        Steps come by micro-batches. splits_further: one of more follows, whose least peaks are no higher.
        """
        self.plays.begin()
        self._splits_further = splits_further
        found = list(self._usual(step))
        if step.repeats == 1 and not any(ranked.fits for ranked in found):
            found += self._paging(step)
        self._bounds.found(found)
        return found

    def moved_splits(self, known: Iterable[RankedPlan]) -> Iterator[RankedPlan]:
        """Of the steps of more micro-batches, some whose activations lie elsewhere, where that is worth it beside what is
        known of all steps."""
        return self._moved_splits.plans(known, self._best)

    def paged_splits(self, steps: Iterable[CapturedStep]) -> Iterator[RankedPlan]:
        """Where no plan fits at all: of the steps of more micro-batches, some whose parameters lie elsewhere."""
        for step in (step for step in steps if step.repeats > 1):
            self.plays.begin()
            yield from self._paging(step)

    def _usual(self, step: CapturedStep) -> Iterator[RankedPlan]:
        """The best plan of each stage for all units alike; and one of several stages where it is better.

        For a script that shards its model by FSDP2 itself: what that may free after the forward, and gather ahead.
        """
        found: list[Arrangement] = []
        alike: list[RankedPlan] = []
        ways: list[tuple[int, bool, int, int]] = []
        for stage in self.stages if self.plays.num_ranks > 1 else (0,):
            if step.shard_groups and stage < 3:
                continue
            kinds = kinds_of(step, stage)
            each_best = [self._unbeaten(step, Way(stage, *kind), found) for kind in kinds]
            usual = [ranked for ranked in each_best if ranked is not None]
            kind = kinds[each_best.index(min(usual, key=order))] if usual else kinds[0]
            hybrids = self._groups(step) if stage else ()
            grouped = grouped_ways(stage, kinds, kind, hybrids, self.near_ranks)
            usual += self._all_unbeaten(step, grouped, found)
            self._bounds.fit(usual)
            early: list[RankedPlan] = []
            if may_update_early(step, self.plays, stage):
                sooner = [Way(stage, *each, early=True) for each in kinds[1:]]
                sooner += [Way(stage, *kind, ranks, early=True) for ranks in hybrids]
                early = self._all_unbeaten(step, sooner, [])
            best = [min(each, key=order) for each in (usual, early) if each]
            if best:
                way, deeper = self._deeper(step, Way(stage, *kind), worthier(best[0], best[-1]))
                alike.append(self._by_unit(step, way, deeper))
            ways += [(stage, *each) for each in kinds]
        tier = None if updates_apart(step) else nearest_tier(step, self.plays.transfers)
        may_move = any(states.has_state_to_move for states in step.states.values())
        keeps_state = may_move and self.plays.asked.optimizer_bits is None
        if alike and tier is not None and keeps_state and not any(ranked.fits for ranked in alike):
            away = [self._alike(step, Way(*way, tier=tier), []) for way in ways]
            alike.append(min(away, key=order))
        yield from alike
        if self.plays.num_ranks > 1 and step.repeats == 1:
            mixed = one_after_another(step, self.plays, self._mixed(step, found))
            if is_worth_it(mixed, min(alike, key=order)):
                yield mixed
        others = (
            self._keeping(step),
            self._sparing(step),
            self._moving(step, (self._kinds, self._state_kinds)),
        )
        yield from (ranked for ranked in others if ranked is not None)

    def _deeper(self, step: CapturedStep, way: Way, usual: RankedPlan) -> tuple[Way, RankedPlan]:
        """A plan that has more reductions under way, where that is clearly faster; with its way, else the usual one's."""
        if way.stage < 2 or step.shard_groups or not may_wait_less(usual):
            return way, usual
        deeper = replace(way, behind=MAX_REDUCE_DEPTH, depth=max(1, way.depth))
        other = self._tried(step, deeper, usual)
        return (way, usual) if other is None else (deeper, other)

    def _tried(self, step: CapturedStep, way: Way, usual: RankedPlan) -> RankedPlan | None:
        """The best plan of a way, if it is worth it beside the usual one."""
        kinds = list(self._kinds)
        other = self._unbeaten(step, way, [])
        if other is not None and worthier(usual, other) is other:
            return other
        self._kinds = kinds
        return None

    def _by_unit(self, step: CapturedStep, way: Way, usual: RankedPlan) -> RankedPlan:
        """A plan whose optimizer step updates units one after another, where it is needed to fit, or clearly faster."""
        is_tried = may_update_by_unit(step, self.plays, usual)
        return (self._tried(step, replace(way, by_unit=True), usual) if is_tried else None) or usual

    def _paging(self, step: CapturedStep) -> Iterator[RankedPlan]:
        """Where nothing else fits, parameters and gradients lie where optimizer state does, and then activations too."""
        tier = nearest_tier(step, self.plays.paged_transfers)
        asked = self.plays.asked
        is_asked = any(
            each is not None for each in (asked.optimizer_bits, asked.chunked_loss, asked.autocast)
        )
        if tier is None or is_asked or not may_page(step, self.plays.num_ranks):
            return
        best = min((self._alike(step, Way(3, *way, tier=tier, pages=True), []) for way in WAYS), key=order)
        best = with_fewest_paged(best, partial(self._paged, step, best.plan))
        yield best
        if not best.fits and (moved := self._moving(step, (self._paged_kinds,))) is not None:
            yield moved

    def _paged(self, step: CapturedStep, plan: Plan, units: tuple[UnitPlan, ...]) -> RankedPlan:
        other = Arrangement(units, plan.behind, plan.gather_depth)
        return self.plays.ranked(step, other, self.plays.play(step, other).prediction())

    def _all_unbeaten(
        self, step: CapturedStep, ways: Iterable[Way], met: list[Arrangement]
    ) -> list[RankedPlan]:
        return [ranked for way in ways if (ranked := self._unbeaten(step, way, met)) is not None]

    def _unbeaten(self, step: CapturedStep, way: Way, found: list[Arrangement]) -> RankedPlan | None:
        """`_alike`; None for a way that cannot be shown (split_bounds.py), of which the least peak alone is asked for."""
        if self.plays.settings is not None or not self._bounds.beat(step, way):
            return self._alike(step, way, found)
        self._ask_least(step, way, self._low(step, way))
        return None

    def _low(self, step: CapturedStep, way: Way) -> Evaluate:
        """As high as plays of a split's way, in less time."""
        brief = self._bounds.brief(step)
        return cache(lambda units: self.plays.look(brief, way.arranged(step, Nested(units, ()), "device")))

    def _ask_least(self, step: CapturedStep, way: Way, low: Evaluate) -> None:
        """The last split has the least peak."""
        if self._splits_further:
            return
        everything = way.arranged(step, Nested(frozenset(step.recomputable), ()), "device")
        known = Limit(peak_bytes=min(self.needs))
        if not self.plays.outcome(self._bounds.brief(step), everything, known).passes(known):
            self._met(step, smallest_peak(step, low).peak_bytes)

    def _met(self, step: CapturedStep, needed_bytes: int) -> None:
        """What a plan for this step needs."""
        self.needs.append(needed_bytes)
        if step.repeats == 1:
            self.needs_unchanged.append(needed_bytes)

    def _alike(self, step: CapturedStep, way: Way, found: list[Arrangement]) -> RankedPlan:
        """All units of one way, with the best choice of units to recompute; what was met joins `found`."""
        nearest = nearest_tier(step, self.plays.transfers) or "device"
        may_nest = not (way.early or way.pages) and self._may_nest(step, way.stage, way.shard_ranks)
        has_parts = not (way.pages or step.shard_groups)
        look, outcome = partial(self.plays.look, step), partial(self.plays.outcome, step)
        has_replay = self.plays.settings is not None
        one = OneWay(
            step,
            way,
            look,
            outcome,
            nearest,
            self._tables,
            may_nest=may_nest,
            has_parts=has_parts,
            has_replay=has_replay,
        )
        self._bounds.saw(way, one.evaluate(frozenset()).step_time_s)
        low = one.evaluate if self._bounds.brief(step) is step else self._low(step, way)
        if (fitting := self._split_that_fits(step, way, one)) is not None:
            self._ask_least(step, way, low)
            self._moved_splits.saw(step, way, fitting)
            return fitting
        smallest = Nested(smallest_peak(step, low).recomputed, ())
        found.append(one.arranged(smallest))
        is_over = may_nest and one.play(smallest).peak_bytes > self.plays.budget_bytes
        least = one.stretches.smallest() if is_over else None
        if least is not None:
            smallest = min(smallest, least, key=lambda nested: one.play(nested).peak_bytes)
        best = self._best(step, one.choose, one.predict, one.arranged(smallest), found)
        self._moved_splits.saw(step, way, best)
        if step.repeats == 1 and not way.early:
            largest = one.arranged(Nested(frozenset(), ()))
            offload, keeps = None, one.keep if has_parts or not has_replay else None
            if self.plays.transfers is not None and nearest != "device":
                is_exact = self.plays.settings is None
                moves = OffloadSearch(
                    step, largest, nearest, self.plays.transfers, one.outcome, one.peak_bytes, is_exact
                )
                offload = offload_choice(moves, one.choose, one.arranged(smallest), num_moves(step))
            of_tier = self._paged_kinds if way.pages else self._state_kinds
            kinds = self._kinds if way.tier == "device" else of_tier
            ends = one.arranged(smallest), largest
            kinds.append(
                Kind(best, one.choose, one.spare if has_parts else None, keeps, offload, one.predict, *ends)
            )
        return best

    def _split_that_fits(self, step: CapturedStep, way: Way, one: OneWay) -> RankedPlan | None:
        """Of a split that is searched: the fastest choice. Beside it the least peak alone is asked for, as of ways that
        are not (split_bounds.py); but of ways with a tier, which later splits need not take."""
        if step.repeats == 1 or self.plays.settings is not None or way.tier != "device":
            return None
        choice = one.choose(self.plays.budget_bytes)
        if choice is None:
            return None
        ranked = self.plays.ranked(step, choice, one.predict(choice))
        return ranked if ranked.fits else None

    def _moving(self, step: CapturedStep, ways: Iterable[list[Kind]]) -> RankedPlan | None:
        """The best plan's way of sharding with activations elsewhere; where nothing of that fits, of the next of `ways`."""
        best: RankedPlan | None = None
        for kinds in ways:
            if step.repeats > 1 or not kinds or (best is not None and best.fits):
                continue
            place = min(range(len(kinds)), key=lambda place: order(kinds[place].ranked))
            ranked = self._moved(step, kinds[place])
            if ranked is not None and worthier(kinds[place].ranked, ranked) is ranked:
                best = ranked if best is None else min(best, ranked, key=order)
                kinds[place] = with_other(kinds[place], ranked, kinds[place].offload, self.plays.budget_bytes)
        return best

    def _moved(self, step: CapturedStep, kind: Kind) -> RankedPlan | None:
        if (offload := kind.offload) is None or (last := offload(self.plays.budget_bytes, False)) is None:
            return None
        return self._best(step, lambda target: offload(target, False), kind.predict, last, [])

    def _keeping(self, step: CapturedStep) -> RankedPlan | None:
        """The best plan's way of sharding, with a choice inside units, where units as they are do not fit. It has not been
        measured to be faster where they do (docs/planning/measured.md)."""
        if step.repeats > 1 or not self._kinds:
            return None
        place = min(range(len(self._kinds)), key=lambda place: order(self._kinds[place].ranked))
        kind = self._kinds[place]
        if (inside := kind.keep) is None or kind.ranked.fits:
            return None
        keep = cache(lambda target_bytes: inside(target_bytes, False))
        # As far below as what is reserved is above what is held, of units as they are.
        over_bytes = kind.ranked.prediction.needed_bytes - kind.predict(kind.smallest).peak_bytes
        target_bytes = self.plays.budget_bytes - (over_bytes if self.plays.settings is not None else 0)
        if (choice := keep(target_bytes)) is None:
            return None
        ranked = self._best(step, keep, kind.predict, choice, [], target_bytes)
        if not ranked.fits:
            return ranked if order(ranked) < order(kind.ranked) else None  # the smallest is shown too
        self._kinds[place] = with_other(kind, ranked, inside, self.plays.budget_bytes)
        return ranked

    def _sparing(self, step: CapturedStep) -> RankedPlan | None:
        """The best way of sharding in which parts of units may run again, with these in place of whole ones, where that is
        faster than the best plan of any way."""
        places = [place for place, kind in enumerate(self._kinds) if kind.spare is not None]
        if step.repeats > 1 or not places:
            return None
        place = min(places, key=lambda place: order(self._kinds[place].ranked))
        kind, best = self._kinds[place], self.best_kind.ranked
        is_free = kind.ranked.fits and not kind.ranked.plan.recomputed_units
        if kind.spare is None or is_free:
            return None
        spare = cache(kind.spare)
        if (choice := spare(self.plays.budget_bytes)) is None:
            return None
        ranked = self._best(step, spare, kind.predict, choice, [])
        if worthier(best, ranked) is best:
            return None
        self._kinds[place] = with_other(
            kind, ranked, lambda target, _: spare(target), self.plays.budget_bytes
        )
        return ranked

    @property
    def best_kind(self) -> Kind:
        """The best way of sharding of all that leave the script alone."""
        return min(self._kinds, key=lambda kind: order(kind.ranked))

    def _may_nest(self, step: CapturedStep, stage: int, shard_ranks: int | None) -> bool:
        """Stretches of units whose parameters are gathered one by one are not played, nor what they reserve predicted."""
        is_first = shard_ranks is None and step.repeats == 1
        return is_first and (stage < 3 or self.plays.num_ranks == 1) and self.plays.settings is None

    def _mixed(self, step: CapturedStep, starts: Iterable[Arrangement]) -> RankedPlan:
        """A stage for each unit, from the arrangements that were best for all alike."""
        evaluate = Outcomes[Arrangement](partial(self.plays.outcome, step))
        space = space_for(step, self.stages, self._groups(step))
        first = tuple(starts)

        @cache
        def choose(target_bytes: int) -> Arrangement:
            return choose_arrangement(space, evaluate, first, target_bytes, num_moves(step))

        predict = cache(lambda one: self.plays.play(step, one).prediction())
        return self._best(step, choose, predict, choose(self.plays.budget_bytes), [])

    def _groups(self, step: CapturedStep) -> tuple[int, ...]:
        """How many ranks may share, beside all of them: FSDP2 has been told by the script; what stays whole is
        compressed among all ranks alone, or averaged (local SGD)."""
        among_all = (
            step.shard_groups
            or self.plays.asked.compression.has_feedback
            or self.plays.asked.local_sgd is not None
        )
        return () if among_all else proper_divisors(self.plays.num_ranks)

    def _best(
        self,
        step: CapturedStep,
        choose: Callable[[int], Arrangement | None],
        predict: Callable[[Arrangement], Prediction],
        smallest: Arrangement,
        found: list[Arrangement],
        target_bytes: int | None = None,
    ) -> RankedPlan:
        """The fastest choice that fits, else `smallest`. `target_bytes`: of the first choice, in place of the budget.

        A choice may reserve more than the simulator says that it holds, by whose peak it was chosen; then the next one aims
        lower by what that is over the budget.
        """
        tried = [self.plays.ranked(step, smallest, predict(smallest))]
        found += [smallest] if not smallest.stretches else []  # stretches are not mixed with other stages
        target_bytes = self.plays.budget_bytes if target_bytes is None else target_bytes
        for _ in range(_MAX_RESERVATIONS):
            choice = choose(target_bytes)
            if choice is None:
                break
            found += [choice] if not choice.stretches else []
            simulated = predict(choice)
            tried.append(tried[0] if choice == smallest else self.plays.ranked(step, choice, simulated))
            if tried[-1].fits or simulated.peak_bytes > target_bytes:
                break
            over_bytes = tried[-1].prediction.needed_bytes - self.plays.budget_bytes
            target_bytes = min(target_bytes, simulated.peak_bytes) - over_bytes
        for one in tried:
            self._met(step, max(one.prediction.needed_bytes, starting_bytes(step, one.plan)))
        return min([ranked for ranked in tried if ranked.fits] or tried[:1], key=order)

"""Which units' gradients of the step before the script has dropped when a segment begins, as the engine finds them."""

from __future__ import annotations

from collections.abc import Collection

from memadvisor.cost.step import CapturedStep, Segment


class DroppedGradients:
    """Told of the segments of a step in order. Of several models each has gradients of its own."""

    def __init__(self, step: CapturedStep, units: Collection[str], num_ranks: int) -> None:
        self._step = step
        self._units = units
        self._num_ranks = num_ranks
        self._phase = ""
        # Segments are many, and answers few: by the models whose gradients are alive, and the one that the engine looks at.
        self._known: dict[tuple[frozenset[str], str | None], frozenset[str]] = {}

    def enter(self, segment: Segment) -> Collection[str]:
        """Units that have none any more. On several ranks the engine looks in a forward, of one model, and where a backward
        begins; one rank drops them where the script does, which cannot be seen in a micro-batch that is played again.
        """
        begins_backward = segment.phase == "backward" != self._phase
        self._phase = segment.phase
        is_forward = segment.phase == "forward" and (segment.unit is None or segment.unit in self._units)
        if self._num_ranks == 1:
            looks = self._step.repeats == 1 or segment.phase == "outside"
        else:
            looks = begins_backward or is_forward
        if not looks:
            return ()
        alive = segment.live_gradients
        if alive is None:
            return () if segment.captured.start.get("gradient") else self._units
        models = self._step.models
        own = models.get(segment.unit or "") if self._num_ranks > 1 and is_forward else None
        if (alive, own) not in self._known:
            found = [(name, models.get(name, "")) for name in self._units]
            gone = (name for name, model in found if model not in alive and own in (None, model))
            self._known[alive, own] = frozenset(gone)
        return self._known[alive, own]

"""One rank of two runs as the page of their difference sees it."""

from __future__ import annotations

from dataclasses import dataclass

from memadvisor.analyzers.comparison import Comparison
from memadvisor.analyzers.run_difference import RankDifference, RunDifference
from memadvisor.report.view import RankView


@dataclass(frozen=True, slots=True)
class PairView:
    """The rank's figures, and its records in both runs."""

    found: RunDifference
    rank: RankDifference
    before: RankView
    after: RankView

    @property
    def sides(self) -> tuple[tuple[str, RankView], tuple[str, RankView]]:
        return ("before", self.before), ("after", self.after)

    @property
    def of_rank(self) -> str:
        return f", rank {self.rank.rank}" if len(self.found.ranks) > 1 else ""

    @property
    def traced_basis(self) -> str:
        """Of what is recorded in traced steps alone."""
        return f"the traced steps{self.of_rank}"

    @property
    def planned(self) -> Comparison | None:
        """What the plan of the run after predicted; it is of the rank with the highest peak, and for no other."""
        is_largest = self.found.after.largest_rank.rank == self.rank.rank
        return self.found.after.comparison if is_largest else None

    @property
    def why_untraced(self) -> str:
        """Which run lacks what only a traced step records."""
        return " ".join(
            f"The run {name}: {view.why_untraced}" for name, view in self.sides if view.result.peak is None
        )

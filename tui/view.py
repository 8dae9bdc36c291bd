"""What every tab is given to show: one rank of one snapshot."""

from __future__ import annotations

from dataclasses import dataclass

from memadvisor.analyzers.analysis import Analysis, RankAnalysis
from memadvisor.run.run import RankRun, Run
from memadvisor.tui.watch import State


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class View:
    """`position` is the rank's place among the ranks that wrote something, not its number."""

    run: Run
    analysis: Analysis
    position: int
    state: State
    message: str

    @property
    def rank(self) -> RankRun:
        return self.run.ranks[self.position]

    @property
    def result(self) -> RankAnalysis:
        return self.analysis.ranks[self.position]

    @property
    def has_ended(self) -> bool:
        """Nothing more will come."""
        return self.state not in (State.WAITING, State.RUNNING, State.SILENT)

    def shows_the_same_as(self, other: View | None) -> bool:
        """Whether `other` is of the same reading; comparing the rows of two readings would take seconds."""
        return (
            other is not None
            and other.run is self.run
            and (other.position, other.state, other.message) == (self.position, self.state, self.message)
        )

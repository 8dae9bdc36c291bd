"""One rank as a view sees it: what was recorded beside what the analyzers say of it."""

from __future__ import annotations

from dataclasses import dataclass

from memadvisor.analyzers.analysis import Analysis, RankAnalysis
from memadvisor.run.records import Span, Step
from memadvisor.run.run import RankRun


@dataclass(frozen=True, slots=True)
class RankView:
    """A rank's records and results; `detail` says how many things a figure may draw, for the file's size."""

    analysis: Analysis
    recorded: RankRun
    result: RankAnalysis
    detail: int

    @property
    def step(self) -> Step:
        """The traced step; to be asked for only where one is known to exist."""
        step = self.recorded.traced_step
        assert step is not None
        return step

    @property
    def traced_basis(self) -> str:
        return f"traced step {self.step.index}{self.of_rank}"

    @property
    def of_rank(self) -> str:
        return f", rank {self.result.rank}" if len(self.analysis.ranks) > 1 else ""

    @property
    def why_untraced(self) -> str:
        """Why nothing that only a traced step records is here."""
        num_steps = len(self.recorded.steps)
        if self.recorded.traced_step is not None:
            if self.recorded.has_lost_trace:
                return f"The record of the traced step {self.step.index} is lost."
            return f"The traced step {self.step.index} left no record of this."
        steps = f"{num_steps} step{'' if num_steps == 1 else 's'}"
        if self.analysis.run.problems:  # it may have been there
            return f"What can be read of this run holds {steps} of this rank, and no traced one."
        option = self.recorded.trace_option
        other = f", or with `{option}` one of these" if option else ""
        return f"No step was traced: this rank finished {steps}. One is traced after the warm-up{other}."

    def spans(self) -> list[Span]:
        """Of the traced step."""
        return [span for span in self.recorded.spans if span.step == self.step.index]

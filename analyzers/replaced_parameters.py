"""Whether a script puts other memory in the place of its parameters while it trains: `p.data = values`, as
sharpness-aware updates and `vector_to_parameters` do."""

from __future__ import annotations

from memadvisor.run.run import RankRun


def replaces_parameters(rank: RankRun) -> bool:
    """Whether parameters' memory is let go of in the traced step, and other memory is theirs when it ends."""
    parameters = [row for row in rank.storages if row.category == "parameter"]
    was_let_go = {row.unit for row in parameters if row.phase == "baseline" and row.death_s is not None}
    return any(
        row.phase != "baseline" and row.death_s is None and row.unit in was_let_go for row in parameters
    )

"""Which ranks train on samples of their own: not those that split a model's layers, nor later stages of a pipeline.

Numbers of ranks are at least 1, whatever a damaged record says.
"""

from __future__ import annotations

from collections.abc import Sequence

from memadvisor.run.run import RankRun, Run


def num_data_ranks(rank: RankRun) -> int:
    """Over how many ranks data parallelism may share what this rank holds."""
    in_pipeline = max([1, *(stage.num_ranks for stage in rank.pipeline_stages)])
    return max(1, rank.process.world_size // (num_splitting(rank) * in_pipeline))


def num_splitting(rank: RankRun) -> int:
    """How many ranks hold parts of one layer, and train on the same samples (tensor parallelism)."""
    return max([1, *(split.num_ranks for split in rank.tensor_parallel)])


def over_all_ranks(per_rank: Sequence[float | None], run: Run) -> float | None:
    """A rate of samples or tokens of all ranks, each sample counted once; None where a rank that counts has none."""
    rates = [
        None if rate is None else rate / num_splitting(rank)
        for rate, rank in zip(per_rank, run.ranks, strict=True)
        if not rank.pipeline_stages or any(stage.index == 0 for stage in rank.pipeline_stages)
    ]
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known and len(known) == len(rates) and not run.missing_ranks else None

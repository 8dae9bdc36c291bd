"""A float32 training whose model could be called under autocast to bfloat16 (analyzers/autocast)."""

from __future__ import annotations

from memadvisor.analyzers.autocast.step import under_autocast, why_not
from memadvisor.analyzers.script_changes.change import LESS_PRECISION, Facts, ScriptChange
from memadvisor.analyzers.script_changes.lives import changed_lives

_PLAN = "Have a plan do it: `--autocast bf16` of `advise` and `run`; or write "
_LEAST_SHARE = 0.1  # of the peak: for less nobody should give up digits


def autocast(facts: Facts) -> ScriptChange | None:
    rank = facts.rank
    if rank.shard_groups or rank.pipeline_stages or rank.tensor_parallel or why_not(rank) is not None:
        return None
    saved_bytes = facts.peak_saved_bytes(changed_lives(rank, under_autocast(rank)))
    if saved_bytes < _LEAST_SHARE * facts.peak_bytes:
        return None
    kind = rank.process.device.partition(":")[0]
    return ScriptChange(
        kind="autocast",
        seen="The model computes in float32 alone, and autograd keeps what it makes in float32.",
        change=f"{_PLAN}`with torch.autocast({kind!r}, dtype=torch.bfloat16):` around the model's call, and its results' `.float()` "
        f"before the loss.{' Steps may take longer, as few CPUs are fast in it.' * (kind == 'cpu')}",
        peak_saved_bytes=saved_bytes,
        effect=LESS_PRECISION,
    )

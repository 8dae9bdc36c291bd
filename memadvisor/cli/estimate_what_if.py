"""How `memadvisor estimate --what-if` shows what would change the answer."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from memadvisor.cli.estimate_search import priced_to_json
from memadvisor.cli.estimate_view import layout_words
from memadvisor.planning.what_if import Outcome

# Gains that round to nothing are not told from none.
_SAME = 0.0005


def print_outcomes(outcomes: tuple[Outcome, ...], console: Console) -> None:
    """A line each."""
    console.print(Text("what would change the answer (predicted, for the same batch)"))
    for outcome in outcomes:
        console.print(Text(f"- {outcome_words(outcome)}"), soft_wrap=True)


def outcome_words(outcome: Outcome) -> str:
    change, best = outcome.change, outcome.best
    if change.cluster is None:
        return f"{change.words}: not asked, {change.reason}."
    if best is None:
        return f"{change.words}: no layout is safe."
    time = f"{best.estimate.step_time_s:.4g} s a step"
    layout = layout_words(best.layout)
    if outcome.speedup is None or outcome.gain_per_accelerator is None:
        return f"{change.words}: {time}, where no layout is safe now; {layout}."
    gain = outcome.gain_per_accelerator
    each = (
        "each accelerator does as much a second"
        if abs(gain) < _SAME
        else f"each accelerator does {abs(gain):.1%} {'more' if gain > 0 else 'less'} a second"
    )
    return f"{change.words}: {time}, {outcome.speedup:.2f} times as fast, {each}; {layout}."


def outcome_to_json(outcome: Outcome) -> dict[str, Any]:
    """Keys are stable (docs/layouts.md)."""
    cluster = outcome.change.cluster
    return {
        "change": outcome.change.words,
        "text": outcome_words(outcome),
        "not_asked": outcome.change.reason,
        "num_accelerators": None if cluster is None else cluster.num_accelerators,
        "memory_bytes": None if cluster is None else cluster.accelerator.memory_bytes,
        "across_bytes_per_s": None
        if cluster is None or cluster.across is None
        else cluster.across.bytes_per_s,
        "best": None if outcome.best is None else priced_to_json(outcome.best),
        "speedup": outcome.speedup,
        "gain_per_accelerator": outcome.gain_per_accelerator,
    }

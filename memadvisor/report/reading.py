"""Notes and problems of the run, and how to read the page."""

from __future__ import annotations

from collections.abc import Sequence

from memadvisor.analyzers.analysis import Analysis
from memadvisor.report.blocks import Block, Html, paragraph, table
from memadvisor.report.escape import html_text
from memadvisor.report.words import PHASE_NAMES, ranks_in_words, unfinished_in_words
from memadvisor.run.records import PHASES
from memadvisor.units import counted

MAX_NOTES = 200

_DEFINITIONS = (
    (
        "measured, predicted, theory, datasheet",
        "Where a figure comes from. Measured: recorded in this run. Predicted: worked out of what was recorded, and not run: what a plan, a change or another device would give. Theory: a formula, cited beside it. Datasheet: the maker's figure for the device; given: the user's own. They are never mixed.",
    ),
    ("step", "From the end of one optimizer step to the end of the next."),
    (
        "timed and traced step",
        "Recorded cheaply, and recorded completely. A traced step may be several times slower: memory, saved tensors, FLOPs and collectives are of it; step times and throughput never are.",
    ),
    (
        "peak",
        "The most bytes that the allocator had handed out at one moment; where it keeps no count, the largest sum of storages.",
    ),
    ("storage", "One allocation of torch's allocator; views share it and count once."),
    (
        "categories",
        "Every live byte belongs to one: parameter, gradient, optimizer state, activation (kept by autograd for the backward), input, temporary, communication (buffers), weight copy (averages, target networks), other. With unexplained they sum to the peak exactly.",
    ),
    (
        "unexplained",
        "Bytes that the allocator reports and no recorded storage explains. May be negative, where storages sum to more.",
    ),
    (
        "unit",
        "A subtree of modules, the grain of every decision; usually a transformer or residual block. (model) is the root itself.",
    ),
    ("micro-batch", "One forward and backward; several make a step with gradient accumulation."),
    (
        "saved, kept for the backward",
        "Tensors that autograd holds from the forward until the backward has used them.",
    ),
    ("model states", "Parameters, gradients and optimizer state, alive when the optimizer step begins."),
    (
        "MFU, HFU",
        "Model and hardware FLOPs utilization: FLOPs that the model needs, or that were executed (recomputation too), over what the hardware could do in the median step. Convention exact: matrix products and convolutions, causal attention as its T(T+1)/2 pairs, the head in, embedding look-up out. Convention palm: 6N + 12LHQT a token (arXiv:2204.02311).",
    ),
    (
        "exposed, overlapped communication",
        "Time in which a collective was in flight and no operator ran, or one did.",
    ),
    ("waiting", "Time that a rank's collective was in flight before the last rank had started its own."),
    ("not recorded", "It could not be seen in this run. Never zero, and never a guess."),
)


def notes_and_problems(analysis: Analysis) -> Sequence[Block]:
    """What the recorder noted and what of the run is damaged or absent, said once for all ranks alike."""
    run = analysis.run
    rows = [("problem", "-", problem) for problem in run.problems]
    if run.missing_ranks:
        missing = ", ".join(str(rank) for rank in run.missing_ranks[:32])
        more = len(run.missing_ranks) - 32
        text = "No readable record" + (f"; and {counted(more, 'more rank')}" if more > 0 else "")
        rows.append(("missing", missing, text))
    rows += [
        ("unfinished", str(rank.rank), unfinished_in_words(rank))
        for rank in analysis.unfinished_ranks[:MAX_NOTES]
    ]
    told: dict[tuple[str, str], list[int]] = {}
    for rank in run.ranks:
        for note in rank.notes:
            told.setdefault((note.level, note.text), []).append(rank.process.rank)
    rows += [(level, ", ".join(map(str, ranks)), text) for (level, text), ranks in told.items()]
    if not rows:
        return [paragraph("Nothing to report: all ranks are readable and the recorder noted nothing.")]
    more = len(rows) - MAX_NOTES
    return [
        table(
            "What was noted",
            ("level", "rank", "what"),
            rows[:MAX_NOTES],
            kinds=(),
            num_text=3,
            note=f"{more} more are left out." if more > 0 else "",
        )
    ]


def alert(analysis: Analysis, whose: str = "This run") -> str:
    """A line at the top of the page where something is wrong with the run itself."""
    run = analysis.run
    trouble = list(run.problems[:5])
    if run.missing_ranks:
        trouble.append(
            f"{len(run.missing_ranks)} of {counted(run.manifest.world_size, 'rank')} left no readable record: {ranks_in_words(run.missing_ranks)}"
        )
    if len(run.ranks) + len(run.missing_ranks) > 1:
        trouble += [
            f"rank {rank.rank}: {unfinished_in_words(rank)}" for rank in analysis.unfinished_ranks[:8]
        ]
    failed = next((e for rank in run.ranks if (e := rank.ending) is not None and e.exit_code), None)
    if failed is not None:
        raised = "" if failed.exception is None else f" ({failed.exception})"
        trouble.append(f"the script ended with exit code {failed.exit_code}{raised}")
    elif len(run.ranks) + len(run.missing_ranks) == 1:
        trouble += [unfinished_in_words(rank) for rank in analysis.unfinished_ranks]
    if not trouble:
        return ""
    items = "".join(f"<li>{html_text(text)}</li>" for text in trouble)
    return f'<div class="alert" role="status"><b>{whose} is not whole.</b><ul>{items}</ul></div>'


def how_to_read() -> Block:
    phases = ", ".join(PHASE_NAMES.get(phase, phase) for phase in PHASES if phase != "baseline")
    definitions = (
        *_DEFINITIONS,
        ("phases", f"Where in a step a moment is: {phases}. Baseline: alive when the traced step began."),
    )
    items = "".join(f"<dt>{html_text(word)}</dt><dd>{html_text(text)}</dd>" for word, text in definitions)
    return Html(
        "<p>Drag in a figure to zoom, double-click to go back; click a name in a legend to hide it. "
        f"All of it works without a network.</p><dl>{items}</dl>"
    )

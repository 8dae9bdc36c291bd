"""Parameters, gradients and optimizer state: theory beside measured."""

from __future__ import annotations

from collections.abc import Iterator

from memadvisor.analyzers.model_states import ModelStates, difference_text, expected_text
from memadvisor.report.blocks import INNER, MEASURED, THEORY, Block, Missing, table
from memadvisor.report.view import RankView
from memadvisor.units import format_bytes, format_count

_NAMES = {"parameter": "parameters", "gradient": "gradients", "optimizer_state": "optimizer state"}


def model_state_table(view: RankView) -> Block:
    """One row a kind of state, the optimizer's components below it, and the sum."""
    title = "Model states"
    states = view.result.model_states
    if states is None:
        why = view.why_untraced
        if view.recorded.traced_step is not None and not view.recorded.has_lost_trace:
            why = "The traced step had no optimizer step, and model states are those alive when it begins."
        return Missing(name="states", title=title, why=why)
    each = states.bytes_per_parameter
    return table(
        title,
        ("", "dtype", "elements", "theory", "measured", "difference", "B per parameter"),
        [*_rows(states), _total(states)],
        kinds=(MEASURED, THEORY),
        basis=f"{view.traced_basis}, when the optimizer step begins",
        num_text=2,
        strong_last=True,
        note=f"{format_count(states.num_params)} parameters ({format_count(states.num_trainable)} trained)"
        + ("" if each is None else f", {each:.2f} B each")
        + f". Theory: {states.theory_text}, each element in its own dtype (arXiv:1910.02054, section 3); "
        "the difference is padding, step counters, and whatever theory does not know."
        + "".join(f" {note}" for note in states.notes),
    )


def _rows(states: ModelStates) -> Iterator[tuple[str, ...]]:
    for kind, expected_bytes, measured_bytes in states.by_kind:
        rows = [row for row in states.components if row.kind == kind]
        dtypes = ", ".join(dict.fromkeys(row.dtype for row in rows))
        elements = sum(row.num_elements for row in rows) if kind != "optimizer_state" else None
        yield (
            _NAMES[kind],
            dtypes or "-",
            "" if elements is None else format_count(elements),
            *_sizes(expected_bytes, measured_bytes, states.num_params),
        )
        for row in rows:
            if row.recorded_bytes is not None:
                sizes = _sizes(row.expected_bytes, row.recorded_bytes, states.num_params)
                yield f"{INNER}{row.component}", row.dtype, format_count(row.num_elements), *sizes


def _total(states: ModelStates) -> tuple[str, ...]:
    sizes = _sizes(states.theory_bytes, states.measured_bytes, states.num_params)
    return "together", "", "", *sizes


def _sizes(expected_bytes: int | None, measured_bytes: int, num_params: int) -> tuple[str, str, str, str]:
    return (
        expected_text(expected_bytes),
        format_bytes(measured_bytes),
        difference_text(expected_bytes, measured_bytes),
        f"{measured_bytes / num_params:.2f}" if num_params else "-",
    )

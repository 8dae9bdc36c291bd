"""The Plan tab: what the applied plan promised beside what this run measured, and what it does to each unit."""

from __future__ import annotations

from rich.text import Text
from textual.app import ComposeResult
from textual.widgets import DataTable, Static

from memadvisor.analyzers.comparison import Compared, Comparison
from memadvisor.analyzers.planned_lanes import planned_lanes
from memadvisor.compression import compression_text
from memadvisor.local_sgd import local_sgd_text
from memadvisor.plan import Plan
from memadvisor.plan_words import kept_calls_text, ranks_text, unit_parts_text
from memadvisor.planning.reasons import stages_text
from memadvisor.precision import precision_text
from memadvisor.report.plan_effect import effect_in_words, results_in_words
from memadvisor.tui.drawing import CATEGORY_COLORS
from memadvisor.tui.pane import Pane
from memadvisor.tui.planned_lanes import lane_lines
from memadvisor.tui.table import Column, Row, refill, row_table
from memadvisor.tui.text import lines, number, paragraph, words
from memadvisor.tui.view import View
from memadvisor.units import counted, format_bytes, format_change, format_seconds

_NO_PLAN = (
    "No plan was applied in this run. `memadvisor advise RUN --memory SIZE -o plan.json` makes one, "
    "`memadvisor run --plan plan.json SCRIPT` applies it."
)
_COMPARED = (
    Column("figure"),
    Column("predicted", is_number=True),
    Column("measured", is_number=True),
    Column("error", is_number=True),
)
_UNITS = (Column("unit"), Column("forward"), Column("elsewhere"))
_UNITS_OF_SEVERAL_RANKS = (*_UNITS, Column("ZeRO stage", is_number=True))


class Lanes(Static, can_focus=True):
    """Takes the focus, so that a small screen, which has it below its edge, comes to it by Tab."""


class PlanPane(Pane):
    """Predicted and measured in one table, lane by lane below it, the plan's units in another table."""

    def content(self) -> ComposeResult:
        yield Static(id="plan-summary", markup=False)
        yield row_table("plan-compared")
        yield Lanes(id="plan-lanes", markup=False)
        yield row_table("plan-units")

    def missing(self, view: View) -> str | None:
        return _NO_PLAN if view.run.plan is None else None

    def fill(self, view: View) -> None:
        plan, found = view.run.plan, view.analysis.comparison
        if plan is None:
            return
        self.query_one("#plan-summary", Static).update(
            lines([*_summary(plan, found), paragraph(results_in_words(view.analysis))])
        )
        compared = self.query_one("#plan-compared", DataTable)
        compared.display = found is not None
        if found is not None:
            refill(compared, _COMPARED, _compared_rows(found))
        drawn = self._lanes(view)
        lanes = self.query_one("#plan-lanes", Lanes)
        lanes.display = bool(drawn)
        lanes.update(lines(drawn))
        units = self.query_one("#plan-units", DataTable)
        units.display = bool(plan.units)
        columns = _UNITS if plan.num_ranks == 1 else _UNITS_OF_SEVERAL_RANKS
        refill(units, columns, [_unit_row(i, plan) for i in range(len(plan.units))])

    def _lanes(self, view: View) -> list[Text]:
        found = planned_lanes(view.analysis)
        return [] if found is None else lane_lines(found, max(20, self.size.width - 6))


def _sharding(plan: Plan) -> str:
    if plan.ranks:
        return f"A pipeline on {plan.num_ranks} ranks, {ranks_text(plan)}"
    return "One rank" if plan.num_ranks == 1 else f"ZeRO stage {stages_text(plan)}, {plan.num_ranks} ranks"


def _summary(plan: Plan, found: Comparison | None) -> list[Text]:
    rows = [
        paragraph(
            (f"{_sharding(plan)}, policy {plan.policy}", "bold"),
            f"; shards in groups of {plan.group_ranks}" if plan.group_ranks < plan.num_ranks else "",
            precision_text(plan.precision),
            compression_text(plan.compression),
            local_sgd_text(plan.local_sgd),
            f"; {plan.elsewhere}" if plan.elsewhere else "",
            f"; {len(plan.recomputed_units)} of {counted(len(plan.units), 'unit')} recomputed"
            if plan.units
            else "",
            f", {len(plan.parted_units)} in parts" if plan.parted_units else "",
        ),
        paragraph((plan.why, "dim")),
    ]
    if found is None:
        rows.append(paragraph("The plan carries no prediction, so there is nothing to compare."))
    elif found.budget_bytes is not None:
        verdict = {
            True: ("held", "#2ec4a6"),
            False: ("did not hold", "#e5484d"),
            None: ("not checked yet", "dim"),
        }
        rows.append(
            paragraph(
                ("budget ", "bold"), f"{format_bytes(found.budget_bytes)}: ", verdict[found.within_budget]
            )
        )
    if found is not None:
        predicted, measured = found.peak_position
        rows.append(
            paragraph(f"peak predicted in {predicted}, measured in {measured or 'nothing traced yet'}")
        )
        rows += [paragraph(effect)] if (effect := effect_in_words(found)) else []
        rows += [paragraph((said, "#f2c14e")) for said in found.remarks]
    return rows


def _compared_rows(found: Comparison) -> list[Row]:
    """Each total with its parts below it."""
    names = [name for name in CATEGORY_COLORS if name in found.shown_by_category_bytes]
    return [
        _compared_row("peak", found.peak_bytes, in_seconds=False),
        *(_compared_row(name, found.by_category_bytes[name], in_seconds=False) for name in names),
        _compared_row("step time", found.step_time_s, in_seconds=True),
        *(
            _compared_row(name, pair, in_seconds=True, is_part=True)
            for name, pair in found.components_s.items()
        ),
    ]


def _compared_row(name: str, figure: Compared, *, in_seconds: bool, is_part: bool = False) -> Row:
    is_inner = is_part or name in CATEGORY_COLORS

    def shown(value: float | None) -> str:
        return format_seconds(value) if in_seconds else format_bytes(value)

    return Row(
        key=name,
        cells=(
            words(
                "  " * is_inner + name.replace("_", " "),
                CATEGORY_COLORS.get(name, "dim" if is_part else "bold"),
            ),
            number(shown(figure.predicted) if figure.predicted is not None else "not predicted"),
            number(shown(figure.measured)),
            number(format_change(figure.error_fraction)),
        ),
    )


def _unit_row(position: int, plan: Plan) -> Row:
    unit = plan.units[position]
    is_again, parts = unit.name in plan.recomputed_units, unit_parts_text(unit)
    stage = number(f"{unit.zero_stage}{' kept' if unit.is_kept else ''}")
    return Row(
        key=str(position),
        cells=(
            words(unit.name or "(model)"),
            words(
                ("recomputed" if is_again else "kept")
                + (f", {calls}" if (calls := kept_calls_text(unit)) else "")
                + (f"; again by themselves: {parts}" if parts else ""),
                "#f2c14e" if is_again or parts else "",
            ),
            words(unit.elsewhere or "-", "" if unit.elsewhere else "dim"),
            *((stage,) if plan.num_ranks > 1 else ()),
        ),
    )

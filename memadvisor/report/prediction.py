"""The plan that was applied, and what it predicted beside what this run measured."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from memadvisor.analyzers.analysis import Analysis
from memadvisor.analyzers.comparison import Compared, Comparison
from memadvisor.category_words import category_name
from memadvisor.plan import Plan
from memadvisor.plan_words import kept_calls_text, options_text, unit_parts_text
from memadvisor.policies import resolve_units
from memadvisor.report.blocks import INNER, MEASURED, PREDICTED, Block, Figure, Missing, paragraph, table
from memadvisor.report.planned_lanes import lanes_figure
from memadvisor.report.words import STACK, bytes_scale, color_of, unit_name
from memadvisor.unit_ranges import unit_ranges
from memadvisor.units import counted, format_bytes, format_change, format_seconds

MAX_UNITS = 200
_BASIS = "largest rank's peak, slowest rank's median step"


_EXPOSED = (
    " Exposed communication is measured as its share of the traced step; the rest of a step that is neither that, a second "
    "forward nor the optimizer's is compute."
)


def plan_and_prediction(analysis: Analysis) -> Sequence[Block]:
    """Overlay and table of errors, then the plan unit by unit."""
    plan, compared = analysis.run.plan, analysis.comparison
    title = "Predicted beside measured"
    if plan is None:
        where = shlex.quote(str(analysis.run.path))
        why = (
            "No plan was applied to this run. Make one with "
            f"`memadvisor advise {where} --memory SIZE -o plan.json` and apply it with "
            "`memadvisor run --plan plan.json SCRIPT`: the run that it leaves has this figure."
        )
        return [Missing(name="prediction", title=title, why=why, absence="Nothing to compare.")]
    if compared is None:
        why = "The plan was made by hand and predicts nothing; plans of `memadvisor advise` do."
        missing = Missing(name="prediction", title=title, why=why, absence="Nothing to compare.")
        return [missing, *_plan_blocks(plan, analysis)]
    return [
        _figure(compared, title),
        _errors(compared),
        *lanes_figure(analysis),
        *_plan_blocks(plan, analysis),
    ]


def _figure(compared: Comparison, title: str) -> Figure:
    names = [name for name in STACK if name in compared.shown_by_category_bytes]
    pairs = [compared.by_category_bytes[name] for name in names]
    factor, unit = bytes_scale(value for pair in pairs for value in (pair.predicted, pair.measured) if value)
    colors = [color_of(name) for name in names]
    series = (
        ("measured", [pair.measured for pair in pairs], {"color": colors}),
        (
            "predicted",
            [pair.predicted for pair in pairs],
            {
                "color": "var(--card)",
                "line": {"width": 2, "color": colors},
                "pattern": {"shape": "/", "size": 5, "fgcolor": colors, "bgcolor": "var(--card)"},
            },
        ),
    )
    return Figure(
        name="prediction",
        title=title,
        kinds=(PREDICTED, MEASURED),
        basis=_BASIS,
        label=f"Peak predicted {format_bytes(compared.peak_bytes.predicted)}, "
        f"measured {format_bytes(compared.peak_bytes.measured)}.",
        traces=[
            {
                "type": "bar",
                "name": name,
                "x": [category_name(category) for category in names],
                "y": [None if value is None else value / factor for value in values],
                "marker": marker,
                "hovertext": [
                    f"{category_name(category)}, {name}: {format_bytes(value)}"
                    for category, value in zip(names, values, strict=True)
                ],
                "hoverinfo": "text",
            }
            for name, values, marker in series
        ],
        layout={
            "xaxis": {"type": "category"},
            "yaxis": {"title": {"text": f"at the peak ({unit})"}},
            "barmode": "group",
            "hovermode": "closest",
            "showlegend": False,
        },
        height_px=330,
        note="Solid is measured, hatched predicted. "
        f"The peak was predicted in {compared.peak_position[0]} and measured in "
        f"{compared.peak_position[1] or 'a place not recorded'}.",
    )


def _errors(compared: Comparison) -> Block:
    rows = [
        ("peak", *_cells(compared.peak_bytes, in_bytes=True)),
        *(
            (f"{INNER}rank {rank}", *_cells(pair, in_bytes=True))
            for rank, pair in compared.rank_peak_bytes.items()
        ),
        *(
            (f"{INNER}{category_name(name)}", *_cells(compared.by_category_bytes[name], in_bytes=True))
            for name in STACK
            if name in compared.shown_by_category_bytes
        ),
        ("step time", *_cells(compared.step_time_s, in_bytes=False)),
        *(
            (f"{INNER}{name.replace('_', ' ')}", *_cells(pair, in_bytes=False))
            for name, pair in compared.components_s.items()
        ),
    ]
    if compared.reserved_bytes.predicted is not None:
        rows.insert(1, ("reserved", *_cells(compared.reserved_bytes, in_bytes=True)))
    said = (compared.unsteady_in_words, compared.other_speed)
    remarks = "".join(f"{each} " for each in said if each is not None)
    budget = ""
    if compared.budget_bytes is not None and compared.within_budget is not None:
        held = "held" if compared.within_budget else "did not hold"
        budget = f"The budget of {format_bytes(compared.budget_bytes)} {held}. "
    return table(
        "Errors of the prediction",
        ("", "predicted", "measured", "error"),
        rows,
        kinds=(PREDICTED, MEASURED),
        basis=_BASIS,
        note=f"{budget}{remarks}The error is (predicted - measured) / measured.{_EXPOSED * bool(compared.components_s)}",
    )


def _cells(pair: Compared, *, in_bytes: bool) -> tuple[str, str, str]:
    form = format_bytes if in_bytes else format_seconds
    return (
        "-" if pair.predicted is None else form(pair.predicted),
        form(pair.measured),
        format_change(pair.error_fraction),
    )


def _choices_by_rank(plan: Plan) -> Sequence[Block]:
    """Of a pipeline or tensor parallelism, whose ranks have units, or parts of them, of their own."""
    rows = []
    for own in plan.ranks:
        names = plan.of_rank(own.rank).recomputed_units
        away = [unit.name for unit in own.units if unit.elsewhere]
        tiers = {unit.activation_tier for unit in own.units} - {"device"}
        moved = f"{unit_ranges(away)}: {' and '.join(sorted(tiers))}" if away else "-"
        rows.append((str(own.rank), f"{len(names)} of {len(own.units)}", unit_ranges(names) or "-", moved))
    title = "The plan, rank by rank"
    headings = ("rank", "recomputed", "units", "activations elsewhere")
    why = [paragraph(f"Why this plan: {plan.why}", "lead")] if plan.why else []
    basis = f"plan for {counted(plan.num_ranks, 'rank')}, policy {plan.policy}"
    return [table(title, headings, rows, kinds=(), basis=basis, num_text=4), *why]


def _plan_blocks(plan: Plan, analysis: Analysis) -> Sequence[Block]:
    if plan.ranks:
        return _choices_by_rank(plan)
    chosen = resolve_units(plan, analysis.run.ranks[0].units)
    more = len(chosen) - MAX_UNITS
    again = {name for stretch in plan.unit_stretches for name in stretch}
    stage = ("ZeRO stage",) if plan.num_ranks > 1 else ()  # one rank has none
    batch = "as the script has it" if plan.micro_batch_size is None else str(plan.micro_batch_size)
    accumulation = "as the script has it" if plan.grad_accum is None else str(plan.grad_accum)
    return [
        table(
            "The plan, unit by unit",
            ("unit", "forward in the backward", "elsewhere", *stage),
            (
                (
                    unit_name(unit.name),
                    ("recomputed" if unit.recompute or unit.name in again else "kept")
                    + (f", but for {len(unit.kept)} outputs" if unit.kept else "")
                    + (f", {calls}" if (calls := kept_calls_text(unit)) else "")
                    + (f"; again by themselves: {parts}" if (parts := unit_parts_text(unit)) else ""),
                    unit.elsewhere or "-",
                    *(
                        (
                            f"{unit.zero_stage}{', parameters kept until the backward' if unit.is_kept else ''}",
                        )
                        if stage
                        else ()
                    ),
                )
                for unit in chosen[:MAX_UNITS]
            ),
            kinds=(),
            basis=f"plan for {counted(plan.num_ranks, 'rank')}, policy {plan.policy}" + options_text(plan),
            num_text=3,
            note=f"Micro-batch {batch}, accumulation {accumulation}."
            + (
                f" {counted(more, 'further unit')} {'is' if more == 1 else 'are'} left out."
                if more > 0
                else ""
            ),
        ),
        *([paragraph(f"Why this plan: {plan.why}", "lead")] if plan.why else []),
    ]

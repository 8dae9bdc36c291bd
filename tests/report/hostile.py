"""A run whose every name tries to break the page, and one that carries a plan."""

from __future__ import annotations

import dataclasses

from memadvisor.plan import Plan, Prediction, UnitPlan
from memadvisor.run.documents import Note
from memadvisor.run.run import RankRun, Run
from tests.make_run import make_run

HOSTILE_NAMES = (
    "</script><script>document.title='broken'</script>",
    "<img src=x onerror=\"document.title='broken'\">",
    "layers[/0]<b>%{y}</b>&amp;",
    "\x1b[31m\u2028\u202e\udcff<!--",
    "$\\alpha$ `code` var(--activation)",
)
PLAN = Plan(
    num_ranks=2,
    zero_stage=2,
    policy="chosen",
    units=(UnitPlan(name="blocks.1", zero_stage=2, recompute=True),),
    micro_batch_size=2,
    grad_accum=2,
    prediction=Prediction(
        peak_bytes=5_000_000,
        step_time_s=0.11,
        by_category_bytes={"parameter": 1_000_000, "activation": 3_000_000, "communication": 1_000_000},
        exposed_communication_s=0.001,
        peak_position="backward of blocks.2",
    ),
    budget_bytes=5_500_000,
    why="recomputes <blocks.1>, the cheapest",
)


def hostile_run() -> Run:
    """Two ranks with a plan; modules, units, operators, shapes, notes and arguments are all hostile."""
    run = make_run(
        num_blocks=2,
        plan=PLAN,
        problems=("journal </script><!-- damaged",),
        notes=(Note(level="warning", text="saw <i>this</i>", time_s=None),),
        device_name="<u>processor</u>",
    )
    names = dict(zip(("embedding", "blocks.0", "blocks.1", "head"), HOSTILE_NAMES, strict=False))
    manifest = dataclasses.replace(run.manifest, script=HOSTILE_NAMES[0], arguments=HOSTILE_NAMES[1:])
    return dataclasses.replace(
        run, manifest=manifest, ranks=tuple(_renamed(rank, names) for rank in run.ranks)
    )


def _renamed(rank: RankRun, names: dict[str, str]) -> RankRun:
    def rename(text: str) -> str:
        for old, new in names.items():
            if text == old or text.startswith(old + "."):
                return new + text[len(old) :]
        return text

    changed = {}
    for field in dataclasses.fields(rank):
        rows = getattr(rank, field.name)
        if isinstance(rows, tuple):
            changed[field.name] = tuple(_renamed_row(row, rename) for row in rows)
    return dataclasses.replace(rank, **changed)


def _renamed_row(row, rename):
    texts = {
        name: rename(getattr(row, name))
        for name in ("module", "unit", "name", "parameter")
        if isinstance(getattr(row, name, None), str)
    }
    if hasattr(row, "operator"):
        texts["operator"] = HOSTILE_NAMES[2]
    if hasattr(row, "dtype") and hasattr(row, "shape"):
        texts["shape"] = HOSTILE_NAMES[3]
    return dataclasses.replace(row, **texts)

"""The command that applies a plan to the script of a recorded run, or the call where there is none, for a user to copy."""

from __future__ import annotations

import shlex

from memadvisor.run.run import DEFAULT_TRACE_STEP, NOTEBOOK, PROMPT, UNKNOWN, Run

NOT_WRITTEN = "No plan is written yet: with `-o plan.json` it is, and the command that applies it is shown."


def apply_command(run: Run, plan: str, num_ranks: int, num_nodes: int | None = None) -> str:
    """`plan`: its file. `num_nodes`: those of the run where it is None; ranks of several are the launcher's to start."""
    script, arguments = run.manifest.script, run.manifest.arguments
    if script in (NOTEBOOK, PROMPT):
        return f"memadvisor.apply({plan!r}, model, optimizer)"
    words = ["memadvisor", "run", "--plan", shlex.quote(plan)]
    if num_nodes is None:
        num_nodes = len({rank.process.host for rank in run.ranks})
    if num_nodes > 1:
        words[:1] = ["torchrun", "...", "-m", "memadvisor"]
    elif num_ranks > 1:
        words += ["--nproc", str(num_ranks)]
    traced = run.traced_step
    if traced is not None and traced.index != DEFAULT_TRACE_STEP:
        words += ["--trace-step", str(traced.index)]  # or measured would be another step than predicted
    if script == UNKNOWN:
        return " ".join((*words, "SCRIPT"))
    module = ["-m"] if script.replace(".", "").isidentifier() and not script.endswith(".py") else []
    return " ".join((*words, *module, *map(shlex.quote, (script, *arguments))))

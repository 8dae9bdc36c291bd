"""Parameters, gradients and optimizer state of two runs."""

from __future__ import annotations

from memadvisor.report.blocks import MEASURED, Block, Missing, table
from memadvisor.report.difference_view import PairView
from memadvisor.report.difference_words import texts
from memadvisor.units import format_bytes, format_count


def states_of_both(view: PairView) -> Block:
    """A row a kind of state, and the number of parameters."""
    title = "Model states of both"
    rank = view.rank
    if all(change.before is None and change.after is None for change in rank.model_states.values()):
        why = (
            view.why_untraced
            or "Neither traced step had an optimizer step, and model states are those alive when it begins."
        )
        return Missing(name="both-states", title=title, why=why)
    return table(
        title,
        ("", "before", "after", "difference", ""),
        [
            *(
                (name.removesuffix("_bytes").replace("_", " "), *texts(change, format_bytes))
                for name, change in rank.model_states.items()
            ),
            ("number of parameters", *texts(rank.num_params, format_count)),
        ],
        kinds=(MEASURED,),
        basis=view.traced_basis,
    )

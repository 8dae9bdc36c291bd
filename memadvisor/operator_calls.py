"""What operators are called, and which calls draw random numbers or count: as the recorder notes it, the analyzers
read it, and the engines find it again.

torch marks operators that may draw (`nondeterministic_seeded`), attention among them, which draws only where its
`dropout_p` is above 0. Operators are asked by their attributes, so torch is not imported here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Not counted among a unit's operators: autocast makes casts of weights where its cache has none, and a saved tensor is
# detached in a second run alone, so a second run may call them at other times than the first.
UNCOUNTED = ("aten::_to_copy", "aten::detach")


def operator_name(operator: Any) -> str:
    """Of an `OpOverload`, without its overload: `aten::add_`."""
    return f"{operator.namespace}::{operator._schema.name.partition('::')[2]}"


def may_draw(operator: Any) -> bool:
    """Whether an `OpOverload` draws random numbers for some arguments."""
    return any(tag.name == "nondeterministic_seeded" for tag in operator.tags)


def dropout_position(operator: Any) -> int | None:
    """The place of `dropout_p` among its arguments; None where it has none."""
    names = [argument.name for argument in operator._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else None


def is_without_dropout(position: int | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an operator with `dropout_p` at this place draws nothing; its default is 0."""
    if position is None:
        return False
    return not (args[position] if len(args) > position else kwargs.get("dropout_p", 0.0))

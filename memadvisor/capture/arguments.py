"""One call of an operator by the names of its schema, and the arithmetic that is counted of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Arithmetic(NamedTuple):
    """FLOPs of one call: executed, and needed by the model. `shapes` are its matrices: the two factors of a
    product, input and weight of a convolution, (batch, heads, length, width) of query, key and value."""

    executed_flops: int
    needed_flops: int
    shapes: str

    @classmethod
    def of(cls, executed: int, needed: int, *matrices: torch.Tensor) -> Arithmetic:
        return cls(int(executed), int(needed), shapes_text(*(tuple(matrix.shape) for matrix in matrices)))

    @classmethod
    def all_needed(cls, flops: int, *matrices: torch.Tensor) -> Arithmetic:
        return cls.of(flops, flops, *matrices)


def shapes_text(*shapes: tuple[Any, ...]) -> str:
    """`[[8, 32], [32, 48]]`; a size that is no number (of a jagged dimension) is null, so that it is JSON."""
    sizes = (", ".join(str(int(n)) if type(n) is int else "null" for n in shape) for shape in shapes)
    return "[" + ", ".join(f"[{text}]" for text in sizes) + "]"


def dense_values(tensor: Any) -> Any:
    """The numbers of a tensor: a jagged one keeps its rows one after the other, without padding."""
    return tensor._values if tensor.layout == torch.jagged else tensor


class Arguments:
    """Arguments by name, whether given by position, by keyword or left at their default."""

    __slots__ = ("_values", "func", "out")

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        self.func = func
        self.out = out
        values = {}
        for position, argument in enumerate(func._schema.arguments):
            name = argument.name
            values[name] = (
                args[position] if position < len(args) else kwargs.get(name, argument.default_value)
            )
        self._values = values

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def get(self, name: str, default: Any = None) -> Any:
        """`default` where the schema has no such argument."""
        return self._values.get(name, default)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    @property
    def result(self) -> torch.Tensor:
        """The first tensor that came out."""
        first: torch.Tensor = self.out[0] if isinstance(self.out, (tuple, list)) else self.out
        return first

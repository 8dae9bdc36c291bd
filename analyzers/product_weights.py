"""Which parameters a forward multiplies by, and how often: matrices that every token meets, and experts.

Every product is laid on the parameter of its module that has its shape. Each parameter must meet all tokens once;
experts share them, so that together they meet each token as often as experts are active.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memadvisor.run.run import RankRun

Shape = tuple[int, ...]


class NoTransformer(Exception):
    """Why a run's model is no transformer that the formulas know; its text is shown."""


@dataclass(frozen=True, slots=True)
class Product:
    """A product of two matrices, or of a batch of them, in a module's forward."""

    module: str
    left: Shape
    right: Shape

    @property
    def num_rows(self) -> int:
        rows = 1
        for size in self.left[:-1]:
            rows *= size
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSizes:
    """Elements by use; the fields of the same names of TransformerShape."""

    vocabulary: int | None
    num_experts: int | None
    num_active_experts: int | None
    num_parameters: int
    num_frozen_parameters: int
    num_embedding_weights: int
    num_product_weights: int
    num_expert_weights: int
    num_router_weights: int
    num_head_weights: int


class ProductWeights:
    """Told of each product of the forward; says what the model's parameters are for."""

    def __init__(self, rank: RankRun) -> None:
        types = {module.name: module.type_name for module in rank.modules}
        self._parameters = {parameter.name: parameter for parameter in rank.parameters}
        self._shapes = {name: _dimensions(p.shape) for name, p in self._parameters.items()}
        self._by_sizes: dict[Shape, list[str]] = defaultdict(list)  # names of matrices, by sizes in order
        for name, shape in self._shapes.items():
            if len(shape) >= 2:
                self._by_sizes[tuple(sorted(shape))].append(name)
        self._tables = {n for n in self._parameters if types.get(_parent(n), "").endswith("Embedding")}
        self._rows: dict[tuple[str, Shape], int] = defaultdict(int)  # by module and sizes in order

    def take(self, product: Product) -> bool:
        """Note the product's rows; False where no parameter in its module has that shape."""
        sizes = tuple(sorted(product.right))
        if not self._candidates(product.module, sizes):
            return False
        self._rows[product.module, sizes] += product.num_rows
        return True

    def sizes(self, num_tokens: int) -> WeightSizes:
        """Raises NoTransformer where a matrix is not multiplied with the tokens as told above."""
        rows = self._rows_by_parameter()
        experts = self._experts(rows, num_tokens)
        dense = set(rows) - set(experts)
        kinds = set(experts.values())
        if len(kinds) > 1:
            raise NoTransformer("its layers have different numbers of experts")
        num_experts, num_active = next(iter(kinds), (None, None))
        own = [parameter for parameter in self._parameters.values() if not parameter.tied_to]
        heads = self._heads(dense)
        multiplied = {self._own(name) for name in dense}
        return WeightSizes(
            vocabulary=max((max(self._shapes[name]) for name in heads), default=None),
            num_experts=num_experts,
            num_active_experts=num_active,
            num_parameters=sum(parameter.num_elements for parameter in own),
            num_frozen_parameters=sum(p.num_elements for p in own if not p.requires_grad),
            num_embedding_weights=self._elements(n for n in self._tables if self._own(n) not in multiplied),
            num_product_weights=self._elements(dense),
            num_expert_weights=self._elements(experts),
            num_router_weights=self._elements(self._routers(dense, experts)),
            num_head_weights=self._elements(heads),
        )

    def _candidates(self, module: str, sizes: Shape) -> list[str]:
        """Parameters inside the module with these sizes, whichever way round; a tied one under one name, which
        is not that of the table that is looked up in, if there is another."""
        inside = f"{module}." if module else ""
        names = [name for name in self._by_sizes.get(sizes, ()) if name.startswith(inside)]
        multiplied = [name for name in names if name not in self._tables] or names
        return list({self._own(name): name for name in multiplied}.values())

    def _rows_by_parameter(self) -> dict[str, int]:
        """The innermost modules decide first; a product in a module around them means what is left over."""
        rows: dict[str, int] = {}
        for (module, sizes), num_rows in sorted(self._rows.items(), key=lambda item: -len(item[0][0])):
            names = [name for name in self._candidates(module, sizes) if name not in rows]
            share, rest = divmod(num_rows, max(1, len(names)))
            if rest or not names:
                raise NoTransformer(f"products in {module!r} cannot be told apart")
            rows.update(dict.fromkeys(names, share))
        return rows

    def _experts(self, rows: dict[str, int], num_tokens: int) -> dict[str, tuple[int, int]]:
        """(experts, active ones) by parameter: one of a family that shares the tokens, or all experts in one."""
        found: dict[str, tuple[int, int]] = {}
        for name, num_rows in rows.items():
            if num_rows == num_tokens or name in found:
                continue
            if len(self._shapes[name]) == 3:
                members, counts, num_experts = [name], [num_rows], self._shapes[name][0]
            else:
                members = self._family(name)
                counts, num_experts = [rows.get(member, 0) for member in members], len(members)
                if num_experts == 1 or max(counts) > num_tokens or set(counts) <= {0, num_tokens}:
                    text = f"{name} is multiplied with {num_rows} rows, not with the {num_tokens} tokens"
                    raise NoTransformer(text)
            active, rest = divmod(sum(counts), num_tokens)
            if rest or not active or active > num_experts:
                raise NoTransformer(f"the experts of {name} do not share all tokens")
            found.update(dict.fromkeys(members, (num_experts, active)))
        return found

    def _family(self, name: str) -> list[str]:
        """Matrices of one shape whose names differ in one number alone, the last one where there are such."""
        for start, end in reversed(_numbers(name)):
            before, after = name[:start], name[end:]
            members = [
                other
                for other, shape in self._shapes.items()
                if other.startswith(before)
                and other.endswith(after)
                and other[len(before) : len(other) - len(after)].isdecimal()
                and shape == self._shapes[name]
                and other not in self._tables
                and not self._parameters[other].tied_to
            ]
            if len(members) > 1:
                return members
        return [name]

    def _heads(self, dense: Iterable[str]) -> list[str]:
        """Matrices as large as the largest table, which are not one of several in equal layers."""
        shapes = [tuple(sorted(self._shapes[name])) for name in self._tables if len(self._shapes[name]) == 2]
        largest = max(shapes, key=lambda shape: shape[0] * shape[1], default=None)
        return [
            name
            for name in dense
            if tuple(sorted(self._shapes[name])) == largest and len(self._family(name)) == 1
        ]

    def _routers(self, dense: Iterable[str], experts: dict[str, tuple[int, int]]) -> set[str]:
        """What chooses among experts: a matrix with one output an expert, beside them."""
        found = set()
        for name, (num_experts, _) in experts.items():
            is_stacked = len(self._shapes[name]) == 3
            beside = _parent(name if is_stacked else _where_they_differ(self._family(name)))
            choices = [
                n
                for n in dense
                if self._shapes[n][0] == num_experts and n.startswith((f"{beside}.", f"{_parent(beside)}."))
            ]
            found.update([n for n in choices if n.startswith(f"{beside}.")] or choices)
        return found

    def _own(self, name: str) -> str:
        return self._parameters[name].tied_to or name

    def _elements(self, names: Iterable[str]) -> int:
        return sum(self._parameters[name].num_elements for name in {self._own(name) for name in names})


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _where_they_differ(names: Sequence[str]) -> str:
    """The dotted beginning that all the names share."""
    shared = []
    for parts in zip(*(name.split(".") for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def _numbers(name: str) -> list[tuple[int, int]]:
    """Where the components that are numbers begin and end."""
    return [match.span() for match in re.finditer(r"(?<![^.])[0-9]+(?![^.])", name)]


def _dimensions(shape: str) -> Shape:
    return tuple(int(number) for number in re.findall(r"[0-9]+", shape))

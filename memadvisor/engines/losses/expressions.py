"""What a tensor made of the head's product is, as an expression that is worked out for some rows at a time.

Every operator in it takes rows apart from each other: element by element, or along the last dimension. So a chunk of rows
of the result needs the same rows of what it is made of, and nothing of a whole tensor's size is ever there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from memadvisor.engines.losses.rows import RowMap, Rows, rows_of

# Some rows of a result, of a function that takes these rows of a plain tensor, and of the inputs' rows.
Call = Callable[[Callable[[torch.Tensor], torch.Tensor], Sequence[torch.Tensor]], torch.Tensor]


class Expression:
    """(positions, `width`) values of one dtype on one device. `inputs`: what its rows are made of."""

    __slots__ = ("device", "dtype", "inputs", "row_map", "width")

    def __init__(
        self,
        row_map: RowMap,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        inputs: Sequence[Expression] = (),
    ) -> None:
        self.row_map = row_map
        self.width = width
        self.dtype = dtype
        self.device = device
        self.inputs = tuple(inputs)

    def compute(self, rows: Rows, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        raise NotImplementedError


def version_of(tensor: torch.Tensor) -> int:
    """Whatever writes into a tensor makes it another; of inference tensors nobody counts."""
    return 0 if tensor.is_inference() else tensor._version


def changed(what: str) -> RuntimeError:
    return RuntimeError(
        f"memadvisor: {what} been changed in place before all of the last layer's output was used. Run without --chunked-loss."
    )


class Product(Expression):
    """A linear layer's output: hidden (rows, features) times weight (width, features), and its bias.

    Its weights change in an update: `keep_weights` makes copies of them for whoever still asks for values afterwards.
    """

    __slots__ = ("__weakref__", "_versions", "bias", "hidden", "weight")

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(RowMap(len(hidden)), len(weight), hidden.dtype, hidden.device)
        self.hidden = hidden
        self.weight = weight
        self.bias = bias
        self._versions = self._versions_now()

    def compute(self, rows: Rows, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        if self._versions_now() != self._versions:
            raise changed("what the model's last layer was called with, or its weights, have")
        made = torch.nn.functional.linear(self.hidden[rows.start : rows.stop], self.weight, self.bias)
        return made if rows.index is None else made.index_select(0, (rows.index - rows.start).to(made.device))

    def keep_weights(self, updated: Collection[int], copies: dict[int, torch.Tensor]) -> None:
        """`updated`: addresses of what is about to change. `copies` so far, by the address of what they are of."""

        def kept(tensor: torch.Tensor) -> torch.Tensor:
            address = tensor.data_ptr()
            if address in updated and address not in copies:
                copies[address] = tensor.clone()
            return copies.get(address, tensor)

        if self._versions_now() != self._versions:  # what has been changed already stays known to have been
            return
        self.weight = kept(self.weight)
        self.bias = None if self.bias is None else kept(self.bias)
        self._versions = self._versions_now()

    def _versions_now(self) -> tuple[int, ...]:
        tensors = (self.hidden, self.weight) if self.bias is None else (self.hidden, self.weight, self.bias)
        return tuple(map(version_of, tensors))


class Operation(Expression):
    """An operator's result. `call`: makes some rows of it of the same rows of the inputs."""

    __slots__ = ("_call",)

    def __init__(
        self,
        like: Expression,
        dtype: torch.dtype,
        inputs: Sequence[Expression],
        call: Call,
    ) -> None:
        """`like`: has as many classes, and the same rows at the same positions."""
        super().__init__(like.row_map, like.width, dtype, like.device, inputs)
        self._call = call

    def compute(self, rows: Rows, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        where = self.row_map.positions(rows)
        assert isinstance(where, Rows)  # whoever asks for rows that are not there asks through Padded
        return self._call(where.of, inputs)


class Moved(Expression):
    """The same rows at other positions, or fewer of them."""

    __slots__ = ()

    def __init__(self, inner: Expression, row_map: RowMap) -> None:
        super().__init__(row_map, inner.width, inner.dtype, inner.device, (inner,))

    def compute(self, rows: Rows, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return inputs[0]


class Padded(Expression):
    """The rows of others, which have none in common, and zeros where none has any."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Expression], row_map: RowMap) -> None:
        super().__init__(row_map, parts[0].width, parts[0].dtype, parts[0].device)
        self.parts = tuple(parts)

    def compute(self, rows: Rows, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        padded: torch.Tensor | None = None
        for part in self.parts:
            where = part.row_map.positions(rows)
            if isinstance(where, Rows):
                return Evaluation(part)(rows)
            there = (where >= 0).nonzero().flatten()
            if len(there):
                found = Evaluation(part)(Rows(rows.start, rows.stop, rows.numbers()[there]))
                if padded is None:
                    padded = found.new_zeros(len(rows), self.width)
                rows_of(there).put(padded, found)
        if padded is None:
            padded = torch.zeros(len(rows), self.width, dtype=self.dtype, device=self.device)
        return padded


class Evaluation:
    """An expression's rows, chunk by chunk: what is needed twice is made once, and lies no longer than it is needed."""

    def __init__(self, result: Expression) -> None:
        self._order: list[Expression] = []
        self._sort(result, set())
        last_use = {id(part): step for step, node in enumerate(self._order) for part in node.inputs}
        self._dead: list[list[int]] = [[] for _ in self._order]
        for part, step in last_use.items():
            self._dead[step].append(part)

    def _sort(self, node: Expression, seen: set[int]) -> None:
        """Inputs before what is made of them."""
        if id(node) in seen:
            return
        seen.add(id(node))
        for part in node.inputs:
            self._sort(part, seen)
        self._order.append(node)

    def __call__(self, rows: Rows) -> torch.Tensor:
        # As the script's operators were called, wherever the script is by now.
        with torch.no_grad(), torch._C._DisableAutocast():
            values: dict[int, torch.Tensor] = {}
            value: torch.Tensor | None = None
            for node, dead in zip(self._order, self._dead, strict=True):
                value = values[id(node)] = node.compute(rows, [values[id(part)] for part in node.inputs])
                for part in dead:
                    del values[part]
            assert value is not None
            return value


def whole(expression: Expression, num_rows: int) -> torch.Tensor:
    """All of it, (positions, width), made so many rows at a time."""
    row_map, make = expression.row_map, Evaluation(expression)
    new = torch.zeros if row_map.has_gaps else torch.empty
    made = new(len(row_map), expression.width, dtype=expression.dtype, device=expression.device)
    for positions, rows in row_map.chunks(num_rows):
        positions.put(made, make(rows))
    return made

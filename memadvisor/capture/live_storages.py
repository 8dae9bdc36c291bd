"""What was alive when memory ran out, as rows: from the watch, from a traced step, or as far as it is known."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

import torch

from memadvisor.capture.allocator import device_blocks
from memadvisor.capture.census import Labelled, cublas_workspaces, state_tensors
from memadvisor.capture.kept_beside import labelled_beside
from memadvisor.capture.memory_watch import LiveBlock, MemoryWatch
from memadvisor.capture.models import Models
from memadvisor.capture.tensor_storage import describe, plain_tensors, storage_address
from memadvisor.run.allocator_records import LiveStorage
from memadvisor.run.records import Storage

NUM_LARGEST = 200  # storages of an event that have a row of their own


def rows_of_known(
    event: int,
    models: Models,
    optimizers: Iterable[torch.optim.Optimizer],
    sources: Iterable[Callable[[], Iterable[Labelled]]],
    device: torch.device,
) -> dict[int, LiveStorage]:
    """Parameters, gradients, optimizer state, buffers, engines' buffers and cuBLAS's on `device`, by their address."""
    found: dict[int, LiveStorage] = {}
    # A subclass may do anything when it is asked something: an engine's would bring its values here.
    with torch._C.DisableTorchFunctionSubclass():
        for tensor, category, module, unit in _known_with_modules(models, optimizers, sources):
            for plain in plain_tensors(tensor):
                address = storage_address(plain) if plain.device == device else 0
                if address and address not in found:
                    size_bytes = plain.untyped_storage().nbytes()
                    found[address] = LiveStorage(
                        event, size_bytes, 1, category, module, unit, "", "", *describe(plain)
                    )
    for address, (size_bytes, operator) in cublas_workspaces(device, found, device_blocks(device)).items():
        found[address] = LiveStorage(event, size_bytes, 1, "other", "", "", "", operator, "", "")
    return found


def _known_with_modules(
    models: Models,
    optimizers: Iterable[torch.optim.Optimizer],
    sources: Iterable[Callable[[], Iterable[Labelled]]],
) -> Iterator[tuple[torch.Tensor, str, str, str]]:
    for source in sources:
        for tensor, category, unit in source():
            yield tensor, category, unit, unit
    owners: dict[int, tuple[str, str]] = {}
    for name, unit, parameter in models.parameters():
        module = name.rpartition(".")[0]
        owners[id(parameter)] = (module, unit)
        yield parameter, "parameter", module, unit
        if parameter.grad is not None:
            yield parameter.grad, "gradient", module, unit
    for optimizer in optimizers:
        for owner, state in optimizer.state.items():
            for tensor in state_tensors(state):
                yield tensor, "optimizer_state", *owners.get(id(owner), ("", ""))
    for buffer in models.buffers():
        yield buffer, "other", "", ""
    for tensor, category, unit in labelled_beside(models):
        yield tensor, category, unit, unit


def rows_of_watch(
    event: int, watch: MemoryWatch, known: dict[int, LiveStorage], device: torch.device
) -> list[LiveStorage]:
    """Every storage that operators made, with what is known of it; and what is known besides."""
    rest = dict(known)
    rows = []
    for block, size_bytes in watch.blocks(device):
        named = rest.pop(block.address, None)
        rows.append(
            LiveStorage(
                event=event,
                size_bytes=size_bytes,
                num_storages=1,
                category=named.category if named is not None else _category(block),
                module=named.module if named is not None else block.module,
                unit=named.unit if named is not None else block.unit,
                phase=block.phase,
                operator=block.operator,
                dtype=block.dtype,
                shape=block.shape,
            )
        )
    return rows + list(rest.values())


def _category(block: LiveBlock) -> str:
    return block.role or ("other" if block.phase == "outside" else "temporary")


def rows_of_trace(event: int, storages: Iterable[Storage], time_s: float) -> list[LiveStorage]:
    """The storages of a traced step that were alive at this moment of the monotonic clock."""
    return [
        LiveStorage(
            event, s.size_bytes, 1, s.category, s.module, s.unit, s.phase, s.operator, s.dtype, s.shape
        )
        for s in storages
        if s.birth_s <= time_s and (s.death_s is None or s.death_s > time_s)
    ]


def summed_up(rows: list[LiveStorage]) -> list[LiveStorage]:
    """The largest as they are; of the rest one row for each category, module and phase."""
    rows = sorted(rows, key=lambda row: -row.size_bytes)
    together: dict[tuple[str, str, str, str], list[LiveStorage]] = defaultdict(list)
    for row in rows[NUM_LARGEST:]:
        together[row.category, row.module, row.unit, row.phase].append(row)
    small = [
        LiveStorage(
            same[0].event, sum(row.size_bytes for row in same), len(same), category, module, unit, phase, "", "", ""
        )
        for (category, module, unit, phase), same in together.items()
    ]  # fmt: skip
    return rows[:NUM_LARGEST] + small

"""State dicts of sharded models: values are brought when they are read, and what is read is what DDP would give."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import filesystem

from memadvisor.capture.cpu_account import open_cpu_account
from memadvisor.engines.sharding.boxes import boxes_of_run
from memadvisor.engines.sharding.late import LateTensor
from tests.engines.ranks import run_ranks
from tests.engines.trainings import Model, Training, applied, build, make_optimizer, make_plan

TIED = Training(model=(("tied", True),))


def one_step(training: Training, rank: int) -> tuple[Any, torch.optim.Optimizer]:
    ddp = build(training, rank)
    optimizer = make_optimizer("adamw", ddp)
    step(ddp, optimizer, rank)
    return ddp, optimizer


def step(ddp: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    ddp(torch.arange(6)[None] + rank).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole_states(ddp: Any, optimizer: Any) -> dict[str, Any]:
    """As DDP has them without us, in copies."""
    return copy.deepcopy({"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()})


def is_alike(one: Any, other: Any) -> bool:
    """In every bit, dtype, stride and type, however deep."""
    if isinstance(one, dict):
        return list(one) == list(other) and all(is_alike(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(is_alike, one, other))
    if not isinstance(one, torch.Tensor):
        return bool(one == other)
    same = (type(one), one.dtype, one.stride(), one.shape) == (
        type(other),
        other.dtype,
        other.stride(),
        other.shape,
    )
    return same and torch.equal(one, other)


def through_files(state: Any) -> dict[str, Any]:
    found = {}
    for name, options in (("saved", {}), ("old format", {"_use_new_zipfile_serialization": False})):
        file = io.BytesIO()
        torch.save(state, file, **options)
        file.seek(0)
        found[name] = torch.load(file, weights_only=True)
    found["pickled"] = pickle.loads(pickle.dumps(state))
    found["copied"] = copy.deepcopy(state)
    return found


def saved(rank: int) -> dict[str, bool]:
    whole = whole_states(*one_step(TIED, rank))
    checks = {}
    for stage in (1, 3):
        with applied(make_plan(2, stage)):
            ddp, optimizer = one_step(TIED, rank)
            if rank == 0:  # the other rank knows nothing of it
                state = {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}
                late = [v for v in state["model"].values() if type(v) is LateTensor]
                checks[f"late {stage}"] = len(late) == (len(whole["model"]) if stage == 3 else 0)
                for name, found in through_files(state).items():
                    checks[f"{name} {stage}"] = is_alike(whole, found)
                    model = found["model"]
                    tied = [model[f"{name}.weight"].untyped_storage() for name in ("tokens", "head")]
                    checks[f"{name} tied {stage}"] = (
                        name == "pickled" or tied[0].data_ptr() == tied[1].data_ptr()
                    )
                checks[f"storages {stage}"] = is_apart(state["model"])
                list(map(torch.norm, ddp.module.parameters()))
                checks[f"storages of a lent unit {stage}"] = is_apart(ddp.module.state_dict())
            step(ddp, optimizer, rank)
    return checks


def is_apart(state: dict[str, torch.Tensor]) -> bool:
    """Whether only tied weights share a storage: safetensors and accelerate take all that do for tied."""
    storages = {name: value.untyped_storage() for name, value in state.items()}
    addresses = [storage.data_ptr() for name, storage in storages.items() if name != "head.weight"]
    return (
        len(set(addresses)) == len(addresses)
        and storages["head.weight"]._cdata == storages["tokens.weight"]._cdata
        and all(storages[name].nbytes() == value.nbytes for name, value in state.items())
    )


def test_one_rank_saves_what_ddp_would_have_saved():
    checks = run_ranks(saved, 2, timeout_s=60)[0]
    assert len(checks) == 22 and all(checks.values()), checks


def used(rank: int) -> dict[str, bool]:
    """What scripts do with a state dict, on both ranks alike, beside the same with DDP's."""
    expected = whole_states(*one_step(TIED, rank))["model"]
    with applied(make_plan(2, 3)) as engine:
        ddp, optimizer = one_step(TIED, rank)
        state = ddp.module.state_dict()
        name, other = "blocks.1.up.weight", "blocks.2.down.bias"
        checks = {
            "printed": repr(state[name]) == repr(expected[name]),
            "computed": torch.equal(state[name] * 2 + expected[name], 3 * expected[name]),
            "stacked": torch.equal(torch.stack([state[other]] * 2), torch.stack([expected[other]] * 2)),
            "array": bool((state[name].numpy() == expected[name].numpy()).all()),
            "on the host": type(state[name].cpu()) is LateTensor,
            "cast": torch.equal(state[name].to(torch.bfloat16), expected[name].to(torch.bfloat16)),
            "a view": torch.equal(state[name][1:3, 2], expected[name][1:3, 2]),
        }
        model = Model(tied=True)
        model.load_state_dict(state)
        checks["loaded"] = is_alike(dict(model.state_dict()), dict(expected))
        with torch.device("meta"):
            empty = Model()
        empty.load_state_dict(ddp.module.state_dict(), assign=True)
        checks["assigned"] = is_alike(dict(empty.state_dict()), dict(expected))
        checks["trainable"] = all(type(p.grad) is torch.Tensor for p in trained(empty))
        moment = optimizer.state_dict()["state"][1]["exp_avg"]
        view = moment[:1]
        checks["a state's view stays"] = bool(optimizer.state_dict()["state"][2]["exp_avg"].norm() >= 0)
        view.zero_()
        checks["and is written through"] = not moment[:1].any() and bool(moment.any())
        threaded: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: threaded.append(state[name].clone()))
        thread.start()
        thread.join()
        checks["in a thread"] = torch.equal(threaded[0], expected[name])
        kept = ddp.module.state_dict()
        address = kept[name].data_ptr()
        _ = [value.norm() for value in kept.values()]
        checks["an address stays"] = kept[name].data_ptr() == address and type(kept[name]) is torch.Tensor
        state[other].add_(1)
        dist.barrier()
        checks["written"] = torch.equal(ddp.module.state_dict()[other], expected[other] + 1)
        ddp(torch.arange(6)[None]).sum().backward()
        ddp.zero_grad()
        checks["and kept"] = torch.equal(ddp.module.state_dict()[other].clone(), expected[other] + 1)
        before, backup = ddp.module.state_dict(), optimizer.state_dict()
        old = copy.deepcopy(backup)
        step(ddp, optimizer, rank)
        newer = copy.deepcopy(optimizer.state_dict())
        checks["live"] = is_alike(newer, copy.deepcopy(backup)) and not is_alike(newer, old)
        optimizer.load_state_dict(old)
        checks["replaced"] = is_alike(newer, copy.deepcopy(backup))
        optimizer.load_state_dict(optimizer.state_dict())
        checks["by itself"] = is_alike(old, copy.deepcopy(optimizer.state_dict()))
        ddp.module.load_state_dict(ddp.module.state_dict())
        last = copy.deepcopy(before)
        engine.remove()
        checks["after the engine"] = is_alike(dict(last), dict(copy.deepcopy(before)))
        checks["and its states"] = is_alike(old, copy.deepcopy(optimizer.state_dict()))
    return checks


def trained(model: nn.Module) -> list[nn.Parameter]:
    model(torch.arange(6)[None]).sum().backward()
    return list(model.parameters())


def test_what_scripts_do_with_a_state_dict_is_as_without_a_plan():
    for checks in run_ranks(used, 2, timeout_s=60):
        assert all(checks.values()), checks


@contextlib.contextmanager
def growth() -> Iterator[list[int]]:
    """The CPU allocator's total after each part that a checkpoint has written."""
    account, write, levels = open_cpu_account([]), filesystem._write_item, []
    assert account is not None

    def noting(*args: Any) -> Any:
        result = write(*args)
        levels.append(account.allocated_bytes())
        return result

    filesystem._write_item = noting
    try:
        yield levels
    finally:
        filesystem._write_item = write
        account.close([])


def checkpointed(rank: int, folder: str) -> dict[str, Any]:
    """A checkpoint written by all ranks, read into the live model, and by a program without us."""
    training = Training(model=(("tied", True), ("dim", 24)))
    expected = whole_states(*one_step(training, rank))
    checks: dict[str, Any] = {}
    held: list[int] = []

    def label(tensor: torch.Tensor, category: str, unit: str) -> None:
        if category in ("parameter", "optimizer_state"):
            held.append(tensor.untyped_storage().nbytes())

    for stage in (2, 3):
        with applied(make_plan(2, stage), label=label):
            ddp, optimizer = one_step(training, rank)
            held.clear()
            state = {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}
            kept = []
            for _ in range(3):  # a message of torch's own between ranks may be let go of late
                with growth() as levels:
                    dcp.save(state, checkpoint_id=f"{folder}/{stage}")
                kept.append(max(levels) - min(levels))
            checks[f"kept while writing {stage}"] = min(kept)
            dcp.save({"as": state["optimizer"]["state"]}, checkpoint_id=f"{folder}/{rank}", no_dist=True)
            if rank == 0:
                state["model"]["tokens.weight"].data_ptr()  # a plain one from here on, on this rank alone
            dcp.save(state, checkpoint_id=f"{folder}/{stage}/unlike")
            step(ddp, optimizer, rank)
            held.clear()
            state = {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}
            dcp.load(state, checkpoint_id=f"{folder}/{stage}")
            checks[f"whole tensors {stage}"] = len(held)
            checks[f"read into the model {stage}"] = is_alike(whole_states(ddp, optimizer), expected)
            ddp.module.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            checks[f"and loaded {stage}"] = is_alike(whole_states(ddp, optimizer), expected)
        for name in ("", "/unlike"):
            alone = copy.deepcopy(expected)
            for value in (
                *alone["model"].values(),
                *(v for s in alone["optimizer"]["state"].values() for v in s.values()),
            ):
                value.fill_(0)
            dcp.load(alone, checkpoint_id=f"{folder}/{stage}{name}")
            checks[f"read without us {stage}{name}"] = is_alike(alone, expected)
    return checks


def test_each_rank_writes_and_reads_its_own_part_of_a_sharded_checkpoint(tmp_path: Path):
    for checks in run_ranks(checkpointed, 2, str(tmp_path), timeout_s=60):
        for stage in (2, 3):
            assert checks.pop(f"whole tensors {stage}") == 0
            # Stage 2 has its weights whole, of which torch's writer copies those that it is given to write.
            assert stage == 2 or checks[f"kept while writing {stage}"] < 1000
            checks.pop(f"kept while writing {stage}")
        assert len(checks) == 8 and all(checks.values()), checks
    metadata = dcp.FileSystemReader(tmp_path / "3").read_metadata().state_dict_metadata
    several = [tensor for tensor in metadata.values() if len(getattr(tensor, "chunks", [])) > 1]
    assert len(several) > 6 and all(
        sum(chunk.sizes.numel() for chunk in tensor.chunks) == tensor.size.numel() for tensor in several
    )


def test_a_run_of_elements_is_few_boxes_in_its_order():
    for sizes in ((), (1,), (5,), (3, 4), (1, 6), (6, 1), (2, 3, 4), (3, 1, 2), (2, 2, 2, 3)):
        whole = torch.arange(math.prod(sizes)).view(sizes)
        for first in range(whole.numel() + 1):
            for end in range(first, whole.numel() + 1):
                boxes, found = boxes_of_run(first, end, sizes), []
                for box in boxes:
                    part = whole
                    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                        part = part.narrow(dim, offset, size)
                    assert box.first == len(found)
                    found += part.flatten().tolist()
                assert found == list(range(first, end))
                assert len(boxes) <= max(1, 2 * len(sizes) - 1)

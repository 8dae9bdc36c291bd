"""A script that knows nothing of ranks, run on several: data-parallel, with no line of it changed.

Each rank runs the whole script. The model that it trains is wrapped, unseen by it, in DistributedDataParallel, whose
reducer is our executor (ddp.py): calls of the bare model count as calls through the wrapper. What it reads from a
DataLoader to train on is dealt to the ranks (dealing.py). A script that starts torch.distributed by itself is not
such a script, and is left alone.

A loader is read to train on when gradients are enabled and no wrapped model is in eval mode; what is read
otherwise, every rank reads whole, so that an evaluation gives what it gives in one process.
"""

from __future__ import annotations

import os
import platform
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, IterableDataset

from memadvisor.engines.dealing import Batch, deal, num_rounds, rounds_of
from memadvisor.engines.script.undo import Undo
from memadvisor.engines.sharding.gradient_hooks import check_outside
from memadvisor.errors import PlanError
from memadvisor.in_making import is_in_making
from memadvisor.never_compiled import called_by_python

Note = Callable[[str, str], None]


@dataclass(slots=True, eq=False)
class _Reading:
    """One pass over a loader that is dealt out; `num_calls` are the model's training calls when it began."""

    num_calls: int
    is_over: bool = False


def _backend() -> str:
    """NCCL for ranks with a GPU each; it refuses those that share one, for which Gloo goes by way of the host."""
    if not torch.cuda.is_available():
        return "gloo"
    shares = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count()
    return "gloo" if shares else "cpu:gloo,cuda:nccl"


class SingleProcess:
    """In force from construction until `remove`; does nothing in a script that starts its ranks itself.

    Made before the plan's own hooks, since what it does at a model's call must come first.
    """

    def __init__(self, num_ranks: int, note: Note) -> None:
        self.num_ranks = num_ranks
        self._note = note
        self._undo = Undo()
        self._pid = os.getpid()
        self._has_started = False  # the process group is ours
        self._wrappers: dict[int, DistributedDataParallel] = {}  # by id of the model, which they keep alive
        self._passes: list[tuple[int, AbstractContextManager[None]]] = []
        self._depth = 0
        self._num_calls = 0
        self._readings: list[_Reading] = []
        self._has_dealt = False
        if torch.cuda.is_available() and "LOCAL_RANK" in os.environ:  # the device 'cuda' is each rank's own
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        self._undo.add(register_module_forward_pre_hook(self._enter).remove)
        self._undo.add(register_module_forward_hook(self._leave, always_call=True).remove)
        self._undo.add(register_optimizer_step_pre_hook(called_by_python(self._before_step)).remove)
        self._patch_loaders()
        self._patch_start()

    def remove(self) -> None:
        self._undo.run()
        self._wrappers.clear()

    @property
    def is_alone(self) -> bool:
        """Whether the script has started no ranks of its own."""
        return os.getpid() == self._pid and (self._has_started or not dist.is_initialized())

    def _start(self) -> None:
        if not self._has_started:
            if os.environ.get("WORLD_SIZE") != str(self.num_ranks) or "RANK" not in os.environ:
                raise PlanError(
                    f"The plan is for {self.num_ranks} ranks, and no launcher has started this process as one of them.",
                    hint=f"start the script with `memadvisor run --nproc {self.num_ranks}` or torchrun.",
                )
            dist.init_process_group(_backend())
            self._has_started = True

    def _patch_start(self) -> None:
        original = dist.init_process_group

        def init_process_group(*args: Any, **kwargs: Any) -> None:
            if self._has_started:
                raise PlanError(
                    "The script reads training data, or trains, before it starts torch.distributed.",
                    hint="have it call init_process_group first.",
                )
            original(*args, **kwargs)

        for owner in (dist, dist.distributed_c10d):
            self._undo.replace(owner, "init_process_group", init_process_group)

    # ---- the model -----------------------------------------------------------------------------

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        self._depth += 1
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not module.training:
            return
        if torch._C._is_tracing():  # by torch.jit.trace, for a drawing of the model
            return
        is_new = self._depth == 1 and id(module) not in self._wrappers and self._is_trained(module)
        if is_new and not is_in_making(module):
            self._wrap(module)
        wrapper: Any = self._wrappers.get(id(module))
        if wrapper is not None and not any(number == id(module) for number, _ in self._passes):
            self._num_calls += 1
            wrapper._pre_forward()  # broadcasts buffers, as a call through the wrapper does
            inside = wrapper._inside_ddp_forward()
            inside.__enter__()
            self._passes.append((id(module), inside))

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if self._passes and self._passes[-1][0] == id(module):
            self._passes.pop()[1].__exit__(None, None, None)

    def _is_trained(self, module: torch.nn.Module) -> bool:
        if not self.is_alone or any(isinstance(m, DistributedDataParallel) for m in module.modules()):
            return False
        known = {id(p) for wrapper in self._wrappers.values() for p in wrapper.module.parameters()}
        return any(p.requires_grad and id(p) not in known for p in module.parameters())

    def _wrap(self, module: torch.nn.Module) -> None:
        self._check_read_through(self._readings[:-1])  # a short last one may have been read ahead by workers
        if any(parameter.grad is not None for parameter in module.parameters()):
            raise PlanError(
                f"{type(module).__name__} has gradients before its first training call.",
                hint="have the script train through one model, or use DistributedDataParallel.",
            )
        self._start()
        self._check_devices(module)
        wrapper = DistributedDataParallel(module)
        self._wrappers[id(module)] = wrapper
        self._note(
            "info",
            f"{type(module).__name__} is trained data-parallel on {self.num_ranks} ranks, each of which runs the "
            f"whole script; gradients are averaged over {self.num_ranks} times the script's batch",
        )

    def _check_devices(self, module: torch.nn.Module) -> None:
        """Ranks of one machine that share a GPU wait for each other, and NCCL refuses them."""
        device = next(module.parameters()).device
        if device.type != "cuda":
            return
        here = torch.tensor([zlib.crc32(f"{platform.node()}/{device.index}".encode())])
        everywhere = [torch.zeros_like(here) for _ in range(self.num_ranks)]
        dist.all_gather(everywhere, here)
        if len({int(place) for place in everywhere}) < self.num_ranks:
            raise PlanError(
                f"Several ranks have put the model on {device} of one machine.",
                hint="have the script use the device 'cuda' (each rank's own) and not a numbered one.",
            )

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._wrappers:
            return
        check_outside(optimizer, self._wrappers)
        if not self._has_dealt:
            raise PlanError(
                "The script has not read its data from a torch DataLoader, so it cannot be dealt to ranks: all would "
                "train on the same.",
                hint="use DistributedDataParallel in the script, or one rank.",
            )
        known = {id(p) for wrapper in self._wrappers.values() for p in wrapper.module.parameters()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and id(parameter) not in known:
                    raise PlanError(
                        f"{type(optimizer).__name__} updates parameters of no model that the script has called: "
                        "their gradients are not averaged over the ranks.",
                        hint="use DistributedDataParallel in the script, or one rank.",
                    )

    # ---- the data ------------------------------------------------------------------------------

    def _patch_loaders(self) -> None:
        original: Any = DataLoader.__dict__["_index_sampler"]

        def index_sampler(loader: DataLoader[Any]) -> Any:
            sampler = original.__get__(loader)
            return _Dealt(self, loader, sampler) if self.is_alone else sampler

        self._undo.replace(DataLoader, "_index_sampler", property(index_sampler))

    def deals(self) -> bool:
        """Whether what is read from a loader now is trained on."""
        if not self.is_alone or not torch.is_grad_enabled():
            return False
        return all(wrapper.module.training for wrapper in self._wrappers.values())

    def read(self, loader: DataLoader[Any], sampler: Any) -> Iterator[Batch]:
        """This rank's share of what the loader's sampler draws."""
        if isinstance(loader.dataset, IterableDataset):
            raise PlanError(
                f"The script trains on {type(loader.dataset).__name__}, an iterable dataset, whose samples have no "
                "numbers by which they could be dealt to ranks.",
                hint="use DistributedDataParallel in the script, or one rank.",
            )
        self._start()
        if not self._has_dealt:
            self._note(
                "info",
                f"the batches of the script's DataLoader are dealt to {self.num_ranks} ranks, one each: "
                f"a pass over the data has 1/{self.num_ranks} as many steps",
            )
        self._has_dealt = True
        self._check_read_through(self._readings)
        reading = _Reading(self._num_calls)
        self._readings.append(reading)
        yield from deal(rounds_of(sampler, self.num_ranks, **_sizes(loader, sampler)), dist.get_rank())
        reading.is_over = True

    def _check_read_through(self, readings: list[_Reading]) -> None:
        """Data that was read from end to end and not trained on should not have been dealt."""
        if any(reading.is_over and reading.num_calls == self._num_calls for reading in readings):
            raise PlanError(
                "The script reads a DataLoader through without training on it, and each rank saw its share alone.",
                hint="have it do so under torch.no_grad(), where every rank reads all.",
            )
        self._readings = [reading for reading in self._readings if not reading.is_over]


class _Dealt:
    """Stands where a loader looks for its sampler, and asks anew each time whether to deal."""

    def __init__(self, single: SingleProcess, loader: DataLoader[Any], sampler: Any) -> None:
        self._single = single
        self._loader = loader
        self._sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        return self._single.read(self._loader, self._sampler) if self._single.deals() else iter(self._sampler)

    def __len__(self) -> int:
        if not self._single.deals():
            return len(self._sampler)
        drop_last = _sizes(self._loader, self._sampler)["drop_last"]
        return num_rounds(len(self._sampler), self._single.num_ranks, drop_last=bool(drop_last))


def _sizes(loader: DataLoader[Any], sampler: Any) -> dict[str, Any]:
    """How large batches are, and whether short ones are dropped, as far as the sampler says."""
    if sampler is not loader.batch_sampler:
        return {"batch_size": None, "drop_last": False}
    return {
        "batch_size": getattr(sampler, "batch_size", None),
        "drop_last": bool(getattr(sampler, "drop_last", False)),
    }

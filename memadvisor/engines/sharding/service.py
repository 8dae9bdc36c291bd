"""Reading other ranks' shards without their taking part: a service thread a rank, over the group's store.

`torch.save(model.state_dict())` or an evaluation on rank 0 alone must not hang. So whoever reads outside
a training pass asks, and each rank's thread answers from the shard that it holds. That is consistent: a
rank that runs ahead blocks at its next collective before anything is updated, and a question carries
the number of optimizer steps, of backwards and of writes that the asking rank has seen, and is answered
when the other has seen as many.

What is asked for goes through the key-value store, which is slow by nature. In a training pass whose ranks may run
different units every rank is there to send, and waits for no answer but the shard itself: on a CPU it travels as a
message, to where it belongs (`begin_fetch`).
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from memadvisor.engines.collectives.works import Work
from memadvisor.engines.sharding.arrivals import drop, settle_all
from memadvisor.engines.sharding.flat import Flat, Slot
from memadvisor.engines.sharding.one_process import NoService, StateOf
from memadvisor.engines.sharding.sharded_model import ShardedModel
from memadvisor.run.torch_names import dtype_name

_CHUNK_BYTES = 8 * 2**20
_FOREVER = datetime.timedelta(days=1)
_POLL_S = 0.002
_QUIET_S = 60.0  # how long a rank that is done waits for another question
_LAST_S = 5.0

OwnedState = Callable[[Slot, int], torch.Tensor]  # by the optimizer's number; as bytes


class Service:
    """Asks and answers for one model, once it is open. `number` tells the models of a process apart."""

    def __init__(
        self, sharded: ShardedModel, number: int, state_of: StateOf, owned_state: OwnedState
    ) -> None:
        self._sharded = weakref.ref(sharded)
        self._shared_prefix = f"memadvisor/{number}"
        # Shards are asked for among the ranks that share them.
        self._prefix = f"{self._shared_prefix}/{sharded.wire.first_rank}"
        self._wire = sharded.wire
        self.state_of = state_of
        self._owned_state = owned_state
        self._pid = os.getpid()
        self._asks = 0
        self._lock = threading.Lock()
        self._asked_s = 0.0  # when somebody asked last
        self._kept: object | None = None
        self._thread: threading.Thread | None = None
        self._goodbye: threading.Thread | None = None
        self._called: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def open(self, kept: object) -> None:
        """Answer from here on, and keep an executor alive until `stop`."""
        sharded = self._sharded()
        if sharded is not None and sharded.num_shared_stages >= 1:
            store: Any = dist.distributed_c10d._get_default_store()
            self._client = store.clone()
            self._thread = threading.Thread(
                target=_answer_until_stopped,
                args=(weakref.ref(self), store.clone(), self._prefix, self._wire.rank),
                name="memadvisor-service",
                daemon=True,
            )
            self._thread.start()
            # Waits from the first: Python 3.12.0 to 3.12.2 start no thread once a script has ended (python/cpython#113964).
            self._goodbye = threading.Thread(
                target=_do_when_called, args=(self._called,), name="memadvisor-goodbye", daemon=True
            )
            self._goodbye.start()
            # Another rank may still ask when this one's script has let go of its wrapper; so may the script, of the model in it.
            self._kept = kept
            atexit.register(self.leave)

    def stop(self) -> None:
        """End the thread. A daemon thread that wakes up while Python shuts down could abort the process."""
        atexit.unregister(self.leave)
        self._kept = None
        thread, self._thread = self._thread, None
        if thread is None or os.getpid() != self._pid:
            return
        self._called.put(None)
        with contextlib.suppress(Exception):  # the store's host may have gone already
            self._send(self._wire.rank, {"kind": "stop"})
            thread.join(timeout=5.0)
        if self._goodbye is not None and self._goodbye is not threading.current_thread():
            self._goodbye.join(timeout=5.0)

    def leave(self) -> None:
        """The script ends here: answer until every rank has come as far, or nobody has asked for long.

        After an exception nobody is waited for: the others may be waiting for this rank in a collective,
        and it is its exit that the launcher ends them by.
        """
        if self._thread is None or self._goodbye is None or os.getpid() != self._pid:
            return
        if sys.exc_info()[0] is None and getattr(sys, "last_value", None) is None:
            sharded = self._sharded()
            if sharded is not None:
                with contextlib.suppress(Exception):  # whoever reads those parameters is told
                    for flat in sharded.flats:  # other ranks wait for what this one still sends
                        settle_all([flat])
                        drop(flat)
            self._say_goodbye(_QUIET_S, _LAST_S)
            return
        # What has failed may be the store's host: frozen, it would hold up this rank's end for good.
        self._called.put(lambda: self._say_goodbye(0.0, 0.0))
        self._goodbye.join(timeout=_LAST_S)

    def _say_goodbye(self, quiet_s: float, last_s: float) -> None:
        with contextlib.suppress(Exception):  # the store's host may have gone already
            self._asked_s = time.monotonic()
            self._wait_for_all("leaving", quiet_s)
        self.stop()
        with contextlib.suppress(Exception):
            # The first rank often hosts the store; without it the others' threads would complain.
            self._asked_s = time.monotonic()
            self._wait_for_all("left", last_s if self._wire.everyone.rank() == 0 else 0.0)

    def _wait_for_all(self, what: str, quiet_s: float) -> None:
        key = f"{self._shared_prefix}/{what}"
        count = self._client.add(key, 1)
        while count < self._wire.num_contributions and time.monotonic() < self._asked_s + quiet_s:
            time.sleep(10 * _POLL_S)
            count = self._client.add(key, 0)

    # ---- asking ------------------------------------------------------------------------------

    def fetch_parameters(self, flat: Flat, full: torch.Tensor) -> None:
        """Fill `full` with every rank's shard of the parameters."""
        self._fetch_shards("parameter", flat, full, flat.shard)

    def fetch_gradients(self, flat: Flat, full: torch.Tensor) -> None:
        """Fill `full` with every rank's shard of the mean gradient."""
        self._fetch_shards("gradient", flat, full, flat.grad_shard)

    def all_have_read(self, number: int) -> bool:
        """Whether each other rank that shares these shards has read gradients, since all ranks met last, before its change
        of them with this number; once it has come to that change."""
        others = [rank for rank in range(self._wire.num_ranks) if rank != self._wire.rank]
        answers = [self._post(rank, "change", key=str(number)) for rank in others]
        told = [bool(json.loads(_take(self._client, answer))) for answer in answers]
        return all(told)

    def can_send(self, device: torch.device) -> bool:
        """Whether shards may travel as messages of their own, at any time and from any thread."""
        return device.type == "cpu"

    def begin_fetch(self, flat: Flat, full: torch.Tensor) -> Arriving:
        """Have every rank's shard of the parameters come into `full`, in its dtype; in training passes of all ranks alone."""
        if flat.shard is None:
            raise RuntimeError(f"the parameters of unit {flat.unit!r} have been dropped")
        parts = full.chunk(self._wire.num_ranks)
        others = [rank for rank in range(self._wire.num_ranks) if rank != self._wire.rank]
        # Posted before they are asked for: Gloo is slow to send what is waited for later.
        works = [self._wire.begin_receive(parts[rank], rank, flat.unit, flat.index) for rank in others]
        for rank in others:
            self._post(rank, "sent", flat, key=dtype_name(full.dtype))
        parts[self._wire.rank].copy_(flat.shard)
        return Arriving(works)

    def fetch(self, slot: Slot, key: str, own: torch.Tensor) -> torch.Tensor:
        """A parameter, or with `key` a state that the optimizer keeps for it, whole: 1-D in storage order."""
        result = torch.empty(slot.end - slot.start, dtype=own.dtype, device=own.device)
        for rank in range(self._wire.num_ranks):
            low, high = slot.range_on(rank)
            part = result[low - slot.start : high - slot.start]
            if rank == self._wire.rank:
                part.copy_(own.reshape(-1))
            elif high > low:
                part.copy_(self._ask(rank, "state" if key else "parameter", slot.flat, slot, key))
        return result

    def fetch_state(self, slot: Slot, key: str, own: torch.Tensor) -> torch.Tensor:
        """One whole tensor of the optimizer's state of a parameter, in the parameter's shape."""
        return self.fetch(slot, key, own).as_strided(slot.shape, slot.stride)

    def fetch_owned_state(self, slot: Slot, number: int, owner: int) -> torch.Tensor:
        """All that optimizer `number` keeps for a parameter on the rank that owns it whole, as bytes."""
        return self._ask(owner, "owned", slot.flat, slot, str(number))

    def _fetch_shards(self, kind: str, flat: Flat, full: torch.Tensor, own: torch.Tensor | None) -> None:
        if own is None:
            raise RuntimeError(f"the {kind} of unit {flat.unit!r} has been dropped")
        for rank, part in enumerate(full.chunk(self._wire.num_ranks)):
            part.copy_(own if rank == self._wire.rank else self._ask(rank, kind, flat))

    def _ask(self, rank: int, kind: str, flat: Flat, slot: Slot | None = None, key: str = "") -> torch.Tensor:
        answer = self._post(rank, kind, flat, slot, key)
        return self._receive(answer, f"{kind} of unit {flat.unit!r} on rank {rank}")

    def _post(
        self, rank: int, kind: str, flat: Flat | None = None, slot: Slot | None = None, key: str = ""
    ) -> str:
        """Ask; gives where the answer will be."""
        sharded = self._sharded()
        if sharded is None or self._thread is None:
            raise RuntimeError("the process group has been destroyed: shards of other ranks are out of reach")
        with self._lock:  # a script may save from a thread of its own
            self._asks += 1
            answer = f"{self._prefix}/answer/{self._wire.rank}/{self._asks}"
        question = {
            "kind": kind,
            "flat": flat.index if flat else -1,
            "slot": slot.index if slot else -1,
            "key": key,
            "rank": self._wire.rank,
            "answer": answer,
            "progress": sharded.progress,
        }
        self._send(rank, question)
        return answer

    def _send(self, rank: int, question: dict[str, Any]) -> None:
        number = self._client.add(f"{self._prefix}/count/{rank}", 1)
        self._client.set(f"{self._prefix}/question/{rank}/{number}", json.dumps(question))

    def _receive(self, answer: str, what: str) -> torch.Tensor:
        header = json.loads(_take(self._client, answer))
        if header is None:
            raise RuntimeError(f"there is no {what} any more")
        data = bytearray()
        for part in range(header["parts"]):
            data += _take(self._client, f"{answer}/{part}")
        dtype = getattr(torch, header["dtype"])
        return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")

    # ---- answering ---------------------------------------------------------------------------

    def answer(self, store: Any, question: dict[str, Any]) -> None:
        self._asked_s = time.monotonic()
        sharded = self._sharded()
        if sharded is None:
            store.set(question["answer"], "null")
            return
        if question["kind"] == "change":
            self._tell_of_reads(store, sharded, int(question["key"]), question["answer"])
            return
        while sharded.in_step or any(
            own < other for own, other in zip(sharded.progress, question["progress"], strict=True)
        ):
            time.sleep(_POLL_S)
        if question["kind"] == "sent":
            self._send_shard(sharded.flats[question["flat"]], question)
            return
        tensor = self._held(sharded, question)
        if tensor is None:
            store.set(question["answer"], "null")
            return
        flat = tensor.detach().reshape(-1).cpu().contiguous()
        step = max(1, _CHUNK_BYTES // max(1, flat.element_size()))
        parts = [flat[start : start + step] for start in range(0, flat.numel(), step)]
        for number, part in enumerate(parts):
            store.set(f"{question['answer']}/{number}", _bytes(part))
        header = {"parts": len(parts), "dtype": dtype_name(flat.dtype)}
        store.set(question["answer"], json.dumps(header))

    def _tell_of_reads(self, store: Any, sharded: ShardedModel, number: int, answer: str) -> None:
        while sharded.num_changes < number:
            time.sleep(_POLL_S)
        # It is there: whoever asks has not met the others yet.
        store.set(answer, json.dumps(sharded.read_before_changes[number]))

    def _send_shard(self, flat: Flat, question: dict[str, Any]) -> None:
        if flat.shard is None:
            raise AssertionError("a rank in a training pass has its shards")
        shard = flat.shard.to(getattr(torch, question["key"]))
        self._wire.send(shard, question["rank"], flat.unit, flat.index)

    def _held(self, sharded: ShardedModel, question: dict[str, Any]) -> torch.Tensor | None:
        flat: Flat = sharded.flats[question["flat"]]
        if question["kind"] == "state":
            return self.state_of(sharded.slots[question["slot"]], question["key"])
        if question["kind"] == "owned":
            return self._owned_state(sharded.slots[question["slot"]], int(question["key"]))
        if question["kind"] == "gradient":
            return flat.grad_shard
        if question["slot"] >= 0 and flat.shard is not None:
            slot: Slot = sharded.slots[question["slot"]]
            return slot.piece(flat.shard)
        return flat.shard


AnyService = Service | NoService  # as other parts of an executor are handed it


class Arriving:
    """Ticket of messages that have been asked for."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = list(works)

    def wait(self) -> None:
        """Block until all are there."""
        while self._works:
            self._works[0].wait()
            self._works.pop(0)

    join = wait


def _answer_until_stopped(service: weakref.ref[Service], store: Any, prefix: str, rank: int) -> None:
    number = 1
    while True:
        key = f"{prefix}/question/{rank}/{number}"
        start_s = time.monotonic()
        try:
            store.wait([key], _FOREVER)
            question = json.loads(_take(store, key))
        except Exception:
            if time.monotonic() - start_s > 3600:
                continue  # a day without a question
            return  # the store's host has gone: the run is over
        number += 1
        owner = service()
        if question["kind"] == "stop" or owner is None:
            return
        try:
            with torch.no_grad():
                owner.answer(store, question)
        except Exception:
            store.set(question["answer"], "null")  # who asked says what is missing
        del owner


def _do_when_called(called: SimpleQueue[Callable[[], None] | None]) -> None:
    if (work := called.get()) is not None:
        work()


def _take(store: Any, key: str) -> bytes:
    value = store.get(key)
    store.delete_key(key)
    return bytes(value)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()

"""What a unit's gathers and reductions to shards send, and what messages of bytes take beside them.

This mirrors memadvisor/engines/sharding/transfers.py: parameters that are float32 travel in the bits that a plan's compression
gives them, each rank's shard as a message of its own; others travel as they are.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from memadvisor.compression import Compression, packed_bytes, scratch_elements, thin_elements
from memadvisor.cost.states import UnitStates
from memadvisor.precision import bytes_in
from memadvisor.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """What a unit's gathers and reductions to shards send and stage, in all of its flats.

    `gather_bytes`, `reduce_bytes`: of a whole message, of all ranks. Staging is what messages of bytes need beside
    what the collective needs anyway; flats that are waited for come one after another, so the largest one counts.
    `all_reduce_bytes`: of gradients that stay whole, with error feedback (engines/sharding/feedback.py), whose staging is there
    until the end of the backward, and whose residuals always are.
    """

    gather_bytes: int
    gather_staging_bytes: int
    largest_gather_staging_bytes: int
    reduce_bytes: int
    reduce_staging_bytes: int
    all_reduce_bytes: int = 0
    all_reduce_staging_bytes: int = 0
    residual_bytes: int = 0


def _feedback_of(states: UnitStates, num_ranks: int, compression: Compression) -> Packing:
    """Of a unit whose gradients stay whole, on `num_ranks`."""
    sent = staged = residuals = 0
    for (dtype, trainable), count in states.num_elements.items():
        part = -(-count // num_ranks)
        if trainable and dtype == "float32" and compression.all_reduce_rank is not None:
            own = [p for p in states.parameters if p.requires_grad and p.dtype == dtype]
            first, second = thin_elements((json.loads(p.shape) for p in own), compression.all_reduce_rank)
            # Each of them is gathered from all ranks, which an all_reduce is twice.
            sent += 4 * num_ranks * (first + second) // 2
            staged += 4 * num_ranks * (first + second)
            residuals += 4 * (count + second)
        elif trainable and dtype == "float32":
            messages_bytes = num_ranks * compression.all_reduce_message_bytes(part)
            sent += messages_bytes
            staged += messages_bytes + 4 * scratch_elements(part)
            residuals += 4 * (count + part)
        elif trainable:
            sent += count * states.item_bytes[dtype]
    return Packing(
        gather_bytes=0,
        gather_staging_bytes=0,
        largest_gather_staging_bytes=0,
        reduce_bytes=0,
        reduce_staging_bytes=0,
        all_reduce_bytes=sent,
        all_reduce_staging_bytes=staged,
        residual_bytes=residuals,
    )


def packing_of(states: UnitStates, stage: int, num_ranks: int, schedule: Schedule) -> Packing:
    """Of a unit of this stage, whose shards are of `num_ranks`."""
    precision, compression = schedule.precision, schedule.compression
    if compression.has_feedback:
        return _feedback_of(states, num_ranks, compression)
    gathers, staged, reduces, staged_sums = 0, [0], 0, 0
    for (dtype, trainable), count in states.num_elements.items():
        shard, item_bytes = -(-count // num_ranks), states.item_bytes[dtype]
        bits = compression.gather_bits_of(dtype) if stage == 3 else None
        casts = precision.of_parameter(dtype) if stage == 3 else dtype
        if bits is None and (trainable or stage == 3):
            gathers += num_ranks * shard * bytes_in(item_bytes, dtype, casts)
        elif bits is not None:
            message_bytes = num_ranks * packed_bytes(shard, bits)
            gathers += message_bytes
            # Where the flat is float32, this rank's part of it is scratch enough.
            staged.append(message_bytes + (4 * scratch_elements(shard) if casts != "float32" else 0))
        if not trainable:
            continue
        bits = compression.reduce_bits_of(dtype) if stage >= 2 else None
        if bits is None:
            sums = precision.of_reduction(dtype) if stage >= 2 else dtype
            reduces += num_ranks * shard * bytes_in(item_bytes, dtype, sums)
        else:
            reduces += num_ranks * packed_bytes(shard, bits)
            staged_sums += 2 * packed_bytes(shard, bits)
    return Packing(
        gather_bytes=gathers,
        gather_staging_bytes=sum(staged),
        largest_gather_staging_bytes=max(staged),
        reduce_bytes=reduces,
        reduce_staging_bytes=staged_sums,
    )

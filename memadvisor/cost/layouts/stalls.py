"""Jobs whose pipeline messages hold up their hosts, as most of nanotron's published jobs on many nodes do.

Of nanotron's sweep of layouts (docs/accuracy.md), pipelined jobs are of two kinds with nothing between them: as fast as
predicted, or longer by 0.26 to 0.33 s for each message of the busiest stage: two of a microbatch where there are two
stages, four where a stage has two neighbours. It is the same whatever the model, the message's bytes, the tensor degree
and whether messages leave a node. Of such jobs there is 1 in 29 on a node, three in ten on 16 nodes, and all of 146 but one
on 64; the columns of the table do not tell them apart, the number of nodes does: as if each node had the same chance of
holding up the whole job, so that n nodes are all well with a chance of (1 - `stalling_node_chance`)^n.

A step's time is that of the likelier kind. Both numbers are fitted to jobs on fewer than 64 nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memadvisor.cost.pipelines.costs import ChunkCosts
from memadvisor.software_traits import Software


def chance_of_stalls(software: Software, num_nodes: int) -> float:
    """That some of `num_nodes` hold up a pipelined job."""
    return 1.0 - (1.0 - software.stalling_node_chance) ** num_nodes


def message_stall_s(software: Software, num_nodes: int) -> float:
    """What a message between stages takes its sender, and its receiver, more: in the likelier kind of job."""
    return software.stalled_message_s if chance_of_stalls(software, num_nodes) > 0.5 else 0.0


def microbatch_stall_s(held: Sequence[int], num_chunks: int, stall_s: float) -> float:
    """Of a device with these chunks of the model, in a microbatch's forwards and backwards."""
    return 2 * stall_s * sum(_neighbours(chunk, num_chunks) for chunk in held)


def stalled_costs(costs: Sequence[ChunkCosts], stall_s: float) -> list[ChunkCosts]:
    """Of a pipeline's chunks in the model's order: each forward and each backward waits for what comes and what leaves."""
    if stall_s == 0.0:
        return list(costs)
    found = []
    for chunk, cost in enumerate(costs):
        each_s = stall_s * _neighbours(chunk, len(costs))
        found.append(
            replace(
                cost,
                forward_s=cost.forward_s + each_s,
                input_backward_s=cost.input_backward_s + each_s,
            )
        )
    return found


def _neighbours(chunk: int, num_chunks: int) -> int:
    return (chunk > 0) + (chunk < num_chunks - 1)

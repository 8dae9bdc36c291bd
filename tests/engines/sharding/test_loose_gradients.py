"""Gradients that stay in autograd's own tensors until they have been reduced to shards."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from memadvisor.engines.collectives.wire import Pieces, Wire
from memadvisor.engines.script.live import read_model
from memadvisor.engines.sharding.build_units import build_units
from memadvisor.engines.sharding.flat import Flat, Label
from memadvisor.engines.sharding.loose_gradients import LooseGradients, loose_gradients
from memadvisor.executors import Algorithm
from memadvisor.write_schedule import write_schedule
from tests.engines.ranks import run_ranks
from tests.engines.trainings import applied, loose_from, make_plan


def flat_of(
    sizes: list[int], num_ranks: int, rank: int, loose_bytes: int, label: Label = lambda *_: None
) -> Flat:
    """Of one unit whose parameters have so many elements; with what of its gradients is loose from so many bytes on."""
    model = nn.Module()
    for number, size in enumerate(sizes):
        model.register_parameter(f"p{number}", nn.Parameter(torch.zeros(size)))
    live = read_model(model)
    schedule = write_schedule(make_plan(num_ranks, 2), live.rows)
    (flat,) = build_units(live, schedule, rank, num_ranks)[""].flats
    with loose_from(loose_bytes):
        flat.loose = loose_gradients(flat, label)
    return flat


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
    st.integers(2, 4),
    st.sampled_from([4, 40, 100]),
)
def test_each_rank_is_sent_its_part_of_the_flat_and_neighbours_in_memory_go_together(
    sizes, num_ranks, loose_bytes
):
    flat = flat_of(sizes, num_ranks, 0, loose_bytes)
    if flat.loose is None:
        assert all(4 * size < loose_bytes for size in sizes)
        return
    values = torch.arange(float(flat.num_elements))
    for slot in flat.slots:
        flat.loose.take(slot, values[slot.start : slot.end].clone(), 1.0)
    pieces = flat.loose.pieces()
    assert pieces.num_elements == flat.padded_numel
    for parts, expected in zip(pieces.by_rank, values.split(flat.shard_numel), strict=False):
        assert torch.equal(torch.cat(parts), expected)
    sent = [part for parts in pieces.by_rank for part in parts]
    assert sum(part.numel() for part in sent) == flat.num_elements
    for parts in pieces.by_rank:
        ends = [part.data_ptr() + part.nbytes for part in parts]
        assert all(
            end != part.data_ptr() or 4 * part.numel() >= loose_bytes
            for end, part in zip(ends, parts[1:], strict=False)
        )


def whose_memory(flat: Flat, gradient: torch.Tensor, share: float = 0.5) -> str:
    """Takes over the first parameter's gradient."""
    loose, slot = flat.loose, flat.slots[0]
    expected = (gradient.detach() * share).clone()
    with torch.no_grad():
        loose.take(slot, gradient, share)
    (taken,) = loose.tensors()
    assert torch.equal(taken.as_strided(slot.shape, slot.stride), expected)
    return "autograd's" if taken.data_ptr() == gradient.data_ptr() else "its own"


def test_a_gradient_stays_only_where_nobody_else_has_its_memory():
    def whose(gradient: torch.Tensor) -> str:
        return whose_memory(flat_of([30], 2, 0, 1), gradient)

    assert whose(torch.rand(30)) == "autograd's"
    gradient = torch.rand(30)
    view, values = gradient.view(5, 6), gradient.clone()
    assert whose(gradient) == "its own"
    assert torch.equal(view.flatten(), values)
    assert whose(torch.rand(60)[:30]) == "its own"
    assert whose(torch.rand(1).expand(30)) == "its own"
    assert whose(torch.rand(30, dtype=torch.float64).float()) == "autograd's"
    with_graph = torch.rand(30, requires_grad=True)
    assert whose(with_graph) == "its own"


def test_all_that_is_kept_is_named_to_who_records_the_training():
    """A gradient that stays was called a temporary of the product that made it."""
    named: list[tuple[int, str, str]] = []
    flat = flat_of([30, 2], 2, 0, 100, lambda tensor, *what: named.append((tensor.data_ptr(), *what)))
    for slot, gradient in zip(flat.slots, (torch.rand(30), torch.rand(2)), strict=True):
        flat.loose.take(slot, gradient, 0.5)
    assert named == [(tensor.data_ptr(), "gradient", "") for tensor in flat.loose.tensors()]


def test_what_comes_again_is_added_and_what_does_not_come_is_zero():
    flat = flat_of([30, 2, 40], 2, 0, 100)
    loose, (first, small, second) = flat.loose, flat.slots
    loose.take(first, torch.ones(30), 0.5)
    flat.ready.add(first.index)
    loose.take(first, torch.full((30,), 3.0), 0.5)
    loose.take(small, torch.ones(2), 0.5)
    loose.add_zeros(second)
    own, others = (torch.cat(parts) for parts in loose.pieces().by_rank)
    expected = torch.cat([torch.full((30,), 2.0), torch.full((2,), 0.5), torch.zeros(40)])
    assert torch.equal(torch.cat([own, others]), expected)
    loose.clear()
    assert not loose.is_there and loose.tensors() == []


@pytest.mark.parametrize("why", ["frozen", "stage 1", "one rank", "8 bits", "sums in bfloat16", "small"])
def test_others_are_collected_in_a_flat_buffer(why):
    flat = flat_of([30], 2, 0, 1)
    flat.num_ranks = 1 if why == "one rank" else 2
    flat.trainable = why != "frozen"
    flat.stage = 1 if why == "stage 1" else 2
    flat.reduce_bits = 8 if why == "8 bits" else None
    flat.reduce_dtype = torch.bfloat16 if why == "sums in bfloat16" else torch.float32
    with loose_from(1000 if why == "small" else 1):
        assert loose_gradients(flat, lambda *_: None) is None
        flat.trainable, flat.stage, flat.num_ranks, flat.reduce_bits = True, 2, 2, None
        flat.reduce_dtype = torch.float32
        assert isinstance(loose_gradients(flat, lambda *_: None), LooseGradients) == (why != "small")


def sums(rank: int, num_ranks: int, together: bool) -> dict[str, bool]:
    """Of messages in many tensors, and of the same in one; several are under way at once."""
    algorithms = (Algorithm(operation="reduce_scatter", min_bytes=0, name="together"),) if together else ()
    wire = Wire(dist.group.WORLD, lambda tensor: None, algorithms=algorithms)
    generator = torch.Generator().manual_seed(rank)
    found = {}
    for number, sizes in enumerate(([1], [3, 100, 2, 7000], [50_000, 1, 1, 30_001])):
        flat = flat_of(sizes, num_ranks, rank, 100)
        gradients = [torch.rand(size, generator=generator) for size in sizes]
        whole = torch.cat([*gradients, torch.zeros(flat.padded_numel - flat.num_elements)])
        if flat.loose is None:
            pieces = Pieces((whole.clone(),), tuple((p,) for p in whole.clone().chunk(num_ranks)), len(whole))
        else:
            for slot, gradient in zip(flat.slots, gradients, strict=True):
                flat.loose.take(slot, gradient, 1.0)
            pieces = flat.loose.pieces()
        begun = wire.begin_reduce_scatter(pieces, "", 2 * number)
        of_whole = wire.reduce_scatter(whole, "", 2 * number + 1)
        found[f"{sizes}"] = torch.equal(begun.wait(), of_whole)
    wire.close()
    return found


def test_what_is_sent_in_many_pieces_is_summed_as_what_is_sent_in_one():
    for num_ranks, together in ((2, False), (3, False), (3, True)):
        for found in run_ranks(sums, num_ranks, num_ranks, together, timeout_s=40):
            assert all(found.values()), found


class Offsets(nn.Module):
    """Each is a parameter of another shape, whose gradient is a view of the sum's."""

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.flat = nn.ParameterList(torch.rand(30, generator=generator) for _ in range(num_parameters))

    def forward(self) -> torch.Tensor:
        return sum(flat.view(6, 5) for flat in self.flat)


class Shared(nn.Module):
    """Autograd gives both parameters views of one tensor's memory. `apart`: each is a unit of its own."""

    def __init__(self, *, apart: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Offsets(1), Offsets(1)] if apart else [Offsets(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * sum(block() for block in self.blocks)


def trained(rank: int, stage: int | None, apart: bool) -> list[torch.Tensor]:
    def steps() -> list[torch.Tensor]:
        ddp = nn.parallel.DistributedDataParallel(Shared(apart=apart))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        data = torch.Generator().manual_seed(rank)
        for _ in range(3):
            optimizer.zero_grad()
            ddp(torch.rand(6, 5, generator=data)).square().sum().backward()
            optimizer.step()
        return [value.detach().clone() for value in ddp.module.parameters()]

    if stage is None:
        return steps()
    with loose_from(None if apart else 1), applied(make_plan(2, stage)):
        return steps()


@pytest.mark.parametrize("apart", [False, True])
def test_parameters_whose_gradients_share_memory_are_trained_as_under_ddp(apart):
    plain = run_ranks(trained, 2, None, apart)
    for stage in range(4):
        for found, expected in zip(run_ranks(trained, 2, stage, apart), plain, strict=True):
            assert all(map(torch.equal, found, expected)), stage

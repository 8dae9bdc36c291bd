"""Joining the allocator's events with the labels, on events small enough to work out by hand."""

from types import MappingProxyType

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import memadvisor
from memadvisor.capture.account import make_account
from memadvisor.capture.label_log import LabelLog, Named, OperatorCall, Place, SavedTensor, Sighting
from memadvisor.capture.ledger import Resident
from memadvisor.capture.truth import AllocatorEvent

MS = 1_000_000
FORWARD = Place("forward", "block.linear", "block", 0)
BACKWARD = Place("backward", "block.linear", "block", 0)


def event(time_ms, address, delta, total, operator="aten::addmm"):
    return AllocatorEvent(time_ms * MS, address, delta, total, 0, operator)


def account(events, log=None, residents=(), given_bytes=MappingProxyType({}), final=(), total=0, alive=tuple):
    return make_account(
        residents=residents,
        given_bytes=given_bytes,
        events=events,
        log=log or LabelLog(),
        final=final,
        alive=alive,
        start_ns=0,
        end_ns=1000 * MS,
        start_allocated_bytes=total,
        offset_ns=0,
        device="cpu",
    )


def by_address(result, events):
    return {row.size_bytes: row for row in result.storages}


def test_a_result_that_autograd_keeps_is_an_activation_of_its_module():
    log = LabelLog()
    log.places = [(1 * MS, FORWARD)]
    log.calls = [
        OperatorCall(1 * MS, 3 * MS, "aten::addmm", FORWARD, (), ((0xA, "float32", "[2, 5]"),), 0, 0)
    ]
    log.saved = [SavedTensor(0xA, 40, "[2, 5]", FORWARD, 4 * MS)]
    result = account([event(2, 0xA, 40, 40), event(9, 0xA, -40, 0)], log)

    (row,) = result.storages
    assert (row.category, row.module, row.unit, row.operator) == (
        "activation",
        "block.linear",
        "block",
        "aten::addmm",
    )
    assert (row.birth_s, row.death_s, row.shape) == (0.002, 0.009, "[2, 5]")
    assert result.saved[0].storage_id == row.storage_id


def test_what_no_operator_returned_is_a_temporary_inside_the_operator_that_ran():
    log = LabelLog(places=[(1 * MS, FORWARD)])
    result = account([event(2, 0xA, 64, 64, "aten::cdist"), event(3, 0xA, -64, 0)], log)

    assert [(row.category, row.operator, row.module) for row in result.storages] == [
        ("temporary", "inside aten::cdist", "block.linear")
    ]


def test_one_address_used_twice_is_two_storages():
    log = LabelLog(places=[(1 * MS, FORWARD), (5 * MS, BACKWARD)])
    log.named = [Named(8 * MS, 0xA, "gradient", "block")]
    result = account([event(2, 0xA, 10, 10), event(3, 0xA, -10, 0), event(7, 0xA, 20, 20)], log)

    assert [(row.size_bytes, row.category) for row in result.storages] == [
        (10, "temporary"),
        (20, "gradient"),
    ]


def test_bytes_that_nobody_knows_are_unexplained_and_never_dropped():
    residents = [Resident(0xB, 100, "parameter", "block", "float32", "[25]")]
    result = account([event(2, 0xA, 10, 160)], residents=residents, total=150)

    assert [row.unexplained_bytes for row in result.residuals] == [50]
    assert result.peak_allocated_bytes == 160
    assert sum(row.size_bytes for row in result.storages) + 50 == 160


def test_a_storage_met_in_the_step_but_never_born_there_was_there_before():
    """DDP's buckets are held by C++ alone: nobody finds them until the backward writes into them."""
    log = LabelLog(named=[Named(5 * MS, 0xC, "communication", "")])
    log.sightings = {0xC: Sighting(5 * MS, 80, "float32", "[20]")}
    result = account([event(2, 0xA, 10, 90)], log, total=80)

    (bucket,) = [row for row in result.storages if row.phase == "baseline"]
    assert (bucket.category, bucket.size_bytes) == ("communication", 80)
    assert [row.unexplained_bytes for row in result.residuals] == [0]


def test_a_storage_met_later_is_as_large_as_the_block_that_the_allocator_gave_for_it():
    """CUDA's gives a whole block of the large pool where less than 1 MiB of it would be left: a bucket of DDP's."""
    log = LabelLog(named=[Named(5 * MS, 0xC, "communication", "")])
    log.sightings = {0xC: Sighting(5 * MS, 80, "float32", "[20]")}
    result = account([event(2, 0xA, 10, 130)], log, given_bytes={0xC: 120}, total=120)

    assert [row.size_bytes for row in result.storages if row.phase == "baseline"] == [120]
    assert [row.unexplained_bytes for row in result.residuals] == [0]


def test_a_free_of_an_unknown_block_reveals_its_size():
    result = account([event(4, 0xD, -30, 70)], total=100)

    (row,) = result.storages
    assert (row.phase, row.size_bytes, row.death_s) == ("baseline", 30, 0.004)
    assert [entry.unexplained_bytes for entry in result.residuals] == [70]


def test_what_waits_for_the_forward_is_input_and_what_does_not_is_temporary():
    log = LabelLog(forward_starts_ns=[5 * MS])
    events = [event(1, 0xA, 8, 8), event(2, 0xB, 16, 24), event(3, 0xB, -16, 8)]
    result = account(events, log)

    assert [(row.size_bytes, row.category) for row in result.storages] == [(8, "input"), (16, "temporary")]


def test_what_a_recomputation_leaves_behind_is_an_activation():
    again = Place("recompute", "block", "block", 0)
    log = LabelLog(places=[(1 * MS, again)], recompute_ends_ns=[5 * MS])
    events = [event(2, 0xA, 8, 8), event(3, 0xB, 16, 24), event(4, 0xB, -16, 8), event(7, 0xA, -8, 0)]

    assert [row.category for row in account(events, log).storages] == ["activation", "temporary"]


def test_a_block_that_another_thread_freed_is_found_by_its_size():
    """Gloo frees its buffers on threads of its own: the profiler sees no event, but the total falls."""
    log = LabelLog(named=[Named(2 * MS, 0xA, "communication", "block")])
    events = [event(2, 0xA, 64, 64), event(3, 0xB, 16, 80), event(6, 0xC, 8, 24)]
    result = account(events, log)

    (freed,) = [row for row in result.storages if row.size_bytes == 64]
    assert (freed.category, freed.death_s) == ("communication", 0.006)
    assert [row.unexplained_bytes for row in result.residuals] == [0]


def test_what_a_script_gathers_before_its_forward_is_freed_by_another_thread_too():
    """FSDP2's `unshard()` called by hand: the gathered buffer, there as the forward begins, was 132 KiB too much for good."""
    log = LabelLog(
        places=[(1 * MS, Place("outside", "", "", 0)), (4 * MS, FORWARD)], forward_starts_ns=[4 * MS]
    )
    log.named = [Named(2 * MS, 0xA, "communication", "")]
    events = [event(2, 0xA, 64, 64), event(3, 0xB, 16, 80), event(6, 0xC, 8, 24)]
    result = account(events, log)

    (freed,) = [row for row in result.storages if row.size_bytes == 64]
    assert (freed.category, freed.death_s) == ("communication", 0.006)
    assert [row.unexplained_bytes for row in result.residuals] == [0]


def test_a_resident_that_another_thread_freed_before_the_first_event_is_no_part_of_the_step():
    """Gloo's thread lets the buffer of the last step's all-reduce go when the profiler starts: -64 KiB were unexplained."""
    residents = [
        Resident(0xA, 64, "other", "", "float32", "[16]"),
        Resident(0xB, 64, "parameter", "block", "float32", "[16]"),
        Resident(0xC, 32, "other", "", "float32", "[8]"),
        Resident(0xD, 16, "other", "", "float32", "[4]"),
    ]
    log = LabelLog(places=[(1 * MS, FORWARD)])
    log.calls = [OperatorCall(1 * MS, 3 * MS, "aten::addmm", FORWARD, (0xC,), (), 0, 0)]

    result = account([event(2, 0xE, 8, 120)], log, residents, total=112)

    assert sorted(row.size_bytes for row in result.storages) == [8, 16, 32, 64]
    assert [row.unexplained_bytes for row in result.residuals] == [0]

    kept = account([event(2, 0xE, 8, 136)], log, residents, total=128)
    assert [row.unexplained_bytes for row in kept.residuals] == [-48]  # what does not add up is shown


def test_what_another_thread_made_in_the_step_and_still_has_is_named():
    """A script's own threads make the next batches: 32 KiB were unexplained."""
    events = [event(2, 0xA, 10, 110), event(4, 0xA, -10, 160), event(6, 0xC, 8, 143), event(8, 0xC, -8, 135)]
    known = Resident(0xB, 100, "parameter", "block", "float32", "[25]")
    alive = [
        known,
        Resident(0xD, 32, "other", "", "float32", "[8]"),
        Resident(0xE, 50, "other", "", "float32", "[]"),
    ]
    result = account(events, residents=[known], total=100, alive=lambda: alive)

    (made,) = [
        row for row in result.storages if row.size_bytes == 32
    ]  # 50 more were gone again: 0xE is newer
    assert (made.category, made.operator, made.birth_s, made.death_s) == (
        "other",
        "(another thread)",
        0.004,
        None,
    )
    assert [row.unexplained_bytes for row in result.residuals] == [0, 28, 3]

    plain = [event(2, 0xA, 10, 110), event(4, 0xA, -10, 100)]
    assert (
        len(account(plain, residents=[known], total=100, alive=lambda: 1 / 0).storages) == 2
    )  # nobody is asked


def test_residents_that_another_thread_frees_within_the_step_are_missed_where_too_much_is_known():
    """What a script sent before the step (an object's bytes, and how many) goes with the backend's work: in trainings
    with Lightning's DDP -8 to -176 B were unexplained. What the step uses later is not taken for it."""
    residents = [
        Resident(0xA, 64, "parameter", "block", "float32", "[16]"),
        Resident(0xB, 8, "other", "", "int64", "[1]"),
        Resident(0xC, 176, "other", "", "uint8", "[176]"),
        Resident(0xD, 184, "other", "", "uint8", "[184]"),
    ]
    log = LabelLog(places=[(1 * MS, FORWARD)])
    log.calls = [OperatorCall(7 * MS, 8 * MS, "aten::addmm", FORWARD, (0xD,), (), 0, 0)]
    result = account([event(2, 0xE, 16, 448), event(6, 0xF, 32, 296)], log, residents, total=432)

    ends = {row.size_bytes: row.death_s for row in result.storages}
    assert ends == {64: None, 8: 0.006, 176: 0.006, 184: None, 16: None, 32: None}
    assert [row.unexplained_bytes for row in result.residuals] == [0]


def test_what_python_makes_for_an_operator_belongs_to_it():
    """`x / 8` makes a tensor of the number before the division runs; a tensor that no operator uses has none."""
    log = LabelLog(places=[(1 * MS, FORWARD)])
    log.calls = [OperatorCall(4 * MS, 5 * MS, "aten::div", FORWARD, (), (), 0, 0)]
    events = [event(2, 0xB, 16, 16, ""), event(3, 0xB, -16, 0), event(3, 0xA, 8, 8, ""), event(6, 0xA, -8, 0)]

    assert [(row.size_bytes, row.operator) for row in account(events, log).storages] == [
        (16, "(no operator)"),
        (8, "inside aten::div"),
    ]


@pytest.mark.parametrize("is_batch", [False, True])
def test_weights_that_a_script_keeps_aside_are_no_input(is_batch, tmp_path):
    """Of a sharpness-aware update by hand they were: as if half the batch made half of them. A batch that was made of
    another tensor is one."""
    model = torch.nn.Linear(50, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(40, 50)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(4):
            x = data * model.weight.detach() if is_batch else data
            model(x).square().sum().backward()
            with torch.no_grad():
                kept = [parameter.clone() for parameter in model.parameters()]
                for parameter in model.parameters():
                    parameter += 0.05 * parameter.grad / parameter.grad.norm()
            optimizer.zero_grad()
            model(x).square().sum().backward()
            with torch.no_grad():
                for parameter, old in zip(model.parameters(), kept, strict=True):
                    parameter.copy_(old)
            optimizer.step()
            optimizer.zero_grad()
    rows = [
        row for row in prof.run.ranks[0].storages if row.phase == "outside" and row.operator == "aten::clone"
    ]
    inputs = [row for row in prof.run.ranks[0].storages if row.phase == "outside" and row.category == "input"]

    assert [(row.shape, row.category) for row in rows] == [("[40, 50]", "temporary"), ("[40]", "temporary")]
    assert [row.operator for row in inputs] == ["aten::mul"] * is_batch


def test_what_is_worked_out_between_parts_is_no_input(tmp_path):
    """A latent that the script samples and hands to a decoder is a result of the encoder: it was counted as a batch. The
    next batch is one, whatever nodes the backward before it has made.
    """
    encoder, decoder = torch.nn.Linear(6, 4), torch.nn.Linear(2, 6)
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(4):
            for _ in range(2):
                batch = torch.randn(5, 6)
                mean, log_scale = checkpoint(encoder, batch, use_reentrant=False).chunk(2, 1)
                scale = log_scale.exp()
                latent = mean + scale * torch.randn(5, 2)
                (decoder(latent) - batch).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    rows = [row for row in prof.run.ranks[0].storages if row.phase == "outside"]
    categories = [
        [row.category for row in rows if (row.operator, row.shape) == made]
        for made in (("aten::randn", "[5, 6]"), ("aten::exp", "[5, 2]"), ("aten::add", "[5, 2]"))
    ]

    assert categories == [["input"] * 2, ["activation"] * 2, ["activation"] * 2]


def test_the_backward_of_what_the_script_works_out_itself_is_of_no_module(tmp_path):
    """It was said to be of the module that had been called last."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 7), torch.nn.Linear(7, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(4):
            between = model[0](torch.randn(5, 3)).tanh()
            model[1](between).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    rows = [row for row in prof.run.ranks[0].operators if row.phase == "backward"]

    assert {row.module for row in rows if row.name == "aten::tanh_backward"} == {""}
    assert {row.module for row in rows if row.name == "aten::mm"} == {"0", "1"}

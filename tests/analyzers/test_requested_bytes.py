"""What was asked of a GPU's allocator, of which blocks alone are known."""

import dataclasses

from memadvisor.analyzers.requested_bytes import requests
from memadvisor.cost.allocator_settings import MIB
from memadvisor.run.records import CUBLAS, Operator
from tests.make_run import storage


def test_of_what_an_operator_makes_inside_itself_others_of_its_block_tell_what_was_asked_for():
    """A block of 12 MiB was given for 11.5; so a buffer of unknown shape in such a block is taken to be of 11.5."""
    shaped = storage(device="cuda:0", size_bytes=12 * MIB, shape=f"[{23 * MIB // 8}]")
    inside = storage(device="cuda:0", size_bytes=12 * MIB, shape="", dtype="", operator="inside aten::clone")
    other = dataclasses.replace(inside, size_bytes=14 * MIB)
    asked = requests([shaped, inside, other])

    assert [asked(row) for row in (shaped, inside, other)] == [23 * MIB // 2, 23 * MIB // 2, 14 * MIB]
    assert requests([other])(inside) == 12 * MIB
    assert asked(dataclasses.replace(inside, operator=CUBLAS)) == 12 * MIB


def test_a_block_that_others_were_given_by_chance_tells_nothing():
    """Of three tensors of 11.5 MiB two were given blocks of just that."""
    exact = storage(device="cuda:0", size_bytes=23 * MIB // 2, shape=f"[{23 * MIB // 8}]")
    chance = dataclasses.replace(exact, size_bytes=12 * MIB)
    inside = storage(device="cuda:0", size_bytes=12 * MIB, shape="", dtype="", operator="inside aten::clone")

    assert requests([exact, exact, chance, inside])(inside) == 12 * MIB


def test_layers_are_alike_in_what_an_operator_makes_inside_itself():
    """The smallest block of about as much is what all asked for; one of half as much is another's."""
    rows = [
        storage(device="cuda:0", size_bytes=size * MIB // 4, shape="", dtype="", operator="inside aten::sum")
        for size in (12, 13, 6)
    ]
    asked = requests(rows)

    assert [asked(row) for row in rows] == [3 * MIB, 3 * MIB, 6 * MIB // 4]


def test_calls_that_read_and_write_as_much_asked_for_as_much():
    """Of one operator, or of others that it calls; the second buffer of a call is compared with second ones."""
    calls = [
        Operator("aten::sum", "", "", "backward", at, at + 0.5, 0, 0, None, read_bytes, 8)
        for at, read_bytes in ((1.0, 100), (2.0, 100), (3.0, 200))
    ]
    rows = [
        storage(
            storage_id=number,
            device="cuda:0",
            size_bytes=size * MIB // 4,
            shape="",
            dtype="",
            operator=operator,
            birth_s=at,
        )
        for number, (at, size, operator) in enumerate(
            [
                (1.1, 12, "inside aten::sum"),
                (1.2, 13, "inside aten::mul"),
                (2.1, 15, "inside aten::sum"),
                (2.2, 14, "inside aten::mul"),
                (3.1, 15, "inside aten::sum"),
            ]
        )
    ]
    asked = requests(rows, calls)

    assert [asked(row) * 4 // MIB for row in rows] == [12, 13, 12, 13, 15]

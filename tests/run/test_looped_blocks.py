"""A module that a loop calls is one unit, unless there are more blocks in it than the loop has rounds."""

from torch import nn

from memadvisor.run.cut import cut_units, module_tree
from memadvisor.run.looped_blocks import SeenCalls, looped_blocks, looped_blocks_of


class Pair(nn.Module):
    """Two layers that are no blocks."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(2, 4), nn.Linear(4, 2)


class Solver(nn.Module):
    def __init__(self, field):
        super().__init__()
        self.stem, self.field, self.head = nn.Linear(2, 2), field, nn.Linear(2, 2)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in range(3))


def blocks_of(model, most, inside=()):
    return looped_blocks(module_tree(model), SeenCalls(most, dict(inside)))


def test_what_a_loop_calls_is_a_unit_with_all_that_is_in_it():
    model = Solver(Pair())
    looped = blocks_of(model, {"field": 4, "stem": 1})
    units = cut_units(module_tree(model), looped)

    assert looped == {"field"}
    assert {units[name] for name in ("field.up", "field.down")} == {"field"}
    assert units["stem"] == "stem"


def test_what_is_called_once_and_a_layer_that_a_loop_calls_are_as_they_were():
    assert not blocks_of(Solver(Pair()), {"field": 1, "head": 9})


def test_a_model_that_is_called_for_chunks_of_its_batch_is_one_unit():
    looped = blocks_of(Pair(), {"": 2})

    assert looped == {""}
    assert set(cut_units(module_tree(Pair()), looped).values()) == {""}


def test_blocks_inside_stay_units_unless_the_loop_goes_round_more_often():
    calls = {"field": {f"field.blocks.{place}": 1 for place in range(3)}}

    assert not blocks_of(Solver(Stack()), {"field": 3}, calls)
    assert blocks_of(Solver(Stack()), {"field": 4}, calls) == {"field"}


def test_the_inner_one_of_two_loops_is_the_unit_unless_the_outer_one_goes_round_more_often():
    model = Solver(Solver(Pair()))
    inside = {"field": {"field.field": 6}}

    assert blocks_of(model, {"field": 2, "field.field": 6}, inside) == {"field.field"}
    assert blocks_of(model, {"field": 8, "field.field": 6}, inside) == {"field"}


def test_a_plan_tells_them_by_naming_nothing_inside():
    tree = module_tree(Solver(Pair()))

    assert looped_blocks_of(tree, {"stem", "field", "head"}) == {"field"}
    assert not looped_blocks_of(tree, {"stem", "field.up", "field.down", "head"})
    assert not looped_blocks_of(tree, ())
    assert looped_blocks_of(module_tree(Pair()), {""}) == {""}

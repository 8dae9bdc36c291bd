"""What a hook of a unit casts of what the unit is called with."""

from dataclasses import replace

from memadvisor.analyzers.cast_arguments import cast_arguments
from memadvisor.run.records import CallTensor, ModuleCall
from tests.make_run import make_run

RANK = make_run(num_ranks=1).ranks[0]
CAST = replace(RANK.operators[0], name="aten::_to_copy", start_s=1.1, end_s=1.3)
CALL = ModuleCall(0, "a", "a", "forward", 0, 1.0, 2.0)


def found(operator):
    storage = replace(RANK.storages[0], storage_id=7, birth_s=1.2, operator=operator)
    rank = replace(RANK, storages=(storage,), operators=(CAST,))
    return cast_arguments(rank, [(CALL, CallTensor(0, 7, "late_input", False))])


def test_a_cast_is_kept_and_what_it_casts_is_used_until_it_is_over():
    arguments = found("aten::_to_copy")

    assert arguments.casts == {7}
    assert [arguments.has(time_s) for time_s in (None, 0.9, 1.3, 1.4)] == [False, False, True, False]


def test_what_a_forward_appends_to_a_list_that_it_is_given_is_no_cast():
    arguments = found("aten::mul")

    assert not arguments.casts and not arguments.has(1.3)

import pytest

from benchmarks.accuracy.analytic import Cell, bytes_per_parameter


@pytest.mark.parametrize("stage, by_hand", [(0, 16), (1, 4 + 12 / 64), (2, 2 + 14 / 64), (3, 16 / 64)])
def test_states_of_a_parameter_by_stage(stage, by_hand):
    assert bytes_per_parameter(stage, 64) == pytest.approx(by_hand)


def test_a_figure_is_exact_within_a_unit_of_its_last_digit():
    assert Cell(what="", published=4187.0, predicted=4187.5, rounding=1.0).is_exact
    assert not Cell(what="", published=41.3, predicted=41.5, rounding=0.1).is_exact

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memadvisor.run.records import CATEGORIES, PHASES, UNEXPLAINED
from memadvisor.tui.drawing import (
    CATEGORY_COLORS,
    PHASE_COLORS,
    bar,
    sparkline,
    stacked_area,
    stacked_bar,
)

sizes = st.floats(0, 1e12)


def test_every_category_and_phase_has_a_color_of_its_own_name():
    assert set(CATEGORY_COLORS) == {*CATEGORIES, UNEXPLAINED}
    assert set(PHASE_COLORS) == set(PHASES)
    assert len(set(CATEGORY_COLORS.values())) == len(CATEGORY_COLORS)


def test_a_bar_is_exact_to_an_eighth_of_a_cell():
    assert bar(1, 2, 10) == "█" * 5
    assert bar(5, 16, 2) == "▋"
    assert bar(1e-9, 1, 10) == "▏"
    assert bar(0, 1, 10) == bar(-1, 1, 10) == bar(1, 0, 10) == ""


@given(sizes, sizes, st.integers(0, 300))
def test_a_bar_never_leaves_its_room(value, largest, width):
    assert len(bar(value, largest, width)) <= width


def test_a_sparkline_shows_the_newest_values():
    assert sparkline([9, 9, 1, 2, 4, 8], 4) == "▁▂▄█"
    assert sparkline([0, 0], 4) == "  "
    assert sparkline([1], 0) == ""


@given(st.lists(sizes, max_size=12), st.integers(1, 200))
def test_a_stacked_bar_is_exactly_as_wide_as_asked(values, width):
    text = stacked_bar([(value, "red") for value in values], width)

    assert len(text.plain) == (width if sum(values) > 0 else 0)


@given(
    st.lists(st.dictionaries(st.sampled_from(list(CATEGORY_COLORS)), st.integers(-10, 10**12)), max_size=9),
    st.integers(1, 20),
    st.one_of(st.none(), st.integers(0, 8)),
)
def test_an_area_fills_its_rectangle_whatever_it_shows(columns, height, cursor):
    rows = stacked_area(columns, height, 1e12, cursor=cursor)

    assert len(rows) == height
    assert all(sum(len(segment.text) for segment in row) == len(columns) for row in rows)


def test_an_area_is_as_high_as_its_total():
    """Two thirds of 10 for parameters, one third of it on top for gradients, in a picture of height 15."""
    rows = stacked_area([{"parameter": 10, "gradient": 5}], 15, 15)

    colors = [row[0].style.color.name for row in rows]
    assert colors == [CATEGORY_COLORS["gradient"]] * 5 + [CATEGORY_COLORS["parameter"]] * 10


def test_a_cell_that_two_categories_share_is_divided_in_eighths():
    [[segment]] = stacked_area([{"parameter": 3, "activation": 5}], 1, 8)

    assert segment.text == "▃"
    assert segment.style.color.name == CATEGORY_COLORS["parameter"]
    assert segment.style.bgcolor.name == CATEGORY_COLORS["activation"]


@pytest.mark.parametrize("top", [0, -1])
def test_nothing_to_show_is_a_blank_area(top):
    assert [row[0].text for row in stacked_area([{"parameter": 1}] * 3, 2, top)] == ["   ", "   "]

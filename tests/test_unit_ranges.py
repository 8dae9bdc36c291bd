"""A list of units says each name, or a range that holds it."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memadvisor.unit_ranges import unit_ranges


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], ""),
        (["head"], "head"),
        (["h.0", "h.1"], "h.0, h.1"),
        (["wte", "h.8", "h.9", "h.10", "head"], "wte, h.8 to 10, head"),
        (["h.0", "h.2", "h.3", "h.4"], "h.0, h.2 to 4"),
        (["a.0", "a.1", "a.2", "b.3"], "a.0 to 2, b.3"),
        (["a.2", "a.1", "a.0"], "a.2, a.1, a.0"),
        (["a.0.mlp", "a.1.mlp", "a.2.mlp"], "a.0.mlp, a.1.mlp, a.2.mlp"),
        (["a.08", "a.09", "a.10"], "a.08, a.09, a.10"),
    ],
)
def test_runs_are_said_once(names, words):
    assert unit_ranges(names) == words


@given(st.lists(st.tuples(st.sampled_from(["a.", "b.c", ""]), st.integers(0, 30)), unique=True))
def test_the_words_stand_for_the_names_and_no_others(pairs):
    names = [f"{stem}{number}" for stem, number in pairs]
    said = []
    for words in filter(None, unit_ranges(names).split(", ")):
        first, _, last = words.partition(" to ")
        stem, number = re.fullmatch(r"(.*?)(\d+)", first).groups()
        said += [f"{stem}{n}" for n in range(int(number), int(last or number) + 1)]

    assert said == names

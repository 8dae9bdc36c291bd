"""Levels of a forward and of its run again for any choice of what stays, against playing them event by event."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from memadvisor.cost.kept import Event, ForwardOperators, KeepableOperator, KeepableStorage, cut


@st.composite
def forwards(draw):
    """Operators one after the other: each may work with something, and makes a storage that dies by the end, or is saved.

    Returns sizes, whether autograd saves each, when each dies if nothing is kept, and what each works with besides.
    """
    count = draw(st.integers(1, 6))
    sizes = draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    saved = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    ends = [draw(st.integers(place, count)) for place in range(count)]
    inside = draw(st.lists(st.integers(0, 20), min_size=count, max_size=count))
    kept = draw(st.sets(st.integers(0, count - 1)))
    return sizes, saved, ends, inside, kept


def made(sizes, saved, ends, inside):
    first, again = [], []
    for place, size in enumerate(sizes):
        for events in (first, again):
            events.append(place)
            events += [Event(inside[place], "temporary"), Event(size, "activation", place)]
            events += [Event(-inside[place], "temporary"), -1]
        gone = [other for other, end in enumerate(ends) if end == place + 1 and other <= place]
        first += [Event(-sizes[other], "activation", other) for other in gone]
        again += [Event(-sizes[other], "activation", other) for other in gone if not saved[other]]
    first = [event for event in first if not isinstance(event, int)]
    forward, deaths = cut({"other": 3}, first, at_births=False)
    rerun, births = cut({}, again, at_births=True)
    operators = tuple(
        KeepableOperator(
            name=f"op#{place}",
            seconds=1.0,
            is_random=False,
            storages=(KeepableStorage(category="activation", size_bytes=size, death_segment=None),),
        )
        for place, size in enumerate(sizes)
    )
    found = ForwardOperators(operators=operators, forward=forward, deaths=deaths, again=rerun, births=births)
    return found, first, again


@given(forwards())
@settings(max_examples=200, deadline=None)
def test_the_first_run_holds_what_it_keeps_from_its_birth_on(example):
    *parts, kept = example
    found, first, _ = made(*parts)
    level = highest = 3
    for event in first:
        if not (event.delta_bytes < 0 and event.operator in kept):
            level += event.delta_bytes
        highest = max(highest, level)

    assert sum(found.forward_peak(kept).values()) == highest


@given(forwards())
@settings(max_examples=200, deadline=None)
def test_the_run_again_makes_nothing_of_what_is_there_and_lets_go_of_what_is_not_saved(example):
    *parts, kept = example
    found, _, again = made(*parts)
    level = highest = 0
    running = None
    for event in again:
        if isinstance(event, int):
            running = event
        elif running not in kept or event.operator not in (None, running) or event.delta_bytes < 0:
            own = event.operator in kept and event.delta_bytes > 0
            level += 0 if own or (running in kept and event.operator is None) else event.delta_bytes
        highest = max(highest, level)

    assert sum(found.growth(kept).values()) == highest


def test_a_name_without_number_is_every_call_and_an_unknown_one_is_none():
    found, *_ = made([1, 2], [True, True], [2, 2], [0, 0])
    assert found.places(["op"]) == {0, 1}
    assert found.places(["op#1", "aten::mm#0"]) == {1}


def test_late_operators_are_held_and_not_kept():
    """Of the last of three nobody asks in the second run: the first one holds it to its end."""
    sizes = [1, 2, 4]
    found, *_ = made(sizes, [True, True, False], [2, 2, 3], [0, 0, 0])
    found = replace(found, operators=found.operators[:2], late=("op#2",))

    assert (found.places(["op"]), found.held(["op"])) == ({0, 1}, {0, 1, 2})
    assert sum(found.forward_peak(found.held(["op"])).values()) == 3 + sum(sizes)
    assert sum(found.forward_peak(found.held(["op#2"])).values()) == 3 + 4

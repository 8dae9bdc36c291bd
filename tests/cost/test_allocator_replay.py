"""The fullest moment of a replay, told apart by category."""

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from memadvisor.cost.allocator_replay import Change, last_peak, replay
from memadvisor.cost.allocator_settings import MIB, AllocatorSettings
from memadvisor.cost.caching_allocator import CachingAllocator

CATEGORIES = ("parameter", "gradient", "activation")
actions = st.lists(
    st.tuples(st.integers(0, 40 * MIB), st.sampled_from(CATEGORIES), st.booleans()), min_size=1, max_size=40
)


def changes_of(actions):
    """Each allocates, or where its size is odd, frees what is oldest; with a flag, the next step begins."""
    changes, live, step = [], [], 0
    for number, (size, category, ends) in enumerate(actions):
        if size % 2 and live:
            changes.append(Change(live.pop(0), 0, step=step))
        else:
            live.append(number)
            changes.append(Change(number, size + 1, 0, category, f"at {number}", step))
        step += ends
    return changes


@given(actions)
@hypothesis_settings(max_examples=60, deadline=None)
def test_its_parts_sum_to_it_and_are_the_allocators_own_blocks(actions):
    changes = changes_of(actions)
    peak = last_peak(changes, replay(changes, AllocatorSettings()))
    allocator, highest, blocks = CachingAllocator(AllocatorSettings()), (-1, {}), {}
    for change in changes:
        before = allocator.allocated_bytes
        if change.size_bytes > 0:
            allocator.allocate(change.name, change.size_bytes)
            blocks[change.name] = change.category, allocator.allocated_bytes - before
        else:
            allocator.free(change.name)
            del blocks[change.name]
        if change.step == changes[-1].step and allocator.allocated_bytes > highest[0]:
            highest = allocator.allocated_bytes, dict(blocks)

    assert sum(peak.by_category_bytes.values()) == peak.allocated_bytes == highest[0]
    assert peak.by_category_bytes == {
        category: sum(size for of, size in highest[1].values() if of == category)
        for category in {of for of, _ in highest[1].values()}
    }


def test_a_moment_that_no_account_has_is_left_out():
    """A sum beside what it is added to, which is freed at once."""
    changes = [
        Change("first", 30 * MIB, category="gradient"),
        Change("sum", 30 * MIB, category="gradient", is_aside=True),
        Change("first", 0),
        Change("kept", 20 * MIB, category="activation"),
    ]
    assert last_peak(changes, replay(changes, AllocatorSettings())).allocated_bytes == 50 * MIB


def test_it_is_of_the_last_step_alone():
    """The first had more; where the last has its most twice, the first place counts."""
    changes = [
        Change("state", 30 * MIB, category="optimizer_state"),
        Change("once", 50 * MIB, category="temporary"),
        Change("once", 0),
        Change("kept", 20 * MIB, category="activation", place="forward of a", step=1),
        Change("kept", 0, step=1),
        Change("again", 20 * MIB, category="gradient", place="backward of a", step=1),
    ]
    peak = last_peak(changes, replay(changes, AllocatorSettings()))

    assert (peak.allocated_bytes, peak.place) == (50 * MIB, "forward of a")
    assert peak.by_category_bytes == {"optimizer_state": 30 * MIB, "activation": 20 * MIB}


def test_what_a_block_has_beyond_what_was_asked_for_is_of_its_category():
    """11 MiB in a free block of 12 have all of it, as splits of less than 1 MiB are not made."""
    changes = [
        Change("first", 12 * MIB, category="activation"),
        Change("first", 0),
        Change("second", 11 * MIB + 512, category="gradient", step=1),
    ]
    assert last_peak(changes, replay(changes, AllocatorSettings())).by_category_bytes == {
        "gradient": 12 * MIB
    }

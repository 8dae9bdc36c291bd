"""The simulated caching allocator: laws, a brute force, and the published behaviour of torch's."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from memadvisor.cost.allocator_replay import Change, replay
from memadvisor.cost.allocator_settings import MIB, AllocatorSettings, parse_allocator_settings
from memadvisor.cost.caching_allocator import CachingAllocator, DeviceFullError

KIB = 2**10
sizes = st.one_of(
    st.integers(1, 3 * KIB),
    st.integers(1, 40 * MIB),
    st.sampled_from(
        [MIB, MIB + 1, 10 * MIB - 512, 10 * MIB, 9 * MIB, 19 * MIB, 2 * MIB, 40 * MIB, 128 * MIB]
    ),
)
# What a script does: allocate on one of two streams, or free one of what is there, at once or still used.
actions = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), sizes, st.integers(0, 1)),
        st.tuples(st.just("free"), st.integers(0, 50), st.booleans()),
        st.tuples(st.just("complete"), st.integers(0, 50), st.none()),
        st.tuples(st.just("empty_cache"), st.none(), st.none()),
    ),
    max_size=60,
)
all_settings = st.sampled_from(
    [
        "",
        "expandable_segments:True",
        "max_split_size_mb:20",
        "max_split_size_mb:64,max_non_split_rounding_mb:32",
        "roundup_power2_divisions:8",
        "large_segment_size_mb:12",
        "large_segment_size_mb:12,expandable_segments:True",
        "garbage_collection_threshold:0.3,per_process_memory_fraction:0.5",
    ]
)
capacities = st.sampled_from([None, 1024 * MIB, 160 * MIB])


def play(actions, allocator):
    """Do the actions that can be done; what is allocated and what is pending, by name."""
    live, pending = {}, {}
    for number, (action, what, how) in enumerate(actions):
        if action == "allocate":
            try:
                allocator.allocate(number, what, stream=how)
                live[number] = what
            except DeviceFullError as error:
                # Freeing everything that is free did not help, and pending blocks had to be waited for.
                assert error.requested_bytes >= what
                pending.clear()
        elif action == "free" and live:
            name = sorted(live)[what % len(live)]
            allocator.free(name, still_used=how)
            size = live.pop(name)
            if how:
                pending[name] = size
        elif action == "complete" and pending:
            name = sorted(pending)[what % len(pending)]
            if any(name == block.name for s in allocator.segments() for block in s.blocks):
                allocator.complete(name)
            del pending[name]
        elif action == "empty_cache":
            allocator.empty_cache()
            pending.clear()
        check_laws(allocator, live)
    return live


def check_laws(allocator, live):
    segments = allocator.segments()
    rounded = sum(allocator.settings.block_bytes(size) for size in live.values())
    assert allocator.reserved_bytes >= allocator.active_bytes >= allocator.allocated_bytes >= rounded
    assert allocator.reserved_bytes == sum(segment.total_bytes for segment in segments)
    if allocator.capacity_bytes is not None:
        assert allocator.reserved_bytes <= allocator.capacity_bytes
    named = {}
    end = 0
    for segment in segments:
        assert segment.address >= end  # segments do not overlap
        address, was_free = segment.address, False
        for block in segment.blocks:
            assert block.address == address and block.size_bytes > 0  # blocks tile their segment
            address += block.size_bytes
            is_free = block.state == "free"
            assert not (is_free and was_free)  # free neighbours are always merged
            was_free = is_free
            if block.state == "allocated":
                named[block.name] = block.size_bytes
        end = address
    assert named.keys() == live.keys()
    assert sum(named.values()) == allocator.allocated_bytes


@hypothesis_settings(max_examples=150, deadline=None)
@given(actions, all_settings, capacities, st.booleans())
def test_laws_hold_after_every_action(actions, text, capacity_bytes, orders_by_address):
    """Blocks tile segments, nothing overlaps, free neighbours are merged, and an empty device is empty."""
    settings = replace(parse_allocator_settings(text), orders_by_address=orders_by_address)
    allocator = CachingAllocator(settings, capacity_bytes=capacity_bytes)
    live = play(actions, allocator)
    for name in live:
        allocator.free(name)
    allocator.empty_cache()

    assert allocator.reserved_bytes == allocator.active_bytes == allocator.allocated_bytes == 0
    assert allocator.segments() == ()


class BruteForce:
    """The default settings on one stream, on plain lists: every segment is [[size, name or None], ...]."""

    def __init__(self):
        self.segments = []
        self.reserved = 0

    def allocate(self, name, size):
        size = max(512, -(-size // 512) * 512)
        small = size <= MIB
        fits = [
            (block[0], number, place)
            for number, (is_small, blocks) in enumerate(self.segments)
            for place, block in enumerate(blocks)
            if block[1] is None and block[0] >= size and is_small == small
        ]
        if fits:
            _, number, place = min(fits)
        else:
            total = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            self.segments.append((small, [[total, None]]))
            self.reserved += total
            number, place = len(self.segments) - 1, 0
        blocks = self.segments[number][1]
        rest = blocks[place][0] - size
        if rest >= 512 if small else rest > MIB:
            blocks[place : place + 1] = [[size, name], [rest, None]]
        else:
            blocks[place][1] = name

    def free(self, name):
        for _, blocks in self.segments:
            for place, block in enumerate(blocks):
                if block[1] == name:
                    block[1] = None
                    for first in (place, place - 1):
                        if 0 <= first < len(blocks) - 1 and blocks[first][1] is blocks[first + 1][1] is None:
                            blocks[first][0] += blocks.pop(first + 1)[0]
                    return


@hypothesis_settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(sizes, st.integers(-50, -1)), max_size=80))
def test_the_defaults_agree_with_a_brute_force(requests):
    """Positive numbers allocate, negative ones free: same reserved bytes and same blocks after each."""
    allocator, oracle, live = CachingAllocator(), BruteForce(), []
    for number, request in enumerate(requests):
        if request > 0:
            allocator.allocate(number, request)
            oracle.allocate(number, request)
            live.append(number)
        elif live:
            name = live.pop(request % len(live))
            allocator.free(name)
            oracle.free(name)
        found = [[[block.size_bytes, block.name] for block in s.blocks] for s in allocator.segments()]
        assert found == [blocks for _, blocks in oracle.segments]
        assert allocator.reserved_bytes == oracle.reserved


@hypothesis_settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(sizes, st.integers(-50, -1)), max_size=60))
def test_an_expandable_segment_reserves_whole_pages_of_what_its_end_needs(requests):
    """Its mapped pages end where the highest block ended at its highest, so growth is at most a page above it."""
    allocator, live, ends = CachingAllocator(AllocatorSettings(expandable_segments=True)), [], {}
    for number, request in enumerate(requests):
        if request > 0:
            allocator.allocate(number, request)
            live.append(number)
        elif live:
            allocator.free(live.pop(request % len(live)))
        for segment in allocator.segments():
            used = [block for block in segment.blocks if block.state == "allocated"]
            end = max((b.address + b.size_bytes - segment.address for b in used), default=0)
            ends[segment.pool] = max(end, ends.get(segment.pool, 0))
        pages = {"small": 2 * MIB, "large": 20 * MIB}
        assert allocator.reserved_bytes == sum(-(-e // pages[p]) * pages[p] for p, e in ends.items())


def reserved(*requests, text="", **options):
    """Reserved bytes after allocations, all alive."""
    changes = [Change(number, size) for number, size in enumerate(requests)]
    return replay(changes, parse_allocator_settings(text), **options).peak_reserved_bytes


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (1000 * MIB, 1000 * MIB),
    ],
)
def test_what_the_first_tensor_reserves(size, segment):
    assert reserved(size) == segment


def test_small_tensors_share_a_segment_and_large_ones_another():
    assert reserved(*[512] * 4096) == 2 * MIB
    assert reserved(*[512] * 4097) == 4 * MIB
    assert reserved(*[4 * MIB] * 5) == 20 * MIB
    assert reserved(*[4 * MIB] * 6) == 40 * MIB
    assert reserved(1, 4 * MIB) == 22 * MIB


def test_the_remainder_of_a_large_block_is_split_off_only_above_1_mib():
    """19 MiB of 20 leave 1 MiB, which stays with the block; 18 leave 2, which serve another."""
    assert reserved(9 * MIB, 10 * MIB - 512) == 20 * MIB
    allocator = CachingAllocator()
    allocator.allocate("a", 20 * MIB)
    allocator.free("a")
    allocator.allocate("b", 19 * MIB)
    assert allocator.allocated_bytes == 20 * MIB
    allocator.free("b")
    allocator.allocate("c", 18 * MIB)
    assert allocator.allocated_bytes == 18 * MIB


def steps_of_growing_batches(num_layers, batches, text=""):
    """The example of the notes on expandable segments: per batch N, each layer keeps N*A, then all are freed."""
    changes = []
    for step, batch in enumerate(batches):
        names = [(step, layer) for layer in range(num_layers)]
        changes += [Change(name, batch * MIB) for name in names]
        changes += [Change(name, 0) for name in names]
    return replay(changes, parse_allocator_settings(text))


def test_batches_that_grow_leave_slivers_and_expandable_segments_do_not():
    """50 layers, batches of 30, 31 and 32: segments of each size pile up; one growing segment holds just the last."""
    plain = steps_of_growing_batches(50, [30, 31, 32])
    expandable = steps_of_growing_batches(50, [30, 31, 32], "expandable_segments:True")

    assert plain.peak_allocated_bytes == 50 * 32 * MIB
    assert plain.peak_reserved_bytes == 50 * (30 + 32) * MIB  # 31 needs 32, which then serves 32 too
    assert (
        plain.fragmentation_bytes == 50 * 30 * MIB
    )  # the segments of the first batch, of no use for the second
    assert expandable.peak_reserved_bytes == 50 * 32 * MIB


def test_a_small_live_block_pins_a_whole_segment():
    """100 MiB split by 2 MiB in its middle: 98 MiB are free, but not for 60 MiB; only its end of use frees them."""
    allocator = CachingAllocator()
    allocator.allocate("all", 100 * MIB)
    allocator.free("all")
    for name, size in (("low", 49 * MIB), ("pin", 2 * MIB), ("high", 49 * MIB)):
        allocator.allocate(name, size)
    allocator.free("low")
    allocator.free("high")
    allocator.allocate("new", 60 * MIB)
    assert allocator.reserved_bytes == 160 * MIB
    allocator.empty_cache()
    assert allocator.reserved_bytes == 160 * MIB
    allocator.free("pin")
    allocator.empty_cache()
    assert allocator.reserved_bytes == 60 * MIB


@pytest.mark.parametrize(("orders_by_address", "taken"), [(False, "old"), (True, "new")])
def test_of_free_blocks_of_equal_size_the_oldest_segments_is_taken_or_that_of_the_lowest_address(
    orders_by_address, taken
):
    """The device gives its address space downwards. torch 2.11 and 2.12 reserved 34 and 44 MiB more for a plan than 2.13."""
    allocator = CachingAllocator(AllocatorSettings(orders_by_address=orders_by_address))
    places = {name: allocator.allocate(name, 30 * MIB) for name in ("old", "new")}
    for name in places:
        allocator.free(name)

    assert allocator.allocate("third", 30 * MIB) == places[taken]


def test_what_is_left_of_a_piece_of_address_space_goes_to_a_segment_that_fits_there():
    """As an H200's driver did: segments of 20 MiB 32 MiB apart, the newer ones lower, and one of 2 MiB behind one of them."""
    allocator = CachingAllocator(AllocatorSettings(orders_by_address=True))
    first, second = (allocator.allocate(name, 9 * MIB + MIB // 2) for name in ("a", "c"))
    fillers = [allocator.allocate(f"filler {number}", 9 * MIB + MIB // 2) for number in range(2)]
    small = allocator.allocate("small", MIB)
    large = allocator.allocate("large", 40 * MIB)

    assert second == first + 9 * MIB + MIB // 2
    assert fillers[0] == first - 32 * MIB
    assert small == first + 20 * MIB
    assert large == first - 32 * MIB - 64 * MIB


def test_streams_do_not_share_free_blocks():
    changes = [Change("a", 30 * MIB, 0), Change("a", 0), Change("b", 30 * MIB, 1)]
    assert replay(changes, AllocatorSettings()).peak_reserved_bytes == 60 * MIB


def test_a_block_that_another_stream_uses_is_active_until_it_completes():
    allocator = CachingAllocator()
    allocator.allocate("a", 30 * MIB)
    allocator.free("a", still_used=True)
    assert (allocator.allocated_bytes, allocator.active_bytes) == (0, 30 * MIB)
    allocator.allocate("b", 30 * MIB)
    assert allocator.reserved_bytes == 60 * MIB
    allocator.complete("a")
    allocator.allocate("c", 30 * MIB)
    assert (allocator.active_bytes, allocator.reserved_bytes) == (60 * MIB, 60 * MIB)


def test_max_split_size_keeps_large_blocks_whole():
    """Without it a 4 MiB tensor breaks up a cached 100 MiB block, and the next 100 MiB need a new one."""
    changes = [Change("big", 100 * MIB), Change("big", 0), Change("small", 4 * MIB), Change("big", 100 * MIB)]

    assert replay(changes, AllocatorSettings()).peak_reserved_bytes == 200 * MIB
    limited = parse_allocator_settings("max_split_size_mb:32")
    assert replay(changes, limited).peak_reserved_bytes == 120 * MIB


def test_an_oversize_block_serves_only_requests_of_about_its_size():
    """Up to 20 MiB smaller, and then it is used whole; `max_non_split_rounding_mb` moves that limit."""
    text = "max_split_size_mb:32"
    changes = [Change("a", 100 * MIB), Change("a", 0)]
    close = replay([*changes, Change("b", 82 * MIB)], parse_allocator_settings(text))
    far = replay([*changes, Change("b", 80 * MIB)], parse_allocator_settings(text))
    wider = parse_allocator_settings(f"{text},max_non_split_rounding_mb:40")

    assert (close.peak_reserved_bytes, close.allocated_bytes[-1]) == (100 * MIB, 100 * MIB)
    assert far.peak_reserved_bytes == 180 * MIB
    assert replay([*changes, Change("b", 80 * MIB)], wider).peak_reserved_bytes == 100 * MIB


def test_a_full_device_takes_back_what_is_cached_and_tries_again():
    changes = [Change("a", 60 * MIB), Change("a", 0), Change("b", 80 * MIB)]
    done = replay(changes, AllocatorSettings(), capacity_bytes=100 * MIB)

    assert done.num_releases == 1
    assert done.peak_reserved_bytes == 80 * MIB


def test_out_of_memory_names_what_was_asked_for():
    """A live sliver keeps 100 MiB reserved: 60 MiB do not fit, though 98 are free."""
    allocator = CachingAllocator(capacity_bytes=120 * MIB)
    allocator.allocate("all", 100 * MIB)
    allocator.free("all")
    allocator.allocate("low", 49 * MIB)
    allocator.allocate("pin", 2 * MIB)
    allocator.free("low")
    with pytest.raises(
        DeviceFullError, match=r"60.0 MiB could not be allocated: 2.00 MiB are allocated"
    ) as caught:
        allocator.allocate("new", 60 * MIB)
    assert caught.value.requested_bytes == 60 * MIB
    assert caught.value.reserved_bytes == 100 * MIB

    expandable = CachingAllocator(AllocatorSettings(expandable_segments=True), capacity_bytes=100 * MIB)
    for name, size in (("low", 49 * MIB), ("pin", 2 * MIB)):
        expandable.allocate(name, size)
    expandable.free("low")
    expandable.allocate("new", 60 * MIB)  # two free pages move to the end of the segment
    assert (expandable.num_releases, expandable.reserved_bytes) == (1, 80 * MIB)


def test_where_splitting_is_limited_only_as_much_is_released_as_is_needed():
    """110 MiB on a full device of 200: the blocks of 100 and 60 go, that of 40 stays cached."""
    sizes = [100, 60, 40]
    changes = [Change(size, size * MIB) for size in sizes] + [Change(size, 0) for size in sizes]
    settings = parse_allocator_settings("max_split_size_mb:32")
    done = replay([*changes, Change("new", 110 * MIB)], settings, capacity_bytes=200 * MIB)

    assert (done.reserved_bytes[-1], done.num_releases) == (150 * MIB, 0)


def test_the_end_of_an_expandable_segment_is_the_last_to_be_used():
    """A hole of 25 MiB is taken for 10 rather than the 13 at the end, which could grow to anything."""
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=True))
    allocator.allocate("hole", 25 * MIB)
    pin = allocator.allocate("pin", 2 * MIB)
    allocator.free("hole")

    assert allocator.allocate("new", 10 * MIB) < pin


def test_a_process_with_a_share_of_the_device_stays_within_it():
    settings = parse_allocator_settings("per_process_memory_fraction:0.5")
    with pytest.raises(DeviceFullError):
        reserved(60 * MIB, text="per_process_memory_fraction:0.5", capacity_bytes=100 * MIB)
    assert replay([Change(0, 50 * MIB)], settings, capacity_bytes=100 * MIB).peak_reserved_bytes == 50 * MIB


def test_garbage_collection_releases_what_was_not_used_for_longest():
    """Above half of 100 MiB allowed, a new segment first costs the oldest free ones their place."""
    text = "garbage_collection_threshold:0.5,per_process_memory_fraction:0.5"
    changes = [Change("old", 40 * MIB), Change("young", 30 * MIB), Change("old", 0), Change("young", 0)]
    changes += [Change("use", 30 * MIB), Change("use", 0), Change("new", 50 * MIB)]
    collected = replay(changes, parse_allocator_settings(text), capacity_bytes=200 * MIB)
    kept = replay(changes, AllocatorSettings(), capacity_bytes=200 * MIB)

    assert kept.peak_reserved_bytes == 120 * MIB
    assert collected.peak_reserved_bytes == 80 * MIB
    assert collected.num_releases == 0

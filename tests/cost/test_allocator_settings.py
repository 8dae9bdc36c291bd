"""The allocator's settings: what torch accepts and refuses, and how requests are rounded."""

import ctypes
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memadvisor.cost.allocator_settings import (
    MIB,
    AllocatorSettings,
    parse_allocator_settings,
    settings_text,
)
from memadvisor.errors import UsageError

# static size_t c10::CachingAllocator::AcceleratorAllocatorConfig::roundup_power2_divisions(size_t)
DIVISIONS_IN_FORCE = "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm"
DIVISION = st.sampled_from([0, 1, 2, 4, 8, 16])
settings = st.builds(
    AllocatorSettings,
    max_split_size_bytes=st.none() | st.integers(64, 4096).map(lambda mib: mib * MIB),
    max_non_split_rounding_bytes=st.integers(64, 200).map(lambda mib: mib * MIB),
    large_segment_bytes=st.integers(11, 64).map(lambda mib: mib * MIB),
    roundup_power2_divisions=st.lists(DIVISION, min_size=16, max_size=16).map(tuple),
    garbage_collection_threshold=st.just(0.0) | st.floats(0.01, 0.99),
    expandable_segments=st.booleans(),
    memory_fraction=st.none() | st.floats(0.01, 0.99),
)


@pytest.fixture(autouse=True, scope="module")
def _leave_torch_as_it_was():
    yield
    torch._C._accelerator_setAllocatorSettings(
        "large_segment_size_mb:20,max_non_split_rounding_mb:20,expandable_segments:False,roundup_power2_divisions:[1:0,>:0]"
    )


@given(settings)
def test_a_text_of_settings_reads_back_and_is_torchs_own(chosen):
    """No setting is lost on the way, and torch's own parser takes what we write."""
    text = settings_text(chosen)
    read = parse_allocator_settings(text)
    torch._C._accelerator_setAllocatorSettings(text)

    effective = [count if count > 1 else 0 for count in chosen.roundup_power2_divisions]
    assert [count if count > 1 else 0 for count in read.roundup_power2_divisions] == effective
    for name in AllocatorSettings.__slots__:
        if name != "roundup_power2_divisions":
            assert getattr(read, name) == getattr(chosen, name), name


@given(st.text(alphabet="max_split_size_mb:,[]>0123456789 TrueFalse.", max_size=40))
def test_any_text_is_read_or_refused_in_one_line(text):
    try:
        parse_allocator_settings(text)
    except UsageError as error:
        assert "\n" not in str(error) and error.hint


@pytest.mark.parametrize(
    "text",
    [
        "max_split_size_mb:19",
        "max_split_size_mb:30,large_segment_size_mb:40",
        "max_non_split_rounding_mb:19",
        "large_segment_size_mb:10",
        "roundup_power2_divisions:3",
        "roundup_power2_divisions:0",
        "roundup_power2_divisions:[3:1]",
        "roundup_power2_divisions:[256:1,512:2",
        "garbage_collection_threshold:1",
        "garbage_collection_threshold:0",
        "expandable_segments:true",
        "expandable_segments:True:False",
        "max_split_size_mb",
        "max_split_size_mb:",
    ],
)
def test_what_torch_refuses_is_refused(text):
    torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")
    with pytest.raises((ValueError, RuntimeError)):
        torch._C._accelerator_setAllocatorSettings(text)
    with pytest.raises(UsageError, match="no setting of the CUDA allocator"):
        parse_allocator_settings(text)


@pytest.mark.parametrize("text", ["max_spilt_size_mb:128", "backend:cudaMallocAsync"])
def test_another_allocator_and_misspelt_options_are_refused(text):
    with pytest.raises(UsageError, match=text):
        parse_allocator_settings(text)


def test_the_documented_example_of_roundup():
    """1200 with 4 divisions: 1024, 1280, 1536, 1792, so 1280 (PyTorch's notes on CUDA semantics, in MiB here)."""
    four = parse_allocator_settings("roundup_power2_divisions:4")

    assert four.block_bytes(1200 * MIB) == 1280 * MIB
    assert four.block_bytes(1024 * MIB) == 1024 * MIB


def test_the_documented_list_of_divisions():
    """[256:1,512:2,1024:4,>:8]: 1 below 512 MiB, 2 in 512-1024, 4 in 1024-2048, 8 above."""
    read = parse_allocator_settings("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]")

    assert read.roundup_power2_divisions[:9] == (1,) * 9
    assert read.block_bytes(300 * MIB + 1) == 300 * MIB + 512
    assert read.block_bytes(513 * MIB) == 768 * MIB
    assert read.block_bytes(1025 * MIB) == 1280 * MIB
    assert read.block_bytes(2049 * MIB) == 2304 * MIB


@given(st.lists(st.tuples(st.sampled_from(["1", "64", "256", "1024", "32768", "65536", ">"]), DIVISION)))
def test_any_list_of_divisions_means_what_torch_takes_it_for(parts):
    """Ranges that are named, that are not, and above the last one, for every power of two."""
    text = "roundup_power2_divisions:[" + ",".join(f"{size}:{count}" for size, count in parts) + "]"
    torch._C._accelerator_setAllocatorSettings("roundup_power2_divisions:[1:0,>:0]")
    torch._C._accelerator_setAllocatorSettings(text)
    in_force = getattr(ctypes.CDLL(Path(torch.__file__).parent / "lib" / "libc10.so"), DIVISIONS_IN_FORCE)
    in_force.argtypes, in_force.restype = [ctypes.c_size_t], ctypes.c_size_t

    ours = parse_allocator_settings(text).roundup_power2_divisions
    assert ours == tuple(in_force(MIB << interval) for interval in range(16))


@given(settings, st.integers(1, 2**40))
def test_rounding_gives_at_least_what_was_asked_in_whole_blocks(chosen, size_bytes):
    block = chosen.block_bytes(size_bytes)

    assert size_bytes <= block <= 2 * size_bytes + 512
    assert block % 512 == 0
    assert chosen.segment_bytes(block) >= block

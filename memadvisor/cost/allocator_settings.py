"""The settings of PyTorch's CUDA caching allocator, and how they round what is asked for.

Names, limits and defaults are those of torch 2.11 to 2.14 (c10/core/AllocatorConfig.h; documented in
"CUDA semantics", "Optimizing memory usage with PYTORCH_CUDA_ALLOC_CONF"). All sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memadvisor.errors import UsageError

MIB = 2**20
MIN_BLOCK_BYTES = 512  # every block is a multiple of it
SMALL_BYTES = MIB  # the largest request that the small pool serves
SMALL_SEGMENT_BYTES = 2 * MIB
MIN_LARGE_BYTES = 10 * MIB  # from here on a request gets a segment of its own size
LARGE_ROUNDING_BYTES = 2 * MIB
NUM_INTERVALS = 16  # of roundup_power2_divisions: from 1 MiB, 2 MiB, ... to 32 GiB and above

# Settings that change nothing of what is modelled here: pinned host memory, locks, CUDA graphs, messages.
_WITHOUT_EFFECT = frozenset(
    {
        "graph_capture_record_stream_reuse",
        "pinned_free_catch_all",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
        "throw_on_cudamalloc_oom",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """What a script may set; the defaults are torch's.

    `max_split_size_bytes` None: any block may be split. `roundup_power2_divisions`: for requests from 2**i MiB
    up, into how many parts each doubling is divided (0 or 1: none). `garbage_collection_threshold` 0: never;
    it has an effect only where the process's share of the device, `memory_fraction`, is set. `orders_by_address` is torch's
    own, before 2.13: of free blocks of equal size that of the lowest address is taken, and not that of the oldest segment.
    """

    max_split_size_bytes: int | None = None
    max_non_split_rounding_bytes: int = 20 * MIB
    large_segment_bytes: int = 20 * MIB
    roundup_power2_divisions: tuple[int, ...] = (0,) * NUM_INTERVALS
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    memory_fraction: float | None = None
    orders_by_address: bool = False

    def block_bytes(self, size_bytes: int) -> int:
        """What a request is rounded up to: 512 B, or the next division between two powers of two."""
        if size_bytes < MIN_BLOCK_BYTES:
            return MIN_BLOCK_BYTES
        exponent = size_bytes.bit_length() - 1
        interval = min(max(exponent - 20, 0), NUM_INTERVALS - 1)
        divisions = self.roundup_power2_divisions[interval]
        if divisions > 1 and size_bytes > MIN_BLOCK_BYTES * divisions:
            return round_up(size_bytes, (1 << exponent) // divisions)
        return round_up(size_bytes, MIN_BLOCK_BYTES)

    def segment_bytes(self, block_bytes: int) -> int:
        """What is asked of the device for a block that no cached one serves."""
        if block_bytes <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if block_bytes < MIN_LARGE_BYTES:
            return self.large_segment_bytes
        return round_up(block_bytes, LARGE_ROUNDING_BYTES)

    def is_oversize(self, size_bytes: int) -> bool:
        """Whether blocks of this size are never split, and kept for requests of about their size."""
        return self.max_split_size_bytes is not None and size_bytes >= self.max_split_size_bytes


def round_up(size_bytes: int, multiple: int) -> int:
    return -(-size_bytes // multiple) * multiple


def parse_allocator_settings(text: str) -> AllocatorSettings:
    """Settings from a PYTORCH_CUDA_ALLOC_CONF text, such as "max_split_size_mb:128,expandable_segments:True".

    Raises UsageError for what torch refuses too, and for the backend cudaMallocAsync, which is another allocator.
    """
    settings = AllocatorSettings()
    # The sizes that may be split are measured against the segments' size, wherever it is written.
    for key, value in sorted(_pairs(text), key=lambda pair: pair[0] != "large_segment_size_mb"):
        settings = _with_option(settings, key, value)
    return settings


def _pairs(text: str) -> list[tuple[str, str]]:
    """The options of the text; a comma inside brackets does not end one."""
    plain = "".join(text.split())
    parts, depth, start = [], 0, 0
    for position, letter in enumerate(plain):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            break
        if letter == "," and depth == 0:
            parts.append(plain[start:position])
            start = position + 1
    if depth:
        raise _error(text, "its brackets do not match")
    pairs = []
    for part in filter(None, [*parts, plain[start:]]):
        key, colon, value = part.partition(":")
        if not (key and colon and value):
            raise _error(part, "an option is written name:value")
        pairs.append((key, value))
    return pairs


def _with_option(settings: AllocatorSettings, key: str, value: str) -> AllocatorSettings:
    if key in _WITHOUT_EFFECT:
        return settings
    if key == "max_split_size_mb":
        least = settings.large_segment_bytes // MIB
        return replace(settings, max_split_size_bytes=_mib(key, value, least))
    if key == "max_non_split_rounding_mb":
        least = settings.large_segment_bytes // MIB
        return replace(settings, max_non_split_rounding_bytes=_mib(key, value, least))
    if key == "large_segment_size_mb":
        return replace(settings, large_segment_bytes=_mib(key, value, MIN_LARGE_BYTES // MIB + 1))
    if key == "garbage_collection_threshold":
        return replace(settings, garbage_collection_threshold=_fraction(key, value))
    if key == "per_process_memory_fraction":
        fraction = 1.0 if value in ("1", "1.0") else _fraction(key, value)
        return replace(settings, memory_fraction=fraction)
    if key == "expandable_segments":
        if value not in ("True", "False"):
            raise _error(f"{key}:{value}", "it is True or False")
        return replace(settings, expandable_segments=value == "True")
    if key == "roundup_power2_divisions":
        return replace(settings, roundup_power2_divisions=_divisions(value))
    if key == "backend":
        if value != "native":
            raise _error(f"{key}:{value}", "only the native allocator is modelled")
        return settings
    raise _error(f"{key}:{value}", "there is no such option")


def _divisions(value: str) -> tuple[int, ...]:
    """A number for all sizes, or [256:1,512:2,>:4] by the size in MiB from which on each holds.

    Sizes below the first named one get its number; one above it that is not named gets none.
    """
    what = f"roundup_power2_divisions:{value}"
    if not value.startswith("["):
        return (_power_of_two(what, value),) * NUM_INTERVALS
    if not value.endswith("]"):
        raise _error(what, "its brackets do not match")
    divisions = [0] * NUM_INTERVALS
    last = None
    for part in filter(None, value[1:-1].split(",")):
        size, colon, number = part.partition(":")
        if not (size and colon):
            raise _error(what, "each part is written size:divisions")
        count = 0 if number == "0" else _power_of_two(what, number)
        if size == ">":
            first = (last or 0) + 1
            divisions[first:] = [count] * (NUM_INTERVALS - first)
            continue
        index = min(_power_of_two(what, size).bit_length() - 1, NUM_INTERVALS - 1)
        if last is None:
            divisions[:index] = [count] * index
        divisions[index] = count
        last = index
    return tuple(divisions)


def _power_of_two(what: str, value: str) -> int:
    number = _whole(what, value)
    if number < 1 or number & (number - 1):
        raise _error(what, f"{value} is no power of two")
    return number


def _mib(key: str, value: str, least: int) -> int:
    number = _whole(f"{key}:{value}", value)
    if number < least:
        raise _error(f"{key}:{value}", f"it must be {least} or more")
    return number * MIB


def _whole(what: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()) or len(value) > 18:
        raise _error(what, f"{value!r} is no whole number")
    return int(value)


def _fraction(key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 < number < 1:
        raise _error(f"{key}:{value}", "it must be between 0 and 1")
    return number


def _error(what: str, reason: str) -> UsageError:
    return UsageError(
        f"{what!r} is no setting of the CUDA allocator: {reason}.",
        hint="write it as in PYTORCH_CUDA_ALLOC_CONF, e.g. max_split_size_mb:128,expandable_segments:True.",
    )


def settings_text(settings: AllocatorSettings) -> str:
    """The text that `parse_allocator_settings` reads these settings from; "" for torch's own defaults."""
    plain = AllocatorSettings()
    options = []
    if settings.large_segment_bytes != plain.large_segment_bytes:
        options.append(f"large_segment_size_mb:{settings.large_segment_bytes // MIB}")
    if settings.max_split_size_bytes is not None:
        options.append(f"max_split_size_mb:{settings.max_split_size_bytes // MIB}")
    if settings.max_non_split_rounding_bytes != plain.max_non_split_rounding_bytes:
        options.append(f"max_non_split_rounding_mb:{settings.max_non_split_rounding_bytes // MIB}")
    if any(count > 1 for count in settings.roundup_power2_divisions):
        options.append(f"roundup_power2_divisions:{_divisions_text(settings.roundup_power2_divisions)}")
    if settings.garbage_collection_threshold:
        options.append(f"garbage_collection_threshold:{settings.garbage_collection_threshold!r}")
    if settings.memory_fraction is not None:
        options.append(f"per_process_memory_fraction:{settings.memory_fraction!r}")
    if settings.expandable_segments:
        options.append("expandable_segments:True")
    return ",".join(options)


def _divisions_text(divisions: Sequence[int]) -> str:
    return "[" + ",".join(f"{2**i}:{count}" for i, count in enumerate(divisions)) + "]"

"""Frames give back what was put in, or nothing: never something else."""

import struct
import time
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memadvisor.run.frames import (
    HEADER,
    LARGEST_FRACTION,
    LARGEST_WHOLE,
    MAGIC,
    MAJOR,
    MAX_RAW_BYTES,
    MISSING_INT,
    SMALLEST_FRACTION,
    TABLE_FRAME,
    Frame,
    pack_column,
    pack_frame,
    read_frames,
    unpack_column,
)

INTEGERS = st.integers(-LARGEST_WHOLE, LARGEST_WHOLE)
FRACTIONS = (
    st.just(0.0)
    | st.just(-0.0)
    | st.floats(SMALLEST_FRACTION, LARGEST_FRACTION)
    | st.floats(-LARGEST_FRACTION, -SMALLEST_FRACTION)
)
PAYLOADS = st.lists(st.binary(max_size=60), min_size=1, max_size=6)


def journal_of(payloads):
    return [pack_frame(TABLE_FRAME, 3, len(p), p, journal=7, number=n) for n, p in enumerate(payloads)]


def frames_of(data):
    return [frame for frame in read_frames(data) if isinstance(frame, Frame)]


@given(st.lists(st.none() | INTEGERS, max_size=50))
def test_whole_numbers_come_back(values):
    stored = pack_column([MISSING_INT if v is None else v for v in values], fraction=False)

    assert len(stored) == 8 * len(values)
    assert unpack_column(stored, len(values), fraction=False) == values


@given(st.lists(st.none() | FRACTIONS, max_size=50))
def test_fractions_come_back_to_the_last_bit(values):
    stored = pack_column([float("nan") if v is None else v for v in values], fraction=True)
    back = unpack_column(stored, len(values), fraction=True)

    assert [None if v is None else struct.pack("<d", v) for v in back] == [
        None if v is None else struct.pack("<d", v) for v in values
    ]


def test_what_can_be_no_number_of_a_training_is_missing():
    """Else sums and quotients of a crafted file would overflow."""
    fractions = [1.0, float("inf"), float("-inf"), float("nan"), 1e300, 1e-300]
    whole = [7, 2**62, -(2**62), 2**63 - 1]

    assert unpack_column(pack_column(fractions, fraction=True), 6, fraction=True) == [1.0, *[None] * 5]
    assert unpack_column(pack_column(whole, fraction=False), 4, fraction=False) == [7, None, None, None]


@given(PAYLOADS)
def test_frames_come_back_in_order(payloads):
    assert [
        (f.kind, f.schema, f.num_rows, f.payload, f.journal, f.number)
        for f in read_frames(b"".join(journal_of(payloads)))
    ] == [(TABLE_FRAME, 3, len(p), p, 7, n) for n, p in enumerate(payloads)]


@given(PAYLOADS, st.data())
def test_a_cut_keeps_every_whole_frame_and_says_nothing(payloads, data):
    """A run that is growing or was killed ends in an unfinished frame; that is no damage."""
    frames = journal_of(payloads)
    whole = b"".join(frames)
    cut = data.draw(st.integers(0, len(whole)))
    ends = [sum(map(len, frames[: n + 1])) for n in range(len(frames))]

    read = list(read_frames(whole[:cut]))

    assert [frame.payload for frame in read] == payloads[: sum(end <= cut for end in ends)]


@given(PAYLOADS, st.data())
def test_a_flipped_bit_costs_one_frame(payloads, data):
    frames = journal_of(payloads)
    victim = data.draw(st.integers(0, len(frames) - 1))
    bit = data.draw(st.integers(0, 8 * len(frames[victim]) - 1))
    damaged = bytearray(frames[victim])
    damaged[bit // 8] ^= 1 << bit % 8
    frames[victim] = bytes(damaged)

    read = frames_of(b"".join(frames))

    assert [f.number for f in read] == [n for n in range(len(frames)) if n != victim]
    assert all(f.payload == payloads[f.number] for f in read)


@given(st.binary(max_size=300), PAYLOADS)
def test_garbage_before_frames_loses_none(garbage, payloads):
    assert [f.payload for f in frames_of(garbage + b"".join(journal_of(payloads)))][
        -len(payloads) :
    ] == payloads


def header_and(stored, *, raw, kind=TABLE_FRAME, major=MAJOR):
    fields = (MAGIC, major, kind, 0, 1, len(stored), raw, 0, 0)
    return HEADER.pack(*fields, zlib.crc32(stored, zlib.crc32(HEADER.pack(*fields, 0)))) + stored


@pytest.mark.parametrize("raw", [MAX_RAW_BYTES + 1, 2**32 - 1])
def test_a_frame_over_the_limit_is_damage(raw):
    [problem] = read_frames(header_and(zlib.compress(b"x"), raw=raw))

    assert "impossible length" in problem


def test_a_payload_that_decompresses_to_more_than_it_says_is_damage():
    bomb = zlib.compress(bytes(10**6))

    [problem] = read_frames(header_and(bomb, raw=1000))

    assert "wrong length" in problem or "impossible" in problem


def test_a_payload_that_is_no_zlib_is_damage():
    [problem] = read_frames(header_and(b"not compressed", raw=14))

    assert "undecodable" in problem


def test_too_large_a_payload_is_never_written():
    with pytest.raises(ValueError, match="over the limit"):
        pack_frame(TABLE_FRAME, 1, 1, bytes(MAX_RAW_BYTES + 1))


def test_a_frame_of_a_later_major_version_is_skipped_by_length():
    later = header_and(b"anything at all", raw=20, major=MAJOR + 1)
    ours = pack_frame(TABLE_FRAME, 1, 1, b"ours", number=1)

    assert [(f.kind, f.payload) for f in read_frames(later + ours)] == [(0, b""), (TABLE_FRAME, b"ours")]


def test_many_false_magics_take_time_linear_in_the_file():
    """Each says that a great length follows, and would have it checksummed: 8 MB x 100,000 without the bound."""
    num_frames = 250_000
    stored = HEADER.size * num_frames // 2
    header = HEADER.pack(MAGIC, MAJOR, TABLE_FRAME, 0, 1, stored, MAX_RAW_BYTES, 0, 0, 12345)
    started_s = time.process_time()

    [problem] = read_frames(header * num_frames)

    assert "the rest is lost" in problem
    assert time.process_time() - started_s < 10


def test_what_follows_a_gibibyte_is_not_read(monkeypatch):
    monkeypatch.setattr("memadvisor.run.frames.MAX_JOURNAL_RAW_BYTES", 250)
    frames = [pack_frame(TABLE_FRAME, 1, 1, bytes(100), number=n) for n in range(5)]

    *read, problem = read_frames(b"".join(frames))

    assert [f.number for f in read] == [0, 1]
    assert "not read" in problem

"""Frames: the self-checking pieces that a journal is made of (docs/run-format.md).

A frame is a 32-byte header and a payload. Its CRC covers both, so a flipped bit loses one frame and never
yields a wrong row; the journal's random id and the frame's number in it tell a frame that stands twice,
or that belongs to another journal, from one that is in its place.

numpy is imported with the first column, not before: by then a script that is recorded has imported torch, and so has
chosen how many threads numpy may use (OPENBLAS_NUM_THREADS and the like are read when it is loaded).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MAGIC = b"MADV"
MAJOR, MINOR = 1, 0
HEADER = struct.Struct("<4sBBHIIIIII")  # magic, major, type, schema, rows, stored, raw, journal, number, crc
MAX_RAW_BYTES = 16 * 2**20  # a declared size above this is damage, not data
MAX_JOURNAL_RAW_BYTES = 2**30  # of all frames of a journal together; what follows is not read

JSON_FRAME, STRINGS_FRAME, TABLE_FRAME = 1, 2, 3

# A missing whole number or text; a missing fraction is NaN.
MISSING_INT = -(2**63)
# What lies outside is no number of any training (7e16 bytes or FLOPs of one thing, 30 million years), and reads
# as missing: sums and quotients of what is left stay finite, whatever a file says.
LARGEST_WHOLE = 2**56
LARGEST_FRACTION, SMALLEST_FRACTION = 1e15, 1e-30
_FLIPPABLE = "<i8"


@dataclass(frozen=True, slots=True)
class Frame:
    """`number` counts the frames of one journal from 0 on; `kind` 0 is a frame of a later major version."""

    kind: int
    schema: int
    num_rows: int
    payload: bytes
    journal: int
    number: int


def pack_frame(
    kind: int, schema: int, num_rows: int, payload: bytes, *, journal: int = 0, number: int = 0
) -> bytes:
    """A whole frame, ready to be appended. Raises ValueError if the payload is over MAX_RAW_BYTES."""
    if len(payload) > MAX_RAW_BYTES:
        raise ValueError(f"a frame of {len(payload)} bytes is over the limit of {MAX_RAW_BYTES}")
    stored = zlib.compress(payload, 1)
    fields = (MAGIC, MAJOR, kind, schema, num_rows, len(stored), len(payload), journal, number)
    crc = zlib.crc32(stored, zlib.crc32(HEADER.pack(*fields, 0)))
    return HEADER.pack(*fields, crc) + stored


def read_frames(data: bytes) -> Iterator[Frame | str]:
    """Every whole frame of `data`; a text instead of a frame says what is damaged, and where.

    After damage the next magic that starts a whole frame goes on. An unfinished last frame is silent:
    a run that is still growing, or was killed, ends so. Work and memory are bounded, whatever `data` is.
    """
    position = 0
    raw_bytes = 0
    effort = _Effort(4 * len(data) + MAX_RAW_BYTES)
    while position < len(data):
        frame, size, damage = _frame_at(data, position)
        if frame is not None:
            raw_bytes += len(frame.payload)
            if raw_bytes > MAX_JOURNAL_RAW_BYTES:
                yield f"more than {MAX_JOURNAL_RAW_BYTES} bytes of rows; what follows byte {position} is not read"
                return
            yield frame
            position += size
            continue
        following = _next_whole_frame(data, position + 1, effort)
        if following is None:
            if damage != "unfinished":
                yield f"{damage} at byte {position}; the rest is lost"
            return
        yield f"{damage} at byte {position}; {following - position} bytes are lost"
        position = following


def _frame_at(data: bytes, position: int) -> tuple[Frame | None, int, str]:
    if len(data) - position < HEADER.size:
        return None, 0, "unfinished"
    magic, major, kind, schema, rows, stored, raw, journal, number, crc = HEADER.unpack_from(data, position)
    if magic != MAGIC:
        return None, 0, "no frame"
    if raw > MAX_RAW_BYTES or stored > raw + raw // 100 + 1024:
        return None, 0, "impossible length"
    end = position + HEADER.size + stored
    if end > len(data):
        return None, 0, "unfinished"
    header = data[position : position + HEADER.size - 4] + b"\0\0\0\0"
    body = data[position + HEADER.size : end]
    if zlib.crc32(body, zlib.crc32(header)) != crc:
        return None, 0, "checksum mismatch"
    if major != MAJOR:
        return (
            Frame(0, schema, rows, b"", journal, number),
            HEADER.size + stored,
            "",
        )  # a later format: skipped by length
    inflate = zlib.decompressobj()
    try:
        payload = inflate.decompress(body, raw + 1)
    except zlib.error:
        return None, 0, "undecodable payload"
    if len(payload) != raw or not inflate.eof or inflate.unused_data:
        return None, 0, "payload of a wrong length"
    return Frame(kind, schema, rows, payload, journal, number), HEADER.size + stored, ""


@dataclass(slots=True)
class _Effort:
    """Bytes that may still be checksummed in search of the next whole frame.

    Without it a file of many magics, each before a great length, would take time quadratic in its size.
    """

    remaining_bytes: int


def _next_whole_frame(data: bytes, start: int, effort: _Effort) -> int | None:
    position = data.find(MAGIC, start)
    while position != -1 and effort.remaining_bytes > 0:
        if _frame_at(data, position)[0] is not None:
            return position
        effort.remaining_bytes -= HEADER.size + _stored_bytes(data, position)
        position = data.find(MAGIC, position + 1)
    return None


def _stored_bytes(data: bytes, position: int) -> int:
    """How many bytes the header at `position` says follow; 0 where that is impossible, so that none was read."""
    if len(data) - position < HEADER.size:
        return 0
    stored: int = HEADER.unpack_from(data, position)[5]
    return stored if position + HEADER.size + stored <= len(data) else 0


def pack_column(values: Any, *, fraction: bool) -> bytes:
    """One column of 8-byte values: whole numbers as differences, both kinds byte-transposed. None is a fraction's NaN."""
    import numpy as np

    if fraction:
        bits = np.array(values, dtype="<f8").view(_FLIPPABLE)
    else:
        bits = np.array(values, dtype=_FLIPPABLE)
        bits[1:] -= bits[:-1]
    return bits.view(np.uint8).reshape(-1, 8).T.tobytes()


def unpack_column(data: bytes, num_rows: int, *, fraction: bool) -> list[Any]:
    """The inverse of `pack_column`, with None for what was missing, or can be no number of a training."""
    import numpy as np

    table = np.frombuffer(data, dtype=np.uint8).reshape(8, num_rows).T
    bits = np.ascontiguousarray(table).view(_FLIPPABLE).reshape(num_rows)
    if fraction:
        numbers = bits.view("<f8")
        size = np.abs(numbers)
        good = (numbers == 0) | ((size >= SMALLEST_FRACTION) & (size <= LARGEST_FRACTION))  # NaN is neither
    else:
        with np.errstate(over="ignore"):
            numbers = np.cumsum(bits, dtype=_FLIPPABLE)
        good = (numbers >= -LARGEST_WHOLE) & (numbers <= LARGEST_WHOLE)
    if good.all():
        return numbers.tolist()
    return [
        value if is_good else None for value, is_good in zip(numbers.tolist(), good.tolist(), strict=True)
    ]

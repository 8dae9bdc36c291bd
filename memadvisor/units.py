"""The only place that turns bytes, seconds and rates into words, and words into bytes.

GiB means 2**30 bytes, GB means 10**9. Inside memadvisor everything is bytes and seconds.
"""

from __future__ import annotations

import math
import re

from memadvisor.errors import UsageError

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
_ROUNDS_TO_1 = 0.9995  # in three digits

_FACTORS = {
    "": 1,
    "b": 1,
    **{
        unit + suffix: factor
        for unit, factor in (("k", KIB), ("m", MIB), ("g", GIB), ("t", TIB))
        for suffix in ("", "ib")
    },
    **{"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12},
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)

_COUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([kmg]?)\s*", re.IGNORECASE | re.ASCII)
_FRACTION = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(%?)\s*", re.ASCII)
_DURATION = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(s|ms|us)?\s*", re.ASCII)
_RATE = re.compile(
    r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([kKMGTgmt])?(i)?(bits?|[Bb]ytes?|Bit|[Bb])(?:/s|ps)\s*", re.ASCII
)


def parse_bytes(text: str) -> int:
    """Bytes meant by a size such as `24GiB`, `10 GB`, `512M` or `1000`.

    A bare K, M, G or T is binary, as in GPU data sheets. Raises UsageError for anything else, and for a number so small
    that its unit was forgotten.
    """
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise UsageError(
            f"{text!r} is not a size.", hint="write it as 24GiB, 10GB, 512MiB or a number of bytes."
        )
    size_bytes = float(match.group(1)) * factor
    if not 0.5 < size_bytes < 2**60:
        raise UsageError(
            f"{text!r} is not a usable size.", hint="it must be more than 0 and less than 1 EiB."
        )
    if not match.group(2) and size_bytes < 1000:
        raise UsageError(
            f"{text!r} has no unit, and would be bytes.",
            hint=f"write {text.strip()}GiB, {text.strip()}GB or {text.strip()}MiB.",
        )
    return round(size_bytes)


def parse_count(text: str) -> int:
    """A number such as `4194304`, `4M` or `4.1M`, rounded down; a bare K, M or G is binary, as in sizes. Raises UsageError."""
    match = _COUNT.fullmatch(text)
    count = float(match.group(1)) * _FACTORS[match.group(2).lower()] if match else 0.0
    if not 1 <= count < 2**60:
        raise UsageError(f"{text!r} is not a number of 1 or more.", hint="write it as 4194304, 4M or 512K.")
    return int(count)


def parse_rate(text: str) -> float:
    """Bytes a second meant by `400Gbps`, `400 Gb/s`, `400 Gbit/s` (bits) or `50GB/s`, `50GBps`, `46GiB/s` (bytes).

    A capital B means bytes, a small one bits. Raises UsageError for anything else.
    """
    match = _RATE.fullmatch(text)
    rate = 0.0
    if match is not None:
        number, prefix, binary, unit = match.groups()
        base = 1024 if binary else 1000
        rate = float(number) * base ** " KMGT".index((prefix or " ").upper())
        rate = rate if unit.startswith("B") or unit.lower().startswith("byte") else rate / 8
    if not 1 <= rate < 2**60:
        raise UsageError(
            f"{text!r} is not a rate.", hint="write it as 400Gbps (bits) or 50GB/s (bytes), a second."
        )
    return rate


def parse_fraction(text: str) -> float:
    """A fraction of 1 meant by `0.4` or `40%`. Above 1 only with a sign: `40` is asked back. Raises UsageError."""
    match = _FRACTION.fullmatch(text)
    value = float(match.group(1)) if match else math.inf
    if match is not None and match.group(2):
        value /= 100
    elif 1 < value < math.inf:
        raise UsageError(f"{text!r} is more than the whole.", hint=f"write {text.strip()}% for per cent.")
    if not math.isfinite(value):
        raise UsageError(f"{text!r} is not a fraction.", hint="write it as 0.4 or 40%.")
    return value


def parse_duration(text: str) -> float:
    """Seconds meant by `0.25`, `0.25s`, `250ms` or `80us`. Raises UsageError for anything else."""
    match = _DURATION.fullmatch(text)
    duration_s = float(match.group(1)) / {"ms": 1e3, "us": 1e6}.get(match.group(2), 1) if match else 0.0
    if not 0 < duration_s < math.inf:
        raise UsageError(f"{text!r} is not a time above 0.", hint="write it as 0.25, 0.25s or 250ms.")
    return duration_s


def format_bytes(size_bytes: float | None) -> str:
    """`None` reads "not recorded"; anything else has three significant digits: `1.46 GiB`."""
    if size_bytes is None:
        return "not recorded"
    magnitude = abs(size_bytes)
    for factor, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        # What would read 1024 of the unit below is 1.00 of this one.
        if magnitude >= factor * (1 - 0.5 / 1024):
            return f"{_three_digits(size_bytes / factor)} {unit}"
    return f"{size_bytes:.0f} B"


def format_seconds(duration_s: float | None) -> str:
    """`2.50 s`, `13.1 ms`, `7.20 us`."""
    if duration_s is None:
        return "not recorded"
    magnitude = abs(duration_s)
    if magnitude >= _ROUNDS_TO_1 or magnitude == 0:
        return f"{_three_digits(duration_s)} s"
    factor, unit = (1e3, "ms") if magnitude >= _ROUNDS_TO_1 * 1e-3 else (1e6, "us")
    return f"{_three_digits(duration_s * factor)} {unit}"


def format_fraction(fraction: float | None) -> str:
    """A fraction of 1 as a percentage: `41.2 %`."""
    text = "not recorded" if fraction is None else f"{100 * fraction:.1f} %"
    return "0.0 %" if text == "-0.0 %" else text


def format_change(fraction: float | None) -> str:
    """With its sign: `+1.9 %`, `-35.5 %`; `0.0 %` for what rounds to it, `-` for None; no digits of what is far more than
    it was, as beside a measurement of next to nothing."""
    if fraction is not None and fraction >= 10:
        return "over 1000 %"
    text = "-" if fraction is None else f"{100 * fraction:+.1f} %"
    return "0.0 %" if text in ("+0.0 %", "-0.0 %") else text


def counted(number: float, what: str) -> str:
    """`1 rank`, `3 ranks`, `2 micro-batches`: a whole number of what has a regular plural."""
    ending = "" if number == 1 else "es" if what.endswith(("ch", "sh", "s", "x")) else "s"
    return f"{number:.0f} {what}{ending}"


def format_count(count: float | None, unit: str = "") -> str:
    """`1.24 G`, `51.0 M`, `983`: decimal prefixes, for parameters, FLOPs and rates."""
    if count is None:
        return "not recorded"
    for factor, prefix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= _ROUNDS_TO_1 * factor:
            return f"{_three_digits(count / factor)} {prefix}{unit}"
    text = f"{count:g}" if count == int(count) else _three_digits(count)
    return f"{text} {unit}".strip()


def _three_digits(value: float) -> str:
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    # Rounding may carry into one more digit: 9.996 is 10.0, and not 10.00.
    decimals = max(0, 2 - math.floor(math.log10(abs(round(value, decimals)))))
    return f"{value:.{decimals}f}"

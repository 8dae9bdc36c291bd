"""Sizes are read as they are written, and written so that they can be read."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memadvisor.errors import UsageError
from memadvisor.units import (
    GIB,
    counted,
    format_bytes,
    format_change,
    format_count,
    format_fraction,
    format_seconds,
    parse_bytes,
    parse_duration,
    parse_fraction,
    parse_rate,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("24GiB", 24 * 2**30),
        ("24 gib", 24 * 2**30),
        ("24G", 24 * 2**30),
        ("24GB", 24 * 10**9),
        ("1.5 GB", 1_500_000_000),
        (".5KiB", 512),
        ("512M", 512 * 2**20),
        ("1TiB", 2**40),
        ("1000", 1000),
        ("7 B", 7),
    ],
)
def test_sizes_are_binary_with_an_i_or_bare_and_decimal_with_a_b(text, size_bytes):
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    ["10GBB", "", "GiB", "-1GiB", "1e9", "nan", "inf", "1,5GiB", "1 G iB", "0", "0GiB", "9" * 400, "٣GiB", "2EiB", "1048577TiB"],
)  # fmt: skip
def test_anything_else_is_a_usage_error_that_names_it(text):
    with pytest.raises(UsageError, match=re.escape(repr(text))) as caught:
        parse_bytes(text)

    assert caught.value.hint


@pytest.mark.parametrize("text", ["24", " 80", "999", "1.5"])
def test_a_number_too_small_for_bytes_has_lost_its_unit(text):
    """`--memory 24` was a budget of 24 bytes, which nothing fits."""
    with pytest.raises(UsageError, match="has no unit") as caught:
        parse_bytes(text)

    assert f"{text.strip()}GiB" in caught.value.hint


@given(st.text(max_size=12))
def test_no_text_raises_anything_but_a_usage_error(text):
    try:
        assert 0 < parse_bytes(text) < 2**60
    except UsageError as error:
        assert "\n" not in error.one_line()


@given(st.integers(1, 2**59))
def test_a_formatted_size_reads_as_the_size_within_its_three_digits(size_bytes):
    assert parse_bytes(format_bytes(size_bytes)) == pytest.approx(size_bytes, rel=0.005)


@given(st.integers(1, 2**59), st.integers(1, 2**59))
def test_formatting_keeps_the_order(first, second):
    smaller, larger = sorted((first, second))

    assert parse_bytes(format_bytes(smaller)) <= parse_bytes(format_bytes(larger))


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1.46 * GIB, "1.46 GiB"),
        (-3 * 2**20, "-3.00 MiB"),
        (1023 * 2**10, "1023 KiB"),
        (2**20 - 1, "1.00 MiB"),
        (-(2**30) + 1, "-1.00 GiB"),
        (9.996 * GIB, "10.0 GiB"),
        (None, "not recorded"),
    ],
)
def test_sizes_have_three_digits_and_a_binary_unit(size_bytes, text):
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [(0, "0 s"), (2.5, "2.50 s"), (0.0131, "13.1 ms"), (7.2e-6, "7.20 us"), (123.4, "123 s"), (None, "not recorded"),
     (0.9994, "999 ms"), (0.9997, "1.00 s"), (-0.9997e-3, "-1.00 ms"), (9.996, "10.0 s"), (0.09996, "100 ms")],
)  # fmt: skip
def test_durations_have_three_digits_and_the_nearest_unit(duration_s, text):
    assert format_seconds(duration_s) == text


@given(st.floats(1e-9, 1e9))
def test_a_formatted_duration_is_the_duration_within_its_three_digits(duration_s):
    number, unit = format_seconds(duration_s).split()

    assert float(number) * {"s": 1, "ms": 1e-3, "us": 1e-6}[unit] == pytest.approx(duration_s, rel=0.006)


@pytest.mark.parametrize(
    ("count", "unit", "text"),
    [
        (983, "", "983"),
        (51_000_000, "", "51.0 M"),
        (1.24e9, "", "1.24 G"),
        (3.1e12, "FLOP/s", "3.10 TFLOP/s"),
        (12, "FLOPs", "12 FLOPs"),
        (999_999, "", "1.00 M"),
        (9_996, "", "10.0 k"),
        (999.7, "", "1.00 k"),
        (5.4e18, "FLOP", "5.40 EFLOP"),
        (None, "", "not recorded"),
    ],
)
def test_counts_have_decimal_prefixes(count, unit, text):
    assert format_count(count, unit) == text


def test_fractions_are_percentages():
    assert format_fraction(0.4123) == "41.2 %"
    assert format_fraction(-0.0004) == "0.0 %"
    assert format_fraction(None) == "not recorded"


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("400Gbps", 50e9), ("400 Gb/s", 50e9), ("400 Gbit/s", 50e9), ("50GB/s", 50e9), ("50 GBps", 50e9), ("1GiB/s", 2**30),
     ("1.6Tbps", 200e9)],
)  # fmt: skip
def test_rates_in_bits_and_bytes(text, bytes_per_s):
    assert parse_rate(text) == pytest.approx(bytes_per_s)


@pytest.mark.parametrize("text", ["", "fast", "50", "50GB", "-1GB/s", "0Gbps", "1e3GB/s", "50 GB/h"])
def test_what_is_no_rate(text):
    with pytest.raises(UsageError):
        parse_rate(text)


@pytest.mark.parametrize(
    ("text", "fraction"), [("0.4", 0.4), ("40%", 0.4), ("1", 1), ("150 %", 1.5), ("0", 0), (".5", 0.5)]
)
def test_fractions_are_of_1_or_per_cent(text, fraction):
    assert parse_fraction(text) == pytest.approx(fraction)


@pytest.mark.parametrize(
    "text", ["40", "1.01", "-0.1", "nan", "inf", "", "%", "4e-1", "0,4", "9" * 400, "9" * 400 + "%"]
)
def test_what_may_be_meant_as_per_cent_is_asked_back(text):
    with pytest.raises(UsageError, match=re.escape(repr(text))) as caught:
        parse_fraction(text)

    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "duration_s"), [("0.25", 0.25), ("250ms", 0.25), ("2 s", 2), ("80us", 80e-6), ("102ms", 0.102)]
)
def test_times_are_seconds_unless_they_say_otherwise(text, duration_s):
    assert parse_duration(text) == duration_s


@pytest.mark.parametrize("text", ["0", "-1", "1h", "ms", "", "inf", "nan", "1e3", "9" * 400])
def test_other_times_are_a_usage_error(text):
    with pytest.raises(UsageError, match=re.escape(repr(text))):
        parse_duration(text)


@pytest.mark.parametrize(
    ("fraction", "text"),
    [
        (0.0193, "+1.9 %"),
        (-0.3549, "-35.5 %"),
        (-0.0004, "0.0 %"),
        (0.0004, "0.0 %"),
        (0.0, "0.0 %"),
        (128341.36, "over 1000 %"),
        (None, "-"),
    ],
)
def test_a_change_has_its_sign_unless_it_rounds_to_nothing(fraction, text):
    assert format_change(fraction) == text


@pytest.mark.parametrize(
    ("number", "what", "text"),
    [(1, "rank", "1 rank"), (2, "rank", "2 ranks"), (0, "step", "0 steps"), (3, "batch", "3 batches")],
)
def test_one_is_singular(number, what, text):
    assert counted(number, what) == text

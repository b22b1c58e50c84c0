"""Sizes as people write them."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bfc.units import MAX_BYTES, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("700", 700),
        ("700 B", 700),
        ("3 MiB", 3 << 20),
        ("3mib", 3 << 20),
        ("  4  GiB ", 4 << 30),
        ("1.5 KiB", 1536),
        (".5 GiB", 1 << 29),
        ("1. TiB", 1 << 40),
        ("2 KB", 2000),
        ("34G", 34 << 30),
        ("34 g", 34 << 30),
        ("34Gi", 34 << 30),
        ("1.5M", 3 << 19),
        ("2k", 2048),
        ("1t", 1 << 40),
        ("34GB", 34 * 10**9),
        ("1.5 GB", 1_500_000_000),
        ("0.1 B", 0),
        (str(MAX_BYTES), MAX_BYTES),
        ("8796093022207 MiB", 8796093022207 << 20),
    ],
)
def test_a_text_is_read_as_bytes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "MiB", "-1", "-1 MiB", "+1", "1e3", "0x10", "1,000", "1_000", "1 XiB", "1 MM"),
        *("nan", "inf", "1 2", "1..2", ".", "1 MiB/s", "\u00b2", "\u0661 MiB", "1\x00", "4 GiB 1"),
    ],
)
def test_a_text_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    "size",
    [-1, MAX_BYTES + 1, 2**64, 10**400, "9223372036854775808", "8388608 TiB", "9" * 400 + " KiB"],
)
def test_a_size_outside_63_bits_is_a_value_error(size: int | str) -> None:
    with pytest.raises(ValueError, match="between 0 and 2"):
        parse_bytes(size)


@pytest.mark.parametrize("text", ["9" * 400 + ".5 KiB", "9" * 5000])
def test_an_absurdly_long_number_is_a_value_error_too(text: str) -> None:
    with pytest.raises(ValueError, match=r"size|digits"):
        parse_bytes(text)


@pytest.mark.parametrize("size", [None, 1.0, 1.5, b"1", [1], object(), np.float64(4), 1j])
def test_anything_else_is_a_type_error(size: object) -> None:
    with pytest.raises(TypeError, match="int or a text"):
        parse_bytes(size)


@pytest.mark.parametrize("size", [np.int8(5), np.uint64(5), True + 4, np.array(5)])
def test_whatever_counts_as_an_int_is_taken(size: object) -> None:
    assert parse_bytes(size) == 5


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1 << 20, "1.00 MiB"),
        (3 << 29, "1.50 GiB"),
        (1 << 40, "1.00 TiB"),
        (1 << 50, "1.00 PiB"),
        (MAX_BYTES, "8192.00 PiB"),
    ],
)
def test_bytes_are_written_for_people(nbytes: int, expected: str) -> None:
    assert format_bytes(nbytes) == expected


@given(st.integers(0, MAX_BYTES >> 10))
def test_what_is_written_is_read_back_nearly_the_same(nbytes: int) -> None:
    text = format_bytes(nbytes)
    if not text.endswith("PiB"):
        assert parse_bytes(text) == pytest.approx(nbytes, rel=0.06, abs=0.5)


@given(st.text(max_size=12))
def test_no_text_does_anything_but_parse_or_raise_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert 0 <= parse_bytes(text) <= MAX_BYTES

"""Numbers of bytes, written and read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.spec.read import parse_size, show_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("12 B", 12),
        ("64MB", 64_000_000),
        ("64M", 64_000_000),
        ("1.5GiB", 3 << 29),
        (" 2 tib ", 2 << 40),
        ("0.5k", 500),
    ],
)
def test_sizes_are_parsed(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "B", "-1", "1e9", "1.2.3", "64 megabytes", "nan", "٣", "1,5GB"])
def test_text_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no number of bytes"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.7, "1.0 kB"),
        (12_345, "12.3 kB"),
        (999_960, "1.0 MB"),
        (4e6, "4.0 MB"),
        (1.2e9, "1.2 GB"),
        (5e18, "5000.0 PB"),
    ],
)
def test_sizes_are_formatted(size: float, text: str) -> None:
    assert show_size(size) == text


@given(st.floats(0, 1e18))
def test_a_written_size_is_read_back_as_about_the_same(size: float) -> None:
    assert abs(parse_size(show_size(size)) - size) <= 0.06 * size + 1

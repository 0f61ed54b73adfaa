"""The values that every room speaks of."""

from __future__ import annotations

import pytest

from unirun.values import split_endpoint


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("127.0.0.1:5", ("127.0.0.1", 5)),
        ("[::1]:5", ("::1", 5)),
        ("::1:5", ("::1", 5)),
        ("host:0", ("host", 0)),
    ],
)
def test_split_endpoint_separates_address_and_port(text: str, parts: tuple[str, int]) -> None:
    assert split_endpoint(text) == parts


def test_split_endpoint_refuses_half_an_endpoint() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        split_endpoint("host:")

"""Bytes of another process are a message about weights or queues, or raise a `FrameError`."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import FrameError
from unirun.weights import messages
from unirun.weights import producing as queues
from unirun.weights.hub import request_of
from unirun.weights.messages import Describe, Fetch, Fetched, Peek, Release, Released
from unirun.weights.producing import AwaitItem, Offered, offered
from unirun.weights.sources import answer_of
from unirun.weights.tensors import Box, NamedBox

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=12,
)
kinds = st.sampled_from(
    ["Describe", "Peek", "Fetch", "Fetched", "Release", "Take", "Hold", "Enter", "Offered"]
)
fields = st.sampled_from(
    ["channel", "queue", "reader", "patience", "parts", "taker", "numbers", "version", "block"]
)

READERS = pytest.mark.parametrize("read", [request_of, answer_of, offered])


@READERS
@given(raw=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(read: Callable[[bytes], object], raw: bytes) -> None:
    _read(read, raw)


@READERS
@given(kind=kinds, values=st.dictionaries(fields, anything, max_size=6))
def test_a_message_with_any_fields_is_read_or_refused(
    read: Callable[[bytes], object], kind: str, values: dict[str, object]
) -> None:
    try:
        raw = msgspec.json.encode({"type": kind, **values})
    except (msgspec.MsgspecError, ValueError, OverflowError):
        return
    _read(read, raw)


@READERS
def test_what_is_nested_without_end_is_refused(read: Callable[[bytes], object]) -> None:
    with pytest.raises(FrameError):
        read(b"[" * 100_000)


def _read(read: Callable[[bytes], object], raw: bytes) -> None:
    try:
        found = read(raw)
    except FrameError as error:
        assert len(str(error)) < 1000
    else:
        assert type(found).__module__ in {messages.__name__, queues.__name__}


@pytest.mark.parametrize(
    "request_",
    [
        Describe("c", 1.0),
        Peek("c", 1.0),
        Fetch("c", "r", 1, -5, 0.5, (1, 2), (NamedBox("w", Box((0,), (3,))),)),
        Release("c", "r", 3),
    ],
)
def test_a_request_is_read_as_it_was_sent(request_: messages.Request) -> None:
    assert request_of(msgspec.json.encode(request_)) == request_


def test_an_answer_is_read_as_it_was_sent() -> None:
    for answer in (Fetched(1, 2, 3), Released(held=True)):
        assert answer_of(msgspec.json.encode(answer)) == answer
    for offer in (Offered(), Offered(1, None, (4, 5))):
        assert offered(msgspec.json.encode(offer)) == offer
    assert request_of(msgspec.json.encode(AwaitItem("q"))) == AwaitItem("q")

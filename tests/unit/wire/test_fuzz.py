"""Any bytes are a message or a `WireError` with a short text, and are not buffered without bound."""

from __future__ import annotations

import json
import math
import struct
import typing

from hypothesis import assume, example, given
from hypothesis import strategies as st

from tests.unit.wire.strategies import within
from unirun.errors import FrameError, WireError
from unirun.wire.frames import FrameReader, decode, encode, encode_frame
from unirun.wire.handshake import Handshake, Token
from unirun.wire.messages import KINDS
from unirun.wire.reports import Message

TOKEN = Token(b"t" * 32)
LIMIT = 4096

NAMES = sorted({name for kind in KINDS.values() for name in typing.get_type_hints(kind)})

hostile = st.sampled_from(
    [
        math.nan,
        math.inf,
        -math.inf,
        10**400,
        -(10**400),
        1 << 64,
        "nan",
        "inf",
        "\ud800",
        "\udcff",
        "\x1b[2J",
        "",
    ]
)
anything = st.recursive(
    hostile | st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | st.text(), inner, max_size=4)
    ),
    max_leaves=12,
)
any_text = st.text(st.characters(codec=None), max_size=20)


def shaped(name: str) -> st.SearchStrategy[dict[str, object]]:
    """Objects with the fields of a message and arbitrary values."""
    fields = dict.fromkeys(typing.get_type_hints(KINDS[name]), anything)
    return st.fixed_dictionaries({"type": st.just(name)}, optional=fields)


def read(raw: bytes, *cuts: int) -> list[Message]:
    """Decode the messages in `raw`, fed in pieces. Raises `WireError`."""
    reader, found = FrameReader(limit=LIMIT), []
    ends = sorted({*(cut for cut in cuts if cut < len(raw)), len(raw)})
    for start, end in zip([0, *ends], ends, strict=False):
        found += [decode(payload) for payload in reader.feed(raw[start:end])]
        assert len(reader._buffer) < LIMIT + 4
    return found


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


@given(
    st.lists(st.binary() | st.binary().map(framed), max_size=4).map(b"".join), st.lists(st.integers(0, 200))
)
def test_any_bytes_are_messages_or_a_wire_error(raw: bytes, cuts: list[int]) -> None:
    try:
        read(raw, *cuts)
    except WireError as error:
        assert len(str(error)) < 400


@given(st.sampled_from(sorted(KINDS)).flatmap(shaped) | anything)
@example({"type": "Stop", "signal": 10**400, "reason": "x"})
@example({"type": "Sample", "node": "n", "memory": {}, "cpu": {"a:0": 10**400}})
def test_any_json_shaped_as_a_message_decodes_or_is_a_wire_error(payload: object) -> None:
    body = json.dumps(payload).encode()
    try:
        read(framed(body))
    except WireError as error:
        assert len(str(error)) < 400
        assert str(error).isascii()


@given(st.text(st.sampled_from('{}[]":,0123456789eE+-.truefalsnNIity\\ud89')).map(str.encode))
def test_any_text_that_is_nearly_json_decodes_or_is_a_wire_error(body: bytes) -> None:
    try:
        read(framed(body))
    except WireError as error:
        assert len(str(error)) < 400


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_any_handshake_bytes_raise_nothing_but_a_wire_error(first: bytes, second: bytes) -> None:
    client = Handshake(TOKEN)
    for attempt in (
        lambda: Handshake(TOKEN).proof(first),
        lambda: client.answer(first),
        lambda: client.check(second),
    ):
        try:
            attempt()
        except WireError:
            continue


@given(
    st.sampled_from(sorted(KINDS.values(), key=lambda kind: kind.__name__)).flatmap(st.from_type),
    any_text,
)
def test_every_message_that_can_be_encoded_can_be_decoded(message: Message, text: str) -> None:
    """No text from user code makes a process send a frame that its peer refuses."""
    # hypothesis takes msgspec's mark for an empty dict as a default for a value.
    assume("<factory>" not in repr(message))
    payload = encode(message)
    assume(within({name: value for name, value in payload.items() if not isinstance(value, float)}))
    for name, value in payload.items():
        if (
            isinstance(value, str)
            and typing.get_type_hints(type(message), include_extras=True).get(name) is str
        ):
            payload[name] = text
    try:
        frame = encode_frame(payload)
    except FrameError:
        return
    (again,) = FrameReader().feed(frame)
    assert isinstance(decode(again), type(message))


def test_a_frame_over_the_limit_is_not_buffered() -> None:
    reader = FrameReader(limit=LIMIT)
    head = struct.pack(">I", LIMIT)
    for _ in range(3):
        assert [*reader.feed(head)] == []
        assert [*reader.feed(b" " * (LIMIT - 2))] == []
        assert [*reader.feed(b"{}")] == [{}]
        assert len(reader._buffer) == 0

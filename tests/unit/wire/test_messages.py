"""Messages survive the trip through JSON, and nothing else gets through."""

from __future__ import annotations

import dataclasses
import json
import math
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import FrameError, WireError
from unirun.wire import FrameReader, Message, decode, encode, encode_frame
from unirun.wire.messages import Welcome
from unirun.wire.reports import Metrics, WorkerMetrics

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)

welcomes = st.builds(Welcome, config=st.dictionaries(st.text(), json_values))
messages = (
    st.one_of([st.from_type(kind) for kind in typing.get_args(Message) if kind is not Welcome]) | welcomes
)


def finite(message: Message) -> bool:
    """Whether a message is equal to itself, and has a form in JSON."""
    if isinstance(message, Metrics | WorkerMetrics) and any(map(math.isnan, message.values.values())):
        return False
    return "NaN" not in json.dumps(encode(message)) and "Infinity" not in json.dumps(encode(message))


@given(messages.filter(finite))
def test_a_message_comes_back_as_it_went(message: Message) -> None:
    (payload,) = FrameReader().feed(encode_frame(encode(message)))
    assert decode(payload) == message


@given(messages.filter(finite), st.data())
def test_frames_may_be_cut_anywhere(message: Message, data: st.DataObject) -> None:
    raw = encode_frame(encode(message)) * 2
    cut = data.draw(st.integers(0, len(raw)))
    reader = FrameReader()
    assert len([*reader.feed(raw[:cut]), *reader.feed(raw[cut:])]) == 2
    assert reader.pending == 0


@given(st.binary())
def test_bytes_from_outside_give_objects_or_a_named_error(raw: bytes) -> None:
    try:
        for payload in FrameReader(limit=1024).feed(raw):
            decode(payload)
    except WireError:
        pass


@given(messages.filter(finite), st.data(), json_values)
def test_a_field_of_another_type_is_refused_or_kept_as_the_declared_type(
    message: Message, data: st.DataObject, wrong: object
) -> None:
    fields = dataclasses.fields(message)
    if not fields:
        return
    name = data.draw(st.sampled_from([field.name for field in fields]))
    try:
        again = decode({**encode(message), name: wrong})
    except FrameError:
        return
    assert json.loads(json.dumps(encode(again)))[name] == wrong


@pytest.mark.parametrize("value", [math.inf, -math.inf, 1, 0.5])
def test_figures_of_a_users_code_may_be_infinite(value: float) -> None:
    again = decode(json.loads(json.dumps(encode(Metrics({"loss": value}, 1.0)), allow_nan=False)))
    assert again == Metrics({"loss": value}, 1.0)


def test_figures_of_a_users_code_may_be_nan() -> None:
    again = decode(json.loads(json.dumps(encode(WorkerMetrics("a", 0, 0, {"loss": math.nan}, 1.0)))))
    assert isinstance(again, WorkerMetrics)
    assert math.isnan(again.values["loss"])


def test_a_length_over_the_cap_is_refused_before_the_body_arrives() -> None:
    with pytest.raises(FrameError, match="over the limit"):
        list(FrameReader(limit=10).feed(b"\x00\x00\x00\x0b"))


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        ({"type": "Nonsense"}, "unknown message"),
        ({"type": ["Join"]}, "unknown message"),
        ({"type": "Shutdown", "now": True}, "no field 'now'"),
        ({"type": "Stop"}, "incomplete"),
        ({"type": "Stop", "signal": "15", "reason": "x"}, "expected"),
        ({"type": "Stop", "signal": 15, "reason": "x", "grace": "nan"}, "expected"),
        ({"type": "Metrics", "values": {"loss": "low"}, "time": 1.0}, "expected"),
        ({"type": "WorkerExited", "cause": "fate"}, "expected"),
        ({"type": "Stop", "signal": True, "reason": "x"}, "expected"),
    ],
)
def test_a_wrong_message_says_what_is_wrong(payload: dict[str, object], says: str) -> None:
    with pytest.raises(FrameError, match=says):
        decode(payload)

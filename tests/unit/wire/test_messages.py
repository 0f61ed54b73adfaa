"""Messages are the same after encoding and decoding; anything else is refused."""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.wire.strategies import within
from unirun.errors import FrameError, WireError
from unirun.values import Value, WorkerId
from unirun.wire.frames import (
    FrameReader,
    decode,
    encode,
    encode_frame,
    finite,
    from_json,
    parse_object,
    typed,
)
from unirun.wire.messages import KINDS, Fault, Inject, Stop, View, Welcome
from unirun.wire.reports import (
    MAX_COUNTS,
    MAX_SPANS,
    CallCount,
    FromWorker,
    Message,
    Metrics,
    Notice,
    Spawn,
    bounded,
    merged,
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=16,
)

messages = st.one_of([st.from_type(kind) for kind in KINDS.values()])


def sendable(message: Message) -> bool:
    """Return True if a message equals itself and can be encoded."""
    # Hypothesis takes the default of a field for a value, also a function that makes it.
    if "<factory>" in repr(message):
        return False
    said = message.message if isinstance(message, FromWorker) else message
    if isinstance(said, Metrics) and said.values != finite(said.values):
        return False
    return within(encode(message))


@given(messages.filter(sendable))
def test_decode_of_an_encoded_message_equals_it(message: Message) -> None:
    (payload,) = FrameReader().feed(encode_frame(encode(message)))
    assert decode(payload) == message


@given(messages.filter(sendable), st.data())
def test_a_frame_may_arrive_in_pieces_cut_anywhere(message: Message, data: st.DataObject) -> None:
    raw = encode_frame(encode(message)) * 2
    cut = data.draw(st.integers(0, len(raw)))
    reader = FrameReader()
    assert len([*reader.feed(raw[:cut]), *reader.feed(raw[cut:])]) == 2
    assert len(reader._buffer) == 0


@given(st.binary())
def test_any_bytes_give_the_frame_reader_objects_or_a_wire_error(raw: bytes) -> None:
    try:
        for payload in FrameReader(limit=1024).feed(raw):
            decode(payload)
    except WireError:
        pass


@given(messages.filter(sendable), st.data(), json_values)
def test_a_message_field_of_another_type_is_refused_or_converted(
    message: Message, data: st.DataObject, wrong: object
) -> None:
    fields = message.__struct_fields__
    if not fields:
        return
    name = data.draw(st.sampled_from(fields))
    try:
        again = decode({**encode(message), name: wrong})
    except FrameError:
        return
    assert json.loads(json.dumps(encode(again)))[name] == wrong


@given(st.dictionaries(st.text(), json_values))
def test_a_frame_is_its_length_and_compact_json(payload: dict[str, object]) -> None:
    frame = encode_frame(payload)
    (length,) = struct.unpack(">I", frame[:4])
    assert length == len(frame) - 4 == len(json.dumps(payload, separators=(",", ":")))
    assert encode_frame(payload, limit=length) == frame
    with pytest.raises(FrameError, match=f"a frame of {length} bytes is over the limit of {length - 1}"):
        encode_frame(payload, limit=length - 1)


class Written(Value):
    """A user's document."""

    name: str
    ranks: tuple[int, ...]


def test_from_json_checks_the_fields_of_a_document() -> None:
    assert from_json(Written, '{"name": "a", "ranks": [1, 2]}') == Written("a", (1, 2))
    assert typed(Written, {"name": "a", "ranks": (1,)}) == Written("a", (1,))
    for text, says in (
        ('{"name": "a"}', "this is no Written: Object missing required field `ranks`"),
        ('{"name": "a", "ranks": [true]}', "no Written: Expected `int`, got `bool` - at `\\$.ranks\\[0\\]`"),
        ('{"name": "a", "rank": 1}', "no Written: Object contains unknown field `rank`"),
        ("[]", "expected a JSON object, found a list"),
    ):
        with pytest.raises(FrameError, match=says):
            from_json(Written, text)


def test_metrics_that_are_not_finite_are_null() -> None:
    metrics = Metrics(finite({"loss": math.nan, "norm": -math.inf, "speed": 0.5}), 1.0)
    for message in (metrics, FromWorker(WorkerId("a", 0, 0), metrics)):
        payload = encode(message)
        assert payload.get("message", payload)["values"] == {"loss": None, "norm": None, "speed": 0.5}
        assert decode(json.loads(json.dumps(payload, allow_nan=False))) == message


def test_a_frame_length_over_the_limit_is_refused_before_the_body_arrives() -> None:
    with pytest.raises(FrameError, match="over the limit"):
        list(FrameReader(limit=10).feed(b"\x00\x00\x00\x0b"))


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        ({"type": "Nonsense"}, "unknown message"),
        ({"type": ["Join"]}, "unknown message"),
        ({"type": "Shutdown", "now": True}, "unknown field `now`"),
        ({"type": "Stop"}, "missing required field `signal`"),
        ({"type": "Stop", "signal": "15", "reason": "x"}, "Expected"),
        ({"type": "Stop", "signal": 15, "reason": "x", "grace": "nan"}, "Expected"),
        ({"type": "Metrics", "values": {"loss": "low"}, "time": 1.0}, "Expected"),
        ({"type": "WorkerExited", "cause": "fate"}, "Invalid enum value"),
        ({"type": "Stop", "signal": True, "reason": "x"}, "Expected"),
    ],
)
def test_decoding_a_wrong_message_names_the_fault(payload: dict[str, object], says: str) -> None:
    with pytest.raises(FrameError, match=says):
        decode(payload)


HUGE = "9" * 400

STOP = '{"type": "Stop", "signal": 15, "reason": "x"'


def read_one(body: bytes) -> Message:
    """The message in a frame with this body."""
    (payload,) = FrameReader().feed(struct.pack(">I", len(body)) + body)
    return decode(payload)


@pytest.mark.parametrize(
    "text",
    [
        f'{STOP}, "grace": {HUGE}}}',
        f'{STOP}, "grace": {"9" * 5000}}}',
        f'{STOP}, "grace": 1e999}}',
        f'{STOP}, "grace": -1e999}}',
        f'{STOP}, "grace": NaN}}',
        f'{STOP}, "grace": Infinity}}',
        f'{{"type": "Stop", "signal": {HUGE}, "reason": "x"}}',
        f'{{"type": "Stop", "signal": {1 << 64}, "reason": "x"}}',
        f'{{"type": "Metrics", "time": 1.0, "values": {{"loss": {HUGE}}}}}',
        '{"type": "Metrics", "time": 1.0, "values": {"loss": NaN}}',
        '{"type": "Metrics", "time": "nan", "values": {}}',
        f'{{"type": {HUGE}}}',
        f'{{"type": "Shutdown", "{"x" * 10_000}": 1}}',
        r'{"type": "Notice", "source": "a", "text": "\ud800"}',
        r'{"type": "Notice", "source": "a", "text": "\udd00"}',
        r'{"type": "Sample", "node": "a", "memory": {"\ud800": 1}, "cpu": {}}',
        "[" * 100_000,
        '{"a":' * 100_000,
    ],
    # pytest cannot be asked for a test with a backslash in its name.
    ids=lambda text: f"{text[:60]}({len(text)})".replace("\\", ""),
)
def test_invalid_text_is_a_frame_error_with_a_short_message(text: str) -> None:
    with pytest.raises(FrameError) as refused:
        read_one(text.encode())
    assert len(str(refused.value)) < 300
    assert str(refused.value).isascii()


@pytest.mark.parametrize(
    "payload",
    [
        {"time": math.nan},
        {"grace": math.inf},
        {"config": {"a": [-math.inf]}},
        {"number": 10**5000},
        {"what": object()},
    ],
    ids=lambda payload: next(iter(payload)),
)
def test_values_without_a_json_form_are_not_encoded(payload: dict[str, object]) -> None:
    with pytest.raises(FrameError, match="cannot encode a message as JSON"):
        encode_frame(payload)


def test_lone_surrogates_in_text_of_user_code_are_sent_escaped() -> None:
    said = Notice("a", "lone \ud800 and \udfff, pair \U0001f600, byte \udcff")
    (payload,) = FrameReader().feed(encode_frame(encode(said)))
    assert decode(payload) == Notice("a", r"lone \ud800 and \udfff, pair " + "\U0001f600, byte \udcff")


def test_undecodable_bytes_in_names_survive_a_frame() -> None:
    name = os.fsdecode(b"caf\xe9")
    kept = Spawn(1, "a:0", "script", name, (name,), False, {"NAME": name}, "/", "/logs", "a/0/0")
    (payload,) = FrameReader().feed(encode_frame(encode(kept)))
    assert decode(payload) == kept


def test_a_users_config_in_a_frame_may_have_any_json_number() -> None:
    config = {"big": 10**400, "list": [1, {"x": [2, None]}]}
    sent = Welcome(View(()), json.dumps(config), "n", (), (), 1.0, "socket")
    (payload,) = FrameReader().feed(encode_frame(encode(sent)))
    welcome = decode(payload)
    assert isinstance(welcome, Welcome)
    assert json.loads(welcome.config) == config


@pytest.mark.parametrize(
    "values", [{"a": ["\ud800"]}, {"a": {"b": "\ud800"}}, {"a": {"\ud800": 1}}, {"\ud800": 1}]
)
def test_a_frame_with_a_lone_surrogate_is_refused(values: dict[str, object]) -> None:
    for escaped in (True, False):
        body = json.dumps(values, ensure_ascii=escaped).encode(errors="surrogatepass")
        with pytest.raises(FrameError, match="invalid JSON"):
            list(FrameReader().feed(struct.pack(">I", len(body)) + body))
    with pytest.raises(FrameError, match="lone surrogate"):
        parse_object(json.dumps(values, ensure_ascii=False))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("form", ['{{"a": {}}}', '{{"a": [{{"b": {}}}]}}'])
def test_a_frame_with_a_number_that_is_not_finite_is_refused(form: str, number: str) -> None:
    """Also among values of user code, which have no declared type."""
    body = form.format(number).encode()
    with pytest.raises(FrameError, match="invalid JSON"):
        list(FrameReader().feed(struct.pack(">I", len(body)) + body))


@given(
    st.integers(-(1 << 66), 1 << 66) | st.sampled_from([-(1 << 63), -(1 << 63) - 1, (1 << 64) - 1, 1 << 64])
)
def test_an_integer_in_a_frame_has_at_most_64_bits(number: int) -> None:
    frame = encode_frame(encode(Stop(number, "x")))
    if -(1 << 63) <= number < 1 << 64:
        (payload,) = FrameReader().feed(frame)
        assert decode(payload) == Stop(number, "x")
    else:
        with pytest.raises(FrameError, match="an integer has more than 64 bits"):
            list(FrameReader().feed(frame))


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (
            {"type": "Join", "workers": [{"worker": [1, 0, 0]}]},
            r"Join: Expected `str`, got `int` - at `\$\.workers\[0\]\.worker\[0\]`",
        ),
        ({"type": "Join", "workers": [{"who": 1}]}, r"unknown field `who` - at `\$\.workers\[0\]`"),
        ({"type": "Join", "endpoints": {"a": 1}}, r"Expected `str`, got `int` - at `\$\.endpoints"),
        (
            {"type": "Metrics", "values": {"loss": [1]}},
            r"Expected `float \| null`, got `array` - at `\$\.values",
        ),
        ({"type": "Notice", "text": {}}, r"Expected `str`, got `object` - at `\$\.text`"),
        ({"type": "Notice", "text": 1 << 63}, r"Expected `str`, got `int` - at `\$\.text`"),
        ({"type": "Stop", "grace": "soon"}, r"Expected `float \| null`, got `str` - at `\$\.grace`"),
        ({"type": "Notice", "x" * 100: 1}, f"Notice: .* unknown field `{'x' * 80}"),
    ],
)
def test_a_wrong_message_field_is_named_with_its_value(payload: dict[str, object], says: str) -> None:
    with pytest.raises(FrameError, match=says):
        decode(payload)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), max_size=8))
def test_merged_ranges_have_the_same_ranks_and_do_not_touch(begins: list[tuple[int, int]]) -> None:
    ranges = [(first, first + length) for first, length in begins]
    found = merged(ranges)
    ranks = [rank for first, last in found for rank in range(first, last + 1)]
    assert ranks == sorted({rank for first, last in ranges for rank in range(first, last + 1)})
    assert all(last + 1 < first for (_, last), (first, _) in itertools.pairwise(found))


COUNTS = st.builds(
    CallCount,
    st.just("actor"),
    st.text(max_size=2),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(0, 9),
    st.just(1.0),
    st.integers(0, MAX_SPANS + 2).map(lambda count: tuple((3 * n + 1, 3 * n + 2) for n in range(count))),
)


@given(st.lists(COUNTS, max_size=8), st.sampled_from((0, MAX_COUNTS - 4)))
def test_a_report_of_calls_has_the_methods_with_the_most_bytes_and_no_rank_too_few(
    some: list[CallCount], more: int
) -> None:
    counts = some + [CallCount("actor", f"m{n}", 1, 2, 3, 1.0, ((n, n),)) for n in range(more)]
    found = bounded(counts)
    sizes = [each.bytes + each.returned for each in counts]
    assert len(found) == min(len(counts), MAX_COUNTS)
    assert sum(each.bytes + each.returned for each in found) == sum(sorted(sizes)[-MAX_COUNTS:])
    for each in found:
        # What was cut is one range, from the first rank to the last; nothing else differs.
        whole = [was for was in counts if (was.role, was.method) == (each.role, each.method)]
        assert any(
            each == was
            if len(was.ranks) <= MAX_SPANS
            else each == replace(was, ranks=((1, was.ranks[-1][1]),))
            for was in whole
        )
    if len(counts) <= MAX_COUNTS:
        assert [each.method for each in found] == [each.method for each in counts]


@pytest.mark.parametrize("asked", [False, True])
def test_a_second_request_hurries_unless_it_says_itself_whether_it_does(asked: bool) -> None:
    assert Stop(15, "x").hurries(asked) == asked
    assert Stop(15, "x", urgent=True).hurries(asked)
    assert not Stop(15, "x", urgent=False).hurries(asked)


def test_a_job_that_is_stopped_has_the_code_that_was_asked_for_or_that_of_the_signal() -> None:
    assert [Stop(15, "x", code=code).exit_code for code in (None, 0, 3)] == [143, 0, 3]


def test_a_fault_is_shown_as_it_is_asked_for() -> None:
    shown = {fault: str(Inject("actor", 0, fault, 3.0)) for fault in get_args(Fault)}
    assert shown == {fault: fault for fault in get_args(Fault)} | {"exit": "exit=3", "slow": "slow=3x"}
    assert str(Inject("actor", 0, "slow", 2.5)) == "slow=2.5x"

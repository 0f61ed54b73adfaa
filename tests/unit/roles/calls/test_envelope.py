"""The envelope of a request: there and back, and nothing but `FrameError` for anything else."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import FrameError
from unirun.roles.calls.codec import (
    MAX_ACKS,
    Request,
    decode_address,
    decode_request,
    encode_address,
    encode_request,
)
from unirun.values import WorkerId

NAMES = st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=30)
ADDRESSES = st.builds(WorkerId, NAMES, st.integers(0, 1 << 40), st.integers(0, 1 << 40))
NUMBERS = st.integers(0, (1 << 64) - 1)


@given(ADDRESSES)
def test_an_address_goes_there_and_back(address: WorkerId) -> None:
    assert decode_address(encode_address(address)) == address


def test_an_address_is_printed_as_everywhere() -> None:
    assert str(WorkerId("actor", 2, 5)) == "actor:2"


@given(
    ADDRESSES,
    NUMBERS,
    st.integers(0, (1 << 32) - 1),
    st.booleans(),
    st.lists(NUMBERS, max_size=50),
    NAMES,
    st.binary(max_size=200),
)
def test_a_request_goes_there_and_back(
    caller: WorkerId, seq: int, generation: int, joint: bool, acks: list[int], method: str, body: bytes
) -> None:
    head = encode_request(encode_address(caller), seq, generation, joint, acks, method.encode(), body)
    found = decode_request(head)
    assert found == Request(caller, seq, generation, joint, tuple(acks), method, memoryview(body))
    assert (found.caller, found.seq) == (caller, seq)


def test_a_request_may_have_the_largest_number_of_acks() -> None:
    acks = list(range(MAX_ACKS))
    head = encode_request(b"a\x000\x000", 1, 0, False, acks, b"m", b"body")
    assert decode_request(head).acks == tuple(acks)
    assert bytes(decode_request(head).body) == b"body"


@given(st.binary(max_size=200))
def test_noise_as_a_request_is_a_frame_error_at_worst(noise: bytes) -> None:
    with contextlib.suppress(FrameError):
        decode_request(noise)


@given(st.data())
def test_a_request_that_is_cut_or_changed_is_a_frame_error_at_worst(data: st.DataObject) -> None:
    head = bytearray(encode_request(b"actor\x001\x002", 7, 1, True, [1, 2, 3], b"update", b""))
    for _ in range(data.draw(st.integers(0, 3))):
        head[data.draw(st.integers(0, len(head) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(FrameError):
        decode_request(bytes(head[: data.draw(st.integers(0, len(head)))]))


def test_a_request_that_ends_early_is_told() -> None:
    head = encode_request(b"actor\x001\x002", 7, 1, True, [1, 2, 3], b"update", b"")
    for end in range(len(head)):
        with pytest.raises(FrameError, match=f"a request of {end} bytes"):
            decode_request(head[:end])

"""The headers of requests and answers, in bytes.

A request can be routed, and recognised when it comes again, without unpickling its arguments::

    seq(8) generation(4) joint(1) acks(2) caller(2) method(2) | acks, 8 each | caller | method | pickled (args, kwargs)

An answer is one byte, `OK`, `ERROR` or `INTERRUPTED`, and the pickled result or error; or `REFUSED` and a
generation (4).
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple

from unirun.errors import CallError, FrameError
from unirun.values import WorkerId

_PREFIX = struct.Struct("<QI?HHH")
_GENERATION = struct.Struct("<I")
_GIVEN_UP = struct.Struct("<Q?")

OK, ERROR, INTERRUPTED, REFUSED = b"\0", b"\1", b"\2", b"\3"
"""`INTERRUPTED`: the method raised while its role lost a worker, so its error is a consequence. `REFUSED`: the method
did not run, as the call was made for an earlier generation than that of the worker, or had lost another one."""

MAX_ACKS = 0xFFFF

DESCRIBE = "__describe__"
"""Asks which methods there are, with their options."""

OPEN_RPC = "__open_rpc__"
"""Asks the process to let itself be called by torch.distributed.rpc."""

ACK = b"__ack__"
"""The method of a request that only carries acks."""

GIVE_UP = b"__give_up__"
"""The method of a request that gives up an earlier request, whose number is in it: the caller no longer waits
for that result."""

VISITOR = "@"
"""The first character in the name of a caller outside the job, which no role has."""


class Request(NamedTuple):
    """One call as a worker gets it. `caller` and `seq` identify it, also when it is sent again.

    `generation` is that of the worker's role as the caller knows it. `joint`: other workers of the role run the same
    call, all in that generation.
    """

    caller: WorkerId
    seq: int
    generation: int
    joint: bool
    acks: tuple[int, ...]
    method: str
    body: memoryview


def encode_request(
    caller: bytes, seq: int, generation: int, joint: bool, acks: list[int], method: bytes, body: bytes
) -> bytes:
    """The head of a request; `caller` is from `encode_address`, `body` from the codec."""
    prefix = _PREFIX.pack(seq, generation, joint, len(acks), len(caller), len(method))
    acked = struct.pack(f"<{len(acks)}Q", *acks) if acks else b""
    return b"".join((prefix, acked, caller, method, body))


def decode_request(head: bytes) -> Request:
    """The inverse. Raises `FrameError`."""
    try:
        seq, generation, joint, acks, caller, method = _PREFIX.unpack_from(head)
        at = _PREFIX.size
        acked = struct.unpack_from(f"<{acks}Q", head, at) if acks else ()
        at += 8 * acks
        sender = decode_address(head[at : at + caller])
        at += caller
        name = head[at : at + method].decode()
        if len(head) < at + method:
            raise FrameError(f"a request of {len(head)} bytes ends early")
    except (struct.error, ValueError) as error:
        raise FrameError(f"a request of {len(head)} bytes is malformed: {error}") from error
    return Request(sender, seq, generation, joint, acked, name, memoryview(head)[at + method :])


def encode_giving_up(seq: int, *, lost: bool) -> bytes:
    """The body of a request that gives up the call `seq`; `lost`: because another worker of it was lost."""
    return _GIVEN_UP.pack(seq, lost)


def decode_giving_up(body: memoryview) -> tuple[int, bool]:
    """The inverse. Raises `FrameError`."""
    if len(body) != _GIVEN_UP.size:
        raise FrameError(f"a request to give a call up has {len(body)} bytes, not {_GIVEN_UP.size}")
    seq, lost = _GIVEN_UP.unpack(body)
    return seq, lost


def encode_refusal(generation: int) -> bytes:
    """The answer of a worker that is in `generation` to a joint call that was made for an earlier one."""
    return REFUSED + _GENERATION.pack(generation)


def refused_for(answer: bytes) -> int | None:
    """The generation of a worker that has refused a call; None for any other answer."""
    return _GENERATION.unpack_from(answer, 1)[0] if answer[:1] == REFUSED else None


def outcome_of(answer: bytes) -> tuple[bytes, memoryview]:
    """The kind of an answer and its body. Raises `CallError` for an empty one."""
    if not answer:
        raise CallError("an empty answer arrived")
    return answer[:1], memoryview(answer)[1:]


def encode_address(address: WorkerId) -> bytes:
    """``role\\0rank\\0incarnation``"""
    return f"{address.role}\0{address.rank}\0{address.incarnation}".encode()


@lru_cache(maxsize=4096)
def decode_address(data: bytes) -> WorkerId:
    """The inverse. Raises ValueError."""
    role, rank, incarnation = data.decode().split("\0")
    return WorkerId(role, int(rank), int(incarnation))

"""Calls as bytes: arguments, results and errors are pickled, behind headers that are read without unpickling.

Values are pickled with protocol 5: the memory of tensors and arrays is not copied into the pickle.

Of a tensor only its elements are sent, not the rest of its storage. A tensor on a GPU is copied through host memory to
the current device of the receiver. Classes and functions of ``__main__`` and lambdas go by value
(cloudpickle); everything else by name, as pickle does.
"""

from __future__ import annotations

import contextlib
import io
import marshal
import pickle
import re
import struct
import traceback
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle

from unirun.errors import CallError, EncodingError, FrameError, RemoteError, RemoteTraceback
from unirun.roles.transport.frames import MAX_HEAD as MAX_FRAME_HEAD
from unirun.roles.transport.protocol import writable
from unirun.values import WorkerId
from unirun.wire.reporting import folded, noted

if TYPE_CHECKING:
    import torch

INLINE = 512
"""Bytes up to which a tensor is part of the pickle itself, which costs less than a separate buffer."""

MAX_HEAD = MAX_FRAME_HEAD - (1 << 24)
"""Bytes that a pickle may have without its buffers. The rest of a frame's head is for the header of the request."""


def _is_tensor(value: Any) -> bool:
    """Return True for a tensor, which is known by name: the import of torch takes long, and many callers send none. In
    a fork of a spawner torch appears as not imported even where a preloaded module makes tensors."""
    kind = type(value)
    return kind.__name__ == "Tensor" and kind.__module__ == "torch"


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if _is_tensor(obj):
            return _reduce(obj)
        if isinstance(obj, type | _FUNCTION) and obj.__module__ == "__main__":
            raise pickle.PicklingError("it goes by value")
        return NotImplemented


class _CloudPickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        if _is_tensor(obj):
            return _reduce(obj)
        if type(obj) is CodeType:
            # cloudpickle 3.1.3 drops the name of the file, and with it the source lines in tracebacks.
            return marshal.loads, (marshal.dumps(obj),)
        return super().reducer_override(obj)


_FUNCTION = type(lambda: None)


def dump(value: Any, what: str) -> tuple[bytes, tuple[memoryview, ...]]:
    """Pickle `value`. Returns the pickle and its buffers. Raises `EncodingError`, which names `what`."""
    head, buffers = (pickle.dumps(value, 5), ()) if _is_plain(value) else _dump_any(value, what)
    if len(head) > MAX_HEAD:
        problem = (
            f"{what} cannot be sent: it has {len(head)} bytes beside its tensors, and {MAX_HEAD} is the most"
        )
        raise EncodingError(problem, "send large data as tensors or arrays")
    return head, buffers


def _dump_any(value: Any, what: str) -> tuple[bytes, tuple[memoryview, ...]]:
    try:
        return _dump(_Pickler, value)
    except Exception:  # noqa: BLE001 - classes raise what they like when they are pickled
        # Objects that pickle cannot find by name; cloudpickle sends them by value.
        pass
    try:
        return _dump(_CloudPickler, value)
    except Exception as error:
        problem = f"{what} cannot be sent: {type(error).__name__}: {error}"
        raise EncodingError(problem, "send plain data, tensors or objects that pickle") from error


def _is_plain(value: Any) -> bool:
    """Return True if `value` is ``(args, {})`` with simple arguments only: plain pickle is enough and fastest."""
    return (
        type(value) is tuple
        and len(value) == 2
        and type(value[0]) is tuple
        and type(value[1]) is dict
        and not value[1]
        and _PLAIN.issuperset(map(type, value[0]))
    )


_PLAIN = frozenset((type(None), bool, int, float, str))


def _dump(kind: Callable[..., Any], value: Any) -> tuple[bytes, tuple[memoryview, ...]]:
    file = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    kind(file, 5, buffer_callback=buffers.append).dump(value)
    return file.getvalue(), tuple(buffer.raw() for buffer in buffers)


def load(head: bytes | memoryview, buffers: tuple[memoryview, ...]) -> Any:
    """The inverse of `dump`. Raises what unpickling raises."""
    return pickle.loads(head, buffers=buffers)  # noqa: S301 - peers have proved the job's token


def _reduce(tensor: torch.Tensor) -> Any:
    import torch

    if (
        tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.device.type not in ("cpu", "cuda")
    ):
        return NotImplemented
    data = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    flat: Any = data.reshape(-1).view(torch.uint8).numpy() if data.numel() else b""
    place = "" if tensor.device.type == "cpu" else tensor.device.type
    shape = tuple(data.shape)
    memory: Any = bytearray(flat) if data.nbytes <= INLINE else pickle.PickleBuffer(flat)
    return _rebuild, (memory, data.dtype, shape, place, tensor.requires_grad)


def _rebuild(
    memory: Any, dtype: torch.dtype, shape: tuple[int, ...], place: str, requires_grad: bool
) -> torch.Tensor:
    import torch

    if len(memory) == 0:
        tensor = torch.empty(shape, dtype=dtype)
    else:
        tensor = torch.frombuffer(writable(memoryview(memory)), dtype=torch.uint8).view(dtype).reshape(shape)
    if place:
        tensor = tensor.to(place)
    return tensor.requires_grad_() if requires_grad else tensor


# Exceptions of a worker, pickled for its caller with type, message, traceback and the worker's name.

_TEXT = 1 << 20
"""Characters of a message or a traceback that are sent at most."""
_ADDRESS = re.compile(r"\b0x[0-9a-f]+")
"""The address in the default repr of an object, which differs after unpickling."""

Packed = tuple[bytes, tuple[memoryview, ...]]
"""A pickle, and the buffers of the tensors and arrays in it."""


def dump_error(error: BaseException, worker: str) -> Packed:
    """Pickle `error`, as much of it as can be pickled."""
    trace = "".join(traceback.format_exception(folded(noted(error))))
    kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    head, buffers = _pack(error) or (None, ())
    return pickle.dumps((kind, _text(error)[:_TEXT], trace[-_TEXT:], worker, head), 5), buffers


def load_error(body: memoryview | bytes, buffers: tuple[memoryview, ...] = ()) -> Exception:
    """The exception to raise in the caller: of the original type if that can be unpickled here, else `RemoteError`.

    An exception that is not an `Exception`, like SystemExit, would end the caller and is a `RemoteError`, too.
    """
    kind, message, trace, worker, head = pickle.loads(body)  # noqa: S301 - peers have proved the job's token
    error: BaseException | None = None
    if head is not None:
        with contextlib.suppress(Exception):
            error = _unpack((head, buffers))
    if not isinstance(error, Exception):
        return RemoteError(kind, message, worker=worker, traceback=trace)
    error.add_note(f"raised in {worker}")
    error.__cause__ = RemoteTraceback(worker, trace)
    return error


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001 - a user's __str__
        return f"<its text cannot be made: {broken!r}>"


def _pack(error: BaseException) -> Packed | None:
    """A pickle from which `_unpack` rebuilds the exception; None if there is none."""
    state = {name: value for name, value in error.__dict__.items() if name != "__notes__"} | _slots(error)
    # First as pickle does it, which also restores the state of exceptions in C. It calls the class with `args`, which
    # is wrong if the constructor takes other arguments, and it leaves out slots. If the arguments cannot be pickled,
    # only the text is sent.
    kind, args = type(error), error.args
    for form in ((error, state), (kind, args, state), (kind, args, {}), (kind, (_text(error),), {})):
        with contextlib.suppress(Exception):
            packed = dump(form, "an exception")
            if _alike(_unpack(packed), error):
                return packed
    return None


def _slots(error: BaseException) -> dict[str, Any]:
    """The attributes that a class keeps in ``__slots__``."""
    names: list[str] = []
    for kind in type(error).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return {name: getattr(error, name) for name in names if name != "__dict__" and hasattr(error, name)}


def _alike(again: BaseException, error: BaseException) -> bool:
    """Return True if an exception was rebuilt: same type and text. Arguments are not compared, as many
    objects have no equality."""
    return type(again) is type(error) and _ADDRESS.sub("", _text(again)) == _ADDRESS.sub("", _text(error))


def _unpack(packed: Packed) -> BaseException:
    form = load(*packed)
    if len(form) == 2:
        error, state = form
        error.__traceback__ = None
    else:
        kind, args, state = form
        error = _made(kind, args)
        error.args = args
    for name, value in state.items():
        setattr(error, name, value)
    return error  # type: ignore[no-any-return]


def _made(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """An exception that is made without its constructor."""
    try:
        return kind.__new__(kind, *args)
    except TypeError:
        return kind.__new__(kind)


# The headers of requests and answers, in bytes.
#
# A request can be routed, and recognised when it comes again, without unpickling its arguments:
#
#   seq(8) generation(4) joint(1) acks(2) caller(2) method(2) | acks, 8 each | caller | method | pickled (args, kwargs)
#
# An answer is one byte, `OK`, `ERROR` or `INTERRUPTED`, and the pickled result or error; or `REFUSED` and a
# generation (4).

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
    caller: bytes, seq: int, generation: int, joint: bool, acks: Sequence[int], method: bytes, body: bytes
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

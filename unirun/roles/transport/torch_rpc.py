"""Calls over torch.distributed.rpc.

``init_rpc`` wants all members of a group to arrive together, and a group cannot take a restarted member back. What
lies below it can do more: each process makes its own TensorPipe agent, which knows nobody, and is told of a peer
when it first calls it (the step by which torch's dynamic groups let members join). So nobody waits for anybody, a
worker that is started again is simply a new peer, and the calls of all others go on undisturbed.

A worker's name is ``role:rank:incarnation``: `unirun.rpc_name` gives it for raw calls of ``torch.distributed.rpc``.
"""

from __future__ import annotations

import importlib
import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import rpc

from unirun.errors import ChannelError
from unirun.roles.transport.protocol import Address, Channel, Handler, Parcel

THREADS = 4
"""Threads of an agent that take requests; each is passed on at once."""

_handler: Handler | None = None

Form = tuple[bytes, list[torch.Tensor]]


def rpc_worker_name(address: Address) -> str:
    """``actor:2:0``, the name of a worker in torch.distributed.rpc."""
    return f"{address.role}:{address.rank}:{address.incarnation}"


class TorchTransport:
    """One per process, as torch has one RPC agent per process."""

    name = "torch"

    def __init__(self, me: Address, index: Callable[[Address], int], workers: int) -> None:
        """`index` numbers the ranks of the job, from 0 to `workers` - 1."""
        self._me, self._index = me, index
        self._numbers = itertools.count(workers)
        self._used: set[int] = set()
        self._lock = threading.Lock()
        self._agent: Any = None
        self._store: Any = None
        self._peers: dict[str, int] = {}

    def serve(self, me: Address, handler: Handler) -> str:
        """Take requests. The endpoint is the address of this process's TensorPipe agent."""
        global _handler
        _handler = handler
        self._start()
        return str(self._store.get(f"addrs/{rpc_worker_name(self._me)}").decode())

    def connect(self, peer: Address, endpoint: str, broken: Callable[[str], None]) -> Channel:
        """Tell the agent where `peer` is. Whether somebody is there shows at the first call."""
        with self._lock:
            self._start()
            name = rpc_worker_name(peer)
            # A pipe that broke cannot be opened again under its name, so each channel has another.
            number = self._peers.get(name, -1) + 1
            self._peers[name] = number
            name = f"{name}_{number}" if number else name
            try:
                self._store.set(f"addrs/{name}", endpoint)
                worker = _rpc().WorkerInfo(name, self._number(peer))
                self._agent._update_group_membership(worker, [], {}, True)
            except RuntimeError as error:
                raise ChannelError(f"{peer} cannot be joined: {error}") from error
        return _Channel(name, broken)

    def close(self) -> None:
        """End the agent; what is open fails in the peers at once."""
        global _handler
        with self._lock:
            agent, self._agent = self._agent, None
            if agent is not None:
                rpc.shutdown(graceful=False)
                _handler = None

    def _start(self) -> None:
        if self._agent is not None:
            return
        name = rpc_worker_name(self._me)
        store = _module("torch.distributed").HashStore()
        options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=THREADS, rpc_timeout=0)
        number = self._index(self._me)
        self._used.add(number)
        _module("torch.distributed.autograd")._init(number)
        agent = _rpc().TensorPipeAgent(store, name, number, None, options, {}, [])
        rpc.api._init_rpc_states(agent)
        self._agent, self._store = agent, store

    def _number(self, peer: Address) -> int:
        """torch keeps pipes by number: the rank's for its first worker, another for each that comes after."""
        number = self._index(peer)
        if number in self._used:
            number = next(self._numbers)
        self._used.add(number)
        return number


class _Channel:
    def __init__(self, name: str, broken: Callable[[str], None]) -> None:
        self._name, self._broken = name, broken
        self._lock = threading.Lock()
        self._open = True

    def call(self, parcel: Parcel, done: Callable[[Parcel], None]) -> None:
        future = rpc.rpc_async(self._name, _enter, args=(parcel.head, _tensors(parcel)), timeout=0)
        future.add_done_callback(lambda answer: self._answered(answer, done))

    def _answered(self, answer: torch.futures.Future[Form], done: Callable[[Parcel], None]) -> None:
        try:
            head, tensors = answer.value()
        except Exception as error:  # noqa: BLE001 - torch raises what it likes here
            self._break(str(error))
            return
        if self._open:
            done(Parcel(head, tuple(_memory(tensor) for tensor in tensors)))

    def _break(self, reason: str) -> None:
        with self._lock:
            was_open, self._open = self._open, False
        if was_open:
            self._broken(reason.partition(" (this error")[0] or "the connection has ended")

    def close(self) -> None:
        with self._lock:
            self._open = False


def _module(name: str) -> Any:
    """A part of torch of which much that is needed here has no types."""
    return importlib.import_module(name)


def _rpc() -> Any:
    return rpc


def _memory(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.numpy()
    return memoryview(array)


def _tensors(parcel: Parcel) -> list[torch.Tensor]:
    return [
        torch.frombuffer(bytearray(b) if b.readonly else b, dtype=torch.uint8)
        if b.nbytes
        else torch.empty(0, dtype=torch.uint8)
        for b in parcel.buffers
    ]


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _enter(head: bytes, tensors: list[torch.Tensor]) -> torch.futures.Future[Form]:
    """Runs in the called process, in a thread of its agent."""
    future: torch.futures.Future[Form] = torch.futures.Future()
    if _handler is None:
        future.set_exception(RuntimeError("this process does not serve calls"))  # type: ignore[arg-type]
        return future
    buffers = tuple(_memory(tensor) for tensor in tensors)
    _handler(Parcel(head, buffers), lambda reply: future.set_result((reply.head, _tensors(reply))))
    return future

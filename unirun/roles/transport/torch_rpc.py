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
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.distributed import rpc

from unirun.errors import ChannelError
from unirun.roles.transport.frames import offsets
from unirun.roles.transport.listening import ListenerGuard, Listeners, listeners
from unirun.roles.transport.mail import Mail
from unirun.roles.transport.protocol import Address, Channel, Handler, Inbox, Parcel, Wait, writable

THREADS = 4
"""Threads of an agent that take requests; each is passed on at once."""

MOMENT = 0.001
"""Seconds for which an answer is looked for without a pause."""

CHANNELS = ("cma", "basic")
"""How tensors travel. Of torch's others, ``mpt_uv`` opens 16 more ports in each process, for several network cards, and
aborts the process when it is greeted on the wrong one of them; those for CUDA have no use without a device map."""

APART = 1 << 20
"""Buffers of fewer bytes travel together in one tensor: each tensor costs as much as a call, and 100 000 of them end
the process (torch 2.13)."""

Form = tuple[bytes, list[int], list[torch.Tensor]] | tuple[bytes]
"""A parcel: the head, the sizes of its buffers, and tensors that hold them; the small ones come first, together.
Most have a head alone."""


@dataclass(eq=False)
class _Line:
    """The requests of one channel: the number of the next, and those that have come before their turn."""

    next: int = 0
    early: dict[int, Callable[[], None]] = field(default_factory=dict)
    busy: bool = False


class _Reception:
    """Passes requests on in the order in which each channel sent them: the agent's threads overtake each other."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self._lock = threading.Lock()
        self._lines: dict[str, _Line] = {}

    def take(self, name: str, number: int, parcel: Parcel, reply: Callable[[Parcel], None]) -> None:
        with self._lock:
            line = self._lines.setdefault(name, _Line())
            line.early[number] = lambda: self.handler(parcel, reply)
            if line.busy:
                return
            line.busy = True
        while True:
            with self._lock:
                request = line.early.pop(line.next, None)
                if request is None:
                    line.busy = False
                    return
                line.next += 1
            request()


_reception: _Reception | None = None


def rpc_worker_name(address: Address) -> str:
    """``actor:2:0``, the name of a worker in torch.distributed.rpc."""
    return f"{address.role}:{address.rank}:{address.incarnation}"


class _Inbox(queue.SimpleQueue[Any]):
    """Whoever takes the error out of it raises it."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        item = super().get(block, timeout)
        if isinstance(item, ChannelError):
            raise item
        return item


class TorchTransport:
    """One per process, as torch has one RPC agent per process."""

    name = "torch"

    def __init__(self, me: Address, index: Callable[[Address], int], workers: int) -> None:
        """`index` numbers the ranks of the job, from 0 to `workers` - 1."""
        self._me, self._index, self._workers = me, index, workers
        self._numbers = itertools.count(workers)
        self._used: set[int] = set()
        self._lock = threading.Lock()
        self._agent: Any = None
        self._store: Any = None
        self._peers: dict[str, int] = {}
        self._mail = Mail("unirun-rpc")
        self._inbox = _Inbox()
        self._listening: Listeners = {}
        self._guard: ListenerGuard | None = None

    def inbox(self) -> Inbox:
        """One whose `get` raises `ChannelError` when nobody can connect to this process any more."""
        return self._inbox

    def serve(self, me: Address, handler: Handler) -> str:
        """Take requests. The endpoint is the address of this process's TensorPipe agent."""
        global _reception
        _reception = _Reception(handler)
        self._start()
        endpoint = str(self._store.get(f"addrs/{rpc_worker_name(self._me)}").decode())
        lost = ChannelError(
            f"torch.distributed.rpc does not listen at {endpoint} any more, as it got bytes that are not its own",
            "find out who connects to the ports of this host; --transport socket lets nobody else in",
        )
        self._guard = ListenerGuard(self._listening, lambda: self._inbox.put(lost))
        return endpoint

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
                worker: Any = _rpc().WorkerInfo(name, self._number(peer))
                self._agent._update_group_membership(worker, [], {}, True)
            except RuntimeError as error:
                raise ChannelError(f"{peer} cannot be joined: {error}") from error
        return _Channel(worker, f"{rpc_worker_name(self._me)} to {name}", broken, self._mail)

    def close(self) -> None:
        """End the agent; what is open fails in the peers at once."""
        global _reception
        if self._guard is not None:
            self._guard.close()
        with self._lock:
            agent, self._agent = self._agent, None
            if agent is not None:
                rpc.shutdown(graceful=False)
                _reception = None
                self._mail.close()

    def _start(self) -> None:
        if self._agent is not None:
            return
        name = rpc_worker_name(self._me)
        store = _module("torch.distributed").HashStore()
        # Through shared memory an agent polls without a pause: where there are fewer cores than agents, they would
        # take them from each other, and from those who compute.
        crowded: Any = {"_transports": ["uv"]} if self._workers > (os.cpu_count() or 1) else {}
        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=THREADS, rpc_timeout=0, _channels=[*CHANNELS], **crowded
        )
        number = self._index(self._me)
        self._used.add(number)
        _module("torch.distributed.autograd")._init(number)
        agent = _rpc().TensorPipeAgent(store, name, number, None, options, {}, [])
        before = listeners()
        # Starts it, too.
        rpc.api._init_rpc_states(agent)
        self._listening = dict(listeners().items() - before.items())
        self._agent, self._store = agent, store

    def _number(self, peer: Address) -> int:
        """torch keeps pipes by number: the rank's for its first worker, another for each that comes after."""
        number = self._index(peer)
        if number in self._used:
            number = next(self._numbers)
        self._used.add(number)
        return number


class _Channel:
    def __init__(self, worker: Any, line: str, broken: Callable[[str], None], mail: Mail) -> None:
        self._worker, self._line, self._broken, self._mail = worker, line, broken, mail
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._open = True

    def call(
        self, parcel: Parcel, done: Callable[[Parcel], None], patience: float | None = None
    ) -> Wait | None:
        try:
            with self._lock:
                future = _ask(self._worker, self._line, next(self._numbers), _form(parcel))
        except RuntimeError as error:
            self._break(str(error))
            return None
        if patience is not None:
            return lambda: self._watch(future, done)
        asking = threading.get_ident()

        def answered(answer: torch.futures.Future[Form]) -> None:
            if threading.get_ident() == asking:
                # It came before this was asked for, and whoever calls may hold locks that `done` wants.
                self._mail.put(lambda: self._answered(answer, done))
            else:
                self._answered(answer, done)

        future.add_done_callback(answered)
        return None

    def _watch(self, future: torch.futures.Future[Form], done: Callable[[Parcel], None]) -> None:
        """Look for the answer for a moment: then no thread has to be woken that wakes this one.

        Whoever waits in torch itself hears no signals.
        """
        end = time.monotonic() + MOMENT
        try:
            while not future.done() and time.monotonic() < end:
                os.sched_yield()
        finally:
            future.add_done_callback(lambda answer: self._answered(answer, done))

    def _answered(self, answer: torch.futures.Future[Form], done: Callable[[Parcel], None]) -> None:
        try:
            form = answer.value()
        except Exception as error:  # noqa: BLE001 - torch raises what it likes here
            self._break(str(error))
            return
        if self._open:
            done(_parcel(form))

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


def _ask(worker: Any, line: str, number: int, form: Form) -> torch.futures.Future[Form]:
    """``rpc.rpc_async(worker, _enter, (line, number, *form), timeout=0)`` without its detours (is the function one of
    torch's own, is there a profiler), which are half of what a call takes in the calling thread."""
    pickled, tensors = rpc.internal.serialize(rpc.internal.PythonUDF(_enter, (line, number, *form), {}))
    future: torch.futures.Future[Form] = _rpc().api._invoke_rpc_python_udf(worker, pickled, tensors, 0, True)
    return future


def _form(parcel: Parcel) -> Form:
    if not parcel.buffers:
        return (parcel.head,)
    sizes = [buffer.nbytes for buffer in parcel.buffers]
    small = [buffer for buffer in parcel.buffers if buffer.nbytes < APART]
    large = [buffer for buffer in parcel.buffers if buffer.nbytes >= APART]
    if small:
        places, end = offsets([buffer.nbytes for buffer in small])
        together = memoryview(bytearray(max(end, 1)))
        for place, buffer in zip(places, small, strict=True):
            together[place : place + buffer.nbytes] = buffer
        large.insert(0, together)
    return parcel.head, sizes, [torch.frombuffer(writable(buffer), dtype=torch.uint8) for buffer in large]


def _parcel(form: Form) -> Parcel:
    if len(form) == 1:
        return Parcel(form[0])
    head, sizes, tensors = form
    memory = deque(memoryview(cast(Any, tensor.numpy())) for tensor in tensors)
    small = [size for size in sizes if size < APART]
    together = memory.popleft() if small else memoryview(b"")
    places = iter(offsets(small)[0])
    buffers = []
    for size in sizes:
        if size < APART:
            place = next(places)
            buffers.append(together[place : place + size])
        else:
            buffers.append(memory.popleft())
    return Parcel(head, tuple(buffers))


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _enter(line: str, number: int, *form: Any) -> torch.futures.Future[Form]:
    """Runs in the called process, in a thread of its agent."""
    future: torch.futures.Future[Form] = torch.futures.Future()
    if _reception is None:
        future.set_exception(RuntimeError("this process does not serve calls"))  # type: ignore[arg-type]
        return future
    _reception.take(line, number, _parcel(form), lambda reply: future.set_result(_form(reply)))
    return future

"""Calls over torch.distributed.rpc: the parcels of all connections go through this process's TensorPipe agent."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import os
import queue
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed
from torch.distributed import rpc

from unirun.errors import ChannelError
from unirun.roles.transport.frames import offsets
from unirun.roles.transport.protocol import (
    Connection,
    Handler,
    Inbox,
    Parcel,
    Reply,
    Scheduler,
    Wait,
    await_end,
    writable,
)
from unirun.values import WorkerId

# The agent of torch.distributed.rpc in this process.
#
# ``init_rpc`` waits for all members of a group, and a group cannot take a restarted member back. The layer below it
# can: each process creates its own TensorPipe agent without peers, and adds a peer before the first call to it, with
# the function that torch uses for dynamic groups. So no process waits for others, and a restarted worker is a new peer.

GUARD_POLL_INTERVAL = 1.0
"""Seconds between two checks; a check takes a microsecond."""

Listeners = dict[int, int]
"""Descriptors of listening sockets with their inodes, as the number of a closed one may be used again."""


def listeners() -> Listeners:
    """Every socket on which this process listens."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        # A descriptor may be closed meanwhile, like that of this directory.
        with contextlib.suppress(OSError):
            info = os.fstat(int(name))
            if stat.S_ISSOCK(info.st_mode) and _listens(int(name)):
                found[int(name)] = info.st_ino
    return found


def _listens(handle: int) -> bool:
    with socket.socket(fileno=os.dup(handle)) as sock:
        return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def watch_listeners(guarded: Listeners, closed: threading.Event, lost: Callable[[], None]) -> None:
    """Call `lost` when one of `guarded` is closed before `closed` is set, and return.

    TensorPipe closes its listener when it gets bytes of another protocol. It writes a warning and goes on with the
    connections that it has, but nobody can connect to the process any more.
    """
    while not closed.wait(GUARD_POLL_INTERVAL):
        if not all(_is_open(handle, inode) for handle, inode in guarded.items()):
            lost()
            return


def _is_open(handle: int, inode: int) -> bool:
    try:
        return os.fstat(handle).st_ino == inode
    except OSError:
        return False


_dist: Any = torch.distributed
"""Much that is used of it has no types."""

THREADS = 4
"""Threads of an agent that take requests."""

ERROR = 2
"""The level of torch's C++ log that has errors and no warnings."""

CHANNELS = ("cma", "basic")
"""The channels by which tensors are sent. Of torch's other channels, ``mpt_uv`` opens 16 more ports in each
process, for several network cards, and aborts the process when it is greeted on the wrong one of them; those
for CUDA have no use without a device map."""


def rpc_worker_name(address: WorkerId) -> str:
    """``actor:2:0``, the name of a worker in torch.distributed.rpc."""
    return f"{address.role}:{address.rank}:{address.incarnation}"


class RpcAgent:
    """This process's TensorPipe agent; it listens from its first use on. Thread-safe."""

    def __init__(self, me: WorkerId, index: Callable[[WorkerId], int], workers: int, *, polls: bool) -> None:
        """`index` numbers the ranks of the job from 0 to `workers` - 1, the same in all its processes. `polls`: use
        shared memory, which halves the time of a call and keeps a core busy, also when nobody calls."""
        self.name = rpc_worker_name(me)
        self.listeners: Listeners = {}
        self._me, self._index = me, index
        # Without shared memory a TensorPipe agent sleeps until its sockets have something.
        self._transports: dict[str, Any] = {} if polls else {"_transports": ["uv"]}
        self._lock = threading.Lock()
        self._agent: Any = None
        self._store: Any = None
        self._workers: dict[str, Any] = {}
        self._used: set[int] = set()
        self._numbers = itertools.count(workers)

    def start(self) -> str:
        """Listen. Returns the endpoint with which others `connect`, the same each time."""
        with self._lock:
            if self._agent is None:
                self._start()
            return str(self._store.get(f"addrs/{self.name}").decode())

    def connect(self, peer: WorkerId, endpoint: str) -> Any:
        """Add `peer` and return its ``WorkerInfo``, with another name each time, as a broken pipe cannot be opened
        again under its name. Raises RuntimeError."""
        self.start()
        with self._lock:
            return self._connect(peer, endpoint)

    def known(self, peer: WorkerId, endpoint: str) -> str:
        """Add `peer` and return its name for raw calls. Raises RuntimeError."""
        self.start()
        name = rpc_worker_name(peer)
        with self._lock:
            if name not in self._workers:
                self._connect(peer, endpoint)
        return name

    def close(self) -> bool:
        """Shut the agent down; open calls fail in the peers at once. False if there was none."""
        atexit.unregister(self.close)
        with self._lock:
            agent, self._agent = self._agent, None
            # The user may have shut it down with torch's own function.
            if agent is not None and _dist.rpc._is_current_rpc_agent_set():
                rpc.shutdown(graceful=False)
            return agent is not None

    def _connect(self, peer: WorkerId, endpoint: str) -> Any:
        name = plain = rpc_worker_name(peer)
        tried = 0
        while name in self._workers:
            tried += 1
            name = f"{plain}_{tried}"
        self._store.set(f"addrs/{name}", endpoint)
        worker = _dist.rpc.WorkerInfo(name, self._number(peer))
        self._agent._update_group_membership(worker, [], {}, True)
        self._workers[name] = worker
        return worker

    def _start(self) -> None:
        _silence()
        store = _dist.HashStore()
        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=THREADS, rpc_timeout=0, _channels=[*CHANNELS], **self._transports
        )
        number = self._number(self._me)
        _dist.autograd._init(number)
        agent = _dist.rpc.TensorPipeAgent(store, self.name, number, None, options, {}, [])
        before = listeners()
        # This also starts the agent.
        _dist.rpc.api._init_rpc_states(agent)
        self.listeners = dict(listeners().items() - before.items())
        self._agent, self._store = agent, store
        # A thread of the agent that runs Python code while the interpreter is finalized aborts the process.
        atexit.register(self.close)

    def _number(self, peer: WorkerId) -> int:
        """torch keeps pipes by number: that of the rank for its first worker, a new one for each later worker."""
        number = self._index(peer)
        if number in self._used:
            number = next(self._numbers)
        self._used.add(number)
        return number


def _silence() -> None:
    """Turn off torch's C++ warnings, as an agent warns of each peer that ends; not if TORCH_CPP_LOG_LEVEL is set.

    torch reads that variable when it is loaded, before it is known whether the process will have an agent.
    """
    if "TORCH_CPP_LOG_LEVEL" not in os.environ:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        # A build of torch with glog has no such flag.
        with contextlib.suppress(ValueError):
            ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level").value = ERROR


ANSWER_SPIN_SECONDS = 0.001
"""Seconds for which a waiting thread polls for the answer."""

APART = 1 << 20
"""Bytes below which buffers are sent together in one tensor: each tensor costs as much as a call, and 100 000 of them
abort the process (torch 2.13)."""

Form = tuple[bytes, list[int], list[torch.Tensor]] | tuple[bytes]
"""A parcel: the head, the sizes of its buffers, and tensors that hold them, first one for all small buffers. Most
parcels have only a head."""


_serving: TorchTransport | None = None
"""The transport that takes the requests of this process."""


class _Incoming:
    """The requests over the latest `connection` of a rank: the number of the `next` one, those that came `early`."""

    def __init__(self, connection: tuple[int, int]) -> None:
        self.connection, self.next = connection, 0
        self.early: dict[int, tuple[Parcel, Reply]] = {}


class TorchTransport:
    """The transport over the RPC agent of this process, of which torch has one."""

    name = "torch"

    def __init__(self, agent: RpcAgent) -> None:
        self._agent = agent
        self._executor = Scheduler("unirun-rpc")
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._guard: threading.Thread | None = None
        # Held while the handler runs, which returns soon.
        self._receiving = threading.Lock()
        self._connections = itertools.count()
        # By rank, as a process has one connection at a time to another.
        self._incoming: dict[str, _Incoming] = {}
        self._handler: Handler

    def inbox(self) -> Inbox:
        """A queue that gets a `ChannelError` if nobody can connect to this process any more."""
        return self._inbox

    def serve(self, me: WorkerId, handler: Handler) -> str:
        """Take requests. The endpoint is the address of this process's TensorPipe agent."""
        global _serving
        self._handler, _serving = handler, self
        endpoint = self._agent.start()
        lost = ChannelError(
            f"torch.distributed.rpc does not listen at {endpoint} any more, as it got bytes that are not its own",
            "find out who connects to the ports of this host; --transport socket lets nobody else in",
        )
        watched = self._agent.listeners, self._closed, partial(self._inbox.put, lost)
        self._guard = threading.Thread(
            target=watch_listeners, args=watched, name="unirun-listener", daemon=True
        )
        self._guard.start()
        return endpoint

    def take(self, caller: str, connection: int, number: int, parcel: Parcel, reply: Reply) -> None:
        """Pass requests on in the order of their connection, as the agent's threads may overtake each other. What
        comes of an earlier connection than the latest is dropped: it is over, and open calls are sent again."""
        rank, _, incarnation = caller.rpartition(":")
        latest = int(incarnation), connection
        with self._receiving:
            incoming = self._incoming.get(rank)
            if incoming is None or incoming.connection < latest:
                incoming = self._incoming[rank] = _Incoming(latest)
            elif latest < incoming.connection:
                return
            incoming.early[number] = parcel, reply
            while (request := incoming.early.pop(incoming.next, None)) is not None:
                incoming.next += 1
                self._handler(*request)

    def connect(self, peer: WorkerId, endpoint: str, broken: Callable[[str], None]) -> Connection:
        """Add `peer` to the agent. The connection is made with the first call."""
        try:
            worker = self._agent.connect(peer, endpoint)
        except RuntimeError as error:
            raise ChannelError(f"{peer} cannot be reached: {error}") from error
        return _RpcConnection(worker, self._agent.name, next(self._connections), broken, self._executor)

    def close(self) -> None:
        """Shut the agent down; open calls fail in the peers at once."""
        global _serving
        self._closed.set()
        await_end(self._guard)
        if self._agent.close():
            _serving = None
            self._executor.close()


class _RpcConnection:
    def __init__(
        self, worker: Any, caller: str, number: int, broken: Callable[[str], None], executor: Scheduler
    ) -> None:
        self._worker, self._from, self._broken, self._executor = worker, (caller, number), broken, executor
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._open = True

    def call(
        self, parcel: Parcel, done: Callable[[Parcel], None], patience: float | None = None
    ) -> Wait | None:
        try:
            with self._lock:
                future = _ask(self._worker, *self._from, next(self._numbers), _form(parcel))
        except RuntimeError as error:
            self._break(str(error))
            return None
        if patience is not None:
            return lambda: self._watch(future, done)
        asking = threading.get_ident()

        def answered(answer: torch.futures.Future[Form]) -> None:
            if threading.get_ident() == asking:
                # The answer is here already, and the calling thread may hold locks that `done` takes.
                self._executor.soon(lambda: self._answered(answer, done))
            else:
                self._answered(answer, done)

        future.add_done_callback(answered)
        return None

    def _watch(self, future: torch.futures.Future[Form], done: Callable[[Parcel], None]) -> None:
        """Poll for the answer for a moment, which saves waking another thread.

        A thread that waits inside torch does not handle signals.
        """
        end = time.monotonic() + ANSWER_SPIN_SECONDS
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
            try:
                done(_parcel(form))
            except BaseException as error:
                # The answer is lost: open calls are sent again.
                self._break(repr(error))
                raise

    def _break(self, reason: str) -> None:
        with self._lock:
            was_open, self._open = self._open, False
        if was_open:
            self._broken(reason.partition(" (this error")[0] or "the connection has ended")

    def keep(self) -> None:
        """Do nothing, as torch reads the memory when it sends it."""

    def close(self) -> None:
        with self._lock:
            self._open = False


_api: Any = rpc.api


def _ask(worker: Any, caller: str, connection: int, number: int, form: Form) -> torch.futures.Future[Form]:
    """``rpc.rpc_async(worker, _enter, (…), timeout=0)`` without its checks (for torch's own functions and for a
    profiler), which take half of the time of a call in the calling thread."""
    given = (caller, connection, number, *form)
    pickled, tensors = rpc.internal.serialize(rpc.internal.PythonUDF(_enter, given, {}))
    future: torch.futures.Future[Form] = _api._invoke_rpc_python_udf(worker, pickled, tensors, 0, True)
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
def _enter(caller: str, connection: int, number: int, *form: Any) -> torch.futures.Future[Form]:
    """Runs in the called process, in a thread of its agent."""
    future: torch.futures.Future[Form] = torch.futures.Future()
    if _serving is None:
        future.set_exception(RuntimeError("this process does not serve calls"))  # type: ignore[arg-type]
        return future
    parcel = _parcel(form)
    _serving.take(caller, connection, number, parcel, lambda reply: future.set_result(_form(reply)))
    return future

"""The agent of torch.distributed.rpc in this process.

``init_rpc`` waits for all members of a group, and a group cannot take a restarted member back. The layer below it can:
each process creates its own TensorPipe agent without peers, and adds a peer before the first call to it, with the
function that torch uses for dynamic groups. So no process waits for others, and a restarted worker is a new peer.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed
from torch.distributed import rpc

from unirun.roles.transport.protocol import await_end
from unirun.values import WorkerId

# `ListenerGuard`: notices when a library closes the sockets on which it listens.
#
# TensorPipe closes its listener when it gets bytes of another protocol. It writes a warning and goes on with the
# connections that it has, but nobody can connect to the process any more.

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


class ListenerGuard:
    """Calls `lost` once, in a thread of its own, when one of `guarded` is closed before `close` was called."""

    def __init__(self, guarded: Listeners, lost: Callable[[], None]) -> None:
        self._guarded, self._lost = guarded, lost
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="unirun-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop checking."""
        self._closed.set()
        await_end(self._thread)

    def _watch(self) -> None:
        while not self._closed.wait(GUARD_POLL_INTERVAL):
            if not all(_is_open(handle, inode) for handle, inode in self._guarded.items()):
                self._lost()
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

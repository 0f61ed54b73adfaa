"""The spawner: imports once, never computes, forks workers, and reports how they end.

Run by `boot` with ``FD AGENT DESCRIPTORS INHERITED [MODULE…]``: FD is one end of a socket pair to the agent, whose pid
is AGENT; DESCRIPTORS is the limit that workers get; INHERITED, with commas, are the descriptors that a child may be
given: of the listening sockets of stores, and of a stdin. The modules are imported before the first fork.
One thread, no polling: it sleeps until the agent speaks or a child ends. When the agent is gone it kills everything
that it started, and ends.
"""

from __future__ import annotations

import atexit
import os
import selectors
import signal
import socket
import time
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from unirun.errors import ConnectionLost, WireError
from unirun.launcher import child
from unirun.launcher.preloaded import PreloadedModules
from unirun.launcher.process import (
    adopt_orphans,
    children,
    die_with_parent,
    environment_of,
    group_of,
    kill_children,
    kill_group,
    outlive_parent,
    set_title,
    title_of,
)
from unirun.reporting import flush
from unirun.values import Value
from unirun.wire.blocking import BlockingStream
from unirun.wire.reports import Notice
from unirun.wire.spawning import (
    Forked,
    Kill,
    Preloaded,
    Reaped,
    ServeStore,
    Spawn,
    SpawnFailed,
    StoreEnded,
    StoreOpened,
)


class _Child(Value):
    """A worker that was forked."""

    id: int
    pid: int
    handle: int
    title: str
    owner: tuple[str, ...]

    def is_ancestor_of(self, pid: int) -> bool:
        """Whether `pid` shows the marks that descendants inherit: variables by exec, the title by fork."""
        env = environment_of(pid)
        return tuple(env.get(name, "") for name in _OWNER) == self.owner or title_of(pid) == self.title


class _Store(Value):
    """The process that serves the store of a role."""

    role: str
    generation: int
    pid: int
    handle: int


_OWNER = ("ROLE_NAME", "RANK", "UNIRUN_INCARNATION")


class Spawner:
    """Serves one agent. In a forked child `serve` returns what the child shall become."""

    def __init__(
        self,
        stream: BlockingStream,
        descriptors: int,
        inherited: Mapping[int, int],
        modules: PreloadedModules,
    ) -> None:
        self._stream, self._descriptors = stream, descriptors
        self._inherited, self._modules = inherited, modules
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, _Child] = {}
        self._stores: dict[str, _Store] = {}

    def serve(self) -> child.Task | None:
        """Work until the agent is gone (then None), or, in a new child, return its task."""
        self._selector.register(self._stream.socket, selectors.EVENT_READ, None)
        while True:
            for key, _ in self._selector.select():
                try:
                    if isinstance(key.data, _Child):
                        self._reap(key.data)
                        continue
                    if isinstance(key.data, _Store):
                        if self._stores.get(key.data.role) is key.data:
                            self._store_ended(key.data)
                        continue
                    task = self._obey()
                except ConnectionLost:
                    self._kill_all()
                    return None
                if task is not None:
                    return task

    def _obey(self) -> child.Task | None:
        """Do what the agent asks; several requests may have arrived at once."""
        for message in self._stream.drain():
            match message:
                case Spawn(stdin=None):
                    task: child.Task | None = self._spawn(message)
                case Spawn(stdin=int(number)):
                    task = self._spawn(replace(message, stdin=self._inherited[number]))
                case ServeStore(fd=number):
                    task = self._open_store(replace(message, fd=self._inherited[number]))
                case Kill(number, signum):
                    task = None
                    if number in self._children:
                        self._kill(self._children[number], signum)
                case _:
                    raise WireError(f"the agent sent {type(message).__name__}")
            if task is not None:
                return task
        return None

    def _spawn(self, request: Spawn) -> child.Task | None:
        if self._modules.threads:
            # A fork would not have them, and what waits for them would wait for ever.
            request = replace(request, fresh=True)
        try:
            logs = child.open_logs(request)
        except OSError as error:
            self._stream.send(SpawnFailed(request.id, time.time(), f"its log cannot be written: {error}"))
            return None
        try:
            pid = self._fork(keep=request.stdin)
        except OSError as error:
            logs.close()
            self._stream.send(
                SpawnFailed(request.id, time.time(), f"no process can be forked: {error.strerror}")
            )
            return None
        if pid == 0:
            return child.WorkerTask(request, logs, self._descriptors, self._modules)
        logs.close()
        handle = os.pidfd_open(pid)
        owner = tuple(request.env.get(name, "") for name in _OWNER)
        known = _Child(request.id, pid, handle, request.title, owner)
        self._children[request.id] = known
        self._selector.register(handle, selectors.EVENT_READ, known)
        self._stream.send(Forked(request.id, pid))
        return None

    def _fork(self, keep: int | None = None) -> int:
        """Fork; the child has no descriptor of the spawner's but `keep`. Raises OSError."""
        parent = os.getpid()
        # What is sent to the child before it can receive it waits; `child` lets it in.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, child.HELD_SIGNALS)
        try:
            pid = os.fork()
        except OSError:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            raise
        if pid != 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        else:
            try:
                # A new session, hence a new process group, made before anything can go wrong.
                os.setsid()
                die_with_parent(parent)
                self._forget(keep)
            except OSError:
                # The spawner's own handling of errors must not run in a second process.
                os._exit(child.SETUP_FAILED)
        return pid

    def _forget(self, keep: int | None) -> None:
        """In a child: close what is the spawner's. What modules have open stays open, as objects refer to it."""
        self._selector.close()
        self._stream.close()
        workers = (worker.handle for worker in self._children.values())
        stores = (store.handle for store in self._stores.values())
        for handle in (*workers, *stores, *self._inherited.values()):
            if handle != keep:
                os.close(handle)

    def _open_store(self, request: ServeStore) -> child.Task | None:
        """A store lives in a process of its own, so a new generation cannot see a key of an old one."""
        role, generation = request.role, request.generation
        if role in self._stores:
            os.kill(self._stores[role].pid, signal.SIGKILL)
            self._close_store(self._stores[role])
        try:
            pid = self._fork(keep=request.fd)
        except OSError as error:
            reason = f"no process can be forked: {error.strerror}"
            self._stream.send(StoreEnded(role, generation, time.time(), reason))
            return None
        if pid == 0:
            return child.StoreTask(role, generation, request.fd)
        store = _Store(role, generation, pid, os.pidfd_open(pid))
        self._stores[role] = store
        self._selector.register(store.handle, selectors.EVENT_READ, store)
        self._stream.send(StoreOpened(role, generation))
        return None

    def _store_ended(self, store: _Store) -> None:
        self._close_store(store)
        self._stream.send(StoreEnded(store.role, store.generation, time.time(), "its process was killed"))

    def _close_store(self, store: _Store) -> None:
        os.waitid(os.P_PIDFD, store.handle, os.WEXITED)
        self._selector.unregister(store.handle)
        os.close(store.handle)
        del self._stores[store.role]

    def _reap(self, known: _Child) -> None:
        """Report the end of a child after nothing of its process group is left."""
        now = time.time()
        # The pid stays taken until it is waited for, so the group that is killed is the right one.
        end = os.waitid(os.P_PIDFD, known.handle, os.WEXITED | os.WNOWAIT)
        kill_group(known.pid, signal.SIGKILL)
        os.waitid(os.P_PIDFD, known.handle, os.WEXITED)
        self._selector.unregister(known.handle)
        os.close(known.handle)
        del self._children[known.id]
        self._kill_strays(known)
        killed = end is not None and end.si_code != os.CLD_EXITED
        status = end.si_status if end is not None else 1
        self._stream.send(Reaped(known.id, now, None if killed else status, status if killed else None))

    def _kill_strays(self, ended: _Child) -> None:
        """Descendants that left the group of their worker were adopted when it ended: kill those too.

        One that has neither mark any more is killed at the end of the spawner, with everything else.
        """
        ours = {known.pid for known in self._children.values()} | {s.pid for s in self._stores.values()}
        strays = {pid for pid in children() if pid not in ours and ended.is_ancestor_of(pid)}
        for pid in strays:
            if group_of(pid) != ended.pid:
                text = f"left process {pid} ({title_of(pid) or 'no name'}) behind, which is killed"
                self._stream.send(Notice(ended.title, text))
        if strays:
            kill_children(keep=set(children()) - strays)

    def _kill(self, known: _Child, signum: int) -> None:
        try:
            os.killpg(known.pid, signum)
        except PermissionError:
            text = "runs as another user and cannot be signalled; end it yourself"
            self._stream.send(Notice(known.title, text))
        except ProcessLookupError:
            # It has not made its group yet; it cannot have gone, as it was not reaped.
            signal.pidfd_send_signal(known.handle, signum)

    def _kill_all(self) -> None:
        for known in self._children.values():
            kill_group(known.pid, signal.SIGKILL)
        kill_children()


def main(argv: list[str]) -> None:
    """Import, serve, and in a child become what was asked for."""
    began = time.monotonic()
    # First of all, as what it does at the end of a child has to come last.
    modules = PreloadedModules()
    # The agent tells its pid: it may have died before this process could have asked for its parent's.
    handle, agent, descriptors = map(int, argv[:3])
    # Until the first worker exists nothing has to be cleaned up, so dying with the agent is enough.
    die_with_parent(agent)
    stream = BlockingStream(socket.socket(fileno=handle))
    inherited = {int(each): int(each) for each in argv[3].split(",") if each}
    work(stream, descriptors, inherited, modules, argv[4:], began)


def work(
    stream: BlockingStream,
    descriptors: int,
    inherited: Mapping[int, int],
    modules: PreloadedModules,
    names: Sequence[str],
    began: float,
) -> None:
    """Import those of the modules `names` that are not there yet, and serve. Returns only in a worker, at its end.

    `inherited`: by the number that the agent knows, descriptors for workers and stores. `began`: the monotonic time
    of the start.
    """
    set_title("unirun-spawner")
    adopt_orphans()
    # A batch system may signal every process of a job at once; workers get their grace all the same.
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    for name in names:
        try:
            modules.load(name)
        except Exception as error:
            stream.send(SpawnFailed(0, time.time(), f"cannot import {name}: {type(error).__name__}: {error}"))
            raise
    modules.freeze()
    outlive_parent()
    spawner = Spawner(stream, descriptors, inherited, modules)
    try:
        stream.send(Preloaded(time.monotonic() - began))
        for name, count in modules.threads.items():
            threads = f"{count} thread{'s' * (count != 1)}"
            text = f"{name} has started {threads}, which a fork would lack: workers are new interpreters"
            stream.send(Notice("spawner", text))
        task = spawner.serve()
    except ConnectionLost:
        task = None
    if task is None:
        # Nothing is left to do, and the end of the job waits for this process: taking the modules of torch apart
        # would hold it up by a quarter of a second.
        atexit._run_exitfuncs()
        flush()
        os._exit(0)
    # Nothing of the spawner is left on the stack: the child ends as any Python process does.
    del spawner, stream, modules
    task.run()

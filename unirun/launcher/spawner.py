"""The spawner: imports modules once, never computes, forks workers and reports their exits.

Run by `boot` with ``FD AGENT DESCRIPTORS INHERITED [MODULE…]``: FD is one end of a socket pair to the agent, whose pid
is AGENT; DESCRIPTORS is the workers' limit of open files; INHERITED is a comma-separated list of descriptors for
children: listening sockets of stores, and a stdin. The modules are imported before the first fork.
It has one thread, which sleeps until the agent sends a message or a child ends. When the agent is gone, it kills all
its descendants and exits.
"""

from __future__ import annotations

import atexit
import os
import selectors
import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from msgspec.structs import replace

from unirun.errors import ConnectionLost, WireError
from unirun.launcher import child
from unirun.launcher.preloaded import PreloadedModules
from unirun.launcher.process import (
    adopt_orphans,
    children,
    collect_orphans,
    descendants,
    die_with_parent,
    environment_of,
    group_of,
    ignore_signals,
    is_tracker,
    kill_children,
    kill_family,
    outlive_parent,
    set_title,
    title_of,
)
from unirun.values import Value
from unirun.wire.blocking import BlockingStream
from unirun.wire.reporting import flush
from unirun.wire.reports import (
    Forked,
    Kill,
    Notice,
    OpenStore,
    Reaped,
    Spawn,
    SpawnerReady,
    SpawnFailed,
    StoreEnded,
    StoreOpened,
)


class _Child(Value):
    """A forked worker; `handle` is its pidfd."""

    id: int
    pid: int
    handle: int
    title: str
    owner: tuple[str, ...]

    def is_ancestor_of(self, pid: int) -> bool:
        """Return True if `pid` has a mark of descendants: environment variables by exec, the title by fork."""
        env = environment_of(pid)
        return tuple(env.get(name, "") for name in _OWNER) == self.owner or title_of(pid) == self.title


class _Store(Value):
    """The process that serves the store of a role."""

    role: str
    generation: int
    pid: int
    handle: int


_OWNER = ("UNIRUN_JOB", "UNIRUN_ROLE", "UNIRUN_RANK", "UNIRUN_INCARNATION")


class Spawner:
    """Serves one agent. In a forked child `serve` returns the child's task."""

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
        self._wake: tuple[int, ...] = ()

    def serve(self) -> child.Task | None:
        """Serve until the agent is gone, then return None; in a new child return its task."""
        self._selector.register(self._stream.socket, selectors.EVENT_READ, None)
        self._wake_on_deaths()
        while True:
            for key, _ in self._selector.select():
                try:
                    if key.fileobj in self._wake:
                        os.read(key.fd, 4096)
                        continue
                    if isinstance(key.data, _Child):
                        self._reap(key.data)
                        continue
                    if isinstance(key.data, _Store):
                        if self._stores.get(key.data.role) is key.data:
                            self._store_ended(key.data)
                        continue
                    task = self._handle_messages()
                except ConnectionLost:
                    self._kill_all()
                    return None
                if task is not None:
                    return task
            collect_orphans(self._pids())

    def _wake_on_deaths(self) -> None:
        """Let each SIGCHLD end the wait for events: of an adopted process there is no pidfd."""
        self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._wake[0], selectors.EVENT_READ, None)
        signal.set_wakeup_fd(self._wake[1], warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def _pids(self) -> set[int]:
        return {known.pid for known in self._children.values()} | {
            store.pid for store in self._stores.values()
        }

    def _handle_messages(self) -> child.Task | None:
        """Carry out the agent's requests that have arrived. In a new child, return its task."""
        for message in self._stream.drain():
            match message:
                case Spawn(stdin=None):
                    task: child.Task | None = self._spawn(message)
                case Spawn(stdin=int(number)):
                    task = self._spawn(replace(message, stdin=self._inherited[number]))
                case OpenStore(fd=number):
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
            # A fork would lack these threads, and code that waits for them would hang.
            request = replace(request, fresh=True)
        try:
            logs = child.open_logs(request)
        except OSError as error:
            self._stream.send(SpawnFailed(request.id, time.time(), f"its log cannot be written: {error}"))
            return None
        try:
            pid = self._fork(keep=request.stdin)
        except OSError as error:
            _close(logs)
            self._stream.send(
                SpawnFailed(request.id, time.time(), f"no process can be forked: {error.strerror}")
            )
            return None
        if pid == 0:
            return partial(child.run_worker, request, logs, self._descriptors, self._modules)
        _close(logs)
        handle = os.pidfd_open(pid)
        owner = tuple(request.env.get(name, "") for name in _OWNER)
        known = _Child(request.id, pid, handle, request.title, owner)
        self._children[request.id] = known
        self._selector.register(handle, selectors.EVENT_READ, known)
        self._stream.send(Forked(request.id, pid))
        return None

    def _fork(self, keep: int | None = None) -> int:
        """Fork; of the spawner's descriptors the child keeps only `keep`. Raises OSError."""
        parent = os.getpid()
        # Signals stay pending until `child` has set its handlers and unblocks them.
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
                # A new session and process group, before anything can fail.
                os.setsid()
                die_with_parent(parent)
                self._forget(keep)
            except OSError:
                # The spawner's error handling must not run in the child.
                os._exit(child.SETUP_FAILED)
        return pid

    def _forget(self, keep: int | None) -> None:
        """In a child: close the spawner's descriptors. Those of modules stay open, as objects refer to them."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        self._selector.close()
        self._stream.close()
        workers = (worker.handle for worker in self._children.values())
        stores = (store.handle for store in self._stores.values())
        for handle in (*workers, *stores, *self._wake, *self._inherited.values()):
            if handle != keep:
                os.close(handle)

    def _open_store(self, request: OpenStore) -> child.Task | None:
        """Fork a process for the store, so that a new generation cannot see keys of an old one."""
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
            return partial(child.run_store, role, generation, request.fd)
        try:
            handle = os.pidfd_open(pid)
        except OSError as error:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            reason = f"no process can be watched: {error.strerror}"
            self._stream.send(StoreEnded(role, generation, time.time(), reason))
            return None
        store = _Store(role, generation, pid, handle)
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
        """Kill the process group of a child that has ended, then report its exit."""
        now = time.time()
        # The pid cannot be reused before the child is reaped, so this kills the right group.
        end = os.waitid(os.P_PIDFD, known.handle, os.WEXITED | os.WNOWAIT)
        ours = self._pids()
        adopted = [pid for pid in children() if pid not in ours and group_of(pid) == known.pid]
        kill_family(known.pid, [*adopted, *(below for pid in adopted for below in descendants(pid))])
        os.waitid(os.P_PIDFD, known.handle, os.WEXITED)
        self._selector.unregister(known.handle)
        os.close(known.handle)
        del self._children[known.id]
        self._kill_strays(known)
        killed = end is not None and end.si_code != os.CLD_EXITED
        status = end.si_status if end is not None else 1
        self._stream.send(Reaped(known.id, now, None if killed else status, status if killed else None))

    def _kill_strays(self, ended: _Child) -> None:
        """Kill descendants that left their worker's process group and were adopted when it ended.

        One that has lost both marks is killed when the spawner exits.
        """
        ours = self._pids()
        collect_orphans(ours)
        found = (pid for pid in children() if pid not in ours and ended.is_ancestor_of(pid))
        strays = {pid for pid in found if not is_tracker(pid)}
        for pid in strays:
            if group_of(pid) != ended.pid:
                text = f"left process {pid} ({title_of(pid) or 'no name'}) behind, which is killed"
                self._stream.send(Notice(ended.title, text))
        if strays:
            kill_children(keep=set(children()) - strays)

    def _kill(self, known: _Child, signum: int) -> None:
        try:
            if signum == signal.SIGKILL and (below := descendants(known.pid)):
                # Sends nothing, but fails like a signal, which the next line does not.
                os.killpg(known.pid, 0)
                kill_family(known.pid, [known.pid, *below])
            else:
                os.killpg(known.pid, signum)
        except PermissionError:
            text = "runs as another user and cannot be signalled; stop it yourself"
            self._stream.send(Notice(known.title, text))
        except ProcessLookupError:
            # It has not created its group yet; it was not reaped, so it exists.
            signal.pidfd_send_signal(known.handle, signum)

    def _kill_all(self) -> None:
        for known in self._children.values():
            kill_family(known.pid, [known.pid, *descendants(known.pid)])
        kill_children()


def _close(handles: Iterable[int]) -> None:
    for handle in handles:
        os.close(handle)


def main(argv: list[str]) -> None:
    """Import, serve, and in a child run its task."""
    began = time.monotonic()
    # First, as its exit handler must run last.
    modules = PreloadedModules()
    # The agent's pid is an argument, as the agent may die before this process could call getppid().
    handle, agent, descriptors = map(int, argv[:3])
    # Before the first worker there is nothing to clean up, so dying with the agent is enough.
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
    """Import the modules `names` that are not imported yet, and serve. Returns only in a worker, at its end.

    `inherited`: descriptors for workers and stores, by their number in the agent. `began`: the start time
    (``time.monotonic``).
    """
    set_title("unirun-spawner")
    adopt_orphans()
    # A batch system may signal all processes of a job; workers still get their grace period.
    ignore_signals(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
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
        stream.send(SpawnerReady(time.monotonic() - began))
        for name, count in modules.threads.items():
            threads = f"{count} thread{'s' * (count != 1)}"
            text = f"{name} has started {threads}, which a fork would lack: workers are new interpreters"
            stream.send(Notice("spawner", text))
        task = spawner.serve()
    except ConnectionLost:
        task = None
    if task is None:
        # The end of the job waits for this process, so skip the interpreter's clean-up: for torch it takes a quarter of
        # a second.
        atexit._run_exitfuncs()
        flush()
        os._exit(0)
    # Drop the spawner's objects, so that the child ends as any Python process.
    del spawner, stream, modules
    task()

"""`Companion`: the thread that receives versions, those that bring them into engines, and the loop that decides."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from unirun.errors import PeerLost, ServerError, WeightsError, WeightsTimeout
from unirun.roles.peers import Peers
from unirun.weights.channel import WeightsChannel
from unirun.weights.companion.deciding import (
    Bring,
    Command,
    Decision,
    Event,
    PollVersion,
    State,
    Tell,
    Version,
    brought,
    failed,
    polled,
    received,
    seen,
)
from unirun.weights.integrations.sending import Checkpoint, Param
from unirun.weights.integrations.vllm import Client
from unirun.wire.reporting import report
from unirun.wire.reports import EngineWeights

PUBLISHER_RETRY_INTERVAL = 0.5
"""Seconds after which a publisher that cannot be reached is looked for again."""

FINAL_LOAD_TIMEOUT = 20.0
"""Seconds in which versions that are being brought into engines may arrive when the companion is told to end: it has 30
before it is killed."""

TIMEOUT = 300.0
"""Seconds for one request to an engine, and for receiving one version."""


class VersionCache:
    """Versions in shared memory: the latest one, and those that engines still load. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: dict[Checkpoint, int] = {}
        self._latest: tuple[Version, Checkpoint] | None = None

    def space(self, params: tuple[Param, ...]) -> Checkpoint:
        """Memory for a version with these tensors that nobody reads. Raises `UnirunError`, `WeightsError`."""
        with self._lock:
            latest = self._latest[1] if self._latest is not None else None
            idle = [c for c, users in self._users.items() if not users and c is not latest]
            found = next((c for c in idle if c.params == params), None)
            for checkpoint in idle:
                if checkpoint is not found:
                    del self._users[checkpoint]
                    checkpoint.close()
            if found is None:
                found = Checkpoint(params)
                self._users[found] = 0
            return found

    def put(self, version: Version, checkpoint: Checkpoint) -> None:
        """The latest version is there now."""
        with self._lock:
            self._latest = version, checkpoint

    @contextmanager
    def latest(self) -> Iterator[tuple[Version, Checkpoint]]:
        """The latest version, which is not written to meanwhile."""
        with self._lock:
            assert self._latest is not None
            version, checkpoint = self._latest
            self._users[checkpoint] += 1
        try:
            yield version, checkpoint
        finally:
            with self._lock:
                self._users[checkpoint] -= 1

    def close(self) -> None:
        """Give all memory back."""
        with self._lock:
            while self._users:
                self._users.popitem()[0].close()


class Companion:
    """Brings the versions of a channel into the vLLM engines of this host, as long as `run` runs.

    The agent of the node tells which engines there are, and hears which of them may serve, over the link of the worker
    whose `peers` are given.

    The publisher waits for nothing of it, and engines do not wait for each other. Requests of an engine stand still
    while it loads, and go on with the new weights; none ends (`vllm.Client.paused` with ``keep``). The host has two
    versions in memory, and one more for each that a slow engine still loads.
    """

    def __init__(self, channel: WeightsChannel, peers: Peers, *, timeout: float = TIMEOUT) -> None:
        """`timeout` is that of one request to an engine, and of receiving a version, in seconds."""
        self._channel, self._peers = channel, peers
        self._timeout = timeout
        self._shelf = VersionCache()
        self._events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
        self._checked: set[tuple[int, int, str]] = set()
        """The files that each process of an engine has been able to read."""
        self._over = threading.Event()
        self._have: Version | None = None
        self._loading: list[threading.Thread] = []

    def run(self) -> None:
        """Run until `stop`. Raises `WeightsError` for tensors that no engine can be given, `UnirunError` when there is
        no memory for them."""
        state = State()
        self._peers.when_changed(lambda: self._events.put(self._look))
        self._start(self._receive, "receives")
        event: Event | BaseException = self._look
        try:
            while not self._over.is_set():
                if isinstance(event, BaseException):
                    raise event
                state, commands = event(state)
                for command in commands:
                    self._do(command)
                event = self._events.get()
        finally:
            self._over.set()
            deadline = time.monotonic() + FINAL_LOAD_TIMEOUT
            for thread in self._loading:
                thread.join(max(deadline - time.monotonic(), 0.0))
            self._shelf.close()

    def stop(self) -> None:
        """Let `run` return once engines have what is being brought into them, so that none is left half new. May be
        called in the handler of a signal."""
        self._over.set()
        self._events.put(self._look)

    def _look(self, state: State) -> Decision:
        return seen(state, self._peers.engines)

    def _do(self, command: Command) -> None:
        if isinstance(command, Bring):
            self._loading = [thread for thread in self._loading if thread.is_alive()]
            self._loading.append(self._start(self._bring, f"engine {command.engine.rank}", command))
        elif isinstance(command, PollVersion):
            self._start(self._ask, "asks", command)
        elif isinstance(command, Tell):
            name, rank, number = self._channel.name, command.rank, command.version and command.version[1]
            if command.problem:
                report(f"unirun: channel {name!r}: engine {rank}: {command.problem}")
            self._peers.tell(
                EngineWeights(name, rank, command.incarnation, number, time.time(), command.problem)
            )

    def _start(self, target: object, name: str, *args: object) -> threading.Thread:
        def run() -> None:
            try:
                target(*args)  # type: ignore[operator]
            except BaseException as error:  # noqa: BLE001
                self._events.put(error)

        # A thread waits for an engine as long as `timeout`, which is no reason for this process to live.
        thread = threading.Thread(target=run, name=f"companion {name}", daemon=True)
        thread.start()
        return thread

    def _ask(self, command: PollVersion) -> None:
        """Find out the latest version. While the publisher cannot be reached, it is the one that is here."""
        while not self._over.is_set():
            try:
                epoch, number = self._channel.latest()
            except PeerLost:
                version = self._have
                if version is None:
                    # There may be versions of which this process knows nothing.
                    self._over.wait(PUBLISHER_RETRY_INTERVAL)
                    continue
            else:
                version = (epoch, number) if number is not None else self._have
            self._events.put(partial(polled, version=version, engines=command.engines))
            return

    def _bring(self, command: Bring) -> None:
        """Bring the latest version, which may be a later one than when that was decided."""
        engine = command.engine
        done = partial(brought, rank=engine.rank, incarnation=engine.incarnation)
        not_done = partial(failed, rank=engine.rank, incarnation=engine.incarnation)
        client = Client(engine.url, timeout=self._timeout)
        with self._shelf.latest() as (version, checkpoint):
            why = "cannot be given weights"
            try:
                known = engine.rank, engine.incarnation, checkpoint.token
                if known not in self._checked:
                    client.check(checkpoint)
                    self._checked.add(known)
                why = "has weights that are half new"
                with client.paused("keep"):
                    client.load(checkpoint, str(version[1]))
            except ServerError as error:
                self._events.put(partial(not_done, problem=f"{why}: {error}"))
                return
        self._events.put(partial(done, version=version))

    def _receive(self) -> None:
        while not self._over.is_set():
            try:
                found = self._next(self._have)
            except WeightsTimeout:
                continue
            except PeerLost:
                # The job tells the end of a publisher. Its successor has the next version.
                found = None
            if found is None:
                self._over.wait(PUBLISHER_RETRY_INTERVAL)
                continue
            self._have, checkpoint = found
            self._shelf.put(self._have, checkpoint)
            self._events.put(partial(received, version=self._have))

    def _next(self, have: Version | None) -> tuple[Version, Checkpoint] | None:
        """Receive the next version into memory of its own. None: a publisher that was started again has none yet.
        Raises `WeightsTimeout`, `PeerLost`."""
        if have is None:
            number, checkpoint = self._received(None)
            return self._labelled(number), checkpoint
        epoch, latest = self._channel.latest()
        if epoch != have[0] and latest is None:
            return None
        number, checkpoint = self._received(have[1] + 1 if epoch == have[0] else None)
        return (epoch, number), checkpoint

    def _labelled(self, number: int) -> Version:
        """The first version of this process. It may be one that the publisher had before it was started again, and that
        has come from another receiver."""
        try:
            epoch, latest = self._channel.latest()
        except PeerLost:
            return -1, number
        return (epoch, number) if latest is not None and number <= latest else (epoch - 1, number)

    def _received(self, after: int | None) -> tuple[int, Checkpoint]:
        """The number of a version from `after` on, and the memory that it is in."""
        while True:
            params = self._published()
            space = self._shelf.space(params)
            try:
                number = self._channel.receive(space.tensors, min_version=after, timeout=self._timeout)
            except WeightsError:
                if params == self._published():
                    raise
                continue
            if params == self._published():
                return number, space

    def _published(self) -> tuple[Param, ...]:
        """The tensors as they were published last, as far as it is known here."""
        about = self._channel.describe(self._timeout)
        return tuple(Param(name, each.dtype, tuple(each.shape)) for name, each in about.items())

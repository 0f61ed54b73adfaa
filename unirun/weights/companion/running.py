"""`Companion`: the thread that receives versions, those that bring them into engines, and the loop that decides."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from unirun.errors import PeerLost, ServerError, WeightsError, WeightsTimeout
from unirun.roles.peers import Peers
from unirun.values import Engine
from unirun.weights.companion.deciding import (
    Bring,
    Broken,
    Brought,
    Command,
    Event,
    PollVersion,
    Received,
    Seen,
    State,
    UpdateFailed,
    UpToDate,
    Version,
    VersionPolled,
    step,
)
from unirun.weights.integrations.sending import Checkpoint, Param
from unirun.weights.integrations.vllm import Client
from unirun.weights.tensors import Weights
from unirun.wire.reporting import report
from unirun.wire.reports import EngineWeights

# `HostEngines`: how a companion learns of the engines of its host, and tells which of them may serve.


class HostEngines(Protocol):
    """The engines of one host, as those who start them know them. Methods may be called in any thread."""

    def here(self) -> tuple[Engine, ...]:
        """All of them, as they are now."""

    def when_changed(self, listener: Callable[[], None]) -> None:
        """Call `listener`, in some thread, when there is another one, another process of one, or one has come alive."""

    def up_to_date(self, rank: int, incarnation: int, version: int | None) -> None:
        """This process has `version`. It may serve from the first time on; None: there is no version yet."""

    def broken(self, rank: int, incarnation: int, reason: str) -> None:
        """This process has to be started again: its weights are half new, or it does not answer."""


class AgentEngines:
    """The engines that the agent of this node runs. It tells them to the worker `peers` is of, and hears from it."""

    def __init__(self, channel: str, peers: Peers) -> None:
        """`channel` is the one whose versions they get."""
        self._channel, self._peers = channel, peers

    def here(self) -> tuple[Engine, ...]:
        """All of them, as the agent has told."""
        return self._peers.engines

    def when_changed(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each update of the job."""
        self._peers.when_changed(listener)

    def up_to_date(self, rank: int, incarnation: int, version: int | None) -> None:
        """Tell the agent, which tells all that the engine is ready."""
        self._peers.tell(EngineWeights(self._channel, rank, incarnation, version, time.time()))

    def broken(self, rank: int, incarnation: int, reason: str) -> None:
        """Tell the agent, which kills the engine. The master has it started again."""
        self._peers.tell(EngineWeights(self._channel, rank, incarnation, None, time.time(), reason))


class EnginesInMemory:
    """Engines that a program names."""

    def __init__(self, engines: Sequence[Engine] = ()) -> None:
        self._engines = tuple(engines)
        self._listeners: list[Callable[[], None]] = []
        self.versions: dict[tuple[int, int], int | None] = {}
        """The versions of engines that may serve, by rank and incarnation."""
        self.reasons: dict[tuple[int, int], str] = {}
        """Of engines that have to be started again."""

    def set(self, *engines: Engine) -> None:
        """These are all engines now."""
        self._engines = engines
        for listener in self._listeners:
            listener()

    def here(self) -> tuple[Engine, ...]:
        """Return them."""
        return self._engines

    def when_changed(self, listener: Callable[[], None]) -> None:
        """Keep it."""
        self._listeners.append(listener)

    def up_to_date(self, rank: int, incarnation: int, version: int | None) -> None:
        """Keep the version."""
        self.versions[rank, incarnation] = version

    def broken(self, rank: int, incarnation: int, reason: str) -> None:
        """Keep the reason."""
        self.versions.pop((rank, incarnation), None)
        self.reasons[rank, incarnation] = reason


PUBLISHER_RETRY_INTERVAL = 0.5
"""Seconds after which a publisher that cannot be reached is looked for again."""

FINAL_LOAD_TIMEOUT = 20.0
"""Seconds in which versions that are being brought into engines may arrive when the companion is told to end: it has 30
before it is killed."""

TIMEOUT = 300.0
"""Seconds for one request to an engine, and for receiving one version."""


class ReceivingChannel(Protocol):
    """The part of a `WeightsChannel` that a companion needs."""

    name: str

    def describe(self, timeout: float | None = None) -> dict[str, torch.Tensor]:
        """The tensors that are published, on the meta device, as far as this process knows."""

    def latest(self) -> tuple[int, int | None]:
        """The number of restarts of the publisher and its latest version, without waiting. Raises `PeerLost`."""

    def receive(self, into: Weights, *, min_version: int | None = None, timeout: float | None = None) -> int:
        """Wait for a version, and copy it into tensors."""


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

    ::

        Companion(unirun.WeightsChannel("policy"), engines).run()

    The publisher waits for nothing of it, and engines do not wait for each other. Requests of an engine stand still
    while it loads, and go on with the new weights; none ends (`vllm.Client.paused` with ``keep``). The host has two
    versions in memory, and one more for each that a slow engine still loads.
    """

    def __init__(self, channel: ReceivingChannel, engines: HostEngines, *, timeout: float = TIMEOUT) -> None:
        """`timeout` is that of one request to an engine, and of receiving a version, in seconds."""
        self._channel, self._engines = channel, engines
        self._timeout = timeout
        self._shelf = VersionCache()
        self._events: queue.SimpleQueue[Event | BaseException | None] = queue.SimpleQueue()
        self._checked: set[tuple[int, int, str]] = set()
        """The files that each process of an engine has been able to read."""
        self._over = threading.Event()
        self._have: Version | None = None
        self._loading: list[threading.Thread] = []

    def run(self) -> None:
        """Run until `stop`. Raises `WeightsError` for tensors that no engine can be given, `UnirunError` when there is
        no memory for them."""
        state = State()
        self._engines.when_changed(lambda: self._events.put(None))
        self._start(self._receive, "receives")
        event: Event | BaseException | None = None
        try:
            while not self._over.is_set():
                if isinstance(event, BaseException):
                    raise event
                state, commands = step(state, Seen(self._engines.here()) if event is None else event)
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
        self._events.put(None)

    def _do(self, command: Command) -> None:
        if isinstance(command, Bring):
            self._loading = [thread for thread in self._loading if thread.is_alive()]
            self._loading.append(self._start(self._bring, f"engine {command.engine.rank}", command))
        elif isinstance(command, PollVersion):
            self._start(self._ask, "asks", command)
        elif isinstance(command, UpToDate):
            number = command.version[1] if command.version is not None else None
            self._engines.up_to_date(command.rank, command.incarnation, number)
        elif isinstance(command, Broken):
            report(f"unirun: channel {self._channel.name!r}: engine {command.rank}: {command.why}")
            self._engines.broken(command.rank, command.incarnation, command.why)

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
            self._events.put(VersionPolled(version, command.engines))
            return

    def _bring(self, command: Bring) -> None:
        """Bring the latest version, which may be a later one than when that was decided."""
        engine = command.engine
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
                self._events.put(UpdateFailed(engine.rank, engine.incarnation, f"{why}: {error}"))
                return
        self._events.put(Brought(engine.rank, engine.incarnation, version))

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
            self._events.put(Received(self._have))

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

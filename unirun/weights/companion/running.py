"""`Companion`: the thread that receives versions, those that bring them into engines, and the loop that decides."""

from __future__ import annotations

import queue
import threading
import time
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
from unirun.weights.integrations.sending import SERVER, Param, file_for
from unirun.weights.integrations.vllm import VLLMClient
from unirun.weights.publishing import Blocks
from unirun.weights.sources import VersionFile
from unirun.wire.progress import page
from unirun.wire.reporting import gave_up, report
from unirun.wire.reports import EngineWeights

PUBLISHER_RETRY_INTERVAL = 0.5
"""Seconds after which a publisher that cannot be reached is looked for again."""

FINAL_LOAD_TIMEOUT = 20.0
"""Seconds in which versions that are being brought into engines may arrive when the companion is told to end: it has 30
before it is killed."""


class Companion:
    """Brings the versions of a channel into the vLLM engines of this host, as long as `run` runs.

    The agent of the node tells which engines there are, and hears which of them may serve, over the link of the worker
    whose `peers` are given.

    The publisher waits for nothing of it, and engines do not wait for each other. Requests of an engine stand still
    while it loads, and go on with the new weights; none ends (`VLLMClient.paused` with ``keep``).

    Engines load a version from the memory of the publisher, where that is on this host and has whole tensors. Any other
    version is received into memory of this process. The host has two versions in memory, and one more for each that a
    slow engine still loads.
    """

    def __init__(
        self, channel: WeightsChannel, peers: Peers, *, timeout: float, clear_cache: bool = True
    ) -> None:
        """`timeout` is that of one request to an engine, and of receiving a version, in seconds. For `clear_cache` see
        `VLLMClient.paused`."""
        self._channel, self._peers = channel, peers
        self._timeout, self._clear_cache = timeout, clear_cache
        # Memory for versions that are received.
        self._blocks = Blocks()
        self._latest: tuple[Version, VersionFile] | None = None
        self._events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
        self._checked: set[tuple[int, int, str]] = set()
        """The files that each process of an engine has been able to read."""
        self._over = threading.Event()
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
                with page().idle():
                    event = self._events.get()
        finally:
            self._over.set()
            deadline = time.monotonic() + FINAL_LOAD_TIMEOUT
            for thread in self._loading:
                thread.join(max(deadline - time.monotonic(), 0.0))
                if thread.is_alive():
                    gave_up("an engine that is brought its weights", FINAL_LOAD_TIMEOUT)
            self._latest = None
            self._blocks.close()

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
                version = self._have()
                if version is None:
                    # There may be versions of which this process knows nothing.
                    self._over.wait(PUBLISHER_RETRY_INTERVAL)
                    continue
            else:
                version = (epoch, number) if number is not None else self._have()
            self._events.put(partial(polled, version=version, engines=command.engines))
            return

    def _bring(self, command: Bring) -> None:
        """Bring the latest version, which may be a later one than when that was decided."""
        engine = command.engine
        done = partial(brought, rank=engine.rank, incarnation=engine.incarnation)
        not_done = partial(failed, rank=engine.rank, incarnation=engine.incarnation)
        client = VLLMClient(engine.url, timeout=self._timeout)
        assert self._latest is not None
        version, file = self._latest
        problem = "cannot be given weights"
        try:
            known = engine.rank, engine.incarnation, file.token
            if known not in self._checked:
                client.check(file.path, file.token)
                self._checked.add(known)
            problem = "has weights that are half new"
            with client.paused("keep", clear_cache=self._clear_cache):
                client.load(file.path, file.token, str(version[1]))
                if not file.is_intact():
                    raise ServerError("the publisher may have written to what was loaded", server=engine.url)
        except ServerError as error:
            self._events.put(partial(not_done, problem=f"{problem}: {error}"))
        else:
            self._events.put(partial(done, version=version))

    def _receive(self) -> None:
        while not self._over.is_set():
            try:
                found = self._next(self._have())
            except WeightsTimeout:
                continue
            except PeerLost:
                # The job tells the end of a publisher. Its successor has the next version.
                found = None
            if found is None:
                self._over.wait(PUBLISHER_RETRY_INTERVAL)
                continue
            self._latest = found
            self._events.put(partial(received, version=found[0]))

    def _have(self) -> Version | None:
        return self._latest[0] if self._latest is not None else None

    def _next(self, have: Version | None) -> tuple[Version, VersionFile] | None:
        """Wait for the next version. None: a publisher that was started again has none yet. Raises `WeightsTimeout`,
        `PeerLost`."""
        if have is None:
            number, file = self._file(None)
            return self._labelled(number), file
        epoch, latest = self._channel.latest()
        if epoch != have[0] and latest is None:
            return None
        number, file = self._file(have[1] + 1 if epoch == have[0] else None)
        return (epoch, number), file

    def _labelled(self, number: int) -> Version:
        """The first version of this process. It may be one that the publisher had before it was started again, and that
        has come from another receiver."""
        try:
            epoch, latest = self._channel.latest()
        except PeerLost:
            return -1, number
        return (epoch, number) if latest is not None and number <= latest else (epoch - 1, number)

    def _file(self, after: int | None) -> tuple[int, VersionFile]:
        """The number of a version from `after` on, and the file that it is in."""
        borrowed = self._channel.borrow(min_version=after, timeout=self._timeout)
        return borrowed if borrowed is not None else self._received(after)

    def _received(self, after: int | None) -> tuple[int, VersionFile]:
        """As `_file`, in memory of this process."""
        while True:
            params = self._published()
            packing, block = file_for(params, self._blocks, SERVER)
            file = VersionFile(block.path, block.token, block.readers.clear)
            try:
                number = self._channel.receive(
                    packing.tensors(block), min_version=after, timeout=self._timeout
                )
            except WeightsError:
                if params == self._published():
                    raise
                continue
            if params == self._published():
                return number, file

    def _published(self) -> tuple[Param, ...]:
        """The tensors as they were published last, as far as it is known here."""
        about = self._channel.describe(self._timeout)
        return tuple(Param(name, each.dtype, tuple(each.shape)) for name, each in about.items())

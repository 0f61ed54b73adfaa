"""`WeightsChannel`: from the module of a publisher to those of its receivers."""

from __future__ import annotations

import math
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from operator import index

import torch
from torch import nn

from unirun.errors import PeerLost, UsageError, WeightsTimeout, WireError
from unirun.roles.context import Context, at_exit, init
from unirun.values import WorkerId
from unirun.weights.hub import MAX_WAIT_SECONDS, Holder, hub_of
from unirun.weights.messages import Fetched, Peek
from unirun.weights.pairing import BACKENDS, PairGroup
from unirun.weights.publishing import Publisher
from unirun.weights.receiving import Receiver, Target
from unirun.weights.sources import PeerConnection, RemoteSource, VersionFile, answer_of
from unirun.weights.tensors import Piecewise, Weights, assigner, targets_of, tensors_of, unsaved
from unirun.wire.progress import page
from unirun.wire.reporting import report
from unirun.wire.reports import FROM, VERSION, Metrics

ANY = -(1 << 62)
"""Before every version."""

VERSION_REPORT_INTERVAL = 0.5
"""Seconds between two reports."""

PEEK_TIMEOUT = 5.0
"""Seconds in which a publisher says what it has; it takes a millisecond."""


class WeightsChannel:
    """Moves weights from the ranks of one role to those of others, each version whole.

    ::

        channel = WeightsChannel("policy", publisher="actor", receivers=["rollout"])
        channel.publish(model, version=step)  # in each actor
        version = channel.receive(into=model, min_version=step - 1)  # in each rollout

    A job file or a builder may declare it (``channels:``); then ``WeightsChannel("policy")`` is enough. Each rank says
    what it has by the tensors themselves: plain tensors are whole, a DTensor is this rank's part (FSDP2, tensor
    parallelism). Names, global shapes and dtypes of publisher and receiver have to agree.

    On one host a version is copied into shared memory once, and from there by each receiver. A publisher never waits
    for receivers. Between hosts, each receiver gets its parts over sockets, with TLS. When a publisher has died,
    receivers that were started again get the last version from the other receivers.
    """

    def __init__(
        self,
        name: str,
        *,
        publisher: str = "",
        receivers: Sequence[str] = (),
        backend: str = "",
        checksums: bool = True,
    ) -> None:
        """With `backend` ``"gloo"`` or ``"nccl"``, a receiver gets its parts from other hosts through process groups of
        torch. They are not encrypted, and have `checksums`. By default that is so, with nccl, where the tensors of both
        ends are on CUDA devices; all others come over sockets with TLS, which notices what is damaged.

        Raises `UsageError` for a channel that is not declared, and in a process that is in neither role.
        """
        if backend not in ("", *BACKENDS):
            raise UsageError(f"backend={backend!r}", f"it is one of {', '.join(BACKENDS)}")
        self.name, self._backend, self._checked = name, backend, checksums
        self._context = init()
        self.publisher, self.receivers = _roles(self._context, name, publisher, tuple(receivers))
        if self._context.role not in (self.publisher, *self.receivers):
            raise UsageError(
                f"{self._context.role} has no part in channel {name!r}",
                f"it goes from {self.publisher} to {', '.join(self.receivers)}",
            )
        self._hub = hub_of(self._context)
        self._publisher: Publisher | None = None
        if self._context.role == self.publisher:
            self._publisher = self._hub.publisher(name)
        self._holder: Holder | None = None
        if self._publisher is None:
            self._holder = self._hub.holder(name)
            # Receivers of one host ask the same publishers, so that each part comes once.
            turn = zlib.crc32(self._context.node.encode())
            self._receiver = Receiver(name, turn, self._holder, self._other)
        me = self._context.session.me
        self._name = f"{me} {me.incarnation}"
        self._sources: dict[tuple[str, int], RemoteSource] = {}
        # The workers whose connection has ended last.
        self._lost: dict[tuple[str, int], WorkerId] = {}
        self._lines: dict[int, PeerConnection] = {}
        self._peeking = threading.Lock()
        self._telling = threading.Lock()
        self._told, self._untold = -VERSION_REPORT_INTERVAL, False
        at_exit(self._tell_last)
        self._moves: set[str] = set()
        self.version: int | None = None
        """The version that was published or received last; None before the first."""
        self._weights: Weights | None = None
        self._about: dict[str, torch.Tensor] | None = None
        self._noted = False

    def publish(self, weights: Weights, version: int) -> None:
        """Make `weights` the version that receivers get from now on. Every rank of the publisher calls it.

        `weights` may be changed when it returns. Versions ascend. Raises `UsageError`, `WeightsError`.
        """
        if self._publisher is None:
            raise UsageError(
                f"{self._context.role} receives channel {self.name!r}", "publish in its publisher"
            )
        # Of numpy, or of torch, it could not be sent.
        version = index(version)
        self._publisher.publish(tensors_of(weights), version)
        self._has(version)

    def withdraw(self) -> None:
        """Publish nothing until the next `publish`, whose version may have any number.

        For ranks that go back to an earlier state, and do not all have the same version: each of them withdraws its own
        before any of them publishes again, so that no receiver gets parts of different states. What receivers have,
        they keep. Raises `UsageError`.
        """
        if self._publisher is None:
            raise UsageError(
                f"{self._context.role} receives channel {self.name!r}", "withdraw in its publisher"
            )
        self._publisher.withdraw()
        self.version = None

    def receive(
        self,
        into: Weights,
        *,
        min_version: int | None = None,
        max_staleness: int | None = None,
        assign: bool = False,
        eta: float = 1.0,
        timeout: float | None = None,
    ) -> int:
        """Copy the latest version into the tensors of `into`, and return it.

        It waits for a version from `min_version` on; by default for any. With `max_staleness`, nothing is copied as
        long as the version that is there is at most that many before the latest one.

        With ``assign=True``, as in ``load_state_dict``, whole tensors of a publisher on this host are not copied:
        parameters and buffers of a module, or the items of a dict, become tensors over the shared memory. Writing to
        one changes this process's copy of it alone.

        With `eta` below 1, `into` becomes a moving average: ``eta * published + (1 - eta) * into`` for numbers with a
        point, as ReaL's parameter reallocation has it (Mei et al. 2024, arXiv:2406.14088).

        All tensors are of that version when it returns. When it raises before it has begun to copy, none has changed.
        Tensors that cannot be written are named before that: those on the meta device, sparse or quantized ones, those
        that overlap, conjugates, memory that is mapped for reading.

        `timeout` is in seconds, by default that of calls. Raises `WeightsTimeout`, `WeightsError` with every tensor
        that does not fit, `PeerLost` when a publisher dies meanwhile; then the next call waits for its successor.
        """
        if self._publisher is not None:
            raise UsageError(
                f"{self._context.role} publishes channel {self.name!r}", "receive in another role"
            )
        if not 0.0 < eta <= 1.0 or (assign and eta < 1.0):
            raise UsageError(
                f"eta={eta:g}", "it is above 0 and at most 1, and below 1 only without assign=True"
            )
        deadline = self._deadline(timeout)
        target = self._receiver.target(
            self._targets(into, eta), deadline, assigner(into) if assign else None, eta
        )
        at_least = ANY if min_version is None else min_version
        have = self.version
        for sources, missing in self._publishers_until(deadline):
            if not self._may_wait(sources, missing, deadline):
                held = self._receive_held(target, at_least)
                if held is not None:
                    return self._has(held)
        if max_staleness is not None and have is not None and have >= at_least:
            behind = self._receiver.latest(sources, deadline) - have
            if 0 <= behind <= max_staleness:
                return have
        with page().idle():
            version = self._receiver.receive(sources, target, at_least)
        if assign:
            # Tensors of the version before are freed now. Its publisher learns that with the next request, and should
            # before it writes another version, as it has to take new memory otherwise.
            del target
            for source in sources:
                with suppress(PeerLost):
                    source.peek(None)
        return self._has(version)

    def borrow(
        self, *, min_version: int | None = None, timeout: float | None = None
    ) -> tuple[int, VersionFile] | None:
        """The version that `receive` would copy, and the file that the publisher's memory is: other programs of this
        host load it from there, and nothing is copied. The publisher does not write to it as long as the file is there.

        None where it has to be received: the publisher is on another host, has parts of tensors only, or has died.
        Raises `WeightsTimeout`, `PeerLost`.
        """
        deadline = self._deadline(timeout)
        for sources, missing in self._publishers_until(deadline):
            if not self._may_wait(sources, missing, deadline):
                return None
        found = self._receiver.borrow(sources, ANY if min_version is None else min_version, deadline)
        if found is not None:
            self._has(found[0])
        return found

    def latest(self) -> tuple[int, int | None]:
        """The number of restarts of the publisher, and the latest version that all of its ranks have since then; None:
        they have published nothing, or have not begun. Any thread may ask, also while another one receives.

        Raises `PeerLost` for a rank that has had versions, perhaps, and cannot be reached now.
        """
        peers = self._context.peers
        ranks = range(peers.size(self.publisher))
        restarts = max(peers.find(self.publisher, rank).address.incarnation for rank in ranks)
        found = [self._peeked(rank) for rank in ranks]
        known = [version for version in found if version is not None]
        return restarts, min(known) if len(known) == len(found) else None

    def _peeked(self, rank: int) -> int | None:
        """The version that a rank of the publisher has; None: it has none. Raises `PeerLost` if it does not answer."""
        peer = self._context.peers.find(self.publisher, rank)
        who = str(peer.address)
        if peer.over:
            return None
        with self._peeking:
            line = self._hub.line(self.publisher, rank, self._lines.pop(rank, None))
            if line is None:
                if not (peer.gone or peer.address.incarnation):
                    return None
                raise PeerLost(f"{who} is started again", "ask later", worker=who)
            self._lines[rank] = line
            try:
                parcel = line.ask(Peek(self.name, None)).result(PEEK_TIMEOUT)
            except FutureTimeout as error:
                raise PeerLost(
                    f"{who} has not answered within {PEEK_TIMEOUT:g} s", "ask later", worker=who
                ) from error
        said = answer_of(parcel.head)
        return said.version if isinstance(said, Fetched) and said.layout else None

    def describe(self, timeout: float | None = None) -> dict[str, torch.Tensor]:
        """The tensors of the version that was received last, by name, whole, on the meta device: shapes and dtypes.

        Before the first one, it waits until something is published, at most for `timeout` seconds, by default those of
        calls. Later it does not wait. Raises `WeightsTimeout`, `PeerLost`.
        """
        deadline = self._deadline(timeout)
        for sources, missing in self._publishers_until(deadline):
            if missing is None and (self._about is None or all(source.packing for source in sources)):
                self._about = self._receiver.described(sources, deadline)
            if self._about is not None:
                break
        assert self._about is not None
        return self._about

    def _deadline(self, timeout: float | None) -> float:
        welcome = self._context.peers.welcome
        patience = timeout if timeout is not None else welcome.call_timeout if welcome else 0.0
        return time.monotonic() + min(patience, MAX_WAIT_SECONDS)

    def _has(self, version: int) -> int:
        """Count it, and tell the job, but not often: ``unirun weights`` shows it."""
        self.version = version
        left = self._told + VERSION_REPORT_INTERVAL - time.monotonic()
        if left <= 0:
            self._tell()
        elif not self._untold:
            self._untold = True
            later = threading.Timer(left, self._tell_last)
            later.daemon = True
            # Where no more threads can be started, it is told with a later one, or at the exit.
            with suppress(RuntimeError):
                later.start()
        return version

    def _tell_last(self) -> None:
        """Tell what came soon after something else, in a moment or at the exit of this process."""
        if self._untold:
            with suppress(WireError, UsageError):
                self._tell()

    def _tell(self) -> None:
        with self._telling:
            self._told, self._untold = time.monotonic(), False
            sizes: Counter[str] = Counter(dict.fromkeys(self._moves, 0))
            for got in self._receiver.last if self._publisher is None else ():
                name = f"{self.name}{FROM}{got.source.who}/{got.path}"
                sizes[name] += sum(view.nbytes for view in got.views)
            self._moves = {name for name, size in sizes.items() if size}
            values: dict[str, float | None] = {name: float(size) for name, size in sizes.items()}
            values[f"{self.name}{VERSION}"] = float(self.version or 0)
            self._context.peers.tell(Metrics(values, time.time()))

    def save(self, url: str) -> str:
        """Write this rank's part of the version that was published last, as a safetensors file under `url`: a path, or
        any URL that fsspec knows. Returns the file's path. Every rank of the publisher calls it; it may be in a thread
        while the next version is published.

        Raises `UsageError` when nothing is published, `WeightsError` for a dtype that safetensors does not have,
        OSError.
        """
        from unirun.weights import disk

        publisher = self._publisher
        if publisher is None:
            raise UsageError(f"{self._context.role} receives channel {self.name!r}", "save in its publisher")
        ranks = self._context.peers.size(self.publisher)
        with publisher.current() as (version, packing, block):
            return disk.save(url, version, self._context.rank, ranks, packing, block.memory)

    def load(self, url: str, into: Weights, *, min_version: int | None = None) -> int:
        """Copy the latest version that all ranks of the publisher have saved under `url` into `into`, and return it.

        For a publisher that begins anew, and for receivers that cannot reach one. Tensors may be cut in another way
        than when they were saved. Raises `WeightsError` when there is no version from `min_version` on or it does not
        fit, `FrameError` for a file that was damaged, OSError.
        """
        from unirun.weights import disk

        return disk.load(url, self._targets(into), ANY if min_version is None else min_version)

    def _targets(self, into: Weights, eta: float = 1.0) -> Mapping[str, Piecewise]:
        """The tensors to write. The first time, a line names the buffers that are not written."""
        found = targets_of(into, eta)
        left = sorted(unsaved(into)) if isinstance(into, nn.Module) and not self._noted else []
        if left:
            self._noted = True
            report(
                f"unirun: versions of channel {self.name!r} do not have these buffers, as no state dict has them: "
                f"{', '.join(left)}; where the module comes from to_empty(), compute them again"
            )
        return found

    def attach(self, weights: Weights) -> None:
        """`weights` are what ``trainer.sync_weights(name)`` publishes or receives in this worker."""
        self._weights = weights
        self._context.session.synced[self.name] = self._sync

    def _sync(self, version: int, timeout: float | None) -> int:
        assert self._weights is not None
        if self._publisher is not None:
            self.publish(self._weights, version)
            return version
        return self.receive(self._weights, min_version=version, timeout=timeout)

    def _publishers_until(
        self, deadline: float
    ) -> Iterator[tuple[list[RemoteSource], WeightsTimeout | PeerLost | None]]:
        """`_publishers`, after each change, up to the first time that none is missing. Raises what is to be said of one
        that is, at the deadline or when no change will help."""
        while True:
            updates = self._context.peers.updates
            found, missing = self._publishers(deadline)
            yield found, missing
            if missing is None:
                return
            left = deadline - time.monotonic()
            if left <= 0 or isinstance(missing, PeerLost):
                raise missing
            self._context.peers.wait(updates, min(left, VERSION_REPORT_INTERVAL))

    def _publishers(self, deadline: float) -> tuple[list[RemoteSource], WeightsTimeout | PeerLost | None]:
        """The ranks of the publisher that can be reached, and what is to be said of one that cannot."""
        found: list[RemoteSource] = []
        missing: WeightsTimeout | PeerLost | None = None
        for rank in range(self._context.peers.size(self.publisher)):
            try:
                source = self._source(self.publisher, rank, deadline)
            except PeerLost as error:
                missing = error
                continue
            if source is not None:
                found.append(source)
            elif missing is None:
                missing = WeightsTimeout(
                    f"{self.publisher}:{rank} does not publish channel {self.name!r}",
                    "does it make the channel, and live?",
                    channel=self.name,
                )
        return found, missing

    def _source(self, role: str, rank: int, deadline: float) -> RemoteSource | None:
        """The worker of a rank, if it can be reached. Raises `PeerLost` when it has ended for good."""
        known = self._sources.pop((role, rank), None)
        line = self._hub.line(role, rank, known.line if known is not None else None)
        if known is not None and line is known.line:
            self._sources[role, rank] = known
            return known
        if known is not None:
            known.unlink()
            self._lost[role, rank] = known.who
        if line is None or (self._lost.get((role, rank)) == line.who and not self._answers(line, deadline)):
            # It has died, and perhaps the news of it come.
            return None
        publishes = role == self.publisher
        here = publishes and self._hub.is_here(line)
        host = self._context.node if publishes and not here else ""
        pairing = None
        if host and self._context.peers.linked:

            def pairing(link: str, deadline: float) -> PairGroup:
                patience = deadline - time.monotonic()
                name = f"{self._name} {rank} {link}"
                return self._hub.pair(self.name, self.publisher, self._context.role, 1, name, patience)

        source = RemoteSource(
            self.name,
            line,
            self._name,
            here=here,
            holder=not publishes,
            host=host,
            backend=self._backend,
            checked=self._checked,
            pairing=pairing,
        )
        self._sources[role, rank] = source
        return source

    def _answers(self, line: PeerConnection, deadline: float) -> bool:
        """Return True if a process answers at the other end of a new connection."""
        left = max(deadline - time.monotonic(), 0.0)
        try:
            line.ask(Peek(self.name, None)).result(min(left, PEEK_TIMEOUT))
        except (PeerLost, FutureTimeout):
            line.close()
            return False
        return True

    def _other(self, reader: str) -> RemoteSource | None:
        """The receiver that has told publishers this name."""
        worker, _, incarnation = reader.partition(" ")
        role, _, rank = worker.rpartition(":")
        try:
            line = self._source(role, int(rank), math.inf)
        except PeerLost:
            return None
        if line is None or line.who.incarnation != int(incarnation):
            return None
        return line

    def _may_wait(self, sources: list[RemoteSource], missing: Exception | None, deadline: float) -> bool:
        """Return True if publishers have the last version or there was none: no publisher has died since it had one."""
        peers = self._context.peers
        if missing is not None:
            ranks = (peers.find(self.publisher, rank) for rank in range(peers.size(self.publisher)))
            return not any(peer.gone or peer.over or peer.address.incarnation for peer in ranks)
        return self._receiver.all_have([s for s in sources if s.who.incarnation], deadline)

    def _receive_held(self, target: Target, at_least: int) -> int | None:
        """Receive from other receivers; a few of them are asked at first, those on this host before others."""
        peers = self._context.peers
        found = []
        for role in self.receivers:
            for rank in range(peers.size(role)):
                try:
                    source = self._source(role, rank, target.deadline)
                except PeerLost:
                    continue
                if source is not None:
                    found.append(source)
        found.sort(key=lambda source: not self._hub.is_here(source.line))
        count = 4
        while True:
            version = self._receiver.receive_held(found[:count], target, at_least)
            if version is not None or count >= len(found):
                return version
            count *= 4

    def close(self) -> None:
        """Give back what this process has of the channel: its memory, or its connections."""
        self._tell_last()
        if self._publisher is not None:
            self._publisher.close()
        if self._holder is not None:
            self._holder.close()
        for source in self._sources.values():
            source.close()
        self._sources.clear()
        with self._peeking:
            for line in self._lines.values():
                line.close()
            self._lines.clear()
        self._context.session.synced.pop(self.name, None)


def _roles(
    context: Context, name: str, publisher: str, receivers: tuple[str, ...]
) -> tuple[str, tuple[str, ...]]:
    """Publisher and receivers: those that are given, else those that the job declares."""
    welcome = context.peers.welcome
    if welcome is not None and name in welcome.channels:
        declared, *others = welcome.channels[name]
        if (publisher or declared) != declared or (receivers or tuple(others)) != tuple(others):
            raise UsageError(
                f"channel {name!r} goes from {declared} to {', '.join(others)} in this job",
                f"write WeightsChannel({name!r})",
            )
        return declared, tuple(others)
    if not publisher or not receivers:
        raise UsageError(
            f"this job declares no channel {name!r}",
            "name its publisher and its receivers, here or in channels:",
        )
    for role in (publisher, *receivers):
        context.peers.known(role)
    if publisher in receivers or len(set(receivers)) != len(receivers):
        raise UsageError(f"channel {name!r}: a role is named twice", "name each role once")
    return publisher, receivers

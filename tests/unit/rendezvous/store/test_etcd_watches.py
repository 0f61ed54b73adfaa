"""A watch of etcd whose streams break at any response: each change is seen once, and in order."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from tests.effort import seeds
from tests.waiting import WAIT_TIMEOUT
from unirun.errors import StoreAway
from unirun.rendezvous.store import etcd
from unirun.rendezvous.store._etcd_cluster import grpc
from unirun.rendezvous.store.etcd import EtcdWatch
from unirun.rendezvous.store.protocol import Change, Listing


class Broken(grpc.RpcError):  # type: ignore[misc]
    """The end of a stream whose member is gone."""

    def code(self) -> Any:
        """As of a call."""
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        """As of a call."""
        return "the member is gone"


class Stream:
    """One stream of responses: all changes from a revision on, in fragments, unless it breaks before."""

    def __init__(self, cluster: Breaking, start: int) -> None:
        self._cluster, self._start = cluster, start
        self._over = threading.Event()

    def cancel(self) -> None:
        """End it."""
        self._over.set()

    def __iter__(self) -> Iterator[Any]:
        for response in (self._response(created=True), *self._responses()):
            if self._cluster.breaks():
                raise Broken
            yield response
        self._over.wait(WAIT_TIMEOUT)

    def _responses(self) -> Iterator[Any]:
        rng = self._cluster.rng
        for revision, keys in self._cluster.written.items():
            left = [(key, revision) for key in keys] if revision >= self._start else []
            while left:
                count = rng.randint(1, len(left))
                some, left = left[:count], left[count:]
                yield self._response(some, fragment=bool(left))

    def _response(
        self, changes: list[tuple[str, int]] | None = None, *, created: bool = False, fragment: bool = False
    ) -> Any:
        events = [
            SimpleNamespace(
                type=0, kv=SimpleNamespace(key=f"p/{key}".encode(), value=b"v", mod_revision=revision)
            )
            for key, revision in changes or ()
        ]
        header = SimpleNamespace(revision=self._cluster.latest)
        flags = {"created": created, "fragment": fragment, "canceled": False, "compact_revision": 0}
        return SimpleNamespace(events=events, header=header, **flags)


class Breaking:
    """A cluster in which a stream breaks now and then. `written` has the keys of each revision."""

    address = SimpleNamespace(prefix="p/")

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        revisions = sorted(rng.sample(range(2, 12), rng.randint(1, 5)))
        self.written = {each: [f"jobs/{n}" for n in range(rng.randint(1, 4))] for each in revisions}
        self.latest = revisions[-1]
        self._breaks = 6

    def breaks(self) -> bool:
        """Return True if the present stream breaks here."""
        self._breaks -= 1
        return self._breaks >= 0 and self.rng.random() < 0.4

    def call(self, *_: Any) -> Any:
        """Answer the question for the revision."""
        return SimpleNamespace(header=SimpleNamespace(revision=self.latest))

    def connect(self) -> str:
        """Name a member."""
        return "m1"

    def stream(self, _member: str, _method: str, requests: Iterator[Any]) -> Stream:
        """Begin a watch."""
        return Stream(self, next(requests).create_request.start_revision)

    def leave(self, *_: Any) -> None:
        """There are others."""


def no_listing(_: str) -> NoReturn:
    raise AssertionError("nothing was compacted")


@pytest.mark.parametrize("seed", seeds(100))
def test_each_change_is_seen_once_wherever_streams_break(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd, "_PAUSES", (0.0,))
    cluster = Breaking(random.Random(seed))
    start = cluster.rng.randint(1, 4)
    wanted = [
        Change("put", key, "v", revision)
        for revision, keys in cluster.written.items()
        for key in keys
        if revision >= start
    ]
    watch = EtcdWatch(cluster, "jobs/", start, no_listing)  # type: ignore[arg-type]
    seen: list[Change] = []
    while len(seen) < len(wanted):
        try:
            news = watch.changes(WAIT_TIMEOUT)
        except StoreAway:
            continue
        assert news, "a change is missing"
        assert not isinstance(news, Listing)
        seen += news
    assert not wanted or watch._failures == 0, "the next break is tried again at once"
    watch.close()
    assert seen == wanted

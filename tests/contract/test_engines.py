"""Each source of engines tells of changes, at once and to all that wait."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.waiting import WAIT_TIMEOUT
from unirun.errors import UsageError
from unirun.rollout import AddressFile, Engine, EngineList, Engines


class Listed:
    """Engines in memory."""

    def __init__(self, path: Path) -> None:
        self.source = EngineList()

    def put(self, engines: Sequence[Engine]) -> None:
        self.source.set(engines)


class Filed:
    """Engines in a file, which is replaced as an agent does it."""

    def __init__(self, path: Path) -> None:
        self.path = path / "addresses.json"
        self.source = AddressFile(str(self.path), "engine")

    def put(self, engines: Sequence[Engine]) -> None:
        entries = [
            {
                "rank": each.rank,
                "incarnation": each.incarnation,
                "host": "127.0.0.1",
                "ports": {"http": int(each.url.rpartition(":")[2])},
                "addr": each.url.removeprefix("http://"),
                "ready": each.ready,
                "node": "n0",
            }
            for each in engines
        ]
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"engine": entries, "router": []}))
        os.replace(new, self.path)


@pytest.fixture(params=[Listed, Filed], ids=["list", "file"])
def peer(request: pytest.FixtureRequest, tmp_path: Path) -> Listed | Filed:
    peer: Listed | Filed = request.param(tmp_path)
    return peer


A = Engine(0, 0, "http://127.0.0.1:20001", True)
B = Engine(1, 2, "http://127.0.0.1:20002", False)


async def settled(source: Engines, expected: tuple[Engine, ...]) -> None:
    """Wait until the source has them."""
    async with asyncio.timeout(WAIT_TIMEOUT):
        found = source.engines()
        while found != expected:
            found = await source.changed(found, WAIT_TIMEOUT)


def test_there_are_none_at_first(peer: Listed | Filed) -> None:
    assert peer.source.engines() == ()


def test_it_has_the_engines_with_all_that_is_known_of_them(peer: Listed | Filed) -> None:
    peer.put([A, B])
    assert peer.source.engines() == (A, B)


def test_nothing_new_is_the_same_tuple(peer: Listed | Filed) -> None:
    peer.put([A, B])
    assert peer.source.engines() is peer.source.engines()


def test_a_change_wakes_all_that_wait(peer: Listed | Filed) -> None:
    async def story() -> None:
        peer.put([A])
        known = peer.source.engines()
        waiting = [asyncio.create_task(peer.source.changed(known, WAIT_TIMEOUT)) for _ in range(3)]
        await asyncio.sleep(0)
        peer.put([A, B])
        assert await asyncio.gather(*waiting) == [(A, B)] * 3

    asyncio.run(story())


def test_a_change_before_the_wait_is_not_missed(peer: Listed | Filed) -> None:
    async def story() -> None:
        peer.put([A, B])
        assert await peer.source.changed((A,), WAIT_TIMEOUT) == (A, B)

    asyncio.run(story())


def test_without_a_change_the_wait_ends_at_its_deadline(peer: Listed | Filed) -> None:
    async def story() -> None:
        peer.put([A])
        known = peer.source.engines()
        began = time.monotonic()
        assert await peer.source.changed(known, 0.1) is known
        assert time.monotonic() - began >= 0.1

    asyncio.run(story())


def test_each_of_many_changes_is_seen_in_the_end(peer: Listed | Filed) -> None:
    async def story() -> None:
        for incarnation in range(5):
            new = (Engine(0, incarnation, A.url, True),)
            peer.put(new)
            await settled(peer.source, new)
        peer.put([])
        await settled(peer.source, ())

    asyncio.run(story())


def test_an_address_of_ipv6_makes_a_url(peer: Listed | Filed) -> None:
    engine = Engine(0, 0, "http://[::1]:20001", True)
    peer.put([engine])
    assert peer.source.engines() == (engine,)


def test_a_role_that_is_not_in_the_file_is_an_error_that_names_those_that_are(tmp_path: Path) -> None:
    filed = Filed(tmp_path)
    filed.put([A])
    with pytest.raises(UsageError, match="role 'engin' has no address in this job; .*: engine, router"):
        AddressFile(str(filed.path), "engin").engines()
    assert AddressFile(str(filed.path), "router").engines() == ()


def test_a_file_of_something_else_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "addresses.json"
    path.write_text("[1]")
    with pytest.raises(UsageError, match="addresses.json is no file of addresses"):
        AddressFile(str(path), "engine").engines()

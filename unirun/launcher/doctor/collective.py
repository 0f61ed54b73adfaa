"""The job of all-reduces: each host measures its links, then all of them add up a tensor. The module that needs torch.

A probe takes part as the command tells it. This is no job of the launcher, which refuses hosts that are not alike, and
ends when one does not reach the head: here both are findings.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from msgspec import json
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from unirun.launcher.doctor.judge import (
    Examination,
    HostReport,
    JobPlace,
    JobResult,
    Link,
    broken_links,
    pair_rounds,
)
from unirun.rendezvous.endpoints import hold_endpoint

CONNECT_TIMEOUT = timedelta(seconds=8)
"""Time to connect to the store."""

STEP_TIMEOUT = timedelta(seconds=30)
"""Time for one step of all hosts, as a round of pairs or an all_reduce."""

PAIR_CONNECT_TIMEOUT = timedelta(seconds=1.5)
"""Time for an attempt of two hosts to connect. gloo makes five."""

PAIR_STEP_TIMEOUT = timedelta(seconds=10)
"""Time for a step of two hosts."""

BANDWIDTH_SECONDS = 0.3
"""Seconds of sending for the bandwidth."""

HOPELESS = 3
"""A host with so many broken links, and no other, is not tried further."""

_ROUND_TRIPS = 30
_CHUNK = 1 << 18
_SIZE = 1 << 18
_TIMES = 5


class HostsAtWork:
    """The hosts of the job, of which this process is one."""

    def __init__(self, place: JobPlace, store: TCPStore) -> None:
        self._place, self._store, self._me = place, store, place.rank
        self._ranks = range(len(place.hosts))

    def barrier(self, name: str) -> None:
        """Wait for all. Raises RuntimeError."""
        if self._store.add(name, 1) == len(self._ranks):
            self._store.set(f"{name}/open", "")
        self._store.wait([f"{name}/open"], STEP_TIMEOUT)

    def shared(self) -> tuple[str, ...]:
        """The directories in which this host sees the file that the first writes; those that it can write, there."""
        if len(self._ranks) < 2:
            return ()
        places = {"cwd": Path(self._place.cwd), "home": Path.home()}
        files = {where: path / self._place.file for where, path in places.items()}
        found: tuple[str, ...] = ()
        try:
            if self._me == 0:
                found = tuple(where for where, file in files.items() if _written(file))
            self.barrier("written")
            if self._me != 0:
                found = tuple(where for where, file in files.items() if file.exists())
            self.barrier("found")
        finally:
            if self._me == 0:
                # Elsewhere also the removal would fail.
                for where in found:
                    files[where].unlink(missing_ok=True)
        return found

    def links(self) -> list[Link]:
        """The links that end at this host. In a round no host is in two pairs, and all wait for the round's end."""
        found: list[Link] = []
        for number, pairs in enumerate(pair_rounds(self._ranks)):
            self.barrier(f"round/{number}")
            pair = next((pair for pair in pairs if self._me in pair), None)
            if pair is not None and not any(self._store.check([f"hopeless/{rank}"]) for rank in pair):
                found.append(self._link(f"pair/{number}/{pair[0]}", pair))
            if len(found) >= HOPELESS and all(link.problem for link in found):
                self._store.set(f"hopeless/{self._me}", "")
        return found

    def _link(self, key: str, pair: tuple[int, int]) -> Link:
        """The link from the other host of `pair` to this one."""
        mine = pair.index(self._me)
        peer = 1 - mine
        source, target = (self._place.hosts[pair[each]] for each in (peer, mine))
        try:
            group = ProcessGroupGloo(PrefixStore(key, self._store), mine, 2, PAIR_CONNECT_TIMEOUT)
            rtts = [_round_trip(group, peer, begins=turn == mine) for turn in (0, 1)]
            if not self._place.bandwidth:
                return Link(source, target, rtts[mine])
            speeds = [_stream(group, peer, sends=turn == mine) for turn in (0, 1)]
        except RuntimeError as error:
            return Link(source, target, problem=_first_line(error))
        return Link(source, target, rtts[mine], speeds[peer])

    def all_reduces(self, links: Sequence[Link]) -> tuple[dict[str, float], dict[str, str]]:
        """Seconds and problems by backend, with all hosts that reach each other; nothing on another one."""
        self._store.set(f"links/{self._me}", json.encode(links).decode())
        self.barrier("links")
        every = [
            link for r in self._ranks for link in json.decode(self._store.get(f"links/{r}"), type=list[Link])
        ]
        reports = tuple(map(HostReport, self._place.hosts))
        apart = {name for fault in broken_links(Examination(reports, tuple(every))) for name in fault.hosts}
        ranks = [rank for rank in self._ranks if self._place.hosts[rank] not in apart]
        seconds: dict[str, float] = {}
        problems: dict[str, str] = {}
        for backend in self._place.backends if self._me in ranks else ():
            try:
                seconds[backend] = all_reduce(backend, ranks.index(self._me), len(ranks), self._store)
            except RuntimeError as error:
                problems[backend] = _first_line(error)
        return seconds, problems


def _written(file: Path) -> bool:
    """Return True if the file could be written: a home directory may be read-only."""
    try:
        file.touch(mode=0o600)
    except OSError:
        return False
    return True


def _round_trip(group: Any, peer: int, *, begins: bool) -> float:
    """The median time, after the first ones. The other end has `begins` False."""
    ball, times = torch.zeros(1), []
    for _ in range(_ROUND_TRIPS):
        began = time.perf_counter()
        if begins:
            group.send([ball], peer, 0).wait(PAIR_STEP_TIMEOUT)
        group.recv([ball], peer, 0).wait(PAIR_STEP_TIMEOUT)
        if not begins:
            group.send([ball], peer, 0).wait(PAIR_STEP_TIMEOUT)
        times.append(time.perf_counter() - began)
    return median(times[2:])


def _stream(group: Any, peer: int, *, sends: bool) -> float:
    """Send for `BANDWIDTH_SECONDS` seconds, or receive what is sent. Returns the bytes per second that came."""
    chunk, count, began = torch.zeros(_CHUNK, dtype=torch.uint8), 0, 0.0
    if sends:
        until = time.monotonic() + BANDWIDTH_SECONDS
        while time.monotonic() < until:
            group.send([chunk], peer, 0).wait(PAIR_STEP_TIMEOUT)
        # The last one.
        group.send([chunk.fill_(1)], peer, 0).wait(PAIR_STEP_TIMEOUT)
        return 0.0
    while not chunk[0]:
        group.recv([chunk], peer, 0).wait(PAIR_STEP_TIMEOUT)
        began = began or time.perf_counter()
        count += 1
    return (count - 1) * _CHUNK / (time.perf_counter() - began)


def all_reduce(backend: str, rank: int, world: int, store: TCPStore) -> float:
    """The median time of an all_reduce of 1 MB in seconds. Raises RuntimeError when it fails or is wrong."""
    device = torch.device("cuda:0" if backend == "nccl" else "cpu")
    prefixed = PrefixStore(backend, store)
    dist.init_process_group(backend, store=prefixed, rank=rank, world_size=world, timeout=STEP_TIMEOUT)
    try:
        return median(_one(device, rank, world) for _ in range(_TIMES))
    finally:
        dist.destroy_process_group()


def _one(device: torch.device, rank: int, world: int) -> float:
    tensor = torch.full((_SIZE,), float(rank + 1), device=device)
    began = time.perf_counter()
    dist.all_reduce(tensor)
    # NCCL works in the background until the result is read.
    result = float(tensor[-1].item())
    seconds = time.perf_counter() - began
    if result != world * (world + 1) / 2:
        raise RuntimeError(f"the sum of 1 … {world} is {result}")
    return seconds


def _first_line(error: Exception) -> str:
    """The first line, without places in C++: torch adds a stack trace."""
    return re.sub(r" ?\[(/[^]]*|none)\]", "", str(error).partition("\n")[0])


def open_store(address: str) -> tuple[TCPStore, int]:
    """A store that listens on `address` only, and its port. It ends when it is no longer referenced."""
    endpoint = hold_endpoint(address)
    port, handle = endpoint.port, endpoint.socket.detach()
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=handle), port


def run(place: JobPlace, interface: str) -> JobResult:
    """Do the work of one host. Raises RuntimeError when another one has ended, or does not reach the store."""
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
    try:
        store = TCPStore(place.address, place.port, is_master=False, timeout=CONNECT_TIMEOUT)
    except RuntimeError as error:
        return JobResult(apart=_first_line(error))
    hosts = HostsAtWork(place, store)
    hosts.barrier("begin")
    shared = hosts.shared() if place.bandwidth else ()
    links = hosts.links()
    return JobResult(tuple(links), shared, *hosts.all_reduces(links))

"""A job that a command on this machine runs on three hosts over ssh, and what happens to them."""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.testbed.host import Host
from tests.testbed.hosts import Hosts
from tests.testbed.warm import WarmHosts, is_warm
from tests.waiting import eventually

from ..harness import EXEC, START_TIMEOUT, Running, Unirun, processes_of

IMPORT = 0.5
"""Seconds that the import of torch takes at least."""

LIVING = """
    # Says when it starts, and writes the time into a file of its own until it dies, or is told that it is enough.
    import os, pathlib, sys, time
    role, rank, incarnation, node = (os.environ[name] for name in ("ROLE_NAME", "RANK", "UNIRUN_INCARNATION", "UNIRUN_NODE"))
    began = time.monotonic()
    print("up", role, rank, incarnation, node, os.environ["WORLD_SIZE"], os.getpid(), began, flush=True)
    with open(f"{role}.{rank}.{incarnation}", "w") as file:
        while not pathlib.Path("enough").exists():
            file.seek(0)
            file.write(f"{time.monotonic():.6f}")
            file.flush()
            time.sleep(0.01)
"""


class Start(NamedTuple):
    """A rank has started; `began` is in seconds of the monotonic clock, which all hosts of the test bed have in common."""

    role: str
    rank: int
    incarnation: int
    node: str
    world: int
    pid: int
    began: float


class UnirunOnHosts(Unirun):
    """The command, on this machine, for jobs on `hosts`."""

    def __init__(self, root: Path, hosts: Hosts, warm: WarmHosts | None = None) -> None:
        """Agents borrow their spawners from `warm`, or import torch."""
        super().__init__(root)
        self.hosts = hosts
        self.warm = warm
        if warm is not None:
            warm.warm(hosts, self.root / "run")
        self.work = root / "work"
        """The working directory, which this machine and each host have for themselves."""

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of a user of the hosts, with this home."""
        own = {"UNIRUN_HOME": str(self.home), "UNIRUN_RUN_DIR": str(self.root / "run")}
        return self.hosts.environment({**own, **(extra or {})})

    def processes(self) -> dict[int, str]:
        """Forks of the warm processes are added, as they show the environment of those."""
        forks = processes_of(self.warm.home) if self.warm is not None else {}
        return super().processes() | {pid: title for pid, title in forks.items() if not is_warm(pid)}

    def over_ssh(
        self, script: str, *args: object, actor: str = "count: 4", spares: int = 0, **start: Any
    ) -> Running:
        """Start a job of `script` on all hosts, with two ranks on each; workers do not import torch. `actor` describes
        its only role."""
        self.place("train.py", script)
        self.place(
            "job.yaml",
            f"spares: {spares}\nroles: {{actor: {{{actor}, script: {self.work}/train.py, max_restarts: 2}}}}\n",
        )
        names = ",".join(f"{host.name}:2" for host in self.hosts)
        argv = ["--hosts", names, *EXEC, "--rdzv-id", "mine", "--config", self.work / "job.yaml", *args]
        return self.start(*argv, cwd=self.work, **start)

    def place(self, name: str, text: str) -> None:
        """Write a file into the working directory, here and on each host."""
        for folder in (self.work, *(host.path(self.work) for host in self.hosts)):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(textwrap.dedent(text))

    def warmed_up(self) -> None:
        """Wait until every node has imported torch for rendezvous stores, without which no role starts again; workers
        do not wait for it. Warm processes have done so before."""
        if self.warm is not None:
            return

        def all_ready() -> bool:
            said = [
                re.fullmatch(r"(\w+): torch is imported after (.*) s", text)
                for text in self.events("spawner")
            ]
            # A spawner of fresh interpreters imports nothing.
            ready = {match[1] for match in said if match and float(match[2]) > IMPORT}
            return ready == {host.name for host in self.hosts}

        eventually(all_ready, "torch is imported everywhere", START_TIMEOUT)

    def enough(self) -> None:
        """Let all workers end."""
        for host in self.hosts:
            (host.path(self.work) / "enough").touch()

    def last_moment(self, start: Start) -> float:
        """The last moment at which a rank has lived, so far."""
        name = f"{start.role}.{start.rank}.{start.incarnation}"
        return float((self.host(start.node).path(self.work) / name).read_text())

    def host(self, name: str) -> Host:
        """The host called `name`."""
        return next(host for host in self.hosts if host.name == name)

    def folder(self, node: str) -> Path:
        """The node's own directory of the job."""
        return self.host(node).path(self.folder_inside(node))

    def folder_inside(self, node: str) -> Path:
        """The same as processes of the host see it."""
        return self.home / "nodes" / node / "mine"

    def others(self, node: str) -> list[str]:
        """The command lines of all processes of a host but sshd and a warm process."""
        lines = [command_line(pid) for pid in self.host(node).pids() if not is_warm(pid)]
        return [line for line in lines if line and "sshd" not in line]

    def pid_on(self, node: str, title: str) -> int:
        """The process of a host with this title, as ps shows it."""

        def only() -> int | None:
            found = [pid for pid in self.host(node).pids() if title_of(pid) == title[:15]]
            return found[0] if len(found) == 1 else None

        return eventually(only, f"one process of {node} is called {title}")


def title_of(pid: int) -> str:
    """The title of a process, empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def command_line(pid: int) -> str:
    """The command line of a process, empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def starts(job: Running, count: int, incarnation: int = 0, within: float = START_TIMEOUT) -> list[Start]:
    """Wait until `count` ranks of one incarnation have started; in the order of roles and ranks."""
    lines = job.lines(rf"up \w+ \d+ {incarnation} .*$", count, within)
    found = []
    for line in lines:
        _, role, rank, number, node, world, pid, began = line.split()
        found.append(Start(role, int(rank), int(number), node, int(world), int(pid), float(began)))
    return sorted(found)


def places(found: list[Start]) -> list[str]:
    """The nodes of ranks in their order."""
    return [start.node for start in found]


def since(moment: float) -> float:
    """Seconds."""
    return time.monotonic() - moment

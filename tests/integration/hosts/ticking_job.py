"""A job on three hosts whose ranks write down when they run."""

from __future__ import annotations

import contextlib
import json
import subprocess
from pathlib import Path
from textwrap import dedent

from tests.testbed.host import Host
from tests.testbed.hosts import Hosts
from tests.testbed.warm import is_warm
from tests.waiting import WAIT_TIMEOUT, eventually

from ..harness import EXEC, START_TIMEOUT, UNIRUN

TICKING = """
    import os, pathlib, time
    me = pathlib.Path("/tmp/ticks") / f"{os.environ['RANK']}.{os.environ['UNIRUN_INCARNATION']}"
    while not pathlib.Path("/tmp/enough").exists():
        with me.open("a") as file:
            file.write(f"{time.monotonic()}\\n")
        time.sleep(0.01)
"""

JOB = "spares: 1\nroles: {actor: {count: 4, script: /tmp/train.py, max_restarts: 2}}\n"

EVENTS = "/run/unirun-testbed/home/.local/state/unirun/jobs/ticking/events.jsonl"


class TickingJob:
    """A job of four ranks on h1 and h2, with h3 held back, whose ranks write down when they run."""

    def __init__(self, hosts: Hosts, *, by_hand: bool = False, store: str = "") -> None:
        """With `by_hand` there is a command on each host, otherwise one on the head, which reaches the others by ssh."""
        self.hosts = hosts
        for host in hosts:
            host.path("/tmp/ticks").mkdir()
            host.path("/tmp/train.py").write_text(dedent(TICKING))
            host.path("/tmp/job.yaml").write_text(JOB)
            host.path("/tmp/token").write_text("5a" * 32)
            host.path("/tmp/token").chmod(0o600)
        meeting = [
            "--nnodes",
            "3",
            "--rdzv-endpoint",
            f"{hosts[0].address}:29400",
            "--token-file",
            "/tmp/token",
        ]
        options = [*(meeting if by_hand else ["--hosts", "h1,h2,h3"]), "--config", "/tmp/job.yaml"]
        options += ["--rdzv-id", "ticking", *EXEC, *(["--store", store] if store else [])]
        self.commands = [
            host.popen(
                [UNIRUN, *options, *(["--node-rank", number] if by_hand else [])],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for number, host in enumerate(hosts if by_hand else [hosts[0]])
        ]

    @property
    def command(self) -> subprocess.Popen[bytes]:
        """The command on the last host that has one."""
        return self.commands[-1]

    def kill(self) -> None:
        """End all commands."""
        for command in self.commands:
            command.kill()
            command.communicate()

    def ticks(self, host: Host, rank: int, incarnation: int) -> list[float]:
        """The times at which a worker has run, in seconds of the machine's clock."""
        file = host.path(f"/tmp/ticks/{rank}.{incarnation}")
        return [float(line) for line in file.read_text().splitlines()] if file.exists() else []

    def until_up(self, host: Host, incarnation: int, *ranks: int, within: float = START_TIMEOUT) -> None:
        def up() -> bool:
            assert self.command.poll() is None, self.command.communicate()
            return all(self.ticks(host, rank, incarnation) for rank in ranks)

        eventually(up, f"ranks {ranks} run on {host.name}", within)

    def events(self, kind: str) -> list[str]:
        """The job's events of a kind."""
        rows = [json.loads(line) for line in self.hosts[0].path(EVENTS).read_text().splitlines()]
        return [row["text"] for row in rows if row["kind"] == kind]

    def ends(self) -> str:
        """Let the job end; it succeeds. Returns what the command has said."""
        for host in self.hosts:
            host.path("/tmp/enough").touch()
        said = self.command.communicate(timeout=START_TIMEOUT)[0].decode()
        assert self.command.returncode == 0, said
        return said

    def masters(self) -> list[int]:
        """The pids of the masters, all of them on the head."""
        found = []
        for pid in self.hosts[0].pids():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().startswith("unirun-master"):
                    found.append(pid)
        return found

    def agents(self) -> list[int]:
        """The pids of the agents."""
        latest = {text.split()[0]: int(text.split()[-1].rstrip(")")) for text in self.events("join")}
        return list(latest.values())

    def nothing_runs_on(self, host: Host) -> None:
        """No process of the job is left on `host`."""

        def ours() -> list[str]:
            found = []
            for pid in (each for each in host.pids() if not is_warm(each)):
                with contextlib.suppress(OSError):
                    found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
            return [line for line in found if not line.startswith("sshd: ")]

        eventually(lambda: not ours(), f"nothing of the job is left on {host.name}", WAIT_TIMEOUT)

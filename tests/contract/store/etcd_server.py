"""Real etcd servers: on free ports of the loopback interface, or on hosts of their own."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import WAIT_TIMEOUT


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def program(name: str) -> str:
    """Path of the program `name`; a machine without it fails, as `make test` installs it."""
    path = shutil.which(name)
    if path is None:
        pytest.fail(
            f"{name} is not installed: run make .venv/.system, or apt-get install etcd-server etcd-client openssl"
        )
    return path


@dataclass
class EtcdMember:
    """One member of a cluster. It keeps its ports and its data when it is killed and started again."""

    name: str
    folder: Path
    flags: tuple[str, ...] = ()
    scheme: str = "http"
    client_port: int = field(default_factory=free_port)
    peer_port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    address: str = "127.0.0.1"
    around: tuple[str, ...] = ()
    """The command that runs the server elsewhere."""

    @property
    def endpoint(self) -> str:
        return f"{self.address}:{self.client_port}"

    @property
    def peer(self) -> str:
        return f"http://{self.address}:{self.peer_port}"

    def start(self, cluster: str | None = None) -> None:
        client = f"{self.scheme}://{self.endpoint}"
        command = [
            *(program("setpriv"), "--pdeathsig", "KILL"),  # no server outlives these tests
            *self.around,
            *(program("etcd"), "--name", self.name, "--data-dir", str(self.folder / self.name)),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", self.peer, "--initial-advertise-peer-urls", self.peer),
            *("--initial-cluster", cluster or f"{self.name}={self.peer}"),
            *self.flags,
        ]
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


class EtcdCluster:
    """A cluster of `count` members, or of those that are given."""

    def __init__(
        self,
        folder: Path,
        count: int = 1,
        flags: tuple[str, ...] = (),
        scheme: str = "http",
        members: Sequence[EtcdMember] = (),
    ) -> None:
        self.members = list(members) or [EtcdMember(f"m{n}", folder, flags, scheme) for n in range(count)]
        self.cluster = ",".join(f"{member.name}={member.peer}" for member in self.members)
        for member in self.members:
            member.start(self.cluster)

    def url(self, prefix: str = "/test/", timeout: float = 20.0, **options: Any) -> str:
        hosts = ",".join(member.endpoint for member in self.members)
        query = "&".join(
            f"{name}={value}" for name, value in {"prefix": prefix, "timeout": timeout, **options}.items()
        )
        return f"etcd://{hosts}?{query}"

    def start(self, member: EtcdMember) -> None:
        member.start(self.cluster)

    def leader(self) -> EtcdMember:
        """The member that is the leader now."""
        for member in self.members:
            if member.process is None:
                continue
            [found] = json.loads(self.ctl("endpoint", "status", "-w", "json", endpoint=member.endpoint))
            status = found["Status"]
            if status["leader"] == status["header"]["member_id"]:
                return member
        raise AssertionError("no member leads")

    def ctl(self, *arguments: str, endpoint: str | None = None) -> str:
        """Output of etcdctl."""
        where = endpoint or ",".join(member.endpoint for member in self.members)
        command = [program("etcdctl"), "--endpoints", where, *arguments]
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WAIT_TIMEOUT,
            check=False,
        )
        assert done.returncode == 0, f"{arguments}: {done.stderr}"
        return done.stdout

    def stop(self) -> None:
        for member in self.members:
            member.kill()

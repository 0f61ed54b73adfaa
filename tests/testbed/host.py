"""One host of a test bed (`tests.testbed.hosts`): namespaces of its own, and what may happen to it."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.testbed.machine import BASE, run, wait_until

if TYPE_CHECKING:
    from tests.testbed.hosts import Hosts

HOME = BASE / "home"
"""The home directory, of each host its own."""

_ETC = ("passwd", "hosts", "nsswitch.conf")
_OWN = (HOME, Path("/tmp"), Path("/dev/shm"))


class Host:
    """One host. Commands and sshd run in its namespaces, which a process without other work holds."""

    def __init__(self, hosts: Hosts, number: int) -> None:
        self.name = f"h{number}"
        self.address = f"{hosts.network}.{number}"
        self.address6 = f"{hosts.network6}::{number}"
        self.namespace = f"{hosts.prefix}-{number}"
        """Of the network; also the name of the machine's end of its cable."""
        self._hosts = hosts
        self._holder = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "KILL", "nsenter", f"--net=/run/netns/{self.namespace}"),
                *("unshare", "--mount", "--uts", "--ipc", "sh", "-ec", self._setup(hosts.visible)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            cwd="/",
        )
        self._sshd: subprocess.Popen[bytes] | None = None
        self.bad_cable: subprocess.Popen[bytes] | None = None
        """Carries what this host sends, between `netem` and its end."""

    def _setup(self, visible: Sequence[Path]) -> str:
        """The script that makes the host's own directories, and then holds the namespaces."""
        kept = {Path("/sys/fs/cgroup"): "cgroup"} if Path("/sys/fs/cgroup").is_mount() else {}
        for path in visible:
            if any(path.is_relative_to(own) for own in _OWN):
                kept[path] = f"kept{len(kept)}"
        # With all that is mounted below, in one call: with -R it fails when another test bed ends meanwhile.
        lines = [f"hostname {self.name}", "umount -l /run/netns"]
        for path, name in kept.items():
            place = self._hosts.folder / name
            lines += [f"mkdir -p {place}", f"mount --rbind {shlex.quote(str(path))} {place}"]
        lines += ["mount -t sysfs sysfs /sys"]
        lines += [f"mount -t tmpfs -o mode=1777 tmpfs {path}" for path in _OWN]
        for path, name in kept.items():
            there = shlex.quote(str(path))
            lines += [f"mkdir -p {there}", f"mount --move {self._hosts.folder / name} {there}"]
        lines += [f"mount --bind {self._hosts.folder / name} /etc/{name}" for name in _ETC]
        return "\n".join([*lines, f"chmod 700 {HOME}", "echo ready", "exec sleep infinity"])

    def wait_for_holder(self) -> None:
        """Return when the namespaces are as they shall be."""
        wait_for_ready(self._holder, self.name)

    def start_sshd(self) -> None:
        """Start sshd, without waiting for it."""
        with (self._hosts.folder / f"sshd.{self.name}.log").open("ab") as log:
            command = ["/usr/sbin/sshd", "-D", "-e", "-f", str(self._hosts.folder / "sshd_config")]
            self._sshd = self.popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def accepts_ssh(self) -> bool:
        """Return True if sshd listens."""
        try:
            socket.create_connection((self.address, 22), timeout=1).close()
        except OSError:
            return False
        return True

    # What runs there.

    def inside(self, argv: Sequence[object], cwd: Path | None = None) -> list[str]:
        """The command line that runs `argv` in this host, in `cwd`, by default its home, with the groups of a session over
        ssh. The process that is started with it becomes that of `argv`."""
        place = ["--mount", "--uts", "--ipc", "--net", f"--wdns={cwd or HOME}"]
        nsenter = ["nsenter", "--target", str(self._holder.pid), *place, "--"]
        return [*nsenter, "setpriv", "--groups", "0", *map(str, argv)]

    def popen(
        self,
        argv: Sequence[object],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        **popen: Any,
    ) -> subprocess.Popen[Any]:
        """Start `argv` in this host; `popen` is for `subprocess.Popen`."""
        return subprocess.Popen(self.inside(argv, cwd), env=self._hosts.environment(env), **popen)

    def run(
        self,
        argv: Sequence[object],
        *,
        check: bool = True,
        within: float = 120.0,
        stdin: str | None = None,
        **popen: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run `argv` in this host and wait for it. With `check`, a failure raises `RuntimeError`."""
        kinds = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with self.popen(argv, **{**kinds, **popen}) as process:
            try:
                out, err = process.communicate(stdin, timeout=within)
            except BaseException:
                process.kill()
                raise
        if check and process.returncode != 0:
            command = shlex.join(map(str, argv))
            raise RuntimeError(f"{self.name}: {command}: exit code {process.returncode}: {err}{out}")
        return subprocess.CompletedProcess(list(map(str, argv)), process.returncode, out, err)

    @property
    def holder(self) -> int:
        """The process that holds its namespaces."""
        return self._holder.pid

    def path(self, inside: Path | str) -> Path:
        """The path by which a test sees the file `inside` of this host."""
        return Path(f"/proc/{self._holder.pid}/root") / str(inside).lstrip("/")

    def pids(self) -> list[int]:
        """All processes of the host, without the one that holds its namespaces."""
        return [pid for pid in pids_in(self.namespace) if pid != self._holder.pid]

    # What may happen to a host.

    def cable(self, *, up: bool) -> None:
        """Plug the network cable in, or pull it: what is sent is lost, and nobody is told."""
        run("ip", "link", "set", self.namespace, "up" if up else "down")

    def netem(self, delay_ms: float = 0.0, loss: float = 0.0) -> None:
        """Delay packets of this host by `delay_ms`, and lose a share `loss` of them; 0 and 0 ends that."""
        if self.bad_cable is not None:
            self.remove_bad_cable()
            run("ip", "link", "set", self.namespace, "master", self._hosts.prefix)
        if delay_ms or loss:
            names = (self.namespace, f"{self.namespace}t", self._hosts.prefix)
            program = [sys.executable, "-E", "-S", Path(__file__).with_name("bad_cable.py")]
            self.bad_cable = subprocess.Popen(
                list(map(str, ["setpriv", "--pdeathsig", "KILL", *program, *names, delay_ms, loss])),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
            )
            wait_for_ready(self.bad_cable, f"the cable of {self.name}")

    def remove_bad_cable(self) -> None:
        """End the process that carries what this host sends, if there is one."""
        if self.bad_cable is not None:
            self.bad_cable.kill()
            self.bad_cable.wait()
            self.bad_cable = None

    def freeze(self) -> None:
        """Stop every process, as a host that hangs. Its kernel still acknowledges what it receives."""
        self._signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let all processes go on."""
        self._signal_all(signal.SIGCONT)

    def kill_all(self, *, sshd: bool = False) -> None:
        """SIGKILL to every process; sshd is started again at once, unless `sshd`. The kernel closes their connections: for a
        power failure, of which nobody is told, pull the cable first."""
        self._signal_all(signal.SIGKILL)
        if self._sshd is not None:
            self._sshd.wait()
            self._sshd = None
        if not sshd:
            self.power_on()

    def power_on(self) -> None:
        """Start sshd after `kill_all(sshd=True)`, and wait until it listens on the host's own loopback interface."""
        self.start_sshd()
        listens = ["ss", "-Hltn", "sport = :22"]
        wait_until(lambda: self.run(listens).stdout, f"sshd of {self.name} listens")

    def _signal_all(self, signum: int) -> None:
        """Signal every process, also those that are forked meanwhile; return when those that were killed are gone."""
        done: set[int] = set()

        def all_signalled() -> bool:
            new = [pid for pid in self.pids() if signum == signal.SIGKILL or pid not in done]
            for pid in new:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)
            done.update(new)
            return not new

        wait_until(all_signalled, f"all processes of {self.name} have got {signal.Signals(signum).name}")


def wait_for_ready(process: subprocess.Popen[bytes], what: str) -> None:
    """Wait until a process has written that it is ready. Raises `RuntimeError`."""
    assert process.stdout is not None
    with process.stdout as pipe:
        if pipe.readline() != b"ready\n":
            raise RuntimeError(f"{what} did not start: exit code {process.wait(10)}")


def pids_in(namespace: str) -> list[int]:
    """All processes in a network namespace that ``ip netns`` has named."""
    inode = f"net:[{os.stat(f'/run/netns/{namespace}').st_ino}]"
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{name}/ns/net") == inode:
                found.append(int(name))
    return found

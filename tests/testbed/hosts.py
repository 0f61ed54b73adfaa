"""Hosts of their own on one machine: network namespaces with sshd, without a shared directory.

::

    with Hosts(3) as hosts:
        hosts[0].run(["ssh", "h2", "hostname"])
        hosts[1].cable(up=False)

Each host has its own network, name, ``$HOME``, ``/tmp``, ``/dev/shm``, ``/etc/hosts`` and network interfaces in ``/sys``;
the rest of the disk is that of the machine, as on a cluster with the same software everywhere. Process ids are those of
the machine.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.contract.store.etcd_server import Member, Servers
from tests.testbed.machine import BASE, Number, require, run, wait_until

REPOSITORY = Path(__file__).parents[2]
HOME = BASE / "home"
"""The home directory, of each host its own."""

PROGRAMS = ("ip", "ss", "sshd", "ssh", "ssh-keygen", "nsenter", "unshare", "setpriv")

ETCD_ELECTION = ("--heartbeat-interval", "50", "--election-timeout", "500")
"""Flags by which an etcd has its first leader, and the next one, after half a second."""

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
        lines = [f"hostname {self.name}", "umount -l -R /run/netns"]
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
        _wait_for_ready(self._holder, self.name)

    def start_sshd(self) -> None:
        """Start sshd, without waiting for it."""
        with (self._hosts.folder / f"sshd.{self.name}.log").open("ab") as log:
            command = ["/usr/sbin/sshd", "-D", "-e", "-f", str(self._hosts.folder / "sshd_config")]
            self._sshd = self.popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def accepts_ssh(self) -> bool:
        """Whether sshd listens."""
        try:
            socket.create_connection((self.address, 22), timeout=1).close()
        except OSError:
            return False
        return True

    # What runs there.

    def inside(self, argv: Sequence[object], cwd: Path | None = None) -> list[str]:
        """The command line that runs `argv` in this host, in `cwd`, by default its home. The process that is started with
        it becomes that of `argv`."""
        place = ["--mount", "--uts", "--ipc", "--net", f"--wdns={cwd or HOME}"]
        return ["nsenter", "--target", str(self._holder.pid), *place, "--", *map(str, argv)]

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
        within: float = 60.0,
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

    def path(self, inside: Path | str) -> Path:
        """The path by which a test sees the file `inside` of this host."""
        return Path(f"/proc/{self._holder.pid}/root") / str(inside).lstrip("/")

    def pids(self) -> list[int]:
        """All processes of the host, without the one that holds its namespaces."""
        return [pid for pid in _pids_in(self.namespace) if pid != self._holder.pid]

    # What may happen to a host.

    def cable(self, *, up: bool) -> None:
        """Plug the network cable in, or pull it: what is sent is lost, and nobody is told."""
        run("ip", "link", "set", self.namespace, "up" if up else "down")

    def netem(self, delay_ms: float = 0.0, loss: float = 0.0) -> None:
        """What this host sends is late by `delay_ms`, and a share `loss` of its packets is lost; 0 and 0 ends that."""
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
            _wait_for_ready(self.bad_cable, f"the cable of {self.name}")

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


class Hosts:
    """`count` hosts h1, h2 … in one network with this machine, which is their gateway.

    The directories `shared` are the same on all of them and here, as on NFS, also when they lie in ``/tmp``; so are the
    repository and this Python. Raises `Unavailable` where a test bed is not possible.
    """

    def __init__(self, count: int = 3, *, shared: Sequence[Path] = ()) -> None:
        require(*PROGRAMS)
        self._number = Number("hosts", range(1, 250), _clean)
        self.folder = self._number.folder
        self.prefix = _prefix(self._number.value)
        self.network = f"198.18.{self._number.value}"
        self.network6 = f"fd75:6e69:{self._number.value:x}"
        self.gateway = f"{self.network}.254"
        self.visible = [*shared, REPOSITORY, *map(Path, {sys.prefix, sys.base_prefix})]
        self._hosts: list[Host] = []
        self._etcd: Servers | None = None
        try:
            self._start(count)
        except BaseException:
            self.close()
            raise

    def _start(self, count: int) -> None:
        for each in (HOME, Path("/run/sshd")):
            each.mkdir(mode=0o755, exist_ok=True)
        names = {f"h{number}": f"{self.network}.{number}" for number in range(1, count + 1)}
        self._write_files(names)
        self._make_network(count)
        self._hosts = [Host(self, number) for number in range(1, count + 1)]
        for host in self:
            host.wait_for_holder()
            host.start_sshd()
        for host in self:
            wait_until(host.accepts_ssh, f"sshd of {host.name} listens")

    def _make_network(self, count: int) -> None:
        inner = range(1, count + 1)
        spaces = {f"{self.prefix}-{number}": number for number in inner}
        run("ip", "-batch", "-", stdin="".join(f"netns add {space}\n" for space in spaces))
        lines = [
            f"link add {self.prefix} type bridge forward_delay 0 stp_state 0",
            f"address add {self.gateway}/24 dev {self.prefix}",
            f"address add {self.network6}::fe/64 dev {self.prefix} nodad",
            f"link set {self.prefix} up",
        ]
        for space in spaces:
            lines += [f"link add {space} type veth peer name eth0 netns {space}"]
            lines += [f"link set {space} master {self.prefix} up"]
        run("ip", "-batch", "-", stdin="\n".join(lines))
        for space, number in spaces.items():
            lines = [
                "link set lo up",
                f"address add {self.network}.{number}/24 dev eth0",
                f"address add {self.network6}::{number}/64 dev eth0 nodad",
                "link set eth0 up",
                f"route add default via {self.gateway}",
            ]
            run("ip", "-n", space, "-batch", "-", stdin="\n".join(lines))

    def _write_files(self, addresses: Mapping[str, str]) -> None:
        folder = self.folder
        for name in ("key", "hostkey"):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", folder / name)
        hostkey = (folder / "hostkey.pub").read_text()
        (folder / "known_hosts").write_text("".join(f"{a} {hostkey}" for a in addresses.values()))
        (folder / "sshd_config").write_text(
            f"HostKey {folder}/hostkey\nAuthorizedKeysFile {folder}/key.pub\n"
            "Port 22\nKexAlgorithms curve25519-sha256\nStrictModes no\nUsePAM no\nPidFile none\nUseDNS no\nPrintMotd no\nPasswordAuthentication no\n"
            "PermitRootLogin yes\nMaxStartups 200\nMaxSessions 200\nSubsystem sftp internal-sftp\n"
        )
        entries = [f"Host {name}\n  HostName {address}\n" for name, address in addresses.items()]
        common = {
            "User": "root",
            "IdentityFile": folder / "key",
            "IdentitiesOnly": "yes",
            "UserKnownHostsFile": folder / "known_hosts",
            "GlobalKnownHostsFile": "/dev/null",
            "StrictHostKeyChecking": "yes",
        }
        entries += ["Host *\n", *(f"  {name} {value}\n" for name, value in common.items())]
        self.config.write_text("".join(entries))
        self.bin.mkdir()
        for name in ("ssh", "scp", "sftp"):
            program = self.bin / name
            program.write_text(f'#!/bin/sh\nexec /usr/bin/{name} -F {self.config} "$@"\n')
            program.chmod(0o755)
        own = "127.0.0.1 localhost\n::1 localhost\n"
        (folder / "hosts").write_text(own + "".join(f"{a} {name}\n" for name, a in addresses.items()))
        users = [line.split(":") for line in Path("/etc/passwd").read_text().splitlines()]
        lines = [":".join([*u[:5], str(HOME) if u[0] == "root" else u[5], *u[6:]]) for u in users]
        (folder / "passwd").write_text("\n".join(lines) + "\n")
        (folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")

    @property
    def config(self) -> Path:
        """For ``ssh -F``."""
        return self.folder / "ssh_config"

    @property
    def bin(self) -> Path:
        """To put first in PATH: there ``ssh`` takes `config`."""
        return self.folder / "bin"

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of a user of these hosts: that of this process, without what launchers set. Commands on this
        machine have another HOME with it as well, which is empty at first."""
        prefixes = ("PET_", "TORCHELASTIC_", "UNIRUN_", "SLURM_", "XDG_", "SSH_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONUNBUFFERED"):
            kept.pop(name, None)
        path = f"{self.bin}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {**kept, "PATH": path, "HOME": str(HOME), **(extra or {})}

    def etcd(self, flags: Sequence[str] = ETCD_ELECTION) -> Servers:
        """An etcd with one member on each host; members end with their hosts."""
        self._etcd = Servers(
            self.folder,
            members=[
                Member(
                    host.name,
                    self.folder,
                    tuple(flags),
                    address=host.address,
                    client_port=2379,
                    peer_port=2380,
                    around=tuple(host.inside([])),
                )
                for host in self
            ],
        )
        return self._etcd

    def close(self) -> None:
        """End all that runs on the hosts, and remove them."""
        for host in self:
            host.remove_bad_cable()
        self._number.give_back()
        if self._etcd is not None:
            self._etcd.stop()

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._hosts)

    def __getitem__(self, index: int) -> Host:
        return self._hosts[index]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)


def _prefix(number: int) -> str:
    return f"unibed{number}"


def _wait_for_ready(process: subprocess.Popen[bytes], what: str) -> None:
    assert process.stdout is not None
    with process.stdout as pipe:
        if pipe.readline() != b"ready\n":
            raise RuntimeError(f"{what} did not start: exit code {process.wait(10)}")


def _pids_in(namespace: str) -> list[int]:
    """All processes in a network namespace that ``ip netns`` has named."""
    inode = f"net:[{os.stat(f'/run/netns/{namespace}').st_ino}]"
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{name}/ns/net") == inode:
                found.append(int(name))
    return found


def _clean(number: int, folder: Path) -> None:
    """Remove the hosts with this number and kill what runs there."""
    prefix = _prefix(number)

    def remaining() -> list[int]:
        return [pid for namespace in namespaces for pid in _pids_in(namespace)]

    def all_killed() -> bool:
        for pid in remaining():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not remaining()

    named = Path("/run/netns")
    namespaces = [path.name for path in named.glob(f"{prefix}-*")] if named.exists() else []
    wait_until(all_killed, "all processes of the hosts are killed")
    links = [path.name for path in Path("/sys/class/net").glob(f"{prefix}-*")]
    links += [prefix] if Path("/sys/class/net", prefix).exists() else []
    run("ip", "-batch", "-", stdin="".join(f"link delete {link}\n" for link in links))
    run("ip", "-batch", "-", stdin="".join(f"netns delete {name}\n" for name in namespaces))
    shutil.rmtree(folder)

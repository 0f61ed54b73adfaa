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
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.contract.store.etcd_server import EtcdCluster, EtcdMember
from tests.testbed.host import HOME, Host, pids_in
from tests.testbed.machine import Number, require, run, wait_until

REPOSITORY = Path(__file__).parents[2]
PROGRAMS = ("ip", "ss", "sshd", "ssh", "ssh-keygen", "nsenter", "unshare", "setpriv")

ETCD_ELECTION = ("--heartbeat-interval", "50", "--election-timeout", "500")
"""Flags by which an etcd has its first leader, and the next one, after half a second."""


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
        self._etcd: EtcdCluster | None = None
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
        """The environment of a user of these hosts: that of this process, without what launchers set, and without a
        language, as a session over ssh has none. Commands on this machine have another HOME with it as well, which is
        empty at first."""
        prefixes = ("PET_", "TORCHELASTIC_", "UNIRUN_", "SLURM_", "XDG_", "SSH_", "LANG", "LC_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONUNBUFFERED"):
            kept.pop(name, None)
        path = f"{self.bin}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {**kept, "PATH": path, "HOME": str(HOME), **(extra or {})}

    def etcd(self, flags: Sequence[str] = ETCD_ELECTION) -> EtcdCluster:
        """An etcd with one member on each host; members end with their hosts."""
        self._etcd = EtcdCluster(
            self.folder,
            members=[
                EtcdMember(
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


def _clean(number: int, folder: Path) -> None:
    """Remove the hosts with this number and kill what runs there."""
    prefix = _prefix(number)

    def remaining() -> list[int]:
        return [pid for namespace in namespaces for pid in pids_in(namespace)]

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

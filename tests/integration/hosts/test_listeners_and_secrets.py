"""A job on three hosts listens on one interface of each host only, and shows its token to nobody."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from tests.testbed.host import HOME, Host

from ..harness import SCRIPTS, Running
from ..sockets import Listener, listeners_of
from .cluster import UnirunOnHosts, title_of

TRAINER = f"""
import os, sys, time
sys.path.insert(0, {str(SCRIPTS)!r})
from crew import Actor, Rollout
from unirun import BaseTrainer

class Patient(BaseTrainer):
    def init(self):
        pass

    def fit(self):
        print("sums", self.RG_ACTOR.add(2), self.RG_ROLLOUT.slow(0).result(), flush=True)
        while not os.path.exists("enough"):
            time.sleep(0.02)
"""


def start(cluster: UnirunOnHosts, *args: object) -> Running:
    """A trainer on h1 has called actors on h1 and h2, which have a gloo group, and a rollout on h3."""
    cluster.place("patient.py", TRAINER)
    cluster.place(
        "job.yaml",
        "trainer: patient:Patient\nroles:\n  actor: {count: 3, workload: 'patient:Actor'}\n"
        "  rollout: {count: 2, workload: 'patient:Rollout'}\n",
    )
    job = cluster.start(
        *("--hosts", "h1:2,h2:2,h3:2", "--rdzv-id", "mine", "--config", cluster.work / "job.yaml", *args),
        cwd=cluster.work,
    )
    job.lines("sums")
    return job


def listeners(host: Host) -> list[tuple[str, Listener]]:
    """Everything that listens on a host but sshd and etcd, each with the titles of its processes."""
    pids = host.pids()
    found = listeners_of(pids, net=Path(f"/proc/{pids[0]}/net"))
    named = [(" ".join(sorted({title_of(pid) for pid in each.owners})), each) for each in found]
    return [(who, each) for who, each in named if who not in ("sshd", "etcd")]


@pytest.mark.cold  # a warm process listens, too
def test_a_job_listens_where_others_of_it_connect_and_its_token_is_nowhere_to_be_seen(
    cluster: UnirunOnHosts,
) -> None:
    """
    1. A trainer calls workloads on three hosts, two of which have a gloo group.
    2. Each socket on which a process listens is one that it needs, at the address of its host or in the job's directory.
    3. The token is in no command line, environment, log, store or other file of any host.
    """
    job = start(cluster)
    calls, gloo, stores, master = 1, 1, 3, 1
    expected = {
        "h1": {
            "actor:0": calls + gloo,
            "actor:1": calls + gloo,
            "unirun-agent": stores,
            "unirun-master": master,
        },
        "h2": {"actor:2": calls + gloo, "unirun-agent": stores},
        "h3": {"rollout:0": calls, "rollout:1": calls, "unirun-agent": stores},
    }
    for host in cluster.hosts:
        found = listeners(host)
        tcp = [(who, each) for who, each in found if each.kind == "tcp"]
        assert {each.address for _, each in tcp} == {host.address}
        assert Counter(map(main_owner, tcp)) == expected[host.name], tcp
        unix = [(who, each) for who, each in found if each.kind == "unix"]
        # A path that is too long for the kernel is bound by way of a descriptor of its directory.
        assert {Path(each.address).name for _, each in unix} == {
            path.name for path in cluster.folder(host.name).rglob("*") if path.is_socket()
        }
        workers = [who for who in expected[host.name] if ":" in who]
        masters = ["unirun-master"] if host.name == "h1" else []
        assert sorted(who for who, _ in unix) == sorted([*workers, *masters, "unirun-agent"])
        assert len(found) == len(tcp) + len(unix), found
    shows_no_token(cluster, job)
    cluster.enough()
    assert job.end().code == 0
    assert (cluster.job_dir() / "token").read_text().strip() not in job.text


@pytest.mark.chaos
def test_the_token_is_not_in_etcd(cluster: UnirunOnHosts) -> None:
    servers = cluster.hosts.etcd()
    job = start(cluster, "--store", servers.url(timeout=5))
    shows_no_token(cluster, job)
    assert (cluster.job_dir() / "token").read_text().strip() not in servers.ctl("get", "", "--prefix")
    cluster.enough()
    assert job.end().code == 0


def main_owner(listener: tuple[str, Listener]) -> str:
    """The process that needs a socket: an agent holds those of stores, and on the head that of masters."""
    titles = listener[0].split()
    return next((who for who in ("unirun-master", "unirun-agent") if who in titles), listener[0])


def shows_no_token(cluster: UnirunOnHosts, job: Running) -> None:
    """Fail when the token can be seen in a process, or is in a file but those that are called token."""
    token = (cluster.job_dir() / "token").read_text().strip()
    assert len(token) == 64
    secrets = (token.encode(), token.upper().encode(), bytes.fromhex(token))
    shown = 0
    for pid in [job.pid, *(pid for host in cluster.hosts for pid in host.pids())]:
        for name in ("cmdline", "environ", "comm"):
            shown += no_secret(Path(f"/proc/{pid}/{name}"), secrets)
    for root in (cluster.root, cluster.hosts.folder):
        shown += sum(no_secret(path, secrets) for path in files_of(root))
    for host in cluster.hosts:
        for root in (Path("/tmp"), Path("/dev/shm"), HOME):
            shown += sum(no_secret(path, secrets) for path in files_of(host.path(root)))
    assert shown > 100, "there was something to look at"


def files_of(root: Path) -> list[Path]:
    """All files below a directory but those called token. What is mounted there is of this machine, and none of the job's."""
    device, found = root.stat().st_dev, []
    for place, folders, names in os.walk(root):
        folders[:] = [name for name in folders if os.lstat(os.path.join(place, name)).st_dev == device]
        found += [Path(place, name) for name in names if name != "token"]
    return [path for path in found if path.is_file()]


def no_secret(path: Path, secrets: tuple[bytes, ...]) -> bool:
    """Return True if the file could be read. Fails when it has a secret."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    assert not any(secret in content for secret in secrets), path
    return True

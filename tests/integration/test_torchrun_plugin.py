"""``torchrun --rdzv-backend=etcd-v3`` as a user calls it: real torchruns, workers over gloo, a real etcd."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contract.store.certificates import Authority
from tests.contract.store.etcd_server import Servers

from .harness import TORCHRUN, Running, Unirun, eventually

pytestmark = pytest.mark.timeout(240)

LONG = 150.0
"""Seconds for what imports torch several times, one after the other, on a busy machine."""

QUICK = {"last_call_timeout": "1", "keep_alive_interval": "1", "keep_alive_max_attempt": "4"}

TRAINING = """
    import json, os, signal, sys, time
    from pathlib import Path
    import torch, torch.distributed as dist

    folder = Path(sys.argv[1])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo")  # env://
    rank, world = dist.get_rank(), dist.get_world_size()
    pid = os.getpid()
    print(f"training {rank}/{world} node {os.environ['GROUP_RANK']} attempt {attempt} pid {pid}.", flush=True)
    for step in range(1_000_000):
        # The sum is that of this step only if nobody reads what an earlier attempt has left.
        total = torch.tensor([float(step), float((folder / f"stop {world}").exists())])
        dist.all_reduce(total)
        assert total[0] == world * step, (total, step)
        if total[1] == world or (step == 5 and "short" in sys.argv):
            break
        if step == 3 and f"die {rank}" in sys.argv and attempt < int(sys.argv[-1]):
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    print(f"finished {rank}/{world} attempt {attempt}.", flush=True)
    dist.destroy_process_group()
"""


WAITING = """
    import os, sys, time
    from pathlib import Path

    folder = Path(sys.argv[1])
    rank, world, attempt = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
    pid = os.getpid()
    print(f"training {rank}/{world} node {os.environ['GROUP_RANK']} attempt {attempt} pid {pid}.", flush=True)
    while "short" not in sys.argv and not (folder / f"stop {world}").exists():
        time.sleep(0.01)
    print(f"finished {rank}/{world} attempt {attempt}.", flush=True)
"""
"""Says what `TRAINING` says, for tests of what happens between nodes and etcd: torch is imported by torchrun only."""


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("etcd"))
    yield servers
    servers.stop()


Node = Callable[..., Running]


@pytest.fixture
def node(unirun: Unirun, etcd: Servers, script: Callable[..., Path], tmp_path: Path) -> Node:
    """Starts one node of a run; the `unirun` fixture ends it, and looks for orphans."""
    scripts = {text: script(text, f"{name}.py") for name, text in (("train", TRAINING), ("wait", WAITING))}

    def start(
        *args: str,
        nodes: str = "1",
        workers: int = 1,
        restarts: int = 0,
        run: str = tmp_path.name,
        etcd: Servers = etcd,
        what: str = TRAINING,
        **conf: str,
    ) -> Running:
        settings = ",".join(f"{key}={value}" for key, value in {**QUICK, **conf}.items())
        command = [
            *(TORCHRUN, "--rdzv-backend=etcd-v3", f"--rdzv-endpoint={etcd.members[0].endpoint}"),
            *(f"--rdzv-id={run}", f"--rdzv-conf={settings}", "--local-addr=127.0.0.1"),
            *(f"--nnodes={nodes}", f"--nproc-per-node={workers}", f"--max-restarts={restarts}"),
            *(str(scripts[what]), str(tmp_path), *args),
        ]
        return unirun.start_program(command)

    return start


def keys(etcd: Servers, run: str) -> list[str]:
    """What is in etcd below one run."""
    return etcd.ctl("get", "--prefix", "--keys-only", f"/torchrun/{run}/").split()


def beats(etcd: Servers, run: str, nodes: int) -> bool:
    """Whether the leases of so many nodes have been kept, or granted, again."""
    return sum("/nodes/" in key for key in keys(etcd, run)) == nodes


def healthy(etcd: Servers, *options: str) -> bool:
    """Whether etcdctl gets an answer."""
    try:
        return bool(etcd.ctl(*options, "get", "nothing", "--write-out=json"))
    except AssertionError:
        return False


def stop(tmp_path: Path, world: int) -> None:
    """Let the workers of a group of `world` finish."""
    (tmp_path / f"stop {world}").touch()


def pids(running: Running, world: int, within: float = LONG) -> int:
    """Wait until this node's worker trains in a group of so many; its pid."""
    return int(running.lines(rf"training \d+/{world} .* pid (\d+)\.", within=within)[0])


def test_two_nodes_meet_train_and_leave_nothing_in_etcd(node: Node, etcd: Servers, tmp_path: Path) -> None:
    nodes = [node("short", nodes="2", workers=2) for _ in range(2)]
    for running in nodes:
        result = running.end(LONG)
        assert result.code == 0, result.err
        assert len(re.findall(r"finished \d/4 attempt 0\.", result.out)) == 2
    assert keys(etcd, tmp_path.name) == []


def test_the_same_run_can_be_started_again_at_once(node: Node) -> None:
    for _ in range(2):
        result = node("short", what=WAITING).end(LONG)
        assert result.code == 0, result.err


def test_a_job_whose_worker_is_killed_again_and_again_restarts_and_finishes(node: Node) -> None:
    result = node("short", "die 1", "2", workers=2, restarts=2).end(LONG)
    assert result.code == 0, result.err
    assert sorted(re.findall(r"training (\d)/2 node 0 attempt (\d)", result.out)) == [
        (rank, attempt) for rank in "01" for attempt in "012"
    ]
    assert len(re.findall(r"finished \d/2 attempt 2\.", result.out)) == 2


def test_when_a_worker_of_one_node_is_killed_both_nodes_meet_again_and_finish(
    node: Node, tmp_path: Path
) -> None:
    nodes = [node(nodes="2", restarts=1) for _ in range(2)]
    workers = [pids(running, 2) for running in nodes]
    os.kill(workers[0], signal.SIGKILL)
    for running in nodes:
        running.lines(r"training \d/2", 2, within=LONG)
    stop(tmp_path, 2)
    for running in nodes:
        result = running.end(LONG)
        assert result.code == 0, result.err


def test_a_node_that_comes_later_joins(node: Node, tmp_path: Path) -> None:
    first = node(nodes="1:2")
    pids(first, 1)
    later = node(nodes="1:2")
    pids(first, 2)
    pids(later, 2)
    stop(tmp_path, 2)
    assert {running.end(LONG).code for running in (first, later)} == {0}


@pytest.mark.parametrize("rank", [0, 1], ids=["that has the workers' store", "that has it not"])
def test_when_a_node_is_killed_the_other_goes_on_alone(node: Node, tmp_path: Path, rank: int) -> None:
    nodes = [node(nodes="1:2", restarts=1, last_call_timeout="10") for _ in range(2)]
    for running in nodes:
        pids(running, 2)
    (killed,) = (running for running in nodes if f"training {rank}/2" in running.text)
    nodes.remove(killed)
    killed.signal(signal.SIGKILL)  # its worker goes on, as torch has it
    pids(nodes[0], 1)
    stop(tmp_path, 1)
    result = nodes[0].end(LONG)
    assert result.code == 0, result.err


def test_an_etcd_that_is_away_for_longer_than_the_heartbeats_stops_nothing(
    node: Node, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    servers = Servers(tmp_path_factory.mktemp("restarted"))
    conf = {"last_call_timeout": "10", "heartbeat_timeout": "1", "keep_alive_max_attempt": "2"}
    try:
        nodes = [node(nodes="1:2", etcd=servers, what=WAITING, **conf) for _ in range(2)]
        for running in nodes:
            pids(running, 2)
        servers.members[0].kill()
        for running in nodes:
            running.lines("failed to send a keep-alive heartbeat", 3, within=LONG)
        servers.start(servers.members[0])
        eventually(lambda: beats(servers, tmp_path.name, 2), "both nodes write to etcd again", LONG)
        stop(tmp_path, 2)
        for running in nodes:
            result = running.end(LONG)
            assert result.code == 0, result.err
            assert "finished" in result.out
            assert result.out.count("training") == 1
    finally:
        servers.stop()


def test_what_killed_nodes_leave_in_etcd_goes_by_itself(node: Node, etcd: Servers, tmp_path: Path) -> None:
    nodes = [node(nodes="2", what=WAITING, keep_alive_max_attempt="2") for _ in range(2)]
    workers = [pids(running, 2) for running in nodes]
    assert keys(etcd, tmp_path.name)
    for running, worker in zip(nodes, workers, strict=True):
        running.signal(signal.SIGKILL)
        os.kill(worker, signal.SIGKILL)
    eventually(lambda: not keys(etcd, tmp_path.name), "the leases end", LONG)


def test_etcd_may_ask_for_a_certificate_and_for_a_password(
    node: Node, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("secured")
    authority = Authority(folder)
    server_cert, server_key = authority.sign("server")
    cert, key = authority.sign("client")
    flags = ("--client-cert-auth", "--trusted-ca-file", str(authority.cert))
    flags += ("--cert-file", str(server_cert), "--key-file", str(server_key))
    servers = Servers(folder, flags=flags, scheme="https")
    tls = ("--cacert", str(authority.cert), "--cert", str(cert), "--key", str(key))
    password = tmp_path / "password"
    password.write_text("secret\n")
    password.chmod(0o600)
    try:
        eventually(lambda: healthy(servers, *tls), "etcd answers", LONG)
        for command in (
            ("user", "add", "root:top"),
            ("user", "add", "train:secret"),
            ("role", "add", "train"),
            ("role", "grant-permission", "train", "--prefix=true", "readwrite", "/jobs/"),
            ("user", "grant-role", "train", "train"),
            ("user", "grant-role", "root", "root"),
            ("auth", "enable"),
        ):
            servers.ctl(*tls, *command)
        conf = {"cacert": str(authority.cert), "cert": str(cert), "key": str(key), "prefix": "/jobs/"}
        conf |= {"what": WAITING, "user": "train", "password_file": str(password)}
        result = node("short", etcd=servers, **conf).end(LONG)
        assert result.code == 0, result.err
        password.write_text("wrong")
        refused = node("short", etcd=servers, **conf).end(LONG)
        assert refused.code != 0
        assert "RendezvousConnectionError" in refused.err
        assert "password" in refused.err
    finally:
        servers.stop()


def test_a_key_of_the_configuration_that_there_is_not_is_named(node: Node) -> None:
    result = node(ssl_cert="x").end(LONG)
    assert result.code != 0
    assert "--rdzv-conf has no key 'ssl_cert' for etcd-v3; there are join_timeout" in result.err

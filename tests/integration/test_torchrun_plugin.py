"""``torchrun --rdzv-backend=etcd-v3`` as a user calls it: torchruns, their workers, a real etcd.

One test starts the program `torchrun`; in the others the nodes are its `main` in processes forked from one that has imported
torch. The workers of one test train over gloo; those of the others do not import torch.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import BinaryIO, cast

import pytest

from tests.contract.cluster import FORKS
from tests.contract.store.certificates import Authority
from tests.contract.store.etcd_server import EtcdCluster
from tests.effort import variants
from tests.waiting import eventually

from .harness import START_TIMEOUT, TORCHRUN, Running, Unirun, alive, gone

pytestmark = [pytest.mark.timeout(300), pytest.mark.cold]

LONG = 150.0
"""Deadline in seconds for several imports of torch in sequence on a busy machine."""

QUICK = {"last_call_timeout": "1", "keep_alive_interval": "0.5", "keep_alive_max_attempt": "6"}

TRAINING = """
    import os, signal, sys, time
    from pathlib import Path
    import torch, torch.distributed as dist

    dist.init_process_group("gloo")  # env://
    rank, world = dist.get_rank(), dist.get_world_size()
    print(f"training {rank}/{world} node {os.environ['GROUP_RANK']} pid {os.getpid()}.", flush=True)
    for step in range(6):
        # The sum is that of this step only if nobody reads what an earlier attempt has left.
        total = torch.tensor([float(step)])
        dist.all_reduce(total)
        assert total[0] == world * step, (total, step)
        if step == 3 and rank == 1 and not (death := Path(sys.argv[1], "death")).exists():
            death.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    print(f"finished {rank}/{world}.", flush=True)
    dist.destroy_process_group()
"""


WAITING = """
    import os, socket, sys, time
    from pathlib import Path

    folder = Path(sys.argv[1])
    rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
    # The workers' store of this round can be reached.
    socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=60).close()
    print(f"training {rank}/{world} node {os.environ['GROUP_RANK']} pid {os.getpid()}.", flush=True)
    while "short" not in sys.argv and not (folder / f"stop {world}").exists():
        time.sleep(0.01)
    print(f"finished {rank}/{world}.", flush=True)
"""
"""Prints what `TRAINING` prints, without torch, for tests of nodes and etcd."""


def be_torchrun(argv: list[str], env: dict[str, str], cwd: Path, streams: list[Connection]) -> None:
    """Run the program `torchrun` in a forked process."""
    os.setsid()
    os.chdir(cwd)
    for number, stream in enumerate(streams, 1):
        os.dup2(stream.fileno(), number)
        stream.close()
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["torchrun", *argv]
    from torch.distributed.run import main

    main(argv)


class Forked:
    """A forked torchrun, with the part of `subprocess.Popen` that `Running` uses."""

    def __init__(self, argv: list[str], env: dict[str, str], cwd: Path) -> None:
        pipes = [FORKS.Pipe(duplex=False) for _ in range(2)]
        theirs = [writer for _, writer in pipes]
        self._process = FORKS.Process(target=be_torchrun, args=(argv, env, cwd, theirs))
        self._process.start()
        self.pid = cast(int, self._process.pid)
        self.stdout, self.stderr = (cast(BinaryIO, reader) for reader, _ in pipes)
        for each in theirs:
            each.close()

    def send_signal(self, signum: int) -> None:
        """Send a signal to this process alone."""
        os.kill(self.pid, signum)

    def wait(self, within: float = START_TIMEOUT) -> int:
        """The exit code, negative for a signal."""
        self._process.join(within)
        return cast(int, self._process.exitcode)


Node = Callable[..., Running]


@pytest.fixture
def node(unirun: Unirun, etcd: EtcdCluster, script: Callable[..., Path], tmp_path: Path) -> Iterator[Node]:
    """Starts one node of a run, forked or as the program; the `unirun` fixture checks for remaining workers."""
    scripts = {text: script(text, f"{name}.py") for name, text in (("train", TRAINING), ("wait", WAITING))}
    forks: list[Forked] = []

    def start(
        *args: str,
        nodes: str = "1",
        restarts: int = 0,
        run: str = tmp_path.name,
        etcd: EtcdCluster = etcd,
        program: str | None = None,
        what: str = WAITING,
        **conf: str,
    ) -> Running:
        settings = ",".join(f"{key}={value}" for key, value in {**QUICK, **conf}.items())
        argv = [
            *("--rdzv-backend=etcd-v3", f"--rdzv-endpoint={etcd.members[0].endpoint}"),
            *(f"--rdzv-id={run}", f"--rdzv-conf={settings}", "--local-addr=127.0.0.1"),
            *(f"--nnodes={nodes}", "--nproc-per-node=1", f"--max-restarts={restarts}"),
            *(str(scripts[what]), str(tmp_path), *args),
        ]
        if program is not None:
            return unirun.start_program([program, *argv])
        forks.append(Forked(argv, unirun.environment(), tmp_path))
        return Running(unirun, forks[-1], read=True)  # type: ignore[arg-type]

    yield start
    left = [fork for fork in forks if alive(fork.pid)]
    for fork in left:
        fork.send_signal(signal.SIGKILL)
        fork.wait()
    assert not left, "every node has ended"


def keys(etcd: EtcdCluster, run: str) -> list[str]:
    """The keys of one run in etcd."""
    return etcd.ctl("get", "--prefix", "--keys-only", f"/torchrun/{run}/").split()


def beats(etcd: EtcdCluster, run: str, nodes: int) -> bool:
    """Return True if the leases of so many nodes have been renewed or granted again."""
    return sum("/nodes/" in key for key in keys(etcd, run)) == nodes


def healthy(etcd: EtcdCluster, *options: str) -> bool:
    """Return True if etcdctl gets a response."""
    try:
        return bool(etcd.ctl(*options, "get", "nothing", "--write-out=json"))
    except AssertionError:
        return False


def stop(tmp_path: Path, world: int) -> None:
    """Let the workers of a group of `world` finish."""
    (tmp_path / f"stop {world}").touch()


def pids(running: Running, world: int, within: float = LONG) -> int:
    """Wait until this node's worker trains in a group of `world`. Returns its pid."""
    return int(running.lines(rf"training \d+/{world} .* pid (\d+)\.", within=within)[0])


def test_two_nodes_meet_again_after_the_kill_of_a_worker_and_leave_no_key_in_etcd(
    node: Node, etcd: EtcdCluster, tmp_path: Path
) -> None:
    # One of the workers dies of the other's death, or is ended first, which costs no restart.
    nodes = [node(nodes="2", restarts=2, what=TRAINING) for _ in range(2)]
    results = [running.end(LONG) for running in nodes]
    assert [result.code for result in results] == [0, 0], [result.err for result in results]
    for result in results:
        assert len(re.findall(r"training \d/2", result.out)) == 2
    assert sorted(re.findall(r"finished (\d)/2", "".join(result.out for result in results))) == ["0", "1"]
    assert keys(etcd, tmp_path.name) == []


def test_a_torchrun_job_whose_worker_is_killed_repeatedly_restarts_and_finishes(
    node: Node, tmp_path: Path
) -> None:
    running = node(restarts=2)
    for attempt in (1, 2):
        os.kill(int(running.lines(r"pid (\d+)\.", attempt, within=LONG)[-1]), signal.SIGKILL)
    running.lines(r"training 0/1", 3, within=LONG)
    stop(tmp_path, 1)
    result = running.end(LONG)
    assert (result.code, result.out.count("finished")) == (0, 1), result.err


def test_a_torchrun_run_can_be_restarted_with_its_id_at_once(node: Node) -> None:
    for program in (TORCHRUN, None):
        result = node("short", program=program).end(LONG)
        assert result.code == 0, result.err


@pytest.mark.parametrize("rank", variants(0, 1))
def test_a_late_node_joins_and_survives_the_kill_of_the_other(node: Node, tmp_path: Path, rank: int) -> None:
    """
    1. A torchrun trains alone, in a run of one or two nodes.
    2. A second one joins: both train in a group of two.
    3. The torchrun of rank 0 or 1 is killed; torch leaves its worker running.
    4. The other trains alone again, and ends with 0.
    """
    first = node(nodes="1:2")
    pids(first, 1)
    later = node(nodes="1:2")
    orphans = {running: pids(running, 2) for running in (first, later)}
    (killed,) = (running for running in (first, later) if f"training {rank}/2" in running.text)
    left = later if killed is first else first
    # The later one may have been alone as well, while the first one came to the second round.
    alone = left.text.count("training 0/1")
    killed.signal(signal.SIGKILL)  # its worker goes on, as torch has it
    left.lines("training 0/1", alone + 1, within=LONG)
    for world in (1, 2):
        stop(tmp_path, world)
    result = left.end(LONG)
    assert result.code == 0, result.err
    assert gone(orphans[killed], LONG)


def test_an_outage_of_etcd_longer_than_the_heartbeats_stops_nothing(
    node: Node, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """
    1. Two torchruns train together.
    2. etcd is killed until three heartbeats of each have failed.
    3. etcd is started again, and both nodes write to it.
    4. The workers end without a restart.
    """
    servers = EtcdCluster(tmp_path_factory.mktemp("restarted"))
    conf = {"last_call_timeout": "10", "heartbeat_timeout": "1", "keep_alive_max_attempt": "2"}
    try:
        nodes = [node(nodes="1:2", etcd=servers, **conf) for _ in range(2)]
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


def test_keys_of_killed_nodes_in_etcd_expire(node: Node, etcd: EtcdCluster, tmp_path: Path) -> None:
    """
    1. Two torchruns train together.
    2. Both and their workers are killed.
    3. The keys of the run in etcd expire.
    """
    nodes = [node(nodes="2", keep_alive_max_attempt="3") for _ in range(2)]
    workers = [pids(running, 2) for running in nodes]
    assert keys(etcd, tmp_path.name)
    for running, worker in zip(nodes, workers, strict=True):
        running.signal(signal.SIGKILL)
        os.kill(worker, signal.SIGKILL)
    eventually(lambda: not keys(etcd, tmp_path.name), "the leases end", LONG)


def test_torchrun_uses_an_etcd_with_certificates_and_a_password(
    node: Node, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("secured")
    authority = Authority(folder)
    server_cert, server_key = authority.sign("server")
    cert, key = authority.sign("client")
    flags: tuple[str, ...] = ("--client-cert-auth", "--trusted-ca-file", str(authority.cert))
    flags += ("--cert-file", str(server_cert), "--key-file", str(server_key))
    servers = EtcdCluster(folder, flags=flags, scheme="https")
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
        conf |= {"user": "train", "password_file": str(password)}
        result = node("short", etcd=servers, **conf).end(LONG)
        assert result.code == 0, result.err
        password.write_text("wrong")
        refused = node("short", etcd=servers, **conf).end(LONG)
        assert refused.code != 0
        assert "RendezvousConnectionError" in refused.err
        assert "password" in refused.err
    finally:
        servers.stop()


def test_an_unknown_rdzv_conf_key_is_named_by_torchrun(node: Node) -> None:
    result = node(ssl_cert="x").end(LONG)
    assert result.code != 0
    assert "--rdzv-conf has no key 'ssl_cert' for etcd-v3; there are join_timeout" in result.err

"""The agents of a job share no directory: each has its own, with the token and the URL of the store."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tests.waiting import eventually
from unirun.observe.events import read_events
from unirun.observe.jobdir import JobDir
from unirun.rendezvous.election import Leader, job_prefix, leader_of
from unirun.rendezvous.store.url import open_store
from unirun.wire.address import UnixAddress

from .harness import SCRIPTS, START_TIMEOUT, Script, Unirun, alive
from .test_losing_a_node import job_file

WAITING = """
    import os, pathlib, time
    role, rank, incarnation = (os.environ[name] for name in ("ROLE_NAME", "RANK", "UNIRUN_INCARNATION"))
    pathlib.Path(f"up-{rank}-{incarnation}").write_text(os.environ["UNIRUN_NODE"])
    print("up", rank, flush=True)
    while not pathlib.Path("enough").exists():
        time.sleep(0.02)
"""


def test_a_job_whose_agents_share_no_directory_outlives_its_master_and_a_node(
    unirun: Unirun, script: Script, tmp_path: Path
) -> None:
    """
    1. Three nodes, each agent with a directory of its own; ranks run on two of them, and log there.
    2. The master is killed: an agent starts the next one, which has nothing but that agent's directory.
    3. The agent of a node is killed: its ranks go on at the third node, with logs there.
    4. The workers end, and the command ends with 0.
    """
    options = job_file(unirun, script(WAITING), nodes=3, spares=1)
    program = [sys.executable, str(SCRIPTS / "own_directories.py"), str(tmp_path / "hosts")]
    job = unirun.start_program([*program, *map(str, options)])

    def up(incarnation: int) -> list[str] | None:
        marks = [unirun.root / f"up-{rank}-{incarnation}" for rank in range(4)]
        found = [mark.read_text() for mark in marks if mark.exists()]
        return found if len(found) == 4 and all(found) else None

    assert eventually(lambda: up(0), "all workers run", START_TIMEOUT) == ["node0", "node0", "node1", "node1"]
    run_id = unirun.job_dir().name
    store = open_store((unirun.job_dir() / "store").read_text())

    def leader(after: int) -> Leader | None:
        found = leader_of(store, job_prefix(run_id))
        return found if found is not None and found.epoch > after and alive(found.pid) else None

    first = eventually(lambda: leader(0), "a master leads")
    os.kill(first.pid, signal.SIGKILL)
    second = eventually(lambda: leader(first.epoch), "another master leads", START_TIMEOUT)
    assert isinstance(second.address, UnixAddress)
    own = JobDir(Path(second.address.path).parent)
    assert own.path.parents[1] == tmp_path / "hosts", (
        "it listens in the directory of the agent that has started it"
    )

    def joined() -> dict[str, int] | None:
        texts = [event.text.split() for event in read_events(own.events) if event.kind == "join"]
        found = {node: int(pid.rstrip(")")) for node, _, _, pid in texts}
        return found if len(found) == 3 else None

    pids = eventually(joined, "all agents have joined it", START_TIMEOUT)
    lost = "node1" if own.path.parent.name == "node0" else "node0"
    os.kill(pids[lost], signal.SIGKILL)
    nodes = eventually(lambda: up(1), "all workers run again", START_TIMEOUT)
    assert sorted(set(nodes)) == sorted({"node0", "node1", "node2"} - {lost})
    (unirun.root / "enough").touch()
    end = job.end()
    assert end.code == 0, end.err
    store.close()
    for rank, node in enumerate(nodes):
        log = tmp_path / "hosts" / node / run_id / "logs" / "actor" / str(rank) / "1" / "stdout.log"
        assert log.read_text() == f"up {rank}\n"

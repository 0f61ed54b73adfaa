"""A job listens only where it has to, and a process that disturbs torch's ports is named."""

from __future__ import annotations

import os
import re
import socket
import stat
from functools import partial
from pathlib import Path

import pytest

from tests.integration.harness import SCRIPTS, Running, Script, Unirun
from tests.integration.sockets import Listener, listeners_of
from tests.waiting import eventually
from unirun.observe.jobdir import JobDir
from unirun.wire.address import unix_address

TRAINER = """
import os, sys, time
sys.path.insert(0, {scripts!r})
from crew import Actor, Rollout
from unirun import BaseTrainer, WorkerLost

class Patient(BaseTrainer):
    def init(self):
        pass

    def fit(self):
        print("sums", self.RG_ACTOR.add(2), self.RG_ROLLOUT.slow(0).result(), flush=True)
        while not os.path.exists({flag!r}):
            time.sleep(0.02)
        for attempt in range(2):
            try:
                print("again", self.RG_ROLLOUT.slow(0).result(), flush=True)
                return
            except WorkerLost as lost:
                print(lost, flush=True)
"""


def start(unirun: Unirun, script: Script, transport: str) -> tuple[Running, Path]:
    """A job of two actors with a gloo group, one rollout and a trainer that has called them all, and the file whose
    appearance lets it call them again."""
    flag = unirun.root / "go"
    folder = script(TRAINER.format(scripts=str(SCRIPTS), flag=str(flag)), "patient.py").parent
    roles = "actor=2@patient:Actor,rollout=1@patient:Rollout"
    job = unirun.start(
        *("--cwd", folder, "--roles", roles, "--trainer", "patient:Patient", "--transport", transport)
    )
    job.lines("sums")
    return job, flag


def owned_by(found: list[Listener], unirun: Unirun, who: str) -> list[Listener]:
    """The sockets in `found` that the process of one rank has."""
    pid = eventually(lambda: unirun.workers()[who]["pid"], f"the status knows the process of {who}")
    return [each for each in found if pid in each.owners]


@pytest.mark.usefixtures("warm_rpc")
@pytest.mark.parametrize("transport", ["torch", "socket"])
def test_a_job_listens_on_loopback_and_in_its_own_directory_only(
    unirun: Unirun, script: Script, transport: str
) -> None:
    job, flag = start(unirun, script, transport)
    found = listeners_of(unirun.processes())
    tcp = [each for each in found if each.kind.startswith("tcp")]
    assert {each.address for each in tcp} == {"127.0.0.1"}
    folder = unirun.job_dir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = [each for each in found if each.kind == "unix" and each.address.startswith("/")]
    ours = {path.name: path.stat().st_mode for path in folder.rglob("*") if path.is_socket()}
    # A path that is too long for the kernel is bound by way of a descriptor of its directory.
    assert {Path(each.address).name for each in files} == ours.keys()
    assert all(each.address.startswith((str(folder), "/proc/self/fd/")) for each in files)
    assert {stat.S_IMODE(mode) for mode in ours.values()} == {0o600}
    # TensorPipe's shared memory, where there are processors for it.
    nameless = [each for each in found if each.address.startswith("@")]
    assert len(nameless) <= (4 if transport == "torch" else 0)
    assert len(found) == len(tcp) + len(files) + len(nameless), found
    stores = [each for each in tcp if len(each.owners) > 1]
    assert len(stores) == 3, "one for each role, held by the agent"
    group, agent = 1, int(transport == "torch")
    for who, count in {"actor:0": group, "actor:1": group, "rollout:0": 0, "trainer:0": 0}.items():
        assert len(owned_by(tcp, unirun, who)) == count + agent, who
    flag.touch()
    assert job.end().code == 0


def disturb(unirun: Unirun, who: str, said: bytes) -> None:
    """Connect to the only port of a rank as a port scanner does."""
    (port,) = [each for each in owned_by(listeners_of(unirun.processes()), unirun, who) if each.kind == "tcp"]
    with socket.create_connection((port.address, port.port)) as stranger:
        stranger.sendall(said)


def test_a_worker_whose_tensorpipe_port_was_closed_fails_and_restarts(unirun: Unirun, script: Script) -> None:
    job, flag = start(unirun, script, "torch")
    disturb(unirun, "rollout:0", b"\0")
    # Seen before the trainer needs it.
    eventually(lambda: unirun.workers()["rollout:0"]["incarnation"] == 1, "the rollout is started again")
    (failure,) = unirun.status()["failures"]
    assert failure["message"].startswith(
        "unirun.errors.ChannelError: torch.distributed.rpc does not listen at"
    )
    flag.touch()
    result = job.end()
    assert result.code == 0, result.err
    assert "again ['rollout:0']" in result.out


def test_a_serving_script_whose_tensorpipe_port_was_closed_fails(unirun: Unirun, script: Script) -> None:
    serving = """
        import time, unirun
        unirun.serve(object(), block=False)
        print("ready", flush=True)
        time.sleep(600)
    """
    job = unirun.start("--transport", "torch", "--role", "a", script(serving))
    job.lines(r"ready$")
    disturb(unirun, "a:0", b"")
    result = job.end()
    assert result.code == 1
    assert "ChannelError: torch.distributed.rpc does not listen at" in result.err.partition("root cause")[2]


def test_who_does_not_prove_the_token_to_the_agent_is_refused_and_counted_and_the_job_goes_on(
    running: Running,
) -> None:
    command = running.command
    job = JobDir(command.job_dir())
    (node,) = {worker["node"] for worker in command.workers().values()}

    def refusals(said: str) -> list[str]:
        return [text for text in command.events("refused") if re.search(said, text)]

    for number, first in enumerate((b"", os.urandom(200), bytes(32)), start=1):
        with socket.socket(socket.AF_UNIX) as sock, unix_address(job.agent_socket(node)) as address:
            sock.connect(address)
            sock.sendall(first)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass
        said = f"at the agent .* was refused: .* \\({number} so far\\)"
        eventually(partial(refusals, said), "the refusal is an event")
    assert {role["phase"] for role in command.status()["roles"]} == {"running"}
    assert command("stop").code == 0
    running.end()

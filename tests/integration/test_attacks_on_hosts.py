"""A job on three hosts is attacked at every address where it lets only its own in, and goes on."""

from __future__ import annotations

import re
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.contract.attacks import INSIDE, OUTSIDE, Target, silence
from tests.testbed.host import HOME, Host
from tests.testbed.hosts import Hosts
from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.observe.events import read_events
from unirun.wire.credentials import Credentials, load_credentials

from .harness import START_TIMEOUT, UNIRUN

CALLS = """
import os, time, torch
from unirun import BaseTrainer, BaseWorkload, WeightsChannel, trainer_invocation

class Has(BaseWorkload):
    def setup(self):
        self.weights = {"w": torch.zeros(1000)}
        if self.rank == 0:
            self.channel = WeightsChannel("policy", publisher="model", receivers=["worker"])

class Model(Has):
    def publish(self, version):
        self.weights["w"].fill_(version)
        self.channel.publish(self.weights, version)

class Worker(Has):
    @trainer_invocation()
    def square(self, number):
        return number * number

    @trainer_invocation(target="RANK0")
    def receive(self, version):
        self.channel.receive(into=self.weights, min_version=version)
        return self.weights["w"].unique().tolist()

class Trainer(BaseTrainer):
    def init(self): pass

    def fit(self):
        self.RG_MODEL.publish(1)
        print("before", self.RG_WORKER.square(2), self.RG_WORKER.receive(1), flush=True)
        while not os.path.exists("/tmp/job/go"):
            time.sleep(0.02)
        self.RG_MODEL.publish(2)
        print("after", self.RG_WORKER.square(3), self.RG_WORKER.receive(2), flush=True)
"""
ROLES = (
    "--roles",
    "worker=5@calls:Worker,model=1@calls:Model",
    "--trainer",
    "calls:Trainer",
    "--rdzv-id",
    "mine",
)
OURS = re.compile(r'"(?:worker:\d|model:\d|trainer:\d|unirun-master|unirun-agent)"')


def targets(host: Host, inside: Credentials, folder: Path) -> list[Target]:
    """The listeners of masters and workers on `host` that let in who has the job's token."""
    found = []
    for line in host.run(["ss", "-Hltnp"]).stdout.splitlines():
        addr, _, port = line.split()[3].rpartition(":")
        if OURS.search(line) and addr == host.address:
            found.append(Target(addr, int(port), host.name, inside, folder, patience=5.0))
    with ThreadPoolExecutor() as pool:
        ours = list(pool.map(lets_in, found))
    return [replace(each, patience=WAIT_TIMEOUT) for each, own in zip(found, ours, strict=True) if own]


def lets_in(target: Target) -> bool:
    try:
        with target.admitted():
            return True
    except (OSError, AssertionError):
        # One of torch, which knows neither TLS nor tokens.
        return False


def holders(host: Host, secret: bytes) -> list[str]:
    """The paths on a host that have the token, but for the files that are there to hold it."""
    found = []
    for pid in host.pids():
        for name in ("cmdline", "environ"):
            try:
                if secret in Path(f"/proc/{pid}/{name}").read_bytes():
                    found.append(f"{name} of process {pid}")
            except OSError:
                # It has ended.
                continue
    for root in (HOME, "/tmp/job"):
        files = [each for each in host.path(root).rglob("*") if each.is_file() and each.name != "token"]
        found += [str(path) for path in files if secret in path.read_bytes()]
    return found


@pytest.mark.cold  # a warm process listens, too
@pytest.mark.chaos
def test_a_job_under_attack_goes_on_and_its_token_is_nowhere(hosts: Hosts, tmp_path: Path) -> None:
    for host in hosts:
        folder = host.path("/tmp/job")
        folder.mkdir()
        (folder / "calls.py").write_text(CALLS)
    command = ["env", "--chdir=/tmp/job", UNIRUN, "--hosts", "h1,h2,h3", *ROLES]
    job = hosts[0].popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    held: list[socket.socket] = []
    try:
        assert job.stdout is not None
        assert b"before" in job.stdout.readline()
        (token,) = hosts[1].path(HOME).rglob("mine/token")
        inside = load_credentials(token.parent)
        attacked = [each for host in hosts for each in targets(host, inside, tmp_path)]
        assert {each.node for each in attacked} == {"h1", "h2", "h3"}, attacked
        for target in attacked:
            for attack in OUTSIDE:
                attack(target)
            held += silence(target, 4)
        for attack in INSIDE:
            attack(attacked[0])
        events = next(hosts[0].path(HOME).rglob("mine/events.jsonl"))

        def refusals(teller: str) -> list[str]:
            found = [each.text for each in read_events(events) if each.kind == "refused"]
            return [text for text in found if text.startswith(teller) and "was refused: " in text]

        for teller in ("a connection from ", "worker:"):
            eventually(partial(refusals, teller), f"an event of a refusal begins with {teller}")
        for secret in (inside.token, inside.token.hex().encode()):
            assert [place for host in hosts for place in holders(host, secret)] == []
        for host in hosts:
            (host.path("/tmp/job") / "go").touch()
        said, _ = job.communicate(timeout=START_TIMEOUT)
    finally:
        job.kill()
        for sock in held:
            sock.close()
    assert b"after [9, 9, 9, 9, 9] [2.0]" in said
    assert job.returncode == 0

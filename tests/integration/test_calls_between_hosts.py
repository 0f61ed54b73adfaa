"""Calls between hosts that share no directory: large tensors arrive whole, over either transport."""

from __future__ import annotations

import pytest

from tests.effort import variants
from tests.testbed.hosts import Hosts

from .harness import START_TIMEOUT, UNIRUN

CALLS = """
import os, torch
from unirun import BaseTrainer, BaseWorkload, trainer_invocation

class Worker(BaseWorkload):
    @trainer_invocation()
    def doubled(self, tensor):
        return os.environ["UNIRUN_NODE"], 2 * tensor

class Trainer(BaseTrainer):
    def init(self): pass

    def fit(self):
        tensor = torch.arange(1 << 20)
        for rank in range(len(self.RG_WORKER)):
            node, answer = self.RG_WORKER[rank].doubled(tensor)
            print("worker", rank, "on", node, "said", bool((answer == 2 * tensor).all()), flush=True)
"""


@pytest.mark.parametrize("transport", variants("socket", "torch"))
def test_a_trainer_calls_workers_on_all_hosts(hosts: Hosts, transport: str) -> None:
    for host in hosts:
        folder = host.path("/tmp/job")
        folder.mkdir()
        (folder / "calls.py").write_text(CALLS)
    roles = ("--roles", "worker=5@calls:Worker", "--trainer", "calls:Trainer", "--transport", transport)
    done = hosts[0].run(
        ["env", "--chdir=/tmp/job", UNIRUN, "--hosts", "h1,h2,h3", *roles], within=2 * START_TIMEOUT
    )
    said = {line.partition("worker ")[2] for line in done.stdout.splitlines() if "said" in line}
    assert len(said) == 5, done.stdout
    assert all(line.endswith("said True") for line in said)
    assert {line.split()[2] for line in said} == {"h1", "h2", "h3"}

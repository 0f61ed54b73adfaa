"""Two hosts that do not hear each other, though the head hears both, are named."""

from __future__ import annotations

import json
import subprocess
from textwrap import dedent

import pytest

from tests.testbed.host import Host
from tests.testbed.hosts import Hosts
from tests.waiting import eventually

from ..harness import EXEC, START_TIMEOUT, UNIRUN

TEXT = "h2 and h3 do not hear each other"
NOWHERE = "02:00:00:00:00:99"

SCRIPT = """
    import datetime, pathlib, os, time, torch, torch.distributed as dist
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    pathlib.Path("/tmp/up").touch()
    while True:
        dist.all_reduce(torch.ones(1))
        time.sleep(0.02)
"""


def loses_what_it_sends_to(host: Host, other: Host) -> None:
    host.run(["ip", "neigh", "replace", other.address, "lladdr", NOWHERE, "dev", "eth0", "nud", "permanent"])


@pytest.mark.chaos
def test_both_are_named_on_the_console_and_are_the_cause_of_the_failures(hosts: Hosts) -> None:
    """
    1. A rank on each of three hosts, in all_reduces with a time-out of 30 s.
    2. h2 and h3 lose what they send to each other. h1, which has the master, hears both, and is heard.
    3. The pair is told before the time-out; it is the likely cause of each failure.
    """
    for host in hosts:
        host.path("/tmp/train.py").write_text(dedent(SCRIPT))
    roles = ["--hosts", "h1:1,h2:1,h3:1", "--roles", "actor=3", "--rdzv-id", "pair"]
    with hosts[0].popen(
        [UNIRUN, *roles, *EXEC, "/tmp/train.py"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        try:
            eventually(
                lambda: all(host.path("/tmp/up").exists() for host in hosts), "all step", START_TIMEOUT
            )
            loses_what_it_sends_to(hosts[1], hosts[2])
            loses_what_it_sends_to(hosts[2], hosts[1])
            said, _ = job.communicate(timeout=START_TIMEOUT + 30)
        finally:
            job.kill()
    assert said.count(f"unirun: h2 and h3: {TEXT}, though both are heard") == 1, said
    assert said.index(TEXT) < said.index("Timed out waiting")
    failures = hosts[0].run([UNIRUN, "failures", "pair", "--json"]).stdout
    records = [json.loads(line)["record"] for line in failures.splitlines()]
    assert {(each["kind"], each["cause"]) for each in records if "Timed out" in each["message"]} == {
        ("cut_off", TEXT)
    }

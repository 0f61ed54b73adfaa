"""``unirun doctor`` on real hosts, one of which is not as the others."""

from __future__ import annotations

import json
import shlex
import textwrap
from typing import Any

import pytest

from tests.effort import variants
from tests.testbed.host import HOME, Host
from tests.testbed.hosts import Hosts
from tests.testbed.slurm import Slurm
from unirun.launcher.doctor.examine import by_ssh, pre_check
from unirun.launcher.hostlist import Host as Named
from unirun.launcher.hostlist import parse_hosts

from .harness import START_TIMEOUT, UNIRUN, Unirun

pytestmark = pytest.mark.cold


def doctor(host: Host, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the result of ``unirun doctor --json`` on `host`."""
    done = host.run([UNIRUN, "doctor", "--json", *options], check=False, within=START_TIMEOUT)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def told_of(host: str, found: dict[str, Any]) -> str:
    """The problems of one host, a line each: a busy machine adds that it is slow."""
    return "\n".join(fault["problem"] for fault in found["findings"] if fault["hosts"] == [host])


def fake(host: Host, program: str) -> None:
    """Every Python that a shell starts on `host` runs `program` first."""
    folder = host.path(HOME) / "fake"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(textwrap.dedent(program))
    (host.path(HOME) / ".bashrc").write_text(f"export PYTHONPATH={HOME}/fake\necho Welcome\n")


def test_hosts_that_are_alike_are_well(hosts: Hosts) -> None:
    hosts[0].path(HOME / "hosts").write_text("h1 slots=2\nh2 # the second\nroot@h3:4\n")
    code, found = doctor(hosts[0], "--hostfile", str(HOME / "hosts"))
    assert [host["facts"]["hostname"] for host in found["hosts"]] == ["h1", "h2", "h3"]
    assert [host["facts"]["address"] for host in found["hosts"]] == [host.address for host in hosts]
    assert len(found["links"]) == 6
    assert all(link["bandwidth"] > 0 and link["rtt"] > 0 for link in found["links"])
    assert [host["shared"] for host in found["hosts"]] == [["cwd", "home"], [], []]
    [reduced] = found["all_reduces"]
    assert (reduced["backend"], reduced["hosts"], reduced["problems"]) == ("gloo", ["h1", "h2", "h3"], {})
    # The hosts share the processors of this machine, and others may fill its shared memory.
    of_the_machine = ("sends ", "receives ", "a round trip ", "/dev/shm ")
    assert [each for each in found["findings"] if not each["problem"].startswith(of_the_machine)] == []
    assert code == bool(found["findings"])


def test_a_slow_host_a_wrong_clock_and_two_hosts_without_a_way_between_them_are_named(hosts: Hosts) -> None:
    hosts[1].netem(delay_ms=8)
    fake(hosts[2], "import time; now = time.time; time.time = lambda: now() + 5")
    hosts[1].run(["ip", "route", "add", "blackhole", hosts[2].address])
    code, found = doctor(hosts[0], "--hosts", "h[1-3]")
    assert code == 1
    assert "round trip" in told_of("h2", found)
    assert "ahead of" in told_of("h3", found)
    assert "no connection between h3 and h2: " in told_of("h3", found)
    [reduced] = found["all_reduces"]
    assert (reduced["hosts"], reduced["problems"]) == (["h1", "h2"], {})


@pytest.mark.chaos
def test_a_host_that_does_not_reach_the_first_one_is_left_out(hosts: Hosts) -> None:
    hosts[2].run(["ip", "route", "add", "blackhole", hosts[1].address])
    code, found = doctor(hosts[0], "--hosts", "h2,h3", "--interface", "eth0")
    assert code == 1
    assert "no connection between h3 and h2: " in told_of("h3", found)
    [reduced] = found["all_reduces"]
    assert (reduced["hosts"], reduced["problems"]) == (["h2"], {})


def test_hosts_that_cannot_be_examined_are_named_all_at_once_with_a_remedy(hosts: Hosts) -> None:
    hosts[1].kill_all(sshd=True)
    fake(hosts[2], "raise SystemExit('no Python here')")
    command = [UNIRUN, "doctor", "--hosts", "h1,h2,h3,nobody", "--interface", "eth7"]
    done = hosts[0].run(command, check=False, within=START_TIMEOUT)
    assert done.returncode == 1
    wrong = [line for line in done.stdout.splitlines() if line.startswith("! ")]
    assert [line.partition(":")[0] for line in wrong[:4]] == ["! h1", "! h2", "! h3", "! nobody"]
    assert "h1 has no interface eth7" in wrong[0]
    assert "Connection refused" in wrong[1]
    assert "no Python here" in wrong[2]
    assert "Could not resolve hostname nobody" in wrong[3]


def test_the_check_before_a_job_leaves_bad_hosts_out(hosts: Hosts) -> None:
    fake(hosts[2], "import time; now = time.time; time.time = lambda: now() - 5")

    def way(host: Named) -> list[str]:
        return ["env", f"PATH={hosts.bin}:/usr/bin", *by_ssh(host)]

    good, bad = pre_check(parse_hosts("h1,nobody,h3,h2"), way=way)
    assert [host.name for host in good] == ["h1", "h2"]
    assert [*bad] == ["nobody", "h3"]
    assert "Could not resolve hostname nobody" in bad["nobody"]
    assert "behind" in bad["h3"]


@pytest.mark.parametrize("heterogeneous", variants(True, False))
def test_in_an_allocation_of_slurm_its_nodes_are_examined(slurm_of_hosts: Slurm, heterogeneous: bool) -> None:
    out, script = (slurm_of_hosts.folder / name for name in ("out", "job.sh"))
    parts = "#SBATCH -N1\n#SBATCH hetjob\n#SBATCH -N1\n" if heterogeneous else "#SBATCH -N2\n"
    script.write_text(f"#!/bin/sh\n{parts}exec {shlex.quote(UNIRUN)} doctor --json\n")
    job = slurm_of_hosts.run("sbatch", "--parsable", f"--output={out}", script).strip()
    slurm_of_hosts.wait(job, START_TIMEOUT)
    found = json.loads(out.read_text())
    assert [host["facts"]["hostname"] for host in found["hosts"]] == ["h1", "h2"]
    assert len(found["links"]) == 2
    assert not found["all_reduces"][0]["problems"]


def test_without_hosts_this_one_is_examined(unirun: Unirun) -> None:
    result = unirun("doctor", "--json", "--interface", "lo")
    found = json.loads(result.out)
    [host] = found["hosts"]
    assert host["facts"]["python"].startswith("3.")
    assert not found["all_reduces"][0]["problems"]
    assert result.code == bool(found["findings"])

"""The test beds do what other tests take for granted."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.testbed.fixtures import available
from tests.testbed.host import HOME, Host
from tests.testbed.hosts import Hosts
from tests.testbed.machine import run
from tests.testbed.slurm import Slurm
from tests.waiting import WAIT_TIMEOUT, eventually

from .harness import gone, state_of

pytestmark = pytest.mark.cold  # on hosts without warm processes


def connects(source: Host, target: Host, timeout: float = 1.0) -> float | None:
    """Seconds until `source` has connected to sshd of `target`, or None."""
    program = f"""
        import socket, time
        began = time.monotonic()
        try:
            socket.create_connection(({target.address!r}, 22), timeout={timeout}).close()
            print(time.monotonic() - began)
        except OSError:
            pass
        """
    out = source.run([sys.executable, "-S", "-E", "-c", textwrap.dedent(program)]).stdout
    return float(out) if out else None


def test_hosts_reach_each_other_by_ssh(hosts: Hosts) -> None:
    for source in hosts:
        names = [source.run(["ssh", target.name, "hostname"]).stdout.strip() for target in hosts]
        assert names == ["h1", "h2", "h3"]


def test_the_machine_reaches_its_hosts_by_ssh(hosts: Hosts) -> None:
    command = ["ssh", "h3", "echo $HOSTNAME $HOME $PWD"]
    out = subprocess.run(command, env=hosts.environment(), capture_output=True, text=True, check=True).stdout
    assert out.split() == ["h3", str(HOME), str(HOME)]


@pytest.mark.parametrize("path", ["/tmp/it", "/dev/shm/it", "~/it"])
def test_a_host_has_its_own_files(hosts: Hosts, path: str) -> None:
    hosts[0].run(["ssh", "h2", f"echo here > {path}"])
    inside = path.replace("~", str(HOME))
    assert hosts[1].path(inside).read_text() == "here\n"
    assert not Path(inside).exists()
    assert not hosts[0].path(inside).exists()


def test_shared_directories_are_the_same_on_all_hosts(tmp_path: Path) -> None:
    with available(), Hosts(2, shared=[tmp_path]) as hosts:
        hosts[0].run(["tee", tmp_path / "it"], stdin="here")
        assert hosts[1].run(["cat", tmp_path / "it"]).stdout == "here"
        assert (tmp_path / "it").read_text() == "here"


def test_the_repository_and_this_python_are_on_all_hosts(hosts: Hosts) -> None:
    for host in hosts:
        out = host.run(
            [sys.executable, "-c", "import unirun; print(unirun.__file__)"], cwd=Path(__file__).parent
        )
        assert out.stdout.strip().endswith("unirun/__init__.py")


def test_a_host_sees_its_own_network_only(hosts: Hosts) -> None:
    assert sorted(hosts[0].run(["ls", "/sys/class/net"]).stdout.split()) == ["eth0", "lo"]
    assert hosts[0].run(["getent", "hosts", "h2"]).stdout.split() == [hosts[1].address, "h2"]


def test_a_pulled_cable_stops_traffic_until_it_is_plugged_in(hosts: Hosts) -> None:
    assert connects(hosts[0], hosts[1]) is not None
    hosts[1].cable(up=False)
    assert connects(hosts[0], hosts[1], timeout=0.3) is None
    assert connects(hosts[0], hosts[2]) is not None
    hosts[1].cable(up=True)
    assert connects(hosts[0], hosts[1], timeout=5.0) is not None


def test_a_bad_cable_delays_what_its_host_sends(hosts: Hosts) -> None:
    hosts[1].netem(delay_ms=60)
    assert (connects(hosts[0], hosts[1], timeout=10.0) or 0.0) > 0.06
    hosts[1].cable(up=False)
    hosts[1].cable(up=True)
    assert (connects(hosts[0], hosts[1], timeout=10.0) or 0.0) > 0.06
    hosts[1].netem(delay_ms=1, loss=1.0)
    assert connects(hosts[0], hosts[1], timeout=0.3) is None
    hosts[1].netem()
    assert connects(hosts[0], hosts[1], timeout=5.0) is not None


def test_the_process_of_a_bad_cable_ends_when_the_cable_is_removed(hosts: Hosts) -> None:
    hosts[1].netem(delay_ms=1)
    run("ip", "link", "delete", f"{hosts[1].namespace}t")
    assert hosts[1].bad_cable is not None
    assert hosts[1].bad_cable.wait(WAIT_TIMEOUT) == 0


def test_a_frozen_host_goes_on_when_it_is_thawed(hosts: Hosts) -> None:
    sleep = hosts[1].popen(["sleep", "60"])
    eventually(lambda: sleep.pid in hosts[1].pids(), "it is there")
    hosts[1].freeze()
    eventually(lambda: state_of(sleep.pid) == "T", "it is stopped")
    hosts[1].thaw()
    eventually(lambda: state_of(sleep.pid) == "S", "it sleeps")
    sleep.kill()
    sleep.wait()


def test_killing_all_leaves_a_host_with_a_new_sshd(hosts: Hosts) -> None:
    with hosts[1].popen(["sleep", "60"]):
        hosts[1].kill_all(sshd=True)
        assert hosts[1].pids() == []
    hosts[1].power_on()
    hosts[0].run(["ssh", "h2", "true"])


def test_etcd_has_a_member_on_each_host_and_outlives_one(hosts: Hosts) -> None:
    servers = hosts.etcd()
    servers.ctl("put", "key", "value")
    hosts[0].kill_all()
    others = ",".join(member.endpoint for member in servers.members[1:])
    assert servers.ctl("get", "key", "--print-value-only", endpoint=others) == "value\n"


def test_what_a_killed_process_has_left_is_removed_by_the_next_one() -> None:
    program = """
        import os, signal, subprocess
        from tests.testbed.hosts import Hosts
        hosts = Hosts(2)
        sleep = hosts[0].popen(["setsid", "sleep", "600"], stdout=subprocess.DEVNULL)
        print(sleep.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    root = Path(__file__).parents[2]
    with available(), Hosts(1):  # or the test is skipped
        maker = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=False)
    with Hosts(1):
        assert gone(int(maker.stdout), WAIT_TIMEOUT)


def test_srun_runs_on_three_nodes(slurm: Slurm) -> None:
    out = slurm.run("srun", "-N3", "--gres=gpu:2", "sh", "-c", "echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES")
    assert sorted(out.splitlines()) == ["n1 0,1", "n2 0,1", "n3 0,1"]


def test_the_nodes_of_slurm_can_be_hosts_of_their_own(slurm_of_hosts: Slurm, tmp_path: Path) -> None:
    out = slurm_of_hosts.run("srun", "-N3", "sh", "-c", f"hostname; ls -d {tmp_path} 2>/dev/null | wc -l")
    assert sorted(out.splitlines()) == ["0", "0", "0", "h1", "h2", "h3"]


def test_slurm_runs_heterogeneous_jobs(slurm: Slurm, tmp_path: Path) -> None:
    script = batch(
        tmp_path,
        """
        #SBATCH --nodes=1
        #SBATCH hetjob
        #SBATCH --nodes=2 --gres=gpu:1
        srun --het-group=0,1 sh -c 'echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES'
        """,
    )
    slurm.run("sbatch", "--wait", script)
    assert sorted((tmp_path / "out").read_text().splitlines()) == ["n1", "n2 0", "n3 0"]


def test_the_processes_of_a_killed_node_are_gone_and_it_can_start_again(slurm: Slurm, tmp_path: Path) -> None:
    script = batch(tmp_path, "sleep 600 & echo running $!\nwait")
    slurm.run("sbatch", "--nodelist=n1", script)
    eventually(lambda: "running" in out_of(tmp_path), "the job runs")
    slurm.kill_node("n1")
    assert gone(int(out_of(tmp_path).split()[-1]), 0.0)
    slurm.start_node("n1")
    assert slurm.run("srun", "--nodelist=n1", "hostname")


def batch(folder: Path, text: str) -> Path:
    """A batch script that writes to ``out`` in `folder`."""
    path = folder / "job.sh"
    path.write_text(f"#!/bin/sh\n#SBATCH --output={folder}/out\n" + textwrap.dedent(text).lstrip())
    return path


def out_of(folder: Path) -> str:
    """The output of the batch script so far."""
    return (folder / "out").read_text() if (folder / "out").exists() else ""

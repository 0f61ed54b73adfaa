"""Nodes that come into a running job, by hand and over ssh, and nodes that are taken out."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.integration.harness import EXEC, START_TIMEOUT, UNIRUN, Script
from tests.testbed.host import Host
from tests.testbed.hosts import Hosts
from tests.testbed.machine import wait_until

UNTIL_GROWN = """
    import os, socket, time
    size = int(os.environ["WORLD_SIZE"])
    mine = os.environ.get("MINE"), os.environ.get("ONLY")
    print("rank", os.environ["RANK"], "of", size, "on", socket.gethostname(), *mine, flush=True)
    if size < 6:
        time.sleep(600)
"""
UNTIL_BACK = """
    import os, time
    size, node = int(os.environ["WORLD_SIZE"]), os.environ["UNIRUN_NODE"]
    seen = os.environ.get("MINE"), os.environ.get("ONLY"), os.getcwd()
    print("rank", os.environ["RANK"], "of", size, "on", node, *seen, flush=True)
    if size < 4 or os.environ["UNIRUN_GENERATION"] == "0":
        time.sleep(600)
"""
UNTIL_MOVED = """
    import os, socket, time
    generation = os.environ["UNIRUN_GENERATION"]
    print("rank", os.environ["RANK"], "on", socket.gethostname(), "in", generation, flush=True)
    if generation == "0":
        time.sleep(600)
"""
JOBS = Path("/run/unirun-testbed/home/.local/state/unirun/jobs")


def visible(hosts: Hosts, script: Path) -> Path:
    """A copy of `script` in the same place on every host, beside a secret that they share."""
    for host in hosts:
        folder = host.path("/tmp/job")
        folder.mkdir()
        (folder / "train.py").write_text(script.read_text())
        (folder / "token").write_text("5a" * 32)
        (folder / "token").chmod(0o600)
    return Path("/tmp/job/train.py")


@contextmanager
def started(host: Host, *command: object) -> Iterator[subprocess.Popen[bytes]]:
    """A command on `host`, which is killed if the test fails before it has ended."""
    with host.popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            yield process
        finally:
            process.kill()


def say(process: subprocess.Popen[bytes], *, until: str) -> str:
    """The output of `process`, up to a line with `until`."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line.decode()
        if until in said:
            return said
    raise AssertionError(f"{until!r} is not in\n{said}")


def test_a_job_grows_by_a_command_that_comes_late_and_by_a_node_that_joins(
    hosts: Hosts, script: Script
) -> None:
    train = visible(hosts, script(UNTIL_GROWN))
    meeting = ("--nnodes", "1:3", "--nproc-per-node", "2", "--rdzv-endpoint", f"{hosts[0].address}:29400")
    command = (
        *(UNIRUN, *meeting, *EXEC, "--token-file", "/tmp/job/token"),
        *("--rdzv-conf", "last_call_timeout=0", "--rdzv-id", "elastic", train),
    )
    with started(hosts[0], "env", "MINE=job", *command) as head:
        said = say(head, until="rank 1 of 2")
        with started(hosts[1], *command) as late:
            said += say(late, until="of 4 on h2 job None")
            token = hosts[2].path("/tmp/job") / "of-the-job"
            token.write_text((hosts[0].path(JOBS / "elastic") / "token").read_text())
            token.chmod(0o600)
            joined = hosts[2].run(
                [
                    *("env", "MINE=shell", "ONLY=shell"),
                    *(UNIRUN, "agent", "join", "--rdzv-endpoint", f"{hosts[0].address}:29400"),
                    *("--token-file", "/tmp/job/of-the-job"),
                ],
                within=START_TIMEOUT,
            )
            assert "of 6 on h3 job None" in joined.stdout
            assert late.wait(START_TIMEOUT) == 0
        said += head.communicate(timeout=START_TIMEOUT)[0].decode()
    assert head.returncode == 0, said
    assert "h2 joined; default grows from 2 to 4 ranks" in said
    assert "h3 joined; default grows from 4 to 6 ranks" in said


def test_a_host_that_was_lost_comes_back_under_its_name_with_the_environment_of_the_job(
    hosts: Hosts, script: Script
) -> None:
    train = visible(hosts, script(UNTIL_BACK))
    command = (
        *("env", "-C", train.parent, "MINE=job", UNIRUN, "--hosts", "h1:2,h2:2", *EXEC),
        *("--roles", "actor=2:4", "--max-restarts", "2", "--rdzv-id", "back", train),
    )
    with started(hosts[0], *command) as running:
        said = ""
        while said.count("of 4 on") < 4:
            said += say(running, until="of 4 on")
        hosts[1].kill_all()
        while said.count("of 2 on h1") < 2:
            said += say(running, until="of 2 on h1")
        shell = ("env", "-C", "/", "MINE=shell", "ONLY=shell")
        joined = hosts[0].run(
            [*shell, UNIRUN, "agent", "join", "back", "--hosts", "h2"], within=START_TIMEOUT
        )
        assert joined.stdout == "h2.2 joined\n"
        said += running.communicate(timeout=START_TIMEOUT)[0].decode()
    assert running.returncode == 0, said
    assert said.count(f"of 4 on h2.2 job None {train.parent}") == 2, said


def test_a_node_is_drained_and_another_one_joins_over_ssh(hosts: Hosts, script: Script) -> None:
    train = visible(hosts, script(UNTIL_MOVED))
    command = (UNIRUN, "--hosts", "h1,h2", *EXEC, "--roles", "actor=4", "--rdzv-id", "moving", train)
    with started(hosts[0], *command) as running:
        said = ""
        while said.count("in 0") < 4:
            said += say(running, until="in 0")
        refused = hosts[0].run([UNIRUN, "agent", "drain", "h1"], within=START_TIMEOUT, check=False)
        assert "h1 keeps the job's store" in refused.stderr
        joined = hosts[0].run([UNIRUN, "agent", "join", "moving", "--hosts", "h3"], within=START_TIMEOUT)
        assert joined.stdout == "h3 joined\n"
        drained = hosts[0].run([UNIRUN, "agent", "drain", "h2"], within=START_TIMEOUT)
        assert drained.stdout == "h2 has left job moving\n"
        said += running.communicate(timeout=START_TIMEOUT)[0].decode()
    assert running.returncode == 0, said
    assert "h2 is drained; role actor starts again, with actor:2-3 elsewhere" in said
    assert {f"rank {rank} on h1 in 1" in said for rank in (0, 1)} == {True}


def test_a_job_over_ssh_that_is_detached_is_seen_and_stopped_from_where_it_was_started(
    hosts: Hosts, script: Script
) -> None:
    train = visible(hosts, script(UNTIL_MOVED))
    command = (UNIRUN, "-d", "--hosts", "h1,h2", *EXEC, "--roles", "actor=4", "--rdzv-id", "left", train)
    here = hosts[2]
    assert here.run(command, within=START_TIMEOUT).stdout == "left\n"
    copying = ["pgrep", "-f", "unirun.launcher.hosts.copying left"]
    seen = partial(here.run, [UNIRUN, "logs", "left"], within=START_TIMEOUT, check=False)
    wait_until(lambda: seen().stdout.count(" in 0") == 4, "output of all ranks", START_TIMEOUT)
    assert "job left: running" in here.run([UNIRUN, "status", "left"], within=START_TIMEOUT).stdout
    (copier,) = here.run(copying).stdout.split()
    os.kill(int(copier), signal.SIGKILL)
    wait_until(lambda: here.run(copying, check=False).returncode == 1, "its end", START_TIMEOUT)
    assert seen().stdout.count(" in 0") == 4
    assert "job left: running" in here.run([UNIRUN, "status", "left"], within=START_TIMEOUT).stdout
    assert "job left stopped" in here.run([UNIRUN, "stop", "left"], within=START_TIMEOUT).stdout
    wait_until(lambda: here.run(copying, check=False).returncode == 1, "the end of the copy", START_TIMEOUT)
    assert not (here.path(JOBS / "left") / "hosts.json").exists()
    assert "the job starts" in here.run([UNIRUN, "events", "left"], within=START_TIMEOUT).stdout
    removed = hosts[0].run([UNIRUN, "gc", "--older-than", "0s"], within=START_TIMEOUT).stdout
    assert "left" in removed
    assert not hosts[0].path(JOBS.parent / "nodes/h1/left").exists()


def test_commands_on_each_host_may_detach_and_the_job_is_stopped_on_the_head(
    hosts: Hosts, script: Script
) -> None:
    train = visible(hosts, script(UNTIL_MOVED))
    command = (
        *(UNIRUN, "-d", "--nnodes", "2", "--rdzv-endpoint", f"{hosts[0].address}:29400", *EXEC),
        *("--token-file", "/tmp/job/token", "--rdzv-id", "both", train),
    )
    with started(hosts[1], *command) as member:
        assert hosts[0].run(command, within=START_TIMEOUT).stdout == "both\n"
        assert member.wait(START_TIMEOUT) == 0
    status = partial(hosts[0].run, [UNIRUN, "status", "both"], within=START_TIMEOUT)
    wait_until(
        lambda: status().stdout.count("  running  ") == 3, "a role of two ranks that run", START_TIMEOUT
    )
    assert "job both stopped" in hosts[0].run([UNIRUN, "stop", "both"], within=START_TIMEOUT).stdout

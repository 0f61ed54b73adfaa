"""One job on several hosts, which share no directory: over ssh, by a command on each, and in a step of Slurm."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.testbed.hosts import Hosts
from tests.testbed.slurm import Slurm

from ..harness import EXEC, START_TIMEOUT, UNIRUN, Script

WHERE = """
    import os, socket
    print(os.environ["ROLE_NAME"], os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "on", socket.gethostname(), flush=True)
"""
ROLES = ("--roles", "actor=4,rollout=2")
EVERY_RANK = {
    *(f"[actor:{rank}] actor {rank} of 4 on h{1 + rank // 2}" for rank in range(4)),
    *(f"[rollout:{rank}] rollout {rank} of 2 on h3" for rank in range(2)),
}


def outputs(text: str) -> set[str]:
    return {line for line in text.splitlines() if line.startswith("[")}


def visible(hosts: Hosts, script: Path) -> Path:
    """A copy of `script` in the same place on every host."""
    for host in hosts:
        folder = host.path("/tmp/job")
        folder.mkdir()
        (folder / "train.py").write_text(script.read_text())
    return Path("/tmp/job/train.py")


def test_a_job_over_ssh_shows_the_output_of_all_ranks_and_leaves_its_logs_with_the_command(
    hosts: Hosts, script: Script
) -> None:
    train = visible(hosts, script(WHERE))
    done = hosts[0].run(
        [UNIRUN, "--hosts", "h1,h2,h3", *EXEC, *ROLES, "--rdzv-id", "mine", train], within=START_TIMEOUT
    )
    assert outputs(done.stdout) == EVERY_RANK
    logs = hosts[0].path("/run/unirun-testbed/home") / ".local/state/unirun/jobs/mine/logs"
    for role, count in (("actor", 4), ("rollout", 2)):
        for rank in range(count):
            assert (
                f"{role} {rank} of {count} on h" in (logs / role / str(rank) / "0" / "stdout.log").read_text()
            )


def test_a_host_that_cannot_take_part_is_named_with_the_remedy_and_so_are_all_others(
    hosts: Hosts, script: Script
) -> None:
    train = visible(hosts, script(WHERE))
    (hosts[1].path("/tmp/job") / "train.py").unlink()
    (hosts[2].path("/tmp/job") / "train.py").unlink()
    with hosts[0].popen(
        [UNIRUN, "--hosts", "h1,h2,h3", *EXEC, *ROLES, train],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as command:
        said = command.communicate(timeout=START_TIMEOUT)[0].decode()
    assert command.returncode == 4
    for name in ("h2", "h3"):
        assert (
            f"{name}: {name} has no /tmp/job/train.py; put it there, share the directory, or use --sync"
            in said
        )


def test_commands_on_each_host_show_the_output_of_their_own_ranks(hosts: Hosts, script: Script) -> None:
    train = visible(hosts, script(WHERE))
    for host in hosts:
        secret = host.path("/tmp/job") / "token"
        secret.write_text("5a" * 32)
        secret.chmod(0o600)
    meeting = (
        "--nnodes",
        "3",
        "--rdzv-endpoint",
        f"{hosts[0].address}:29400",
        "--token-file",
        "/tmp/job/token",
    )
    commands = [
        host.popen(
            [UNIRUN, *meeting, "--node-rank", str(rank), *EXEC, *ROLES, train],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank, host in enumerate(hosts)
    ]
    said = [command.communicate(timeout=START_TIMEOUT)[0].decode() for command in commands]
    assert [command.returncode for command in commands] == [0, 0, 0], said
    # Nodes without a rank have the order in which they have come.
    for number, text in enumerate(said, 1):
        assert {line.split()[-1] for line in outputs(text)} == {f"h{number}"}
    shown = [line.split(" on ")[0] for text in said for line in outputs(text)]
    assert sorted(shown) == sorted(line.split(" on ")[0] for line in EVERY_RANK)


def test_a_job_in_a_step_of_slurm_has_an_agent_on_each_node(
    slurm: Slurm, script: Script, tmp_path: Path
) -> None:
    train = script(WHERE.replace("socket.gethostname()", 'os.environ["UNIRUN_NODE"].replace("n", "h")'))
    home = {**os.environ, "UNIRUN_HOME": str(tmp_path / "home")}
    step = ("srun", "-N3", "--ntasks-per-node=1", "--cpus-per-task=2")
    done = slurm.run(*step, UNIRUN, *EXEC, *ROLES, train, env=slurm.environment(home))
    assert outputs(done) == EVERY_RANK
    assert not any((tmp_path / "home" / "slurm").iterdir())

"""A trainer whose workers are on other hosts, over ssh. Checkpoints are in a directory that all of them share."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import unirun
from tests.testbed.fixtures import available
from tests.testbed.hosts import REPOSITORY, Hosts
from tests.testbed.warm import WarmHosts, is_warm
from tests.waiting import eventually
from unirun import train
from unirun.train import Trainer, TrainingCallback

from ..harness import START_TIMEOUT, Script, gone, swept
from ..test_trainer_data import SAMPLES, consume, each_once
from .cluster import UnirunOnHosts, title_of

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, warm_hosts: WarmHosts) -> Iterator[UnirunOnHosts]:
    """The command on this machine. Drivers run here, too, as users of the hosts."""
    root, shared = tmp_path_factory.mktemp("cluster"), tmp_path_factory.mktemp("shared")
    with (
        available(),
        Hosts(3, shared=[shared]) as hosts,
        swept(UnirunOnHosts(root, hosts, warm_hosts)) as command,
    ):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in command.environment({"SHARED": str(shared)}).items():
                patch.setenv(name, value)
            patch.chdir(REPOSITORY)
            yield command
        # What ssh has started may not have this home in its environment, by which `swept` finds processes.
        eventually(lambda: not left_on(hosts), "nothing is left on the hosts")


def left_on(hosts: Hosts) -> list[str]:
    """The processes that run on the hosts, but for the test bed: sshd, a warm process, and what holds the namespaces."""
    found = [title_of(pid) for host in hosts for pid in host.pids() if not is_warm(pid)]
    return [title for title in found if title not in ("sshd", "sleep", "")]


@pytest.fixture(scope="module")
def shared(cluster: UnirunOnHosts) -> Path:
    return Path(os.environ["SHARED"])


@pytest.fixture(scope="module")
def trainer(cluster: UnirunOnHosts, shared: Path) -> Iterator[Trainer]:
    """Two ranks on h1 and two on h2 at first, and more where a host joins."""
    logdir = shared / "logs"
    with Trainer((2, 6), placement="h1:2,h2:2", logdir=logdir, max_failures=1, grow_every=0.0) as made:
        made.start()
        yield made


def test_results_of_all_hosts_are_in_rank_order_and_ranks_are_numbered_on_each(trainer: Trainer) -> None:
    def function() -> Any:
        total = torch.tensor([train.world_rank()])
        dist.all_reduce(total)
        return train.world_rank(), train.local_rank(), socket.gethostname(), total.item()

    found = [(0, 0, "h1", 6), (1, 1, "h1", 6), (2, 0, "h2", 6), (3, 1, "h2", 6)]
    assert trainer.run(function) == found


def step_by_step(config: dict[str, Any]) -> int:
    """Saves and reports each of three steps; rank 3 is killed once after the second one was saved."""
    state = train.load_checkpoint()
    first: int = state["step"] + 1 if state else 0
    for step in range(first, 3):
        dist.barrier()
        train.save_checkpoint(step=step)
        train.report(step=step, host=socket.gethostname())
        mark = Path(config["mark"])
        if step == 1 and train.world_rank() == 3 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return first


def test_a_run_goes_on_from_its_last_checkpoint_when_a_rank_of_another_host_is_killed(
    trainer: Trainer, shared: Path
) -> None:
    rounds: list[Results] = []

    class Rounds(TrainingCallback):
        def handle_result(self, results: Results) -> None:
            rounds.append(results)

    firsts = trainer.run(step_by_step, config={"mark": str(shared / "killed")}, callbacks=[Rounds()])
    assert (shared / "killed").exists()
    assert len({*firsts}) == 1
    assert firsts[0] in (1, 2), "the last report may not have reached the driver"
    assert [results[0]["step"] for results in rounds] == [0, 1, 2]
    assert [[each["host"] for each in results] for results in rounds] == [["h1", "h1", "h2", "h2"]] * 3
    latest = trainer.latest_checkpoint
    assert latest is not None
    assert Path(latest).is_relative_to(shared)
    assert trainer.run(step_by_step, config={"mark": str(shared / "killed")}, checkpoint=latest) == [3] * 4


def test_print_and_the_command_and_who_attaches_see_the_workers_where_they_are(
    cluster: UnirunOnHosts, trainer: Trainer
) -> None:
    lines = str(trainer).splitlines()
    assert [line.split()[1] for line in lines[2:]] == ["h1", "h1", "h2", "h2"]
    name = lines[0].split()[1].rstrip(":")
    with unirun.attach(name) as job:
        described = job["worker"].describe()
    assert [str(each["pid"]) for each in described] == [line.split()[2] for line in lines[2:]]
    shown = cluster("status", name).out
    assert f"job {name}: running" in shown


@pytest.mark.chaos
def test_a_host_that_joins_makes_the_run_larger_at_the_next_checkpoint_and_each_sample_is_used_once(
    cluster: UnirunOnHosts, trainer: Trainer, shared: Path
) -> None:
    name = str(trainer).split()[1].rstrip(":")
    worlds: list[int] = []

    class Joining(TrainingCallback):
        """After the third report a host joins, and the run takes no next one before it has."""

        def handle_result(self, results: Results) -> None:
            worlds.append(len(results))
            if len(worlds) == 3:
                joined = cluster("agent", "join", name, "--hosts", "h3:2", cwd=REPOSITORY)
                assert joined.out == "h3 joined\n", joined.err

    config = {"batch": 5, "kill": -1, "mark": str(shared / "unused"), "victim": None}
    results = trainer.run(consume, config=config, dataset=torch.arange(SAMPLES), callbacks=[Joining()])
    assert {*worlds} == {4, 6}
    assert worlds == sorted(worlds)
    assert len(results) == 6
    assert each_once(results[0])
    assert trainer.run(lambda: socket.gethostname()) == ["h1", "h1", "h2", "h2", "h3", "h3"]


DRIVER = """
    import os
    from unirun import train

    def function():
        train.report(pid=os.getpid())
        while True:
            pass

    if __name__ == "__main__":
        trainer = train.Trainer(2, placement="h1:1,h2:1")
        for results in trainer.run_iterator(function):
            print("pids", *(each["pid"] for each in results), flush=True)
"""


@pytest.mark.chaos
def test_a_driver_that_is_killed_leaves_no_worker_on_any_host(cluster: UnirunOnHosts, script: Script) -> None:
    driver = cluster.start_program([sys.executable, str(script(DRIVER))], cwd=REPOSITORY)
    (line,) = driver.lines(r"pids ([\d ]+)", within=START_TIMEOUT)
    os.kill(driver.pid, signal.SIGKILL)
    for pid in map(int, line.split()):
        assert gone(pid, 10)

"""Jobs that are submitted to a Slurm of three nodes on this host."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.effort import variants
from tests.waiting import eventually
from unirun.experiments.starting import PRELOAD

from ..testbed.fixtures import available
from ..testbed.slurm import Slurm
from . import test_trials as trials
from .harness import EXEC, START_TIMEOUT, UNIRUN, Running, Script, Unirun
from .test_stopping_together import STEPS
from .warm import ONE_THREAD, Warm

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).parents[2] / "examples"

KILLED = {"UNIRUN_WARM": "0"}
"""For jobs on a node that is killed: all of their processes must be found there."""

WAIT = "import time; print('here', flush=True); time.sleep(600)"

SAVES = """
    import os, time
    from unirun import BaseTrainer, BaseWorkload

    class Actor(BaseWorkload):
        pass

    class Trainer(BaseTrainer):
        def init(self):
            pass

        def fit(self):
            print("found", self.load_state(), "requeued", os.environ.get("SLURM_RESTART_COUNT", "0"), flush=True)
            if self.load_state() is None:
                self.save_state(b"half")
                print("saved", flush=True)
                time.sleep(600)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    """One for all tests: each leaves it idle."""
    with available(), Slurm() as slurm:
        yield slurm


@pytest.fixture(scope="session")
def warm_steps(warm: Warm) -> None:
    """Warm processes for spawners in steps, which have root's group as a supplementary one; one is for trials."""
    warm.fork(holder=os.getpid())
    warm.fork(holder=os.getpid(), env=ONE_THREAD)
    warm.fork(*PRELOAD, holder=os.getpid(), env=ONE_THREAD)


@pytest.fixture
def command(unirun: Unirun, cluster: Slurm, warm_steps: None, monkeypatch: pytest.MonkeyPatch) -> Unirun:
    """The command on a login node."""
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    return unirun


def slurm_id(running: Running) -> str:
    (found,) = running.lines(r"is Slurm job (\d+)")
    return found


def test_a_submitted_job_is_followed_and_has_its_exit_code(command: Unirun, script: Script) -> None:
    train = script(
        """
        import os, pathlib, sys, time
        rank = os.environ["RANK"]
        print("rank", rank, sys.argv[1:], flush=True)
        pathlib.Path(rank).touch()
        while not pathlib.Path(str(1 - int(rank))).exists():
            time.sleep(0.01)
        sys.exit(7)
        """
    )
    result = command("--slurm", "nodes=1,partition=debug", *EXEC, "--roles", "a=2", train, "a b", "$x")
    assert result.code == 7
    for rank in (0, 1):
        assert f"[a:{rank}] rank {rank} ['a b', '$x']\n" in result.out
    assert "RUNNING on n" in result.err
    assert "FAILED on n" in result.err
    assert (command.status()["phase"], command.status()["code"]) == ("failed", 7)


def test_ctrl_c_cancels_a_submitted_job(command: Unirun, script: Script, cluster: Slurm) -> None:
    job = command.start("--slurm", "nodes=1", *EXEC, script(WAIT))
    job.lines("here")
    job.signal(signal.SIGINT)
    result = job.end()
    assert result.code == 128 + signal.SIGINT, result.err
    assert cluster.job(slurm_id(job))["JobState"] == "CANCELLED"
    assert (command.status()["phase"], command.status()["code"]) == ("stopped", 143)


def test_status_logs_and_stop_work_on_a_submitted_job(command: Unirun, script: Script) -> None:
    name = command("--slurm", "nodes=1", "--detach", *EXEC, script(WAIT)).out.strip()
    eventually(lambda: [*command.home.glob("jobs/*/state.json")], "the job has begun", START_TIMEOUT)
    eventually(lambda: command.status()["phase"] == "running", "the job runs", START_TIMEOUT)
    assert "RUNNING on n" in command("status", name).out
    assert eventually(lambda: command("logs", name).out, "the worker has written") == "[default:0] here\n"
    assert "running" in command("ls").out
    stopped = command("stop", name)
    assert (stopped.code, "CANCELLED, exit code 143" in stopped.out) == (0, True), stopped
    assert (command.status()["phase"], command.status()["code"]) == ("stopped", 143)


def test_a_pending_job_tells_why_and_can_be_stopped(command: Unirun, script: Script) -> None:
    job = command.start("--slurm", "nodes=1,begin=now+1hour", *EXEC, script(WAIT))
    job.lines(r"PENDING \(BeginTime\)")
    assert command.status()["phase"] == "pending"
    assert "pending" in command("ls").out
    again = command("--slurm", "nodes=1", "--rdzv-id", command.status()["run_id"], script(WAIT))
    assert (again.code, "is running; stop it with" in again.err) == (2, True)
    assert command("gc", "--older-than", "0s").code == 0
    assert command("stop").code == 0
    assert job.end().code == 143
    assert command.status()["reason"] == "its batch job has ended before it began"


def test_what_sbatch_refuses_leaves_nothing(command: Unirun, script: Script) -> None:
    result = command("--slurm", "nodes=1,partition=missing", script(WAIT))
    assert result.code == 2
    assert "sbatch: invalid partition specified: missing; Batch job submission failed: " in result.err
    assert [*(command.home / "jobs").iterdir()] == []


def test_a_job_that_a_step_submits_has_its_own_processors_memory_options_and_setup(
    command: Unirun, script: Script, cluster: Slurm
) -> None:
    train = script("import os; print(os.environ['SLURM_CPUS_ON_NODE'], os.environ['A'], flush=True)")
    script("export A=1", "env.sh")
    job = ("--slurm", "nodes=1,cpus_per_task=8,mem_per_cpu=100,without=open_mode")
    more = ("--slurm-extra", "--comment='a b'", "--slurm-setup", "source ./env.sh")
    step = ("srun", "-N1", "-n1", "-c2", "--mem=500", UNIRUN)
    done = command.start_program([*step, *job, *more, *EXEC, str(train)]).end(2 * START_TIMEOUT)
    assert (done.code, [line for line in done.lines if line == "8 1"]) == (0, ["8 1"]), done
    (number,) = re.findall(r"is Slurm job (\d+)", done.err)
    assert "Comment=a b " in cluster.run("scontrol", "--oneliner", "show", "job", number)


def test_a_job_that_is_told_to_end_before_its_step_has_begun_ends(
    command: Unirun, script: Script, cluster: Slurm
) -> None:
    """Slurm passes no signal on to a step that is about to begin. This one begins when the script has got it."""
    script('srun() { touch held; until [ -e go ]; do sleep 0.1; done; command srun "$@"; }', "late.sh")
    late = ("--slurm-setup", "source ./late.sh")
    job = command.start("--slurm", "nodes=1", *late, *EXEC, script(WAIT))
    eventually((command.root / "held").exists, "the script is about to begin its step", START_TIMEOUT)
    cluster.run("scancel", "--batch", "--signal=TERM", slurm_id(job))
    job.lines("CANCELLED AT")
    (command.root / "go").touch()
    result = job.end()
    # The signal may come before unirun has handlers: then nothing says more of the end.
    assert (result.code, command.status()["phase"] in ("stopped", "lost")) == (143, True), (
        result,
        command.status(),
    )
    assert cluster.wait(slurm_id(job))["JobState"] == "FAILED"


@pytest.mark.chaos
def test_a_job_is_told_to_end_before_its_time_limit(command: Unirun, script: Script, cluster: Slurm) -> None:
    """Slurm looks at time limits once in 30 s, so a job of a minute is told in its first half."""
    job = command.start("--slurm", "nodes=1,time=1,grace=59", *EXEC, script(WAIT))
    assert job.end(2 * START_TIMEOUT).code == 143
    assert cluster.wait(slurm_id(job))["JobState"] == "FAILED", "it has not reached the limit"


def test_a_preempted_job_begins_anew_and_finds_what_its_workers_had_saved(
    command: Unirun, script: Script, cluster: Slurm
) -> None:
    script(SAVES, "saves.py")
    job = command.start("--slurm", "nodes=2", "--roles", "a=1@saves:Actor", "--trainer", "saves:Trainer")
    job.lines("saved")
    number = slurm_id(job)
    cluster.run("srun", "--partition=urgent", "--nodes=3", "--exclusive", "true")
    eventually(lambda: cluster.job(number)["JobState"] == "PENDING", "the job is requeued")
    cluster.start_now(number)
    result = job.end()
    assert result.code == 0, result.err
    assert "found None requeued 0" in result.out
    assert "found b'half' requeued 1" in result.out
    for options, state in (((), "b'half'"), (("--attempt", 1), "b'half'"), (("--attempt", 0), "None")):
        logs = command("logs", *options, command.status()["run_id"], "trainer").out
        assert re.findall(r"found (\S+)", logs) == [state]
    missing = command("logs", "--attempt", 2)
    assert (missing.code, "has no attempt 2; it has 0, 1" in missing.err) == (2, True)


def saved_steps(text: str) -> list[str]:
    """The steps at which ranks have saved."""
    return re.findall(r"saved (\d+)", text)


def test_all_ranks_save_at_one_step_when_scancel_ends_the_job(
    command: Unirun, script: Script, cluster: Slurm
) -> None:
    """Of a job on two nodes. scancel sends SIGTERM to all processes of the step, and SIGKILL after Slurm's KillWait."""
    more = ("--slurm", "nodes=2", "--nproc-per-node", "2")
    job = command.start(*more, script(STEPS), "0.05")
    job.lines("up", 4, within=2 * START_TIMEOUT)
    cluster.run("scancel", slurm_id(job))
    result = job.end()
    saved = saved_steps(command("logs", command.status()["run_id"]).out)
    assert (len(saved), len({*saved})) == (4, 1), result
    assert (result.code, command.status()["code"]) == (143, 143), result


@pytest.mark.chaos
def test_all_ranks_save_at_one_step_when_the_job_is_preempted(
    command: Unirun, script: Script, cluster: Slurm
) -> None:
    job = command.start("--slurm", "nodes=2", "--nproc-per-node", "2", script(STEPS), "0.05")
    job.lines("up", 4, within=2 * START_TIMEOUT)
    number = slurm_id(job)
    cluster.run("srun", "--partition=urgent", "--nodes=3", "--exclusive", "true")
    eventually(lambda: cluster.job(number)["JobState"] == "PENDING", "the job is requeued")
    saved = saved_steps(command("logs", "--attempt", 0, command.status()["run_id"]).out)
    assert (len(saved), len({*saved})) == (4, 1), saved
    job.signal(signal.SIGINT)
    job.end()


def test_a_step_of_several_tasks_on_one_node_starts_no_job(
    command: Unirun, script: Script, cluster: Slurm
) -> None:
    done = command.start_program(["srun", "-N1", "-n4", UNIRUN, *EXEC, str(script("print('here')"))]).end()
    assert (done.code, done.out) == (2, ""), done
    assert done.err.count("more than one task on a node (4)") == 4


def test_the_shell_of_an_allocation_says_that_its_nodes_are_not_used(
    command: Unirun, script: Script, cluster: Slurm
) -> None:
    done = command.start_program(["salloc", "-N2", UNIRUN, *EXEC, str(script("print('here')"))]).end()
    assert (done.code, done.lines) == (0, ["here"]), done
    assert re.search(r"the allocation's nodes n\[\d-\d\] are not used; start the job with: srun", done.err)


class TestJobsOnThreeNodes:
    """The head is n1, and each node has a part of the ranks."""

    def test_a_torchrun_script_runs_in_a_step(self, command: Unirun, cluster: Slurm) -> None:
        step = ("srun", "-N3", "--ntasks-per-node=1", UNIRUN, "--nproc-per-node", "1")
        done = command.start_program([*step, str(EXAMPLES / "ddp_digits" / "train.py")]).end(
            2 * START_TIMEOUT
        )
        assert done.code == 0, done.err
        (accuracy,) = re.findall(r"final loss [\d.]+ accuracy ([\d.]+)", done.out)
        assert float(accuracy) > 0.9
        assert {worker["node"] for worker in command.workers().values()} == {"n1", "n2", "n3"}
        assert len(re.findall("ranks of 1 role up", done.err)) == 1, "one node tells it"

    def test_two_roles_are_submitted_and_cancelled(
        self, command: Unirun, tmp_path: Path, cluster: Slurm
    ) -> None:
        roles = (
            "--roles",
            "actor=2,rollout=2",
            EXAMPLES / "ppo_cartpole" / "train.py",
            "--out",
            tmp_path / "x.png",
        )
        job = command.start("--slurm", "nodes=3,cpus_per_task=2", *roles)
        job.lines("seed 0  update +1 ")
        assert len({worker["node"] for worker in command.workers().values()}) > 1
        assert "[actor:0] seed 0  update   1 " in command("logs").out
        cluster.run("scancel", slurm_id(job))
        assert job.end().code == 143
        found = command.status()
        # Slurm signals the workers too, and the end of one may be known before the request to stop.
        assert found["code"] == 143
        assert found["phase"] == "stopped" or "killed by SIGTERM" in found["reason"]

    def test_workers_on_all_nodes_have_time_to_save_when_it_is_cancelled(
        self, command: Unirun, script: Script, cluster: Slurm
    ) -> None:
        saves = script(
            """
            import os, signal, time
            asked = []
            signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
            signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"got SIGUSR1\\n"))
            print("here", flush=True)
            while not asked:
                time.sleep(0.01)
            print("asked", flush=True)
            while not os.path.exists("go"):
                time.sleep(0.01)
            print("saved", flush=True)
            """
        )
        job = command.start("--slurm", "nodes=2", *EXEC, "--nproc-per-node", 1, saves)
        job.lines("here", 2)
        cluster.run("scancel", "--full", "--signal=USR1", slurm_id(job))
        job.lines("got SIGUSR1", 2)
        cluster.run("scancel", slurm_id(job))
        job.lines("asked", 2)
        (command.root / "go").touch()
        result = job.end()
        assert (result.code, result.out.count("saved")) == (143, 2), result.err
        assert command.status()["phase"] == "stopped"

    @pytest.mark.chaos
    def test_a_trainer_with_workloads_is_submitted(self, command: Unirun, tmp_path: Path) -> None:
        short = ("config.solved=40", "config.bar=20", f"config.out={tmp_path / 'reward.png'}")
        job = ("--slurm", "nodes=3,cpus_per_task=2", "--config", "job.yaml", *short)
        done = command(*job, cwd=EXAMPLES / "ppo_cartpole", within=2 * START_TIMEOUT)
        assert done.code == 0, done.err
        assert "1 of 1 seeds reached 20" in done.out

    def test_roles_of_a_heterogeneous_job_are_on_their_components(
        self, command: Unirun, script: Script
    ) -> None:
        train = script("import os; print(os.environ['ROLE_NAME'], os.environ['UNIRUN_NODE'], flush=True)")
        components = ("--slurm", "nodes=1,roles=learner", "--slurm", "nodes=2")
        done = command(*components, *EXEC, "--roles", "actor=4,learner=2", train)
        assert done.code == 0, done.err
        where = dict.fromkeys(re.findall(r"\] (\w+) (n\d)", done.out))
        assert {node for role, node in where if role == "learner"} == {"n1"}
        assert {node for role, node in where if role == "actor"} <= {"n2", "n3"}

    def test_the_job_goes_on_when_a_node_is_lost_and_has_its_own_exit_code(
        self, command: Unirun, script: Script, cluster: Slurm
    ) -> None:
        script(
            """
            import os, time
            print("rank", os.environ["RANK"], "on", os.environ["UNIRUN_NODE"], flush=True)
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                time.sleep(600)
            """
        )
        roles = "{a: {count: 2, per_node: 1, max_restarts: 1}}"
        job_file = script(f"{{script: train.py, start_method: exec, roles: {roles}}}", "job.yaml")
        rest = {"unirun.launcher.slurm.submit.TASK_END_TIMEOUT": 2}
        job = command.start("--slurm", "nodes=3", "--config", job_file, env=KILLED, constants=rest)
        before = job.lines(r"rank \d on (n\d)", 2)
        lost = next(node for node in before if node != "n1")
        cluster.kill_node(lost)
        try:
            job.lines("succeeded after")
        finally:
            cluster.start_node(lost)
        result = job.end()
        assert result.code == 0, result.err
        assert {worker["node"] for worker in command.workers().values()} == {"n1", "n2", "n3"} - {lost}

    @pytest.mark.chaos
    def test_a_job_that_has_lost_its_first_node_is_requeued(
        self, command: Unirun, script: Script, cluster: Slurm
    ) -> None:
        train = script(
            """
            import os, time
            print("rank", os.environ["RANK"], "on", os.environ["UNIRUN_NODE"], flush=True)
            if "SLURM_RESTART_COUNT" not in os.environ:
                time.sleep(600)
            """
        )
        job = command.start("--slurm", "nodes=2", *EXEC, "--nproc-per-node", "1", train, env=KILLED)
        job.lines(r"rank \d on (n\d)", 2)
        number = slurm_id(job)
        first = cluster.job(number)["BatchHost"]
        cluster.kill_node(first)
        try:
            job.lines(r"PENDING .*requeued once", within=2 * START_TIMEOUT)
            cluster.start_now(number)
            result = job.end(2 * START_TIMEOUT)
            assert result.code == 0, result.err
            assert {worker["node"] for worker in command.workers().values()} == {"n1", "n2", "n3"} - {first}
            (before,) = command.home.glob("jobs/*/attempt_0/state.json")
            assert "its first node is lost" in before.read_text()
        finally:
            cluster.start_node(first)

    @pytest.mark.chaos
    def test_a_job_that_has_lost_its_first_node_goes_on_with_etcd_and_frees_its_nodes(
        self, command: Unirun, script: Script, cluster: Slurm
    ) -> None:
        train = script(
            """
            import os, time
            print("rank", os.environ["RANK"], "on", os.environ["UNIRUN_NODE"], flush=True)
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                time.sleep(600)
            """
        )
        roles = ("--roles", "a=2", "--max-restarts", "3", train)
        job = command.start("--slurm", "nodes=3", "--store", "etcd", *EXEC, *roles, env=KILLED)
        job.lines(r"rank \d on (n\d)", 2)
        number = slurm_id(job)
        first = cluster.job(number)["BatchHost"]
        cluster.kill_node(first)
        try:
            result = job.end(2 * START_TIMEOUT)
            assert result.code == 0, result.err
            assert cluster.wait(number)["JobState"] == "CANCELLED"
            found = command.status()
            assert (found["phase"], found["code"]) == ("succeeded", 0)
            assert {worker["node"] for worker in command.workers().values()} == {"n1", "n2", "n3"} - {first}
        finally:
            cluster.start_node(first)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("failing", variants(False, True))
def test_a_trial_runs_on_three_nodes_and_has_its_exit_code(
    command: Unirun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: bool
) -> None:
    for name, value in trials.environment(command).items():
        monkeypatch.setenv(name, value)
    where = ("--mode", "slurm", "--partition", "debug", "--nodes", 2)
    if failing:
        wrong = command("experiment", "start", *trials.SMALL, "-f", "a", *where, "failing=always", within=240)
        assert wrong.code == 1, wrong.err
        assert "FAILED on n" in wrong.err
        return
    result = command("experiment", "start", *trials.SMALL, "-f", "first", *where, within=240)
    assert result.code == 0, result.err
    assert "COMPLETED on n" in result.err
    assert len(trials.steps(trials.trial(command, "first"))) == 6
    missing = command(
        "experiment", "start", *trials.SMALL, "-f", "none", "--mode", "slurm", "--partition", "no"
    )
    assert missing.code == 2, missing.err

"""A trial as a job: its files, which trials there are, and how they stand."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from omegaconf import OmegaConf

from tests.unit.collocation.samples import hosts, masks
from tests.unit.experiments.sample_configs import ACTOR, PROMPTS, ppo
from unirun.collocation import place
from unirun.errors import PlacementError, UsageError
from unirun.experiments.config import (
    AgentAbstraction,
    AutomaticEvaluator,
    EnvServiceAbstraction,
    ExperimentScheduling,
    ExpStatus,
    GenerationServer,
    GserverManager,
    RolloutWorker,
    Scheduling,
    TasksGroup,
    WorkerInformation,
    without_effect,
)
from unirun.experiments.experiment import ExperimentConfig, Trial, trial_of
from unirun.experiments.starting import (
    GRAPH,
    JOB,
    LOCK,
    PRELOAD,
    alone,
    end_of,
    excluded_hosts,
    job_file,
    job_mapping,
    job_of,
    options_of_slurm,
    phase_of,
    refuse_running,
    root_of,
    trial_status,
    trials,
    worker_groups,
)
from unirun.launcher.slurm.options import parse_slurm
from unirun.observe.status import FailureStatus, JobStatus, write_status
from unirun.rendezvous.creation import create_job
from unirun.spec.parse import parse_job
from unirun.wire.handshake import new_token


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def config() -> ExperimentConfig:
    found = ppo(separate=False)
    found.lazy_init()
    return found


def trial(name: str = "first", experiment: str = "ppo", top: str = "") -> Trial:
    return Trial(experiment, name, str(root_of(top, experiment, name)), overrides=("lr=1e-4",))


def two(**needs: object) -> ExperimentScheduling:
    return ExperimentScheduling(TasksGroup(2, Scheduling(**needs)))  # type: ignore[arg-type]


def start(config: ExperimentConfig, run_id: str, about: Trial | None = None) -> Path:
    about = about or trial()
    with job_file(Path(about.root), config, job_mapping(about, config, two()), run_id) as path:
        return path


class TestDirectories:
    def test_a_trial_is_below_its_experiment(self, home: Path) -> None:
        assert root_of("", "ppo", "first") == home / "experiments" / "ppo" / "first"
        assert root_of("/shared", "ppo", "first") == Path("/shared/ppo/first")

    @pytest.mark.parametrize(("experiment", "name"), [("ppo", "../x"), ("a/b", "first")])
    def test_names_that_no_path_can_have_are_refused(self, experiment: str, name: str) -> None:
        with pytest.raises(UsageError, match="is no name for"):
            root_of("", experiment, name)


class TestTheJob:
    def test_it_has_the_workers_and_the_master(self, config: ExperimentConfig) -> None:
        scheduling = two(gpu=1, env_vars={"A": "1"})
        scheduling.master_worker.scheduling.env_vars["B"] = "2"
        found = job_mapping(trial(), config, scheduling)
        assert found["name"] == "ppo-first"
        role = found["roles"]["model_worker"]
        assert (role["count"], role["env"]) == (2, {"A": "1"})
        assert (role["device"], role["slots"]) == ("cuda", 1)
        assert job_mapping(trial(), config, two(gpu=4))["roles"]["model_worker"]["slots"] == 4
        assert found["trainer"]["env"] == {"B": "2"}
        assert [*found["roles"]] == ["model_worker"]

    def test_workers_that_need_no_device_have_and_see_none(self, config: ExperimentConfig) -> None:
        role = job_mapping(trial(), config, two())["roles"]["model_worker"]
        assert role["device"] == "cpu"
        assert role["env"] == {"CUDA_VISIBLE_DEVICES": ""}

    @pytest.mark.parametrize(("gpus", "expected"), [(1, [("0",), ("1",)]), (2, [("0", "1"), ("2", "3")])])
    def test_each_worker_sees_its_own_devices_only(
        self, config: ExperimentConfig, gpus: int, expected: list[tuple[str, ...]]
    ) -> None:
        mapping = {**job_mapping(trial(), config, two(gpu=gpus)), "preload": []}
        spec = parse_job(mapping, count_slots=lambda *_: 4, run_id="x")
        assert masks(place(spec, hosts("devices=4"))[1])["model_worker"] == expected

    def test_modules_that_take_long_to_import_are_imported_once(self, config: ExperimentConfig) -> None:
        assert job_mapping(trial(), config, two(), ("slow",))["preload"] == [*PRELOAD, "slow"]

    def test_generation_servers_are_engines_that_receive_the_policy(self, config: ExperimentConfig) -> None:
        options = {"max_num_seqs": 8, "python": sys.prefix}
        config.generation_server = [GenerationServer(7, "builtin", options, "m", 1)] * 2
        scheduling = replace(two(), generation_server=TasksGroup(2, Scheduling(gpu=0)))
        job = job_mapping(trial(), config, scheduling)
        role = job["roles"]["generation_server"]
        assert (role["kind"], role["model"], role["count"], role["device"]) == ("builtin", "m", 2, "cpu")
        assert role["args"] == ["--seed", "7", "--max-num-seqs", "8"]
        assert role["python"] == sys.prefix
        assert job["channels"]["policy"]["receivers"] == ["generation_server"]
        spec = parse_job(job, count_slots=lambda _: 2, run_id="x")
        assert spec.role("generation_server-weights").beside == "generation_server"

    def test_how_servers_take_new_weights_are_settings_of_the_manager_and_of_theirs(
        self, config: ExperimentConfig
    ) -> None:
        config.generation_server = [GenerationServer(7, "builtin", {"clear_cache": False}, "m", 1)]
        config.gserver_manager = [GserverManager(ACTOR, 1, "round_robin", 0, 8, 20, 4)]
        scheduling = replace(two(), generation_server=TasksGroup(1, Scheduling(gpu=0)))
        job = job_mapping(trial(), config, scheduling)
        job["roles"].pop("rollout_worker")
        assert job["roles"]["generation_server"]["args"] == ["--seed", "7"]
        companion = parse_job(job, count_slots=lambda _: 2, run_id="x").role("generation_server-weights")
        assert companion.entry.args == ("policy", "--timeout=20.0", "--keep-cache")

    def test_another_number_of_servers_than_it_schedules_is_refused(self, config: ExperimentConfig) -> None:
        config.generation_server = [GenerationServer(7, "vllm", None, "m", 2)]
        role = job_mapping(trial(), config, two())["roles"]["generation_server"]
        assert (role["slots"], role["args"][-1]) == (2, "processed_logprobs")
        # A place for each of its parts also on processors.
        on_cpus = replace(two(), generation_server=TasksGroup(1, Scheduling(gpu=0)))
        role = job_mapping(trial(), config, on_cpus)["roles"]["generation_server"]
        assert (role["device"], role["slots"]) == ("cpu", 2)
        scheduling = replace(two(), generation_server=TasksGroup(2, Scheduling(gpu=0)))
        with pytest.raises(UsageError, match=r"has 2 generation servers, initial_setup\(\) has 1"):
            job_mapping(trial(), config, scheduling)

    def test_rollout_workers_are_a_role_of_an_asynchronous_experiment(self, config: ExperimentConfig) -> None:
        rollout = RolloutWorker(
            1, ACTOR, "t", 8, 10, EnvServiceAbstraction("e"), AgentAbstraction("a"), [PROMPTS]
        )
        config.gserver_manager = [GserverManager(ACTOR, 0, "round_robin", 0, 8, 10, 4)]
        config.rollout_worker = [rollout] * 3
        role = job_mapping(trial(), config, two())["roles"]["rollout_worker"]
        assert (role["count"], role["device"]) == (3, "cpu")
        scheduling = replace(two(), rollout_worker=TasksGroup(2, Scheduling(gpu=0)))
        with pytest.raises(UsageError, match=r"has 2 rollout workers, initial_setup\(\) has 3"):
            job_mapping(trial(), config, scheduling)

    def test_its_configuration_is_the_trial(self, config: ExperimentConfig) -> None:
        about = trial()
        assert trial_of(OmegaConf.create(job_mapping(about, config, two())["config"])) == about

    def test_an_evaluator_is_one_more_role(self, config: ExperimentConfig) -> None:
        config = replace(config, auto_eval=True, evaluator=AutomaticEvaluator(PROMPTS, "actor"))
        found = job_mapping(trial(), config, two())["roles"]
        assert [*found] == ["model_worker", "evaluator"]
        assert (found["evaluator"]["count"], found["model_worker"]["count"]) == (1, 2)
        assert found["evaluator"]["workload"] != found["model_worker"]["workload"]

    def test_an_evaluator_has_a_device_of_its_own_or_none_and_workers_keep_theirs(
        self, config: ExperimentConfig
    ) -> None:
        config = replace(config, auto_eval=True, evaluator=AutomaticEvaluator(PROMPTS, "actor"))

        def placed(scheduling: ExperimentScheduling, devices: int) -> dict[str, list[tuple[str, ...] | None]]:
            mapping = {**job_mapping(trial(), config, scheduling), "preload": []}
            spec = parse_job(mapping, count_slots=lambda *_: devices, run_id="x")
            return masks(place(spec, hosts(f"devices={devices}"))[1])

        assert placed(two(gpu=1), 3) == {
            "model_worker": [("0",), ("1",)],
            "evaluator": [("2",)],
            "trainer": [None],
        }
        with pytest.raises(PlacementError, match="3 cuda slots are needed, 2 are there"):
            placed(two(gpu=1), 2)
        on_cpu = replace(two(gpu=1), evaluator=Scheduling())
        assert placed(on_cpu, 2)["model_worker"] == [("0",), ("1",)]
        assert job_mapping(trial(), config, on_cpu)["roles"]["evaluator"]["device"] == "cpu"

    def test_other_numbers_of_workers_are_refused(self, config: ExperimentConfig) -> None:
        scheduling = ExperimentScheduling(TasksGroup(3, Scheduling()))
        with pytest.raises(
            UsageError, match=r"scheduling_setup\(\) has 3 model workers, initial_setup\(\) has 2"
        ):
            job_mapping(trial(), config, scheduling)


class TestNeeds:
    def test_processors_and_memory_of_each_type_are_needs_of_its_role(self, config: ExperimentConfig) -> None:
        config = replace(config, auto_eval=True, evaluator=AutomaticEvaluator(PROMPTS, "actor"))
        config.generation_server = [GenerationServer(7, "builtin", None, "m", 1)]
        scheduling = replace(
            two(gpu=1, cpu=4, mem=1000),
            master_worker=TasksGroup(
                1, Scheduling.master_worker_default(cpu=16, mem=20, env_vars={"A": "1"})
            ),
            gserver_manager=TasksGroup(1, Scheduling(cpu=2, mem=30, env_vars={"A": "2", "B": "2"})),
            generation_server=TasksGroup(1, Scheduling(gpu=1, cpu=2)),
            evaluator=Scheduling(cpu=3),
        )
        job = job_mapping(trial(), config, scheduling)
        spec = parse_job({**job, "preload": []}, count_slots=lambda *_: 8, run_id="x")
        found = {role.name: (role.cpus, role.memory, role.slots) for role in spec.roles}
        found.pop("generation_server-weights")
        assert found == {
            "model_worker": (4, 1000 << 20, 1),
            "evaluator": (3, None, 3),
            "generation_server": (2, None, 1),
            "trainer": (16, 30 << 20, 1),
        }
        assert job["trainer"]["env"] == {"A": "1", "B": "2"}

    def test_one_processor_is_no_need_as_workers_may_share_them(self, config: ExperimentConfig) -> None:
        job = {**job_mapping(trial(), config, two()), "preload": []}
        spec = parse_job(job, count_slots=lambda *_: 1, run_id="x")
        assert {role.cpus for role in spec.roles} == {None}

    def test_more_than_a_host_has_is_refused(self, config: ExperimentConfig) -> None:
        job = {**job_mapping(trial(), config, two(gpu=1, cpu=500)), "preload": []}
        spec = parse_job(job, count_slots=lambda *_: 2, run_id="x")
        with pytest.raises(PlacementError, match="model_worker"):
            place(spec, hosts("devices=2"))


class TestHosts:
    @staticmethod
    def excluded(**types: Scheduling) -> list[str]:
        return excluded_hosts(types, ("h1", "h2", "h3"), "--hosts")

    def test_lists_hold_for_all_workers(self) -> None:
        assert self.excluded(model_worker=Scheduling()) == []
        assert self.excluded(a=Scheduling(exclude="h[3-7]"), b=Scheduling(exclude="h1")) == ["h1", "h3"]
        assert self.excluded(a=Scheduling(nodelist="h[1-2]"), b=Scheduling(exclude="h2")) == ["h2", "h3"]

    def test_a_host_has_its_name_with_and_without_the_domain(self) -> None:
        def excluded(here: str, **lists: str) -> list[str]:
            return excluded_hosts({"a": Scheduling(**lists)}, [here, "other"], "--mode local")  # type: ignore[arg-type]

        assert excluded("n1.a.org", nodelist="n[1-1]") == ["other"]
        assert excluded("n1", nodelist="N1.a.org") == ["other"]
        assert excluded("n1.a.org", exclude="n1") == ["n1.a.org"]
        assert excluded("n1.a.org", exclude="n1.b.org,n1.a.org.x,n") == []
        with pytest.raises(UsageError, match=re.escape("names n1.b.org, and --mode local has n1.a.org")):
            excluded("n1.a.org", nodelist="n1.b.org")

    @pytest.mark.parametrize(
        ("types", "message"),
        [
            (
                {"a": Scheduling(time_limit="1:00")},
                "Scheduling.time_limit of a is '1:00', which needs --mode slurm",
            ),
            ({"a": Scheduling(container_image="i")}, "Scheduling.container_image of a is 'i', which needs"),
            ({"a": Scheduling(nodelist="h[1-2],n7")}, "nodelist of a names n7, and --hosts has h1, h2, h3"),
            ({"a": Scheduling(exclude="h[1-3]")}, "Scheduling.exclude leaves no host of --hosts"),
            (
                {"a": Scheduling(nodelist="h1"), "b": Scheduling(), "c": Scheduling(nodelist="h2")},
                "Scheduling.nodelist of a is 'h1', that of c is 'h2'; the workers of a trial have the same hosts",
            ),
        ],
    )
    def test_lists_and_options_that_cannot_hold_are_refused_by_name(
        self, types: dict[str, Scheduling], message: str
    ) -> None:
        with pytest.raises(UsageError, match=re.escape(message)):
            self.excluded(**types)


class TestFiles:
    def test_a_start_is_written(self, home: Path, config: ExperimentConfig) -> None:
        path = start(config, "ppo-first-0a1b2c")
        root = home / "experiments" / "ppo" / "first"
        assert path == root / JOB
        mapping = job_mapping(trial(), config, two())
        assert json.loads(path.read_text()) == json.loads(
            json.dumps({**mapping, "run_id": "ppo-first-0a1b2c"})
        )
        assert job_of(root) == "ppo-first-0a1b2c"
        assert (root / GRAPH).read_text().startswith("<svg")

    def test_the_latest_start_counts(self, home: Path, config: ExperimentConfig) -> None:
        start(config, "one")
        start(config, "two")
        assert job_of(root_of("", "ppo", "first")) == "two"
        assert sorted(path.name for path in (home / "experiments/ppo/first").iterdir()) == sorted(
            [GRAPH, JOB]
        )

    def test_one_that_was_never_started_is_not_known(self) -> None:
        assert job_of(root_of("", "ppo", "first")) == ""

    def test_all_trials_are_listed_by_name(
        self, home: Path, config: ExperimentConfig, tmp_path: Path
    ) -> None:
        for name, experiment in (("b", "sft"), ("a", "sft"), ("c", "ppo")):
            start(config, f"{experiment}-{name}", trial(name, experiment))
        start(config, "elsewhere", trial("d", "ppo", str(tmp_path / "shared")))
        assert [*map(job_of, trials(""))] == ["ppo-c", "sft-a", "sft-b"]
        assert [*map(job_of, trials(str(tmp_path / "shared")))] == ["elsewhere"]

    @pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"name": "a"}', b'{"run_id": "\xff"}'])
    def test_one_that_cannot_be_read_is_left_out(
        self, home: Path, config: ExperimentConfig, data: bytes
    ) -> None:
        start(config, "good")
        start(config, "bad", trial("second"))
        (root_of("", "ppo", "second") / JOB).write_bytes(data)
        assert [*map(job_of, trials(""))] == ["good"]

    def test_without_any_there_are_none(self) -> None:
        assert trials("") == []


class TestHowItStands:
    @staticmethod
    def stands(phase: str, *, alive: bool) -> int:
        """The job of the trial is in this phase. Returns the lock of one that is alive."""
        job, lock = create_job("ppo-first-1", new_token())
        write_status(job, JobStatus("ppo-first-1", "ppo-first", phase, "", 1.0, None, None, ()))
        if not alive:
            os.close(lock)
        return lock

    def test_one_that_runs_is_not_started_again(self, config: ExperimentConfig) -> None:
        start(config, "ppo-first-1")
        lock = self.stands("running", alive=True)
        assert phase_of("ppo-first-1") == "running"
        assert trial_status("ppo", "first") is ExpStatus.RUNNING
        with pytest.raises(UsageError, match="trial 'first' of 'ppo' runs already, as job ppo-first-1"):
            refuse_running(root_of("", "ppo", "first"))
        os.close(lock)

    @pytest.mark.parametrize("phase", ["succeeded", "failed", "stopped"])
    def test_one_that_has_ended_may_be_started_again(self, config: ExperimentConfig, phase: str) -> None:
        start(config, "ppo-first-1")
        self.stands(phase, alive=False)
        assert phase_of("ppo-first-1") == phase
        ended = ExpStatus.COMPLETE if phase == "succeeded" else ExpStatus.ABORTED
        assert trial_status("ppo", "first") is ended
        refuse_running(root_of("", "ppo", "first"))

    def test_so_may_one_whose_processes_are_gone(self, config: ExperimentConfig) -> None:
        start(config, "ppo-first-1")
        self.stands("running", alive=False)
        assert phase_of("ppo-first-1") == "lost"
        assert trial_status("ppo", "first") is ExpStatus.ABORTED
        refuse_running(root_of("", "ppo", "first"))

    @pytest.mark.parametrize("job", ["ppo-first-9", "no id/", ""])
    def test_one_of_which_nothing_is_known_any_more_is_gone(self, config: ExperimentConfig, job: str) -> None:
        start(config, job)
        assert phase_of(job) == "gone"
        assert not job or trial_status("ppo", "first") is ExpStatus.ABORTED
        refuse_running(root_of("", "ppo", "first"))

    def test_one_that_was_never_started_may_be(self) -> None:
        refuse_running(root_of("", "ppo", "first"))
        with pytest.raises(UsageError, match="ppo/first was never started"):
            trial_status("ppo", "first")


def test_fields_that_mean_nothing_here_are_accepted_and_told(config: ExperimentConfig) -> None:
    scheduling = two()
    assert without_effect(config, scheduling) == []
    scheduling.controller_image = "image"
    config.model_worker[0].use_dataset_cache = True
    config.model_rpcs[0] = structs.replace(config.model_rpcs[0], model_type="llama")
    config.model_worker[0].worker_info = WorkerInformation(watch_keys="key")
    assert without_effect(config, scheduling) == [
        "ExperimentScheduling.controller_image has no effect: the command is the controller, and container_image is "
        "that of the workers",
        "ModelWorker.use_dataset_cache has no effect: a dataset is read once, by each worker that needs it",
        "WorkerInformation.watch_keys has no effect: the job watches its workers",
        "MFCDef.model_type has no effect: a network has the type that its configuration names",
    ]
    config.set_worker_information("ppo", "first")
    assert config.model_worker[0].worker_info == WorkerInformation(
        "ppo", "first", "model_worker", 0, len(config.model_worker), watch_keys="key"
    )


class TestTwoCommands:
    def test_the_second_is_refused_until_the_first_ends(self, config: ExperimentConfig) -> None:
        root = root_of("", "ppo", "first")
        with (
            alone(root),
            pytest.raises(UsageError, match="trial 'first' of 'ppo' runs already; wait"),
            alone(root),
        ):
            pass
        with alone(root):
            start(config, "ppo-first-1")
            with pytest.raises(UsageError, match="runs already, its latest job is ppo-first-1"), alone(root):
                pass
            with alone(root_of("", "ppo", "second")):
                pass

    def test_one_that_fails_and_one_whose_children_live_on_give_it_back(self) -> None:
        root = root_of("", "ppo", "first")
        children: list[int] = []

        def fail() -> None:
            with alone(root):
                # A process that is forked meanwhile has the same.
                mine = [int(fd) for fd in os.listdir("/proc/self/fd") if points_to(fd, root / LOCK)]
                children.extend(map(os.dup, mine))
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert len(children) == 1
        with alone(root):
            pass
        os.close(children[0])

    def test_a_directory_that_cannot_be_made_is_told(self, home: Path) -> None:
        (home / "file").touch()
        with (
            pytest.raises(UsageError, match="cannot be written: not a directory; see --root"),
            alone(home / "file" / "x"),
        ):
            pass

    @pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
    def test_without_locks_in_the_file_system_a_trial_starts_with_a_warning(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
    ) -> None:
        def flock(handle: int, how: int) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr("fcntl.flock", flock)
        with alone(root_of("", "ppo", "first")):
            pass
        assert "has no locks: do not start a trial twice" in capsys.readouterr().err


def points_to(fd: str, path: Path) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}") == str(path)
    except OSError:
        return False


class TestAStartThatMakesNoJob:
    @staticmethod
    def fails(config: ExperimentConfig, run_id: str) -> None:
        mapping = job_mapping(trial(), config, two())
        with pytest.raises(KeyboardInterrupt), job_file(root_of("", "ppo", "first"), config, mapping, run_id):
            raise KeyboardInterrupt

    def test_the_one_before_counts(self, config: ExperimentConfig) -> None:
        before = start(config, "one").read_bytes()
        self.fails(config, "two")
        root = root_of("", "ppo", "first")
        assert job_of(root) == "one"
        assert (root / JOB).read_bytes() == before

    def test_without_one_before_there_is_none(self, config: ExperimentConfig) -> None:
        self.fails(config, "one")
        assert job_of(root_of("", "ppo", "first")) == ""
        assert trials("") == []

    def test_one_that_has_made_its_job_stays(self, config: ExperimentConfig) -> None:
        TestHowItStands.stands("failed", alive=False)
        self.fails(config, "ppo-first-1")
        assert job_of(root_of("", "ppo", "first")) == "ppo-first-1"


wanted = st.builds(
    TasksGroup,
    st.integers(1, 5),
    st.builds(Scheduling, cpu=st.integers(1, 3), gpu=st.integers(0, 2)),
)


def fit(nodes: list[tuple[int, int]], workers: list[tuple[int, int]]) -> bool:
    """Return True if there is a place for each worker on nodes with so many GPUs and processors."""
    if not workers:
        return True
    (gpu, cpu), *others = workers
    for at, (gpus, cpus) in enumerate(nodes):
        if (gpus, cpus) not in nodes[:at] and gpus >= gpu and cpus >= cpu:
            left = [*nodes[:at], (gpus - gpu, cpus - cpu), *nodes[at + 1 :]]
            if fit(sorted(left, reverse=True), others):
                return True
    return False


class TestSlurm:
    @staticmethod
    def asked(nodes: int, partition: str = "", **groups: TasksGroup) -> str:
        return options_of_slurm(groups, Scheduling.master_worker_default(), partition, nodes)

    def test_what_workers_need_is_asked_of_each_node(self) -> None:
        group = TasksGroup(10, Scheduling(cpu=3, gpu=1, mem=1000, time_limit="2:00:00"))
        found = self.asked(4, "gpus", model_worker=group)
        assert found == ("nodes=4,partition=gpus,cpus_per_task=10,gpus_per_node=3,mem=3000M,time=2:00:00")

    def test_smaller_workers_take_the_places_that_larger_ones_leave(self) -> None:
        workers = TasksGroup(3, Scheduling(cpu=1, gpu=2))
        alike, large = replace(workers, count=1), TasksGroup(1, Scheduling(cpu=1, gpu=4))
        assert "gpus_per_node=4" in self.asked(2, model_worker=workers, evaluator=alike)
        assert "gpus_per_node=6" in self.asked(2, model_worker=workers, evaluator=large)
        four = replace(workers, count=4)
        cpus = TasksGroup(1, Scheduling(cpu=2))
        assert "cpus_per_task=5,gpus_per_node=4" in self.asked(2, model_worker=four, evaluator=cpus)

    def test_all_kinds_of_workers_count(self) -> None:
        found = self.asked(
            2,
            model_worker=TasksGroup(2, Scheduling(cpu=4, gpu=1, mem=1000)),
            generation_server=TasksGroup(4, Scheduling(cpu=2, gpu=2, mem=2000)),
            rollout_worker=TasksGroup(6, Scheduling(cpu=1, mem=500)),
            evaluator=TasksGroup(1, Scheduling(cpu=1, gpu=1)),
        )
        assert found == "nodes=2,cpus_per_task=13,gpus_per_node=6,mem=6500M"

    def needs(self, groups: list[TasksGroup], nodes: int) -> tuple[int, int]:
        """The GPUs and the processors that are asked of each node for these groups."""
        named: dict[str, Any] = {str(at): group for at, group in enumerate(groups)}
        words = dict(word.split("=") for word in self.asked(nodes, **named).split(","))
        master = Scheduling.master_worker_default()
        return int(words.get("gpus_per_node", 0)), int(words["cpus_per_task"]) - master.cpu

    @given(groups=st.lists(wanted, min_size=1, max_size=3), nodes=st.integers(1, 3))
    def test_what_is_asked_for_has_room_for_all_workers(self, groups: list[TasksGroup], nodes: int) -> None:
        workers = [(each.scheduling.gpu, each.scheduling.cpu) for each in groups for _ in range(each.count)]
        assert fit([self.needs(groups, nodes)] * nodes, sorted(workers, reverse=True))

    @given(
        st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=4), st.integers(1, 4)
    )
    def test_no_place_is_asked_for_as_long_as_larger_workers_leave_some(
        self, sizes: list[tuple[int, int]], nodes: int
    ) -> None:
        """Each worker fits into the place of any larger one, so there are no more places than for all alike."""
        groups = [TasksGroup(count, Scheduling(cpu=size, gpu=size - 1)) for count, size in sizes]
        gpus = cpus = count = places = 0
        for group in sorted(groups, key=lambda group: -group.scheduling.cpu):
            count += group.count
            more = -(-count // nodes) - places
            gpus, cpus = gpus + more * group.scheduling.gpu, cpus + more * group.scheduling.cpu
            places += more
        assert self.needs(groups, nodes) == (gpus, cpus)

    def test_the_workers_of_a_trial_are_those_of_its_job(self, config: ExperimentConfig) -> None:
        config.generation_server = [GenerationServer(7, "vllm", {}, "m", 2)] * 2
        config.gserver_manager = [GserverManager(ACTOR, 2, "round_robin", 0, 4, 10, 8)]
        env, agent = EnvServiceAbstraction("null"), AgentAbstraction("null")
        config.rollout_worker = [RolloutWorker(1, ACTOR, "t", 8, 10, env, agent, [PROMPTS])] * 3
        groups = worker_groups(config, two(gpu=1))
        assert {kind: (each.count, each.scheduling.gpu) for kind, each in groups.items()} == {
            "model_worker": (2, 1),
            "rollout_worker": (3, 0),
            "generation_server": (2, 2),
        }
        roles = job_mapping(trial(), config, two(gpu=1))["roles"]
        assert [*roles] == [*groups]
        assert roles["generation_server"]["slots"] == 2

    def test_options_of_a_server_that_are_false_or_none_are_left_out(self, config: ExperimentConfig) -> None:
        args = {"enforce_eager": True, "async_scheduling": False, "max_model_len": 512, "quantization": None}
        config.generation_server = [GenerationServer(7, "vllm", args, "m", 1)]
        found = job_mapping(trial(), config, two())["roles"]["generation_server"]["args"]
        assert found[-3:] == ["--enforce-eager", "--max-model-len", "512"]

    @pytest.mark.parametrize("args", [{}, None, {"clear_cache": True}, {"clear_cache": False}])
    def test_keys_and_values_are_computed_anew_unless_a_server_is_to_keep_them(
        self, config: ExperimentConfig, args: dict[str, Any] | None
    ) -> None:
        config.generation_server = [GenerationServer(7, "vllm", args, "m", 1)]
        role = job_mapping(trial(), config, two())["roles"]["generation_server"]
        assert role["clear_cache"] == (args or {}).get("clear_cache", True)
        assert not any("cache" in word for word in role["args"])

    def test_what_is_not_needed_is_left_out(self) -> None:
        assert self.asked(1, model_worker=two().model_worker) == "nodes=1,cpus_per_task=3"

    def test_lists_of_nodes_are_read_as_they_were_written(self) -> None:
        scheduling = two(nodelist="n[1-3],n7", exclude="n2,n9", begin="now+1hour")
        text = self.asked(2, "a,b", model_worker=scheduling.model_worker)
        (component,) = parse_slurm([text]).components
        assert component.options["nodelist"] == "n[1-3],n7"
        assert component.options["exclude"] == "n2,n9"
        assert component.options["nodes"] == "2"

    def test_the_master_has_its_part_of_a_node(self) -> None:
        groups = {"model_worker": TasksGroup(2, Scheduling(cpu=4, mem=1000))}
        found = options_of_slurm(groups, Scheduling(cpu=16, mem=500, exclude="n2"), "", 1)
        assert found == "nodes=1,cpus_per_task=24,mem=2500M,exclude=n2"


def test_how_a_worker_has_ended_is_known_from_the_state_of_the_job(config: ExperimentConfig) -> None:
    start(config, "ppo-first-1")
    root = root_of("", "ppo", "first")
    assert end_of(root, "model_worker:1", 0.0) is None
    job, lock = create_job("ppo-first-1", new_token())
    failures = (
        FailureStatus("model_worker", 1, 0, "n", 5.0, "exit code 3"),
        FailureStatus("model_worker", 1, 1, "n", 7.0, "killed by SIGKILL"),
        FailureStatus("model_worker", 0, 0, "n", 9.0, "exit code 1"),
    )
    status = JobStatus("ppo-first-1", "ppo-first", "running", "", 1.0, None, None, ())
    write_status(job, structs.replace(status, failures=failures))
    assert end_of(root, "model_worker:1", 6.0) == ("model_worker:1", "killed by SIGKILL")
    assert end_of(root, "model_worker:1", 5.0) == end_of(root, "model_worker:1", 7.0)
    assert end_of(root, "", 0.0) == ("model_worker:0", "exit code 1")
    assert end_of(root, "model_worker:1", 8.0) is None
    assert end_of(root, "", 8.0) == ("model_worker:0", "exit code 1")
    os.close(lock)


class TestWhoseTheDirectoryIs:
    def test_it_is_for_this_user_only_whatever_the_umask_says(self, tmp_path: Path) -> None:
        before = os.umask(0)
        try:
            with alone(root_of(str(tmp_path / "runs"), "ppo", "first")):
                pass
        finally:
            os.umask(before)
        for path in (tmp_path / "runs", tmp_path / "runs" / "ppo", tmp_path / "runs" / "ppo" / "first"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert stat.S_IMODE((tmp_path / "runs" / "ppo" / "first" / LOCK).stat().st_mode) == 0o600

    @pytest.mark.parametrize("which", ["runs", "runs/ppo", "runs/ppo/first"])
    def test_one_that_others_may_write_is_refused_and_nothing_is_made_in_it(
        self, tmp_path: Path, which: str
    ) -> None:
        root = root_of(str(tmp_path / "runs"), "ppo", "first")
        root.mkdir(parents=True)
        (tmp_path / which).chmod(0o777)
        told = f"the trial is not safe in {root}: {tmp_path / which} may be written by all users; chmod go-w .*--root"
        with pytest.raises(UsageError, match=told), alone(root):
            pass
        assert not any(root.iterdir())

    def test_one_that_others_have_made_meanwhile_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        root = root_of(str(tmp_path), "ppo", "first")

        def made(folder: Path) -> None:
            folder.mkdir(parents=True)
            folder.chmod(0o777)

        monkeypatch.setattr("unirun.experiments.starting.make_private", made)
        with pytest.raises(UsageError, match=f"{root} may be written by all users"), alone(root):
            pass

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
    def test_one_of_another_user_is_refused(self, tmp_path: Path) -> None:
        root = root_of(str(tmp_path / "runs"), "ppo", "first")
        root.mkdir(parents=True)
        os.chown(root, 65534, 65534)
        with (
            pytest.raises(UsageError, match=f"{root} belongs to user .*; name a directory of your own"),
            alone(root),
        ):
            pass

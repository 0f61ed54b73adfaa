"""The environment of a worker, and the key of its spawner."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from unirun.errors import RendezvousError
from unirun.launcher.environment import (
    base_env,
    bound_to,
    carried,
    for_workers,
    is_loopback,
    joined,
    spawner_key,
    worker_env,
)
from unirun.observe.jobdir import JobDir
from unirun.spec.job import Contract, Entry, EntryKind, JobSpec, RoleSpec
from unirun.spec.read import RESERVED_ENV
from unirun.values import RankAddress
from unirun.wire.messages import StartRole, StartWorker

JOB = JobDir(Path("/jobs/run-1"))


def spec(**more: object) -> JobSpec:
    roles = more.pop(
        "roles", (RoleSpec("actor", 4, Entry("script", "a.py", ("--rank", "${local_rank}")), max_restarts=3),)
    )
    return JobSpec("job", "run-1", roles, ("actor",), **more)  # type: ignore[arg-type]


ORDER = StartRole(
    role="actor",
    generation=2,
    restarts=2,
    world_size=4,
    local_world_size=2,
    group_rank=1,
    group_world_size=2,
    endpoint="10.0.0.1:29500",
    members=(),
    mask="CUDA_VISIBLE_DEVICES",
)
MEMBER = StartWorker(rank=3, local_rank=1, incarnation=2)


def env_of(
    job: JobSpec, member: StartWorker = MEMBER, order: StartRole = ORDER, **inherited: str
) -> dict[str, str]:
    return worker_env(job, order, member, JOB, "n1", inherited)


def test_a_workers_environment_has_torchruns_and_unirun_variables() -> None:
    env = env_of(spec())
    for name, value in {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "actor",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "run-1",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_ERROR_FILE": "/jobs/run-1/logs/actor/3/2/error.json",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "UNIRUN_JOB": "run-1",
        "UNIRUN_NODE": "n1",
        "UNIRUN_GENERATION": "2",
        "UNIRUN_INCARNATION": "2",
        "UNIRUN_SOCKET": "/jobs/run-1/agent.n1.sock",
    }.items():
        assert env[name] == value, name


def test_a_worker_knows_the_step_that_all_roles_have_committed_if_there_is_one() -> None:
    assert env_of(spec(), order=replace(ORDER, committed=0))["UNIRUN_COMMITTED_STEP"] == "0"
    assert "UNIRUN_COMMITTED_STEP" not in env_of(spec())


def test_a_virtual_local_rank_is_0_for_every_worker() -> None:
    assert env_of(spec(virtual_local_rank=True))["LOCAL_RANK"] == "0"


def test_environment_precedence_is_built_in_then_job_then_role() -> None:
    role = RoleSpec("actor", 2, Entry("script", "a.py"), env={"B": "role", "C": "role"})
    job = spec(roles=(role,), env={"A": "job", "B": "job", "OMP_NUM_THREADS": "6"})
    env = env_of(job, A="shell", B="shell", C="shell", D="shell")
    assert [env[name] for name in "ABCD"] == ["job", "role", "role", "shell"]
    assert env["OMP_NUM_THREADS"] == "6"


def test_the_identity_of_a_worker_cannot_be_overridden_by_env() -> None:
    env = env_of(spec(env={"RANK": "9"}), RANK="7", UNIRUN_SOCKET="/other")
    assert (env["RANK"], env["UNIRUN_SOCKET"]) == ("3", "/jobs/run-1/agent.n1.sock")


def test_workers_do_not_get_the_stores_password() -> None:
    env = env_of(spec(), UNIRUN_STORE_PASSWORD="secret", UNIRUN_STORE="etcd://h?user=u")
    assert "UNIRUN_STORE_PASSWORD" not in env
    assert env["UNIRUN_STORE"] == "etcd://h?user=u"
    assert for_workers({"UNIRUN_STORE_PASSWORD": "secret", "PATH": "/bin"}) == {"PATH": "/bin"}


def test_workers_do_not_get_the_cache_directory_that_torch_has_chosen_for_another_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, path = "TORCHINDUCTOR_CACHE_DIR", {"PATH": "/bin"}
    # Importing the compiler sets it in this process, too.
    monkeypatch.setenv(name, "/scratch/cache")
    chosen = importlib.import_module("torch._inductor.runtime.cache_dir_utils").default_cache_dir()
    assert for_workers({name: chosen, **path}) == path
    assert for_workers({name: "/scratch/cache", **path}) == {name: "/scratch/cache", **path}
    assert carried({name: chosen, "TMPDIR": "/tmp", **path}) == path, "that of another host may differ"


def test_a_node_that_comes_later_has_the_environment_of_the_job_and_nothing_of_its_shell() -> None:
    shell = {
        "HOME": "/home/me",
        "MINE": "shell",
        "ONLY": "shell",
        "UNIRUN_HOME": "/own",
        "SSH_TTY": "/dev/pts/0",
    }
    job = {"MINE": "job", "PATH": "/job/bin", "UNIRUN_HOME": "/of/the/head"}
    assert joined(shell, job) == {
        "HOME": "/home/me",
        "SSH_TTY": "/dev/pts/0",
        "MINE": "job",
        "PATH": "/job/bin",
        "UNIRUN_HOME": "/own",
    }
    assert joined({}, job) == job


def test_omp_threads_are_limited_when_there_are_several_workers() -> None:
    alone = spec(roles=(RoleSpec("actor", 1, Entry("script", "a.py")),))
    assert "OMP_NUM_THREADS" not in base_env(alone, "actor", {})
    assert base_env(spec(), "actor", {})["OMP_NUM_THREADS"] == "1"
    assert base_env(spec(), "actor", {"OMP_NUM_THREADS": "8"})["OMP_NUM_THREADS"] == "8"


def test_torch_libraries_listen_on_loopback_when_the_job_does() -> None:
    assert base_env(spec(), "actor", {})["GLOO_SOCKET_IFNAME"] == "lo"
    assert base_env(spec(), "actor", {"GLOO_SOCKET_IFNAME": "eth0"})["GLOO_SOCKET_IFNAME"] == "eth0"
    assert "GLOO_SOCKET_IFNAME" not in base_env(spec(master_addr="10.0.0.1"), "actor", {})


def test_tensorpipe_stays_on_loopback_wherever_the_stores_are() -> None:
    elsewhere = spec(master_addr="10.0.0.1")
    assert base_env(elsewhere, "actor", {})["TP_SOCKET_IFNAME"] == "lo"
    assert base_env(elsewhere, "actor", {"TP_SOCKET_IFNAME": "eth0"})["TP_SOCKET_IFNAME"] == "eth0"


@pytest.mark.parametrize(
    ("addr", "local"),
    [
        ("127.0.0.1", True),
        ("127.8.0.1", True),
        ("localhost", True),
        ("::1", True),
        ("10.0.0.1", False),
        ("", False),
    ],
)
def test_is_loopback_recognises_addresses(addr: str, local: bool) -> None:
    assert is_loopback(addr) is local


def test_workers_of_several_hosts_listen_at_the_address_of_their_host_and_at_its_interface() -> None:
    assert bound_to("127.0.0.1", {"TP_SOCKET_IFNAME": "ib0"}) == {
        "UNIRUN_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "=lo",
    }
    with pytest.raises(RendezvousError, match="has the address"):
        bound_to("192.0.2.1", {})


class TestTheDeviceMask:
    MASKED = StartWorker(3, 1, 2, devices=("4", "5"))

    def test_the_device_mask_is_set_when_devices_are_assigned(self) -> None:
        assert env_of(spec(), self.MASKED)["CUDA_VISIBLE_DEVICES"] == "4,5"
        assert env_of(spec(), self.MASKED)["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID", "as the numbers are meant"
        assert env_of(spec(), self.MASKED, CUDA_VISIBLE_DEVICES="0")["CUDA_VISIBLE_DEVICES"] == "4,5"

    def test_the_device_mask_of_a_worker_that_is_to_see_no_device_is_empty(self) -> None:
        blind = StartWorker(0, 0, 0, devices=())
        assert env_of(spec(), blind, CUDA_VISIBLE_DEVICES="0,1")["CUDA_VISIBLE_DEVICES"] == ""
        sees = RoleSpec("actor", 4, Entry("script", "a.py"), auto_visible_device=False)
        assert env_of(spec(roles=(sees,)), blind, CUDA_VISIBLE_DEVICES="0")["CUDA_VISIBLE_DEVICES"] == "0"

    def test_the_device_mask_is_unchanged_without_devices(self) -> None:
        assert "CUDA_VISIBLE_DEVICES" not in env_of(spec())
        assert env_of(spec(), CUDA_VISIBLE_DEVICES="6")["CUDA_VISIBLE_DEVICES"] == "6"

    def test_the_device_mask_is_unchanged_without_auto_visible_device(self) -> None:
        role = RoleSpec("actor", 4, Entry("script", "a.py"), auto_visible_device=False)
        job = spec(roles=(role,))
        assert "CUDA_VISIBLE_DEVICES" not in env_of(job, self.MASKED)

    def test_a_users_device_mask_has_precedence(self) -> None:
        job = spec(env={"CUDA_VISIBLE_DEVICES": "7"})
        assert env_of(job, self.MASKED)["CUDA_VISIBLE_DEVICES"] == "7"

    def test_devices_of_another_type_have_their_own_mask(self) -> None:
        env = env_of(spec(), self.MASKED, replace(ORDER, mask="ZE_AFFINITY_MASK"))
        assert env["ZE_AFFINITY_MASK"] == "4,5"
        assert not [name for name in env if name.startswith("CUDA")]

    def test_a_device_type_without_a_mask_leaves_the_environment_unchanged(self) -> None:
        assert env_of(spec(), self.MASKED, replace(ORDER, mask="")) == env_of(spec())


class TestTheKeyOfASpawner:
    @pytest.mark.parametrize(
        "name",
        [
            "OMP_NUM_THREADS",
            "MKL_NUM_THREADS",
            "KMP_AFFINITY",
            "PYTORCH_CUDA_ALLOC_CONF",
            "LD_PRELOAD",
            "PYTHONPATH",
            "MALLOC_ARENA_MAX",
            "TORCH_CPP_LOG_LEVEL",
        ],
    )
    def test_a_spawner_key_has_variables_read_at_import(self, name: str) -> None:
        assert spawner_key({name: "1", "HOME": "/"}) == ((name, "1"),)

    @pytest.mark.parametrize(
        "name", ["RANK", "TORCH_LOGS", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES", "PATH"]
    )
    def test_a_spawner_key_has_no_other_variables(self, name: str) -> None:
        assert spawner_key({name: "1"}) == ()

    @given(st.dictionaries(st.sampled_from(["OMP_A", "LD_B", "PATH", "X"]), st.text(max_size=3)))
    def test_a_spawner_key_is_independent_of_order_and_idempotent(self, env: dict[str, str]) -> None:
        turned = dict(reversed(env.items()))
        assert spawner_key(env) == spawner_key(turned)
        assert spawner_key(dict(spawner_key(env))) == spawner_key(env)

    def test_a_spawner_key_distinguishes_roles_by_variables_read_at_import(self) -> None:
        roles = tuple(
            RoleSpec(name, 1, Entry("script", "a.py"), env=env)
            for name, env in (("actor", {}), ("rollout", {"X": "1"}), ("critic", {"OMP_NUM_THREADS": "2"}))
        )
        actor, rollout, critic = (spawner_key(base_env(spec(roles=roles), r.name, {})) for r in roles)
        assert actor == rollout != critic


class TestAShareOfADevice:
    SHARED = StartWorker(3, 1, 2, ("0",), share=0.25)

    def test_a_device_share_is_in_the_workers_environment(self) -> None:
        assert env_of(spec(), self.SHARED)["UNIRUN_DEVICE_SHARE"] == "0.25"
        assert "UNIRUN_DEVICE_SHARE" not in env_of(spec())

    def test_a_device_share_limits_an_mps_client(self) -> None:
        name = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
        assert name not in env_of(spec(), self.SHARED)
        assert env_of(spec(), self.SHARED, CUDA_MPS_PIPE_DIRECTORY="/tmp/mps")[name] == "25"
        asked = spec(env={name: "60", "CUDA_MPS_PIPE_DIRECTORY": "/tmp/mps"})
        assert env_of(asked, self.SHARED)[name] == "60"
        least = env_of(spec(), replace(self.SHARED, share=0.001), CUDA_MPS_PIPE_DIRECTORY="/tmp/mps")
        assert least[name] == "1", "0 is no limit that MPS takes"


def test_a_rank_with_several_cpu_slots_has_as_many_threads() -> None:
    entry = Entry("script", "a.py")
    job = spec(roles=(RoleSpec("actor", 4, entry, device="cpu", slots=3.0), RoleSpec("rollout", 1, entry)))
    assert base_env(job, "actor", {})["OMP_NUM_THREADS"] == "3"
    assert base_env(job, "rollout", {})["OMP_NUM_THREADS"] == "1"
    assert base_env(job, "actor", {"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"


class TestPrograms:
    """A program finds its own variables and addresses, and none that it would take for those of a group of its own."""

    ENGINE = RoleSpec("my-engine", 4, Entry("program", "serve"), contract="none", ports=("http",), group=2)
    PLACES: ClassVar = {
        "my-engine": tuple(RankAddress(f"fd00::{rank}", (20000 + rank,)) for rank in range(4))
    }

    def env(self, role: RoleSpec, **inherited: str) -> dict[str, str]:
        order = replace(ORDER, role=role.name, endpoint="", mask="", places=self.PLACES)
        train = RoleSpec("train", 1, Entry("script", "train.py"))
        return env_of(JobSpec("job", "run-1", (role, train), ("train",)), MEMBER, order, **inherited)

    def test_programs_have_no_variable_of_torchrun(self) -> None:
        env = self.env(self.ENGINE)
        assert not RESERVED_ENV & env.keys()
        torch = ("OMP_", "MASTER_", "TORCH", "WORLD_", "LOCAL_", "GROUP_", "ROLE_")
        assert [name for name in env if name.startswith(torch) or name == "RANK"] == []

    def test_programs_do_not_inherit_the_variables_of_a_launcher_of_unirun_itself(self) -> None:
        inherited = {**dict.fromkeys(RESERVED_ENV, "7"), "OMP_NUM_THREADS": "5", "HOME": "/root"}
        env = self.env(self.ENGINE, **inherited)
        assert not RESERVED_ENV & env.keys()
        assert (env["OMP_NUM_THREADS"], env["HOME"]) == ("5", "/root")

    def test_programs_can_be_executed_whatever_the_number_of_addresses(self) -> None:
        """Linux refuses a variable of 128 KiB. The file of addresses has all."""
        places = tuple(RankAddress("10.0.0.1", (20000,)) for _ in range(10_000))
        order = replace(ORDER, role="train", endpoint="", mask="", places={"engine": places})
        roles = (
            RoleSpec("train", 1, Entry("program", "t"), contract="none"),
            replace(self.ENGINE, name="engine"),
        )
        assert "UNIRUN_ADDRS_ENGINE" in env_of(
            JobSpec("job", "run-1", roles, ("train",)),
            MEMBER,
            replace(order, places={"engine": places[:100]}),
        )
        env = env_of(JobSpec("job", "run-1", roles, ("train",)), MEMBER, order)
        assert max(map(len, env.values())) < 1 << 17

    def test_programs_have_their_role_and_rank_under_names_of_unirun(self) -> None:
        env = self.env(self.ENGINE)
        assert (env["UNIRUN_ROLE"], env["UNIRUN_RANK"], env["UNIRUN_NODE"]) == ("my-engine", "3", "n1")

    def test_programs_with_torchruns_contract_have_all_of_it(self) -> None:
        role = RoleSpec("actor", 4, Entry("program", "serve"), contract="torchrun")
        order = replace(ORDER, places=self.PLACES)
        env = worker_env(
            JobSpec("job", "run-1", (self.ENGINE, role), ("actor",)), order, MEMBER, JOB, "n1", {}
        )
        assert env.keys() >= RESERVED_ENV

    @pytest.mark.parametrize("kind", ["program", "script"])
    def test_programs_and_ranks_find_the_addresses_of_each_group(self, kind: EntryKind) -> None:
        contract: Contract = "none" if kind == "program" else "torchrun"
        role = RoleSpec("actor", 4, Entry(kind, "train"), contract=contract)
        job = JobSpec("job", "run-1", (self.ENGINE, role), ("actor",))
        env = env_of(job, order=replace(ORDER, places=self.PLACES))
        assert env["UNIRUN_ADDRS_MY_ENGINE"] == "[fd00::0]:20000,[fd00::2]:20002"
        assert env["UNIRUN_ADDRS_FILE"] == str(JOB.addresses("n1"))

    def test_programs_of_a_job_without_ports_find_no_file_of_addresses(self) -> None:
        assert "UNIRUN_ADDRS_FILE" not in env_of(spec())

    def test_programs_run_in_their_virtual_environment(self, tmp_path: Path) -> None:
        (tmp_path / "bin").mkdir()
        (tmp_path / "pyvenv.cfg").touch()
        role = replace(self.ENGINE, python=str(tmp_path / "bin/python"))
        env = self.env(role, PATH="/usr/bin", PYTHONHOME="/x", VIRTUAL_ENV="/old")
        assert env["PATH"] == f"{tmp_path}/bin:/usr/bin"
        assert env["VIRTUAL_ENV"] == str(tmp_path)
        assert "PYTHONHOME" not in env
        assert "PYTHON_EXEC" not in env
        assert self.env(role)["PATH"] == f"{tmp_path}/bin"

    def test_programs_of_an_interpreter_leave_the_virtual_environment_of_unirun(self) -> None:
        env = self.env(
            replace(self.ENGINE, python="/opt/python/bin/python3"), PATH="/venv/bin", VIRTUAL_ENV="/venv"
        )
        assert env["PATH"] == "/opt/python/bin:/venv/bin"
        assert "VIRTUAL_ENV" not in env

    def test_programs_keep_the_path_of_their_own_env_behind_their_interpreter(self) -> None:
        role = replace(self.ENGINE, python="/opt/bin/python3", env={"PATH": "/mine"})
        assert self.env(role, PATH="/usr/bin")["PATH"] == "/opt/bin:/mine"

    def test_scripts_with_another_interpreter_are_new_processes_of_it(self) -> None:
        role = RoleSpec("actor", 4, Entry("script", "a.py"), python="/opt/bin/python3", start_method="exec")
        env = env_of(JobSpec("job", "run-1", (role,), ("actor",)), PATH="/usr/bin")
        assert (env["PYTHON_EXEC"], env["PATH"]) == ("/opt/bin/python3", "/opt/bin:/usr/bin")
        assert env["RANK"] == "3"

"""The reader of stdin, the spawner that inherits it, and the imports of spawners."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from unirun.launcher.environment import FRESH
from unirun.launcher.orders import PRELOAD, Orders
from unirun.launcher.timers import ENABLE
from unirun.observe.jobdir import JobDir
from unirun.spec.job import Entry, JobSpec, RoleSpec
from unirun.wire.messages import AgentTask, StartRole, StartWorker
from unirun.wire.reports import Spawn

STDIN = 7
JOB = JobDir(Path("/jobs/run-1"))


def orders(*counts: int, stdin: str | None = None, given: int | None = STDIN) -> Orders:
    names = ("actor", "critic")[: len(counts)]
    roles = tuple(
        RoleSpec(name, count, Entry("script", "a.py"), env={"OMP_NUM_THREADS": name})
        for name, count in zip(names, counts, strict=True)
    )
    spec = JobSpec("job", "run-1", roles, names, stdin=stdin)
    return Orders(JOB, AgentTask(spec, "n0", ("n0",), "/", ""), {}, given)


def readers(which: Orders, role: str, count: int) -> list[int | None]:
    members = tuple(StartWorker(rank=rank, local_rank=rank, incarnation=0) for rank in range(count))
    order = StartRole(role, 0, 0, count, count, 0, 1, "127.0.0.1:1", members, "")
    return [worker.request.stdin for worker in which.launch(order).workers]


def test_the_only_worker_of_a_job_reads_stdin() -> None:
    assert readers(orders(1), "actor", 1) == [STDIN]


def test_of_several_workers_only_the_named_one_reads_stdin() -> None:
    assert readers(orders(2), "actor", 2) == [None, None]
    assert readers(orders(1, 1), "actor", 1) == [None]
    named = orders(2, 2, stdin="critic:1")
    assert readers(named, "actor", 2) == [None, None]
    assert readers(named, "critic", 2) == [None, STDIN]


@pytest.mark.parametrize("named", ["actor:0", "critic:1"])
def test_only_the_spawner_of_the_reader_inherits_stdin(named: str) -> None:
    made = orders(2, 2, stdin=named)
    role = named.partition(":")[0]
    inherited = {key: made.stdin_for(key) for key in made.spawners}
    assert inherited == {
        (("OMP_NUM_THREADS", name),): [STDIN] if name == role else [] for name in ("actor", "critic")
    }


def test_no_worker_on_another_node_reads_stdin() -> None:
    made = orders(1, given=None)
    assert readers(made, "actor", 1) == [None]
    assert all(made.stdin_for(key) == [] for key in made.spawners)


def test_a_spawner_for_stores_only_imports_torch_and_no_user_module() -> None:
    role = RoleSpec("actor", 1, Entry("workload", "pkg:Actor"), start_method="exec")
    other = replace(role, name="critic", start_method="fork", entry=Entry("script", "a.py"))
    for roles, expected in (((role,), PRELOAD), ((role, other), (*PRELOAD, "mine"))):
        spec = JobSpec("job", "run-1", roles, tuple(each.name for each in roles), preload=("mine",))
        which = Orders(JOB, AgentTask(spec, "n0", ("n0",), "/", ""), {})
        assert {which.modules(key) for key in which.spawners} == {(), expected}


def test_workers_of_another_interpreter_are_not_forked() -> None:
    roles = (RoleSpec("actor", 1, Entry("script", "a.py")),)
    spec = JobSpec("job", "run-1", roles, ("actor",))
    which = Orders(JOB, AgentTask(spec, "n0", ("n0",), "/", ""), {"PYTHON_EXEC": "/opt/python"})
    order = StartRole("actor", 0, 0, 1, 1, 0, 1, "127.0.0.1:1", (StartWorker(0, 0, 0),), "")
    (worker,) = which.launch(order).workers
    assert (worker.spawner, worker.request.fresh) == (FRESH, True)


def test_each_process_that_is_launched_has_an_id_of_its_own() -> None:
    made = orders(2, 1)
    numbers = []
    for restarts, (role, count) in enumerate((("actor", 2), ("critic", 1), ("actor", 2))):
        members = tuple(StartWorker(rank, rank, restarts) for rank in range(count))
        order = StartRole(role, restarts, 0, count, count, 0, 1, "127.0.0.1:1", members, "")
        numbers += [(worker.id, worker.request.id) for worker in made.launch(order).workers]
    assert numbers == [(number, number) for number in range(1, 6)]


@pytest.mark.parametrize("which", [set(), {"actor"}, {"critic"}, {"actor", "critic"}])
def test_timers_are_served_when_a_role_enables_them(which: set[str]) -> None:
    roles = tuple(
        RoleSpec(name, 1, Entry("script", "a.py"), env={ENABLE: "1"} if name in which else {})
        for name in ("actor", "critic")
    )
    spec = JobSpec("job", "run-1", roles, ("actor",))
    assert Orders(JOB, AgentTask(spec, "n0", ("n0",), "/", ""), {}).timers == bool(which)


class TestARequest:
    def requested(self, member: StartWorker, *roles: RoleSpec, env: dict[str, str] | None = None) -> Spawn:
        roles = roles or (RoleSpec("actor", 4, Entry("script", "a.py", ("--rank", "${local_rank}"))),)
        task = AgentTask(JobSpec("job", "run-1", roles, ("actor",)), "n1", ("n1",), "/where", "")
        order = StartRole("actor", 2, 2, 4, 2, 1, 2, "10.0.0.1:29500", (member,), "")
        (worker,) = Orders(JOB, task, env or {}).launch(order).workers
        return worker.request

    def test_a_spawn_request_has_all_that_a_process_needs(self) -> None:
        request = self.requested(StartWorker(3, 1, 2), env={"PATH": "/bin"})
        assert (request.id, request.title, request.kind, request.target) == (1, "actor:3", "script", "a.py")
        assert (request.cwd, request.fresh, request.cpus) == ("/where", False, None)
        assert (request.logs, request.folder) == ("/jobs/run-1/logs", "actor/3/2")
        assert request.env["PATH"] == "/bin"

    def test_a_spawn_request_substitutes_the_local_rank(self) -> None:
        assert self.requested(StartWorker(3, 1, 2)).args == ("--rank", "1")

    def test_a_spawn_request_has_the_roles_directory_and_processors(self) -> None:
        role = RoleSpec("actor", 1, Entry("program", "ls"), cwd="/own", start_method="exec")
        request = self.requested(StartWorker(0, 0, 0, cpus=(1, 2)), role)
        assert (request.cwd, request.fresh, request.cpus) == ("/own", True, (1, 2))

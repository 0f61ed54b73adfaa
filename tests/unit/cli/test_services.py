"""Services on the command line, and what a status says of them."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.unit.cli.conftest import Compose
from tests.unit.failover.services import Services, program, service
from unirun.cli import status as command
from unirun.errors import SpecError, UsageError
from unirun.failover.status_views import status_of
from unirun.observe.status import JobStatus
from unirun.spec.job import Entry, Probe

SERVE = "engine=2: sleep 9 --port {port}"


@pytest.fixture
def line(compose: Compose) -> Compose:
    """``line("--service 'a: sleep 1' train.py")``: the spec."""
    return lambda text: compose(*shlex.split(text))


class TestService:
    def test_service_is_a_role_beside_the_script(self, compose: Compose) -> None:
        spec = compose("--service", SERVE, "train.py", "--lr", "1")
        engine, train = spec.role("engine"), spec.role("default")
        assert (engine.count, engine.service, engine.contract) == (2, True, "none")
        assert engine.entry == Entry("program", "sleep", ("9", "--port", "{port}"))
        assert (engine.ready, engine.slots, engine.max_restarts) == (Probe("tcp"), 0, 10)
        assert train.entry == Entry("script", "train.py", ("--lr", "1"))
        assert spec.primary == ("default",)

    def test_service_has_one_rank_unless_a_number_is_given(self, line: Compose) -> None:
        assert line("--service 'a: sleep 1' train.py").role("a").count == 1

    def test_service_is_repeatable_and_stands_beside_roles(self, line: Compose) -> None:
        spec = line("--service 'a: sleep 1' --service 'b=3: sleep 2' --roles actor=2,critic=1 train.py")
        assert sorted((r.name, r.count) for r in spec.roles) == [
            ("a", 1),
            ("actor", 2),
            ("b", 3),
            ("critic", 1),
        ]
        assert sorted(spec.primary) == ["actor", "critic"]

    def test_service_stands_beside_the_role_that_is_named(self, line: Compose) -> None:
        assert line("--service 'a: sleep 1' --role learner train.py").primary == ("learner",)

    def test_service_is_added_to_the_roles_of_a_job_file(self, line: Compose) -> None:
        Path("job.yaml").write_text("script: train.py\nroles: {actor: 2}\n")
        spec = line("--config job.yaml --service 'a: sleep 1'")
        assert sorted(role.name for role in spec.roles) == ["a", "actor"]

    def test_service_may_be_ready_made_in_the_job_file(self, line: Compose) -> None:
        """It has a command of its own, and is none of the roles that start after it."""
        Path("job.yaml").write_text("roles: {actor: 2, judge: {kind: openai, program: sleep, args: ['9']}}\n")
        spec = line("--config job.yaml --after judge train.py")
        assert spec.role("judge").entry == Entry("program", "sleep", ("9",))
        assert spec.role("actor").entry.target == "train.py"
        assert (spec.role("actor").after, spec.role("judge").after) == ({"judge": 0}, {})
        assert line("--config job.yaml --no-python true").role("judge").contract == "none"

    def test_service_alone_is_a_job_until_it_is_stopped(self, line: Compose) -> None:
        spec = line("--service 'a: sleep 1'")
        assert ([role.name for role in spec.roles], spec.primary) == (["a"], ())

    def test_service_has_the_words_of_a_shell_and_braces_of_json(self, compose: Compose) -> None:
        words = "a: sleep \"x y\" 'it''s' --json '{\"a\": {}}' http://h:1"
        args = ("x y", "its", "--json", '{"a": {}}', "http://h:1")
        assert compose("--service", words, "train.py").role("a").entry.args == args

    @pytest.mark.parametrize("text", ["engine", "engine=2", "engine=2:", ": sleep 1", "engine: "])
    def test_service_without_a_name_or_a_command_is_refused(self, compose: Compose, text: str) -> None:
        with pytest.raises(UsageError, match="names no command; write 'engine=2: COMMAND --port {port}'"):
            compose("--service", text, "train.py")

    def test_service_with_an_open_quote_is_refused(self, compose: Compose) -> None:
        with pytest.raises(UsageError, match="No closing quotation; quote the command as for a shell"):
            compose("--service", "a: sleep 'x", "train.py")

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("--service 'a: sleep 1' --service 'a: sleep 2' train.py", "role 'a' is there twice"),
            ("--service 'a: sleep 1' --roles a=2 train.py", "role 'a' is there twice"),
            ("--service 'a=x: sleep 1' train.py", "expected a whole number, found 'x'"),
            ("--service 'a: sleep {prot}' train.py", r"did you mean \{port\}"),
            ("--service 'a: no-such-program' train.py", "no-such-program"),
        ],
    )
    def test_service_with_a_fault_is_refused(self, line: Compose, text: str, problem: str) -> None:
        with pytest.raises(SpecError, match=problem):
            line(text)


class TestOrder:
    def test_after_without_a_role_is_for_all_that_are_no_services(self, line: Compose) -> None:
        spec = line("--service 'a: sleep 1' --service 'b: sleep 1' --after a,b --roles x=1,y=1 train.py")
        after = {role.name: dict(role.after) for role in spec.roles}
        assert after == {"a": {}, "b": {}, "x": {"a": 0, "b": 0}, "y": {"a": 0, "b": 0}}

    def test_after_with_a_role_is_for_that_one(self, line: Compose) -> None:
        spec = line("--service 'a: sleep 1' --service 'b: sleep 1' --after b=a --after default=b train.py")
        assert {role.name: dict(role.after) for role in spec.roles} == {
            "a": {},
            "b": {"a": 0},
            "default": {"b": 0},
        }

    @pytest.mark.parametrize(
        "options", ["--after default=a,b", "--after default=a --after default=b", "--after a --after b"]
    )
    def test_several_after_add_up(self, line: Compose, options: str) -> None:
        spec = line(f"--service 'a: sleep 1' --service 'b: sleep 1' {options} train.py")
        assert dict(spec.role("default").after) == {"a": 0, "b": 0}

    def test_after_of_an_unknown_role_is_refused(self, line: Compose) -> None:
        with pytest.raises(SpecError, match="no role is called 'c'"):
            line("--service 'a: sleep 1' --after c train.py")
        with pytest.raises((SpecError, UsageError), match="no role is called 'c'"):
            line("--service 'a: sleep 1' --after c=a train.py")

    def test_after_in_a_circle_is_refused(self, line: Compose) -> None:
        with pytest.raises(SpecError, match="a circle"):
            line("--service 'a: sleep 1' --service 'b: sleep 1' --after a=b --after b=a train.py")

    def test_ready_is_a_url_or_a_port_that_is_open(self, line: Compose) -> None:
        spec = line(
            "--service 'a: sleep 1' --ready a=http://{addr}/x?y=z --service 'b: sleep 1' --ready b=tcp train.py"
        )
        assert spec.role("a").ready == Probe("http", ("http://{addr}/x?y=z",))
        assert spec.role("b").ready == Probe("tcp")

    def test_ready_of_another_kind_or_of_no_role_is_refused(self, line: Compose) -> None:
        with pytest.raises(SpecError, match="'soon' is no probe"):
            line("--service 'a: sleep 1' --ready a=soon train.py")
        with pytest.raises((SpecError, UsageError), match="--ready"):
            line("--service 'a: sleep 1' --ready tcp train.py")

    def test_slots_are_those_of_one_role(self, line: Compose) -> None:
        spec = line("--service 'a: sleep 1' --slots a=1 --slots default=2 train.py")
        assert [spec.role(name).slots for name in ("a", "default")] == [1, 2]
        with pytest.raises((SpecError, UsageError), match="--slots"):
            line("--service 'a: sleep 1' --slots 2 train.py")


class TestStatus:
    def status(self, job: Services) -> JobStatus:
        return status_of(job.state, {}, {})

    def rows(self, job: Services, capsys: pytest.CaptureFixture[str], now: float = 0.0) -> list[str]:
        """The lines of `unirun status` at `now` seconds after the job's last event."""
        at = job.now + now
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("unirun.cli.status.time.time", lambda: at)
            command._print(self.status(job), "", "", "/logs")
        return capsys.readouterr().out.splitlines()

    def test_status_of_a_service_has_its_address_and_since_when_it_is_ready(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        job = Services(service(), program("train", after={"engine": 0})).up()
        since = job.worker().health
        assert since is not None
        row = next(line for line in self.rows(job, capsys, now=31) if line.startswith("engine:0"))
        assert "ready for 31 s" in row
        assert row.rstrip().endswith("n0:20000")

    def test_status_of_a_service_that_is_not_ready_says_why(self, capsys: pytest.CaptureFixture[str]) -> None:
        job = Services(service(), program("train", after={"engine": 0})).begin().all_run("engine")
        job.ready("engine", 0, ok=False, why="status 503")
        lines = self.rows(job, capsys)
        assert any("not ready: status 503" in line for line in lines if line.startswith("engine:0"))
        assert "waiting: train starts after engine, of which 0 of 1 are ready (status 503)" in lines

    def test_status_of_a_program_without_a_probe_is_its_phase(self) -> None:
        job = Services(service(), program()).up()
        (train,) = self.status(job).roles[1].workers
        assert (train.phase, train.ready, train.address, train.why) == ("running", None, "", "")

    def test_status_survives_json(self) -> None:
        job = Services(service(count=2), program()).up().ready("engine", 1, ok=False, why="closed")
        status = self.status(job)
        assert JobStatus.from_json(status.to_json()) == status
        ready = [(worker.ready, worker.why) for worker in status.roles[0].workers]
        assert ready == [(True, ""), (False, "closed")]
        assert replace(status, waiting=()) == status


class TestAfterServicesOfAFile:
    def test_after_is_for_the_roles_that_are_no_services(self, line: Compose) -> None:
        engine = "{program: sleep, args: ['9'], service: true}"
        Path("job.yaml").write_text(f"roles: {{engine: {engine}, actor: {{script: train.py}}}}\n")
        spec = line("--config job.yaml --after engine")
        assert dict(spec.role("actor").after) == {"engine": 0}
        assert dict(spec.role("engine").after) == {}

    def test_after_is_for_the_trainer_too(self, line: Compose) -> None:
        Path("ppo.py").write_text("class Trainer: ...\nclass Actor: ...\n")
        spec = line("--service 'a: sleep 1' --after a --roles actor=1@ppo:Actor --trainer ppo:Trainer")
        assert dict(spec.role("trainer").after) == {"a": 0}

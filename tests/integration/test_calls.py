"""Jobs of workloads and a trainer, with real processes, over both transports."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.effort import CHAOS, variants
from tests.integration.harness import SCRIPTS, START_TIMEOUT, Result, Script, Unirun, swept
from tests.integration.kills import COLLECTIVES, calls_of, kill_stores
from tests.integration.warm import Warm, WarmUnirun
from tests.waiting import WAIT_TIMEOUT

pytestmark = pytest.mark.usefixtures("warm_rpc")

Played = tuple[Unirun, dict[str, Any]]
"""The finished command, and the output of the job's trainer."""

both = pytest.mark.parametrize("transport", ["torch", "socket"])


def run(
    unirun: Unirun, trainer: str, *args: object, roles: str = "actor=2@crew:Actor,rollout=2@crew:Rollout"
) -> Result:
    return unirun("--cwd", SCRIPTS, "--roles", roles, "--trainer", f"crew:{trainer}", *args)


def told(result: Result) -> dict[str, Any]:
    """The trainer's output, all rows merged."""
    assert result.code == 0, result.err
    rows = (json.loads(line) for line in result.lines if line.startswith("{"))
    return {key: value for row in rows for key, value in row.items()}


@pytest.fixture(scope="module", params=["torch", "socket"])
def plain(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, warm: Warm
) -> Iterator[Played]:
    """One job without failures, over each transport."""
    with swept(WarmUnirun(tmp_path_factory.mktemp("plain"), warm)) as command:
        result = run(command, "Plain", "--transport", request.param, "--env", "actor:FLAVOUR=sour")
        yield command, told(result)


def test_a_trainer_calls_its_workloads_and_gets_results_in_rank_order(plain: Played) -> None:
    _, said = plain
    assert said["groups"] == ["RG_ACTOR", "RG_ROLLOUT"]
    assert said["resource"]["total"] == 2
    assert said["sums"] == [4.0, 4.0]
    assert (said["one"], said["part"]) == ("actor:1", 1)
    assert said["handles"] == {"actor": 2, "rollout": 2}
    first, second = said["who"]
    assert (first["name"], first["rank"]) == ("actor:0", [0, 2, 2, 0, 2])
    assert (second["name"], second["rank"]) == ("actor:1", [1, 2, 2, 1, 2])
    assert first["actor"]
    assert first["port"]
    assert first["env"] == "sour"
    assert first["generations"] == [0]
    assert said["texts"] == [["0:a", "0:b"], ["1:c"]]
    assert said["sharding"] == {"0": "shard 2+1"}
    assert (said["error"], said["worker"]) == (["größer", 0], "actor:0") or said["worker"] == "actor:1"
    assert 'raise ValueError("größer", self.rank)' in said["trace"]
    assert "has no method 'no_such_method'" in said["unknown"]
    assert "add_or_die" in said["unknown"]
    assert said["info"]["roles"]["rollout"]["world_size"] == 2


def test_a_job_file_starts_the_same_job_and_its_config_reaches_every_worker(unirun: Unirun) -> None:
    job = unirun.root / "job.yaml"
    job.write_text(
        "roles:\n  actor: {count: 2, workload: 'crew:Actor'}\n  rollout: {count: 2, workload: 'crew:Rollout'}\n"
        f"trainer: crew:Plain\ntransport: socket\ncwd: {SCRIPTS}\nconfig: {{rate: 0.5}}\n"
    )
    said = told(unirun("--config", job))
    assert said["config"] == {"rate": 0.5}
    assert said["who"][1]["config"] == {"rate": 0.5}


def test_metrics_that_a_workload_reports_are_kept(plain: Played) -> None:
    command, _ = plain
    (line,) = (command.job_dir() / "metrics.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert (row["role"], row["rank"], row["values"]) == ("actor", 0, {"loss": 0.5})


def test_workloads_are_torn_down_at_the_end_and_the_result_of_fit_is_kept(plain: Played) -> None:
    command, _ = plain
    assert b"torn down actor:1" in command.log("actor", 1)
    assert (command.job_dir() / "result.pkl").exists()


@pytest.mark.chaos
def test_workloads_run_in_fresh_interpreters_too(unirun: Unirun) -> None:
    assert told(run(unirun, "Plain", "--start-method", "exec"))["sums"] == [4.0, 4.0]


@both
def test_raw_torch_rpc_reaches_a_workload_by_its_name(unirun: Unirun, transport: str) -> None:
    said = told(run(unirun, "Raw", "--transport", transport))
    assert said["said"] == [["0:x"], ["1:x"]]
    asked = transport == "torch"
    # The trainer, the rollout that it asks for, and the one that it does not ask for yet.
    assert said["before"] == [asked, asked, asked]
    assert said["listening"] == [True, True, asked]
    first, second, again = said["pids"]
    assert first == again != second == said["remote"]
    assert said["after"] not in (first, second), "the rank's next worker has an agent of its own"


@both
def test_a_workload_that_dies_restarts_alone_and_the_others_keep_their_memory(
    unirun: Unirun, transport: str
) -> None:
    said = told(run(unirun, "Killer", "--transport", transport))
    assert said["lost"] == "actor:1"
    assert said["seconds"] < WAIT_TIMEOUT
    before, after = said["before"], said["after"]
    assert said["sums"] == [10.0, 10.0]
    assert after[0]["pid"] == before[0]["pid"]
    assert after[1]["pid"] != before[1]["pid"]
    assert [row["count"] for row in after] == [2, 2], "the new rank was given what the other knows"
    assert after[0]["generations"] == [0, 1]
    assert after[1]["generations"] == [1]
    (decision,) = unirun.events("decision")
    assert "actor:1 alone" in decision


def test_the_next_call_reports_a_workload_that_died_meanwhile(unirun: Unirun) -> None:
    said = told(run(unirun, "Silent"))
    assert said["lost"] == "actor:1"
    assert said["counts"] == [1, 1], "the call was not made in any worker"
    assert said["sums"] == [2.0, 2.0]


@pytest.mark.parametrize("transport", variants("socket", "torch"))
def test_a_death_in_a_collective_repeats_an_idempotent_call(unirun: Unirun, transport: str) -> None:
    marker = unirun.root / "marker"
    job = unirun.root / "job.yaml"
    job.write_text(f"config: {{marker: {marker}}}\n")
    said = told(run(unirun, "InCollective", "--transport", transport, "--config", job))
    assert said["sums"] == [6.0, 6.0]
    assert said["after"][0]["generations"] == [0, 1]


def test_deaths_of_a_workload_do_not_affect_calls_of_others(unirun: Unirun) -> None:
    deaths = 20 if CHAOS else 5
    job = unirun.root / "job.yaml"
    job.write_text(f"config: {{deaths: {deaths}, seconds: {deaths / 5}}}\n")
    roles = "actor=1@crew:Actor,rollout=2@crew:Rollout"
    said = told(run(unirun, "Deaths", "--config", job, "--max-restarts", 30, roles=roles))
    assert said["deaths"] == deaths
    assert said["long"] == "rollout:0"
    assert said["last"] == [deaths]


def test_a_recoverable_trainer_restarts_with_its_state_and_finds_the_workloads_unchanged(
    unirun: Unirun,
) -> None:
    said = told(run(unirun, "Phoenix"))
    assert said["before"] == said["after"]
    assert said["sums"] == [8.0, 8.0]


def test_a_trainer_that_is_not_recoverable_ends_the_job(unirun: Unirun) -> None:
    result = run(unirun, "Mortal")
    assert result.code == 137
    assert "trainer:0 is not recoverable" in result.err


def test_an_error_of_the_trainer_is_the_root_cause(unirun: Unirun) -> None:
    result = run(unirun, "Wrong")
    assert result.code == 1
    assert "root cause: trainer:0" in result.err
    assert "RuntimeError: no tokenizer" in result.err
    assert "unirun/roles" not in result.err, "the traceback shows the user's code only"


def test_a_workload_that_cannot_be_set_up_uses_up_its_restarts(unirun: Unirun) -> None:
    result = run(unirun, "Plain", "--max-restarts", 1, roles="actor=1@crew:NoSetup,rollout=1@crew:Rollout")
    assert result.code == 5
    assert "no such model" in result.err


def test_a_script_that_serves_an_object_ends_when_no_caller_is_left(unirun: Unirun) -> None:
    result = unirun("--roles", "actor=1,rollout=2", SCRIPTS / "crew.py")
    assert result.code == 0, result.err
    actor, *rollouts = result.rows
    assert actor["texts"] == ["0 says hi", "1 says hi"]
    assert actor["first"] == 0
    assert [row["served"] for row in rollouts] == [True, True]


@pytest.mark.parametrize("plain", ["socket"], indirect=True)
def test_files_of_a_job_with_calls_are_private(plain: Played) -> None:
    command, _ = plain
    assert (command.job_dir() / "calls").stat().st_mode & 0o077 == 0


def test_a_rendezvous_store_that_is_killed_costs_no_idempotent_call(unirun: Unirun, script: Script) -> None:
    folder = script(COLLECTIVES, "reducing.py").parent
    job = unirun.start("--roles", "w=3@reducing:Worker", "--trainer", "reducing:Trainer", "--cwd", folder)
    job.lines("call once right")
    kill_stores(unirun, 2, random.Random(0))
    (folder / "enough").touch()
    result = job.end(within=2 * START_TIMEOUT)
    assert result.code == 0, result.err
    assert set(calls_of(result.out, "again")) == {"right"}
    assert set(calls_of(result.out, "once")) <= {"right", "WorkerLost"}

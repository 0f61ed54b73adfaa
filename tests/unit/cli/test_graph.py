"""``unirun graph``: the edges of a job file, or those that follow from a trainer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from msgspec import structs

from tests.unit.failover.job import Job
from unirun.cli import main
from unirun.collocation.graph.svg import LOOKS
from unirun.failover.context import ContextStore
from unirun.observe.jobdir import JobDir
from unirun.observe.status import CallStatus, JobStatus, RoleStatus, WorkerStatus
from unirun.rendezvous.creation import create_job
from unirun.rendezvous.election import campaign, job_prefix
from unirun.rendezvous.store.url import open_store
from unirun.values import WorkerId
from unirun.wire.address import UnixAddress
from unirun.wire.handshake import new_token
from unirun.wire.reports import CallCount, Calls, FromWorker

LOOP = """
script: train.py
roles: {actor: 2, rollout: 4}
edges:
  - {from: actor, to: rollout, invocation: load, kind: broadcast, async: true, weight: 2GB}
  - "rollout -> actor: update"
"""
TREE = (
    "actor ×2\n└─ load · broadcast · 2.0 GB ⇢ rollout ×4\n   └─ update · all_to_all → actor ×2 (above)\n"
    "\nwait for each other: actor + rollout\n"
)


def graph(*argv: str) -> int:
    with pytest.raises(SystemExit) as leave:
        main(["graph", *argv])
    assert isinstance(leave.value.code, int)
    return leave.value.code


def test_a_tree_is_drawn_of_the_edges(
    capsys: pytest.CaptureFixture[str], job_file: Callable[[str], str]
) -> None:
    assert graph("--config", job_file(LOOP)) == 0
    output = capsys.readouterr()
    assert output.out == TREE
    assert output.err == ""


def test_programs_are_named_and_need_no_edge(
    capsys: pytest.CaptureFixture[str], job_file: Callable[[str], str]
) -> None:
    roles = "{a: {script: train.py}, b: {script: train.py}, engine: {program: /bin/ls, count: 2}}"
    assert graph("--config", job_file(f"{{roles: {roles}, edges: [a -> b]}}")) == 0
    output = capsys.readouterr()
    assert "engine ×2  ls\n" in output.out
    assert output.err == ""


def test_a_trainer_without_edges_calls_every_role(capsys: pytest.CaptureFixture[str]) -> None:
    assert graph("--roles", "actor=1@ppo:Actor,rollout=2@ppo:Rollout", "--trainer", "ppo:PPOTrainer") == 0
    assert capsys.readouterr().out == (
        "trainer ×1\n├─ one_to_one → actor ×1\n└─ scatter → rollout ×2\n"
        "\nwait for each other: actor + rollout + trainer\n"
    )


@pytest.mark.parametrize(
    ("form", "begins"), [("mermaid", "flowchart LR"), ("dot", "digraph"), ("svg", "<svg")]
)
def test_the_format_option_chooses_the_form(
    capsys: pytest.CaptureFixture[str], job_file: Callable[[str], str], form: str, begins: str
) -> None:
    assert graph("--format", form, "--config", job_file(LOOP)) == 0
    assert capsys.readouterr().out.startswith(begins)


def test_output_writes_a_file(
    capsys: pytest.CaptureFixture[str], job_file: Callable[[str], str], scripts: Path
) -> None:
    assert graph("--format", "svg", "-o", "job.svg", "--config", job_file(LOOP)) == 0
    assert capsys.readouterr().out == ""
    assert ElementTree.fromstring((scripts / "job.svg").read_text(encoding="utf-8")).tag.endswith("svg")


@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("a.svg", "<svg"),
        ("a.mmd", "flowchart"),
        ("a.dot", "digraph"),
        ("a.yml", "edges:"),
        ("a.txt", "actor"),
    ],
)
def test_the_name_of_a_file_tells_the_form(
    job_file: Callable[[str], str], scripts: Path, name: str, begins: str
) -> None:
    assert graph("-o", name, "--config", job_file(LOOP)) == 0
    assert (scripts / name).read_text(encoding="utf-8").startswith(begins)


def test_edges_for_a_job_file(capsys: pytest.CaptureFixture[str], job_file: Callable[[str], str]) -> None:
    assert graph("--format", "yaml", "--config", job_file(LOOP)) == 0
    edges = capsys.readouterr().out
    path = job_file("script: train.py\nroles: {actor: 2, rollout: 4}\n" + edges)
    assert graph("--config", path) == 0
    assert capsys.readouterr().out == TREE


CALL = CallStatus("actor", "rollout", "load", "broadcast", "forward", False, 5e6, 40, 50_000_000, 400, 0.5)
STATUS = JobStatus(
    "ppo-1",
    "ppo",
    "running",
    "",
    1.0,
    None,
    None,
    tuple(
        RoleStatus(
            name, phase, 0, 0, 3, tuple(WorkerStatus(rank, phase, "n0", 0, None, "") for rank in range(2))
        )
        for name, phase in (("actor", "running"), ("rollout", "restarting"))
    ),
    calls=(CALL,),
)


@pytest.fixture
def job(scripts: Path, monkeypatch: pytest.MonkeyPatch) -> JobDir:
    """A job of two actors that have called two rollouts."""
    monkeypatch.setenv("UNIRUN_HOME", str(scripts / "home"))
    monkeypatch.delenv("UNIRUN_STORE", raising=False)
    job, lock = create_job("ppo-1", new_token())
    job.write_json(job.state.name, structs.replace(STATUS, phase="succeeded", ended=9.0, code=0).to_json())
    os.close(lock)
    return job


@pytest.mark.parametrize("argv", [(), ("ppo-1",), ("ppo",)])
def test_a_job_is_drawn_as_it_was_seen(
    capsys: pytest.CaptureFixture[str], job: JobDir, argv: tuple[str, ...]
) -> None:
    assert graph(*argv) == 0
    assert capsys.readouterr().out == (
        "actor ×2  running\n"
        "└─ load · broadcast · 5.0 MB → rollout ×2  restarting\n"
        "\n"
        "CALL                   CALLS  EACH     SENT     RETURNED\n"
        "actor → rollout: load  40     12.5 ms  50.0 MB  400 B\n"
    )


def test_a_picture_of_a_job_has_the_colours_of_its_states(
    capsys: pytest.CaptureFixture[str], job: JobDir, scripts: Path
) -> None:
    assert graph("ppo-1", "--format", "svg", "-o", "seen.svg") == 0
    assert capsys.readouterr().out == ""
    picture = (scripts / "seen.svg").read_text(encoding="utf-8")
    assert LOOKS["running"].fill in picture
    assert LOOKS["restarting"].fill in picture


def test_observed_edges_are_written_as_yaml_for_the_next_job(
    capsys: pytest.CaptureFixture[str], job: JobDir
) -> None:
    assert graph("ppo-1", "--format", "yaml") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[1].removeprefix("  - ")) == {
        "from": "actor",
        "to": "rollout",
        "invocation": "load",
        "kind": "broadcast",
        "weight": 5_000_000,
    }


def test_a_job_that_has_called_nothing_says_so(capsys: pytest.CaptureFixture[str], job: JobDir) -> None:
    quiet = structs.replace(STATUS, phase="succeeded", ended=9.0, code=0, calls=())
    job.write_json(job.state.name, quiet.to_json())
    assert graph("ppo-1") == 0
    output = capsys.readouterr()
    assert output.out == "actor ×2  running\nrollout ×2  restarting\n"
    assert output.err == "unirun: job ppo-1 has made no calls that unirun has seen\n"


def test_a_job_of_another_host_is_drawn_from_its_store(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    seen = CallCount("rollout", "load", 8, 4000, 0, 0.1, ((0, 1),))
    state = (
        Job({"actor": 1, "rollout": 2})
        .running()
        .on(FromWorker(WorkerId("actor", 0, 0), Calls((seen,))))
        .state
    )
    url = f"sqlite:{tmp_path / 'shared.db'}"
    store = open_store(url)
    term = campaign(store, job_prefix("job-1"), UnixAddress("/x", "far"), 7, ttl=60)
    assert term is not None
    ContextStore(store, "job-1", term).create(state)
    store.close()
    assert graph("--store", url) == 0
    assert capsys.readouterr().out.startswith(
        "actor ×1  running\n└─ load · broadcast · 1.0 kB → rollout ×2  running\n"
    )


def test_a_job_file_is_no_script(capsys: pytest.CaptureFixture[str], job_file: Callable[[str], str]) -> None:
    path = job_file(LOOP)
    assert graph(path) == 2
    assert capsys.readouterr().err == f"unirun: {path} is a job file; write unirun graph --config {path}\n"


def test_roles_that_share_devices_need_no_edge(
    capsys: pytest.CaptureFixture[str], job_file: Callable[[str], str]
) -> None:
    text = "{script: train.py, roles: {a: 1, b: 1, c: 1}, edges: ['a -> b'], collocations: [[a, c]]}"
    assert graph("--config", job_file(text)) == 0
    assert capsys.readouterr().err == ""


def test_a_job_that_there_is_not_is_one_line(capsys: pytest.CaptureFixture[str], job: JobDir) -> None:
    assert graph("nobody") != 0
    assert capsys.readouterr().err.count("\n") == 1


def test_warnings_about_a_graph_are_on_stderr(
    capsys: pytest.CaptureFixture[str], job_file: Callable[[str], str]
) -> None:
    path = job_file("{script: train.py, roles: {a: 1, b: 1, c: 1}, edges: ['a -> b']}")
    assert graph("--config", path) == 0
    output = capsys.readouterr()
    assert output.err.startswith("unirun: role c has no edge")
    assert output.out == "a ×1\n└─ one_to_one → b ×1\nc ×1\n\nwait for each other: a + b, c\n"


def test_all_faults_of_a_graph_are_reported(
    capsys: pytest.CaptureFixture[str], job_file: Callable[[str], str]
) -> None:
    path = job_file("{script: train.py, roles: {actor: 1, b: 1}, edges: ['actr -> b', 'b -> b']}")
    assert graph("--config", path) == 2
    lines = capsys.readouterr().err.splitlines()
    assert any("edges[0]" in line and "actor" in line for line in lines)
    assert any("edges[1]" in line for line in lines)


def test_the_graph_counts_devices_of_simulated_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--inventory", "fake:devices=8", "--nproc-per-node", "gpu", "train.py")
    assert graph(*argv) == 0
    assert capsys.readouterr().out == "default ×8\n"


def test_a_file_that_cannot_be_written_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert graph("-o", "no/such/folder.txt", "train.py") == 2
    assert (
        capsys.readouterr().err == "unirun: no/such/folder.txt cannot be written: no such file or directory\n"
    )

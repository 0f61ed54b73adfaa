"""The graph of a real job."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.harness import SCRIPTS, Unirun
from tests.waiting import eventually

TRAINER = """
    import pathlib, time
    import numpy
    from unirun import BaseTrainer, BaseWorkload

    class Actor(BaseWorkload):
        def load(self, data):
            return len(data)

        def ping(self):
            return "x"

        def state(self):
            return numpy.zeros(1_000_000, dtype=numpy.uint8)

    class Rollout(Actor):
        pass

    class Trainer(BaseTrainer):
        def init(self):
            pass

        def fit(self):
            for _ in range(4):
                self.RG_ACTOR.load(b"x" * 10_000)
                self.RG_ACTOR.ping.rank0()
                refs = [self.RG_ROLLOUT.state.call_async()]
                [ref.result() for ref in refs]
            for _ in range(600):
                if pathlib.Path("go").exists():
                    return
                time.sleep(0.05)
"""


@pytest.fixture
def options(unirun: Unirun, script: Callable[..., Path]) -> tuple[object, ...]:
    script(TRAINER, "loop.py")
    roles = "actor=2@loop:Actor,rollout=3@loop:Rollout"
    return "--roles", roles, "--trainer", "loop:Trainer", "--transport", "socket"


def drawn(text: str) -> str:
    """The picture without sizes, which depend on the encoding of arguments."""
    return re.sub(r"[\d.]+ (k?B)", r"… \1", text)


def test_the_graph_of_a_job_is_shown_while_it_runs_and_after_its_end(
    unirun: Unirun, options: tuple[object, ...]
) -> None:
    """1. A trainer calls all actors, one of them, and all rollouts.

    2. `unirun graph` shows these calls while the job runs.
    3. The job ends.
    4. `unirun graph` shows the same edges with the roles' last phases, and a table of all calls.
    """
    running = unirun.start(*options)
    eventually(lambda: "state" in unirun("graph").out, "the trainer's calls are seen")
    (unirun.root / "go").touch()
    assert running.end().code == 0
    seen = unirun("graph")
    assert seen.code == 0, seen.err
    picture, _, table = drawn(seen.out).partition("\n\n")
    assert picture.splitlines() == [
        "trainer ×1  succeeded",
        "├─ load · broadcast · … kB → actor ×2  stopped",
        "├─ ping · one_to_one · ⟷ … B → actor ×2  stopped (above)",
        "└─ state · broadcast · ⟵ 3.0 MB ⇢ rollout ×3  stopped",
    ]
    assert [line.split()[:5] for line in table.splitlines()[1:]] == [
        ["trainer", "→", "actor:", "load", "8"],
        ["trainer", "→", "actor:", "ping", "4"],
        ["trainer", "⇢", "rollout:", "state", "12"],
    ]


def test_the_edges_of_a_job_can_be_used_for_the_next_job(unirun: Unirun, options: tuple[object, ...]) -> None:
    """1. A job runs to its end.

    2. `unirun graph --format yaml` writes its edges, which become part of a job file.
    3. The plan of that file has their weights, and places the trainer beside the role with the most traffic.
    """
    (unirun.root / "go").touch()
    assert unirun(*options).code == 0
    edges = unirun("graph", "--format", "yaml").out
    job = unirun.root / "job.yaml"
    job.write_text(
        "roles:\n  actor: {count: 2, workload: 'loop:Actor'}\n"
        "  rollout: {count: 3, workload: 'loop:Rollout'}\ntrainer: loop:Trainer\n" + edges
    )
    plan = json.loads(unirun("plan", "--json", "--config", job, "--inventory", "fake:nodes=3,devices=2").out)
    weights = {edge["invocation"]: edge["weight"] for edge in plan["spec"]["edges"]}
    assert weights["load"] < 30_000 < 2_999_999 < weights["state"]
    # What moves most is near the trainer.
    node = {(row["role"], row["rank"]): row["node"] for row in plan["workers"]}
    assert node["trainer", 0] in {node["rollout", rank] for rank in range(3)}


def test_the_event_of_a_dead_worker_names_the_roles_that_wait_for_it(unirun: Unirun) -> None:
    """The trainer of `crew` calls an actor that dies."""
    result = unirun(
        "--cwd",
        SCRIPTS,
        "--roles",
        "actor=3@crew:Actor,rollout=1@crew:Rollout",
        "--trainer",
        "crew:Killer",
        "--max-restarts",
        "2",
    )
    assert result.code == 0, result.err
    assert any("trainer:0 waits for actor:" in each for each in unirun.events("affected"))

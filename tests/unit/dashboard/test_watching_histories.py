"""A job that the page watches, in any history: events, metrics and statuses come, and another job takes its id.

The reference is the list of all that was written since the job was created.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from contextlib import ExitStack
from unittest import mock

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.effort import examples
from tests.unit.dashboard.recorded import START, line, recorded_status
from unirun.dashboard import watching
from unirun.dashboard.watching import Jobs
from unirun.observe.events import EventLog
from unirun.observe.status import write_status
from unirun.rendezvous.creation import create_job
from unirun.wire.handshake import new_token

EVENTS, SHOWN, NAMES = 6, 4, 3
"""Events that are kept, and shown; metrics that are kept."""


class Watching(RuleBasedStateMachine):
    """The files of a job, and the page's view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = ExitStack()
        home = self.opened.enter_context(tempfile.TemporaryDirectory())
        self.opened.enter_context(mock.patch.dict(os.environ, {"UNIRUN_HOME": home}))
        self.opened.enter_context(mock.patch.multiple(watching, EVENTS=EVENTS, SHOWN_EVENTS=SHOWN))
        self.opened.enter_context(mock.patch.object(watching, "NAMES", NAMES))
        self.jobs = Jobs()
        self.job_ends = ExitStack()

    @initialize()
    def begins(self) -> None:
        self.job, lock = create_job("job-1", new_token())
        self.job_ends.callback(os.close, lock)
        self.log = EventLog(self.job.events, 1, clock=lambda: START)
        self.job_ends.callback(self.log.close)
        self.events: list[str] = []
        self.metrics: dict[str, list[float]] = {}
        self.left_out = 0
        self.status_comes("starting", 2)

    @rule(really=st.sampled_from((False, False, False, True)))
    def another_job_takes_the_id(self, really: bool) -> None:
        if really:
            self.job_ends.close()
            shutil.rmtree(self.job.path)
            self.begins()

    @rule(phase=st.sampled_from(("running", "recovering")), ranks=st.integers(1, 3))
    def status_comes(self, phase: str, ranks: int) -> None:
        self.status = recorded_status("job-1", ranks, phase)
        write_status(self.job, self.status)

    @rule(count=st.integers(1, EVENTS + 1))
    def events_come(self, count: int) -> None:
        for _ in range(count):
            self.events.append(f"event {len(self.events)}")
            self.log.write("decision", self.events[-1])

    @rule(name=st.sampled_from("abcde"), value=st.integers(0, 9))
    def a_metric_comes(self, name: str, value: int) -> None:
        with open(self.job.metrics, "a") as file:
            file.write(json.dumps(line("actor", 0, START + 1, {name: value})) + "\n")
        if name in self.metrics or len(self.metrics) < NAMES:
            self.metrics.setdefault(name, []).append(value)
        else:
            self.left_out += 1

    @rule(number=st.integers(0, 3 * EVENTS))
    def events_since_a_number_are_shown(self, number: int) -> None:
        rows, so_far = self.jobs.find("job-1").events_since(number)
        assert [row["text"] for row in rows] == self.events[number:][-SHOWN:]
        assert so_far == len(self.events)

    @rule()
    def metrics_are_shown(self) -> None:
        found = self.jobs.find("job-1").metrics("time")
        points = {each["name"]: each["points"] for each in found["series"]}
        assert {name: (each["low"], each["high"]) for name, each in points.items()} == {
            name: ([min(values)], [max(values)]) for name, values in self.metrics.items()
        }
        assert found["too_many"] == self.left_out

    @invariant()
    def the_status_is_the_latest(self) -> None:
        if hasattr(self, "job"):
            view = self.jobs.find("job-1").view()
            ranks = [len(role["ranks"]) for role in view["roles"]]
            assert (view["phase"], ranks) == (self.status.phase, [len(r.workers) for r in self.status.roles])

    def teardown(self) -> None:
        self.job_ends.close()
        self.opened.close()


TestWatching = Watching.TestCase
TestWatching.settings = examples(40, shrunk=False)

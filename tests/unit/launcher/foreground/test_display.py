"""The live line of the console says how far each role is."""

from __future__ import annotations

from unirun.launcher.foreground.session import progress
from unirun.spec.job import Entry, Probe, RoleSpec


def test_roles_with_a_probe_are_counted_by_ranks_that_are_ready() -> None:
    train = RoleSpec("train", 4, Entry("script", "train.py"))
    engine = RoleSpec("engine", 2, Entry("program", "serve"), ready=Probe("tcp"))
    assert progress(train, 3) == "train 3/4"
    assert progress(engine, 1) == "engine 1 of 2 ready"

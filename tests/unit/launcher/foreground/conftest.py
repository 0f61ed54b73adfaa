"""Commands that a test does not follow to their end are closed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from unirun.launcher.foreground.console import Console
from unirun.launcher.foreground.session import JobFollower
from unirun.launcher.local import RunningJob


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made: list[JobFollower] = []
    init = JobFollower.__init__

    def make(self: JobFollower, running: RunningJob, console: Console) -> None:
        init(self, running, console)
        made.append(self)

    monkeypatch.setattr(JobFollower, "__init__", make)
    yield
    for each in made:
        if each._display._follower._thread.is_alive():
            each._display.finish()
        each._console.close()

"""A job that ends while it is looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unirun.observe.jobdir import JobDir


def ending(job: JobDir, moment: int, end: Callable[[], None]) -> JobDir:
    """The directory of `job`, which ends (`end`) before the look of that number."""
    left = [moment]

    def look() -> None:
        left[0] -= 1
        if left[0] == -1:
            end()

    class Ending(JobDir):
        def alive(self) -> bool:
            look()
            return JobDir.alive(self)

        def read_json(self, name: str) -> dict[str, Any]:
            look()
            return JobDir.read_json(self, name)

    return Ending(job.path)

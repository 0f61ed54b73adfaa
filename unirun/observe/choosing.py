"""The choice of the job that a command means by an id, a part of one, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unirun.errors import JobError

MATCHES_SHOWN = 5


def choose_job(name: str | None, run_ids: Sequence[str], runs: Callable[[str], bool]) -> str:
    """Return the id in `run_ids` (the oldest first) that is `name` or begins with it. Without a name, return the newest
    job that `runs`, or else the newest. Raises `JobError`."""
    if not run_ids:
        raise JobError("there are no jobs", "start one with: unirun script.py")
    if name is None:
        return next((each for each in reversed(run_ids) if runs(each)), run_ids[-1])
    matches = [each for each in run_ids if each == name] or [x for x in run_ids if x.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        newest = ", ".join(reversed(matches[-MATCHES_SHOWN:]))
        and_more = ", …" if len(matches) > MATCHES_SHOWN else ""
        raise JobError(f"{name!r} fits {len(matches)} jobs", f"write more of the id: {newest}{and_more}")
    if ":" in name:
        raise JobError(f"{name!r} is a worker and no job", "name its job; unirun ls shows the jobs there are")
    raise JobError(f"no job is called {name!r}", "unirun ls shows the jobs there are")

"""``unirun dashboard`` and ``unirun report``: jobs as a page in a browser, and as a file."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import Any

from unirun import atomic
from unirun.cli.output import write_file
from unirun.cli.stored import find_here
from unirun.errors import JobError, UsageError
from unirun.launcher.foreground.terminal import say
from unirun.observe.jobdir import unirun_home
from unirun.observe.ownership import make_private, read_file

TOKEN = "dashboard.token"
"""The file, in the directory of unirun, with the token of programs that read metrics."""


def main(options: Any) -> int:
    """Serve the page until a signal ends this process, as it ends others."""
    only = [find_here(None, name, "dashboard").run_id for name in options.jobs]
    try:
        from unirun.dashboard.server import PageServer, listen
    except ModuleNotFoundError as error:
        raise UsageError(
            f"the page needs {error.name}, which is not installed", "pip install 'torch-unirun[dashboard]'"
        ) from error
    from unirun.dashboard.watching import Jobs

    listener = listen(options.port)
    PageServer(Jobs(only), listener, _scrape_token(), _announce).run()
    return 0


def _announce(link: str) -> None:
    """Print a link, at once even where a program reads it."""
    say(f"open {link}")
    sys.stdout.flush()


def _scrape_token() -> str:
    """The token of programs that read metrics, the same for each server. Raises `JobError`."""
    path = unirun_home() / TOKEN
    try:
        make_private(path.parent)
        if not path.exists():
            atomic.replace(path, secrets.token_urlsafe(32))
        return read_file(path).strip()
    except OSError as error:
        raise JobError(f"{path} cannot be written: {error.strerror}") from error


def report(options: Any) -> int:
    """Write a job as one file. Returns 0."""
    from unirun.dashboard.report import report_of

    job = find_here(None, options.job, "report")
    output = options.output or f"{job.run_id}.html"
    write_file(output, report_of(job))
    say(f"{output} has all of job {job.run_id}, {Path(output).stat().st_size / 1e6:.1f} MB")
    return 0

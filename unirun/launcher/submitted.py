"""The process that launches a job for a Python program: ``python -m unirun.launcher.submitted PID [--detach]``.

It reads the planned job from stdin, as JSON. The program itself is never forked, as it may have threads and devices. In
the foreground this process follows the job, and gets SIGTERM when the program, process PID, ends.
"""

from __future__ import annotations

import signal
import sys

from unirun.errors import UnirunError
from unirun.launcher.foreground.terminal import outlast_user_signals, prepare_streams, warn
from unirun.launcher.launch import run
from unirun.launcher.planned import PlannedJob
from unirun.launcher.process import die_with_parent
from unirun.rendezvous.store.url import store_url


def main(argv: list[str]) -> int:
    """Run the job on stdin. Returns the exit code."""
    die_with_parent(int(argv[0]), signal.SIGTERM)
    prepare_streams()
    outlast_user_signals()
    try:
        planned = PlannedJob.from_json(sys.stdin.read())
        return run(planned, store=store_url(None), detach="--detach" in argv)
    except UnirunError as error:
        warn(str(error))
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

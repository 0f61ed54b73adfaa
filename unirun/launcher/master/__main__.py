"""``python -m unirun.launcher.master JOB_DIR DEPOSING [FD]``: go on for a master that is dead. Agents start this.

`FD` is an inherited socket that listens for the agents on other hosts.
"""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path

from unirun.errors import EXIT_FAILURE, UnirunError
from unirun.launcher.master.lead import lead
from unirun.launcher.process import set_title
from unirun.observe.jobdir import JobDir
from unirun.wire.reporting import NO_THREAD, lacks_threads, report


def main() -> int:
    """Returns the exit code."""
    # As the first master is called in ps.
    set_title("unirun-master")
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    tcp = socket.socket(fileno=int(sys.argv[3])) if len(sys.argv) > 3 else None
    try:
        lead(JobDir(Path(sys.argv[1])), tcp=tcp, deposing=int(sys.argv[2]))
    except UnirunError as error:
        report(f"unirun-master: {error}")
        return error.exit_code
    except RuntimeError as error:
        if not lacks_threads(error):
            raise
        report(f"unirun-master: {NO_THREAD}")
        return EXIT_FAILURE
    return 0


if __name__ == "__main__":
    sys.exit(main())

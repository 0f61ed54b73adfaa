"""``python -m unirun.master JOB_DIR DEPOSING``: go on for a master that is dead. Agents start this."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from unirun.errors import UnirunError
from unirun.master.lead import lead
from unirun.rendezvous import JobDir
from unirun.reporting import report
from unirun.wire.aio import listen


def main() -> int:
    """Returns the exit code."""
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)
    job = JobDir(Path(sys.argv[1]))
    path = job.master_socket(os.getpid())
    path.unlink(missing_ok=True)
    try:
        with listen(path) as listener:
            lead(job, path, listener, deposing=int(sys.argv[2]))
    except UnirunError as error:
        report(f"unirun-master: {error}")
        return error.exit_code
    finally:
        path.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

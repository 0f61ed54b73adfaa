"""The command as a child of the program that submits a job: ``python -m unirun.cli.submitted PID …``.

It is asked to end when that program, process PID, is gone, so that a job in the foreground does not go on without it.
"""

from __future__ import annotations

import signal
import sys

from unirun.cli import main
from unirun.launcher.process import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]), signal.SIGTERM)
    main(sys.argv[2:])

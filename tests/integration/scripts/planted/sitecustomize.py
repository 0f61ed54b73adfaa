"""On the PYTHONPATH of a job: its masters have a bug.

PLANTED is the function of `unirun.failover.step` that fails; PLANTED_WAY is ``raise`` or ``exit``.
"""

import os
import sys
from importlib import import_module

COMMAND = "/testbed/patched.py"

if "unirun.launcher.master" in sys.orig_argv or any(each.endswith(COMMAND) for each in sys.orig_argv[:2]):

    def broken(turn, event):
        if os.environ["PLANTED_WAY"] == "exit":
            os._exit(1)
        raise ZeroDivisionError("planted")

    setattr(import_module("unirun.failover.step"), os.environ["PLANTED"], broken)

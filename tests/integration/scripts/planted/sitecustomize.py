"""On the PYTHONPATH of a job: its masters have a bug.

PLANTED is the function of `unirun.master.step` that fails; PLANTED_WAY is ``raise`` or ``exit``. With STANDBY_DELAY agents
start masters one after another after so many seconds, at most.
"""

import os
import sys
from importlib import import_module

NAME, WAY = os.environ.get("PLANTED"), os.environ.get("PLANTED_WAY")

if "unirun.master" in sys.orig_argv or any(each.endswith("/unirun") for each in sys.orig_argv[:2]):
    if NAME is not None:

        def broken(turn, event):
            if WAY == "exit":
                os._exit(1)
            raise ZeroDivisionError("planted")

        setattr(import_module("unirun.master.step"), NAME, broken)
    if "STANDBY_DELAY" in os.environ:
        standby = import_module("unirun.launcher.standby")
        standby.DELAY = standby.MAX_DELAY = float(os.environ["STANDBY_DELAY"])

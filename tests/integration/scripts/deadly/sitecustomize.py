"""On the PYTHONPATH of a job: its master kills itself before or after one of the job's writes to its store.

DEADLY_FOLDER has the file `writes`, a byte for each; DEADLY_WRITE is the number of the one that is deadly, and
DEADLY_WHEN is before or after.
"""

import os
import signal
import sys
from pathlib import Path


def is_master():
    """The first one is forked from the command, the others are programs."""
    return (
        Path("/proc/self/comm").read_text() == "unirun-master\n" or "unirun.launcher.master" in sys.orig_argv
    )


def count():
    with open(os.path.join(os.environ["DEADLY_FOLDER"], "writes"), "ab") as file:
        file.write(b".")
        file.flush()
        return os.fstat(file.fileno()).st_size


def make_deadly(store):
    txn = store.txn
    deadly = int(os.environ["DEADLY_WRITE"]), os.environ["DEADLY_WHEN"]

    def deadly_txn(self, *args, **kwargs):
        number = count() if is_master() else 0
        if deadly == (number, "before"):
            os.kill(os.getpid(), signal.SIGKILL)
        outcome = txn(self, *args, **kwargs)
        if deadly == (number, "after"):
            os.kill(os.getpid(), signal.SIGKILL)
        return outcome

    store.txn = deadly_txn


if "unirun.launcher.master" in sys.orig_argv or any(each.endswith("/unirun") for each in sys.orig_argv[:2]):
    from unirun.rendezvous.store.sqlite import SqliteStore

    make_deadly(SqliteStore)

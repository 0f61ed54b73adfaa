"""The script of the ranks of a measured job: a plain torchrun script, which depends on no launcher.

    ranks.py POINTS once       leave after the first all_reduce
    ranks.py POINTS sit        sleep after it
    ranks.py POINTS train      go on: an all_reduce every 10 ms, as a training loop has them
    ranks.py POINTS stubborn   sleep, ignore SIGTERM, and hold a child process in a session of its own

Every rank appends one line to the file POINTS when it is past its first all_reduce: its rank, how often its
group was restarted, its pid and the time in seconds since the epoch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist


def main(points: str, then: str) -> None:
    """Join the group, run one all_reduce, write a point, and do what `then` selects."""
    if then == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    dist.init_process_group("gloo")
    meet()
    note_time(points)
    if then == "train":
        while True:
            time.sleep(0.01)
            meet()
    if then != "once":
        time.sleep(600)
    dist.destroy_process_group()


def meet() -> None:
    """Run one all_reduce. Its sum shows that every rank took part."""
    ones = torch.ones(1)
    dist.all_reduce(ones)
    if ones.item() != dist.get_world_size():
        raise RuntimeError(f"{ones.item():g} ranks took part, {dist.get_world_size()} were expected")


def note_time(points: str) -> None:
    """Append one line with one write, so that lines of several processes stay whole."""
    now = time.time()
    restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
    line = f"{os.environ['RANK']} {restarts} {os.getpid()} {now:.6f}\n"
    file = os.open(points, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, line.encode())
    os.close(file)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

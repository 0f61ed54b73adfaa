"""The member of a job's own etcd on this node: a process that lives as long as the node's agent."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

from unirun.errors import StoreError
from unirun.failover.offers import AgentTask
from unirun.launcher.process import die_with_parent
from unirun.observe.jobdir import JobDir
from unirun.rendezvous.election import leader_of
from unirun.rendezvous.keys import job_prefix
from unirun.rendezvous.ownetcd import command_of
from unirun.rendezvous.store.url import open_store

LINGER = 3.0
"""Seconds that a member waits at the end for the master, which gives up its term last."""

AGAIN = 0.05

END = 2.0
"""Seconds that etcd has to end."""


@contextmanager
def running_member(job: JobDir, task: AgentTask) -> Iterator[frozenset[int]]:
    """Run the member of the task's node, if it has one; gives its pid. Call it before any thread is started."""
    me = next((each for each in task.etcd if each.node == task.node), None)
    if me is None:
        yield frozenset()
        return
    with open(job.path / "etcd.log", "ab") as log:
        process = subprocess.Popen(
            command_of(task.etcd, me, job, insecure=(job.path / "tls" / "insecure").exists()),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
    try:
        yield frozenset((process.pid,))
        with suppress(StoreError):
            _wait_for_the_master(job)
    finally:
        process.terminate()
        try:
            process.wait(END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for_the_master(job: JobDir) -> None:
    """Wait until nobody leads the job. Raises `StoreError`."""
    # Not the store's own timeout: most members may be lost.
    store = open_store(job.store_url, timeout=LINGER)
    try:
        end = time.monotonic() + LINGER
        while leader_of(store, job_prefix(job.run_id)) is not None and time.monotonic() < end:
            time.sleep(AGAIN)
    finally:
        store.close()

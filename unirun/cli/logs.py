"""``unirun logs [JOB] [ROLE[:RANK]]``: what the workers of a job wrote."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from unirun.cli.stored import find_here
from unirun.errors import JobElsewhere, JobError, UsageError
from unirun.observe.batchjob import read_batch
from unirun.observe.jobdir import JobDir, directories_of_nodes, file_of
from unirun.observe.status import ENDED, is_between_runs, read_status, read_summary
from unirun.values import WorkerId

BLOCK = 1 << 20
"""Bytes that are read at once."""

PIECE = 1 << 16
"""Bytes of a line that are printed at once."""

LINE_END = re.compile(rb"\r\n|\n|\r")
NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")


def main(options: Any) -> int:
    """Print, and with -f follow, the logs of a job. Returns 0."""
    job, who = _found(options.store, options.job, options.who)
    both = options.stdout == options.stderr
    names = ["stdout.log"] * (both or options.stdout) + ["stderr.log"] * (both or options.stderr)
    if options.follow:
        if options.attempt is not None:
            raise UsageError(
                "--attempt: a run that has ended has no more output to follow", "leave out --follow"
            )
        _refuse_unknown(job, who)
        _follow(job, who, names, options.lines)
        return 0
    files = list(_files(job, who, names, every=options.all, attempt=options.attempt))
    if not files:
        raise JobError(f"job {job.run_id} has no logs of {who or 'any worker'}", "see unirun status")
    for path, prefix in files:
        with open(path, "rb") as file:
            _show(file, prefix, options.lines)
    return 0


def _found(store: str | None, name: str | None, who: str | None) -> tuple[JobDir, str | None]:
    """The job and the worker or role whose logs are shown. A worker or a role alone is one of the newest job."""
    if name is not None and ":" in name:
        if who is not None:
            problem = f"{name} is a worker, and stands behind the job"
            raise UsageError(problem, f"write unirun logs {who} {name}")
        return find_here(store, None, "logs"), name
    try:
        return find_here(store, name, "logs"), who
    except JobElsewhere:
        raise
    except JobError:
        if name is None or who is not None:
            raise
        newest = find_here(store, None, "logs")
        if all(role.name != name for role in read_status(newest).roles):
            raise
        return newest, name


def _show(file: BinaryIO, prefix: bytes, count: int | None) -> None:
    """Print the last `count` lines of `file`, or all. Of a long line, or of many, a part is in memory at a time."""
    if count is not None:
        file.seek(start_of_last(file, count))
    begins = True
    while piece := file.readline(PIECE):
        if piece.endswith(b"\r"):
            # A newline after a carriage return belongs to the same line end.
            piece += file.read(1)
        for row in piece.splitlines(keepends=True):
            line = row.rstrip(b"\r\n")
            ends = len(line) < len(row)
            _put((prefix if begins else b"") + line + (b"\n" if ends else b""))
            begins = ends
    if not begins:
        _put(b"\n")


def start_of_last(file: BinaryIO, count: int) -> int:
    """The offset of the last `count` lines in `file`, which is read backwards, in blocks."""
    end = file.seek(0, os.SEEK_END)
    if not count:
        return end
    number = 0
    for at in range((end - 1) // BLOCK * BLOCK, -1, -BLOCK):
        # With the byte before and the byte behind the block, as the end of a line may lie in two blocks.
        first = max(at - 1, 0)
        file.seek(first)
        data = file.read(min(at + BLOCK + 1, end) - first)
        for found in reversed([*LINE_END.finditer(data)]):
            start, after = first + found.start(), first + found.end()
            if at <= start < at + BLOCK and after < end:
                number += 1
                if number == count:
                    return after
    return 0


def _put(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _folders(job: JobDir, attempt: int | None) -> tuple[JobDir, ...]:
    """The directories with the logs of the last run, or of another `attempt`; the first has the status. Raises
    `JobError`."""
    kept = job.attempts
    last = kept[-1] + 1 if kept else 0
    if attempt is None or attempt == last:
        # In a step of Slurm each node writes into a directory of its own.
        return (job, *directories_of_nodes(job))
    if attempt not in kept:
        known = ", ".join(map(str, (*kept, last)))
        raise JobError(f"job {job.run_id} has no attempt {attempt}", f"it has {known}")
    return (job.attempt(attempt), *directories_of_nodes(job, attempt))


def _files(
    job: JobDir, who: str | None, names: list[str], *, every: bool, attempt: int | None = None
) -> Iterator[tuple[Path, bytes]]:
    """Log files in the order of roles, ranks and incarnations, each with the prefix of its lines."""
    folders = _folders(job, attempt)
    status = read_status(folders[0])
    role_wanted, _, rank_wanted = (who or "").partition(":")
    known = [role.name for role in status.roles]
    if role_wanted and role_wanted not in known:
        raise UsageError(f"job {job.run_id} has no role {role_wanted!r}", f"it has {', '.join(known)}")
    for role in status.roles:
        for worker in role.workers:
            if (role_wanted and role_wanted != role.name) or (
                rank_wanted and rank_wanted != str(worker.rank)
            ):
                continue
            here = [folder.worker_logs(WorkerId(role.name, worker.rank, 0)).parent for folder in folders]
            for incarnation in _incarnations(here, worker.incarnation) if every else [worker.incarnation]:
                one = WorkerId(role.name, worker.rank, incarnation)
                for name in names:
                    if (path := file_of(folders, one, name)) is not None:
                        yield path, f"[{role.name}:{worker.rank}] ".encode()


def _incarnations(folders: Sequence[Path], latest: int) -> list[int]:
    """The incarnations with logs in one of `folders`, up to the `latest`."""
    found = {entry.name for folder in folders if folder.is_dir() for entry in os.scandir(folder)}
    return [
        number for number in sorted(int(each) for each in found if NUMBER.fullmatch(each)) if number <= latest
    ]


def _refuse_unknown(job: JobDir, who: str | None) -> None:
    """Raise `UsageError` for a rank that a role of the job does not have: its logs would be waited for to the end."""
    name, _, rank = (who or "").partition(":")
    for role in read_status(job).roles:
        if rank and role.name == name and rank not in {str(worker.rank) for worker in role.workers}:
            raise UsageError(
                f"job {job.run_id} has no {who}", f"{name} has ranks 0 to {len(role.workers) - 1}"
            )


def _follow(job: JobDir, who: str | None, names: list[str], lines: int | None) -> None:
    """Follow files as they come until the job has ended; a new incarnation is a new file.

    Raises OSError when stdout cannot be written any more.
    """
    from unirun.launcher.logs import LogFollower

    # The workers of a batch job write on other hosts.
    follower = LogFollower(shared=read_batch(job) is not None)
    stopped = threading.Event()
    failed: list[OSError] = []
    seen: set[tuple[str, ...]] = set()
    uid = ""

    def sink(prefix: bytes, run: str) -> Callable[[bytes], None]:
        def put(data: bytes) -> None:
            try:
                # The files of a run are elsewhere when Slurm has requeued the job.
                if not failed and run == uid:
                    _put(b"".join(prefix + row for row in data.splitlines(keepends=True)))
            except OSError as error:
                failed.append(error)
                stopped.set()

        return put

    try:
        while True:
            try:
                ended = read_summary(job).phase in ENDED
                if uid != job.uid:
                    uid = job.uid
                    seen.clear()
                files = [*_files(job, who, names, every=True)]
            except JobError as error:
                if not is_between_runs(job, error):
                    raise
                ended, files = False, []
            for path, prefix in files:
                # The copy of a file may come after it.
                log = path.parts[-4:]
                if log not in seen:
                    seen.add(log)
                    with open(path, "rb") as file:
                        start = 0 if lines is None else start_of_last(file, lines)
                    follower.follow(path, sink(prefix, uid), start=start)
            if ended or stopped.is_set():
                break
            _wait_for_change(job, stopped)
    finally:
        follower.finish()
    if failed:
        raise failed[0]


def _wait_for_change(job: JobDir, stopped: threading.Event) -> None:
    """Wait until the job's state is written again or `stopped` is set, at most a second."""
    before = _mtime(job)
    end = time.monotonic() + 1.0
    while time.monotonic() < end and _mtime(job) == before and not stopped.wait(0.05):
        continue


def _mtime(job: JobDir) -> int:
    try:
        return os.stat(job.state).st_mtime_ns
    except OSError:
        return 0

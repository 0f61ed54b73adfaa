"""Checks what users pass to a trainer, before workers start."""

from __future__ import annotations

import fcntl
import inspect
import math
import os
import re
import secrets
import socket
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

from unirun.errors import UsageError
from unirun.observe.ownership import exposure, make_private
from unirun.train.checkpoints import Folder
from unirun.train.data import Files, file_system
from unirun.values import natural
from unirun.wire.reporting import report

# The directory of a trainer: ``run_001``, ``run_002``, … with what each run keeps. It may be a URL.


def absolute(url: str) -> str:
    """A path as users write it, also with ``file://``, as an absolute one. Any other URL stays as it is."""
    scheme, separator, path = url.partition("://")
    if separator and scheme != "file":
        return url
    return os.path.abspath(os.path.expanduser(path if separator else url))


def check_writable(url: str) -> None:
    """Raise `UsageError` when nothing can be written below `url`, and when another user could replace its
    files: runs read their checkpoints again, which are pickles. Errors of other file systems are only known
    when something is written there."""
    if "://" in url:
        _check_kind("logdir", url)
        return
    try:
        make_private(Path(url))
        exposed = exposure(Path(url))
        if exposed is not None:
            raise UsageError(f"logdir {url} is not safe: {exposed.problem}", exposed.remedy)
        with tempfile.TemporaryFile(dir=url):
            pass
    except OSError as error:
        raise UsageError(f"logdir {url} cannot be written: {error.strerror}", "give another one") from error


def _check_kind(what: str, url: str) -> None:
    """Raise `UsageError` for a URL of a kind that fsspec does not know, or has no package for."""
    try:
        file_system(url)
    except (ValueError, ImportError) as error:
        raise UsageError(f"{what} {url} cannot be used: {error}", "see fsspec for what it needs") from error


LOCK = ".lock"
"""The file in the directory of a run that the trainer locks whose run it is."""

FINISHED = "finished"
"""The file in the directory of a run whose function has returned."""


def runs_in(logdir: str) -> dict[int, str]:
    """The folders of the runs, by their numbers, in ascending order. Raises OSError."""
    files, root = file_system(logdir)
    found = files.ls(root, detail=False, refresh=True) if files.exists(root) else []
    names = sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)
    runs = (re.fullmatch(r"run_(\d{3,})(-[0-9a-f]{8})?", name) for name in names)
    numbers = {int(run[1]): f"{logdir.rstrip('/')}/{run[0]}" for run in runs if run is not None}
    return {number: numbers[number] for number in sorted(numbers)}


def left_unfinished(logdir: str) -> str:
    """The last run, if its function has not returned and it has a checkpoint; empty if not. Raises OSError."""
    (last,) = [*runs_in(logdir).values()][-1:] or [""]
    if not last:
        return ""
    files, root = file_system(last)
    return last if not files.exists(f"{root}/{FINISHED}") and Folder(f"{last}/checkpoints").infos() else ""


def hold(url: str) -> IO[str] | None:
    """The open lock file of the run in a directory of this host, which `release` gives back; it ends with this process,
    too. None for a URL, or where the file system has no locks. Raises `UsageError` while another trainer holds it."""
    if "://" in url or not os.path.isdir(url):
        return None
    file = open(os.path.join(url, LOCK), "a+", opener=partial(os.open, mode=0o600))  # noqa: SIM115 - the run has it
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read(200).strip() or "another process"
        file.close()
        raise UsageError(
            f"{url} is in use by {holder}",
            "wait until that has ended, or stop it; another logdir begins anew",
        ) from None
    except OSError:
        file.close()
        report(f"unirun: the file system of {url} has no locks: start only one program that goes on with it")
        return None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def release(file: IO[str] | None) -> None:
    """Give a lock back."""
    if file is not None and not file.closed:
        # Processes that were forked meanwhile have the same lock, which would last as long as they do.
        fcntl.flock(file, fcntl.LOCK_UN)
        file.close()


def mark_finished(url: str) -> None:
    """Note that the function of a run has returned. Raises OSError."""
    files, root = file_system(url)
    files.pipe_file(f"{root}/{FINISHED}", b"")


def next_run(logdir: str, again: int | None = None) -> tuple[str, str]:
    """The folder of the next run, or that of the run `again` if there is one, and that of its callbacks: in the same
    place, or in a directory of this host if that is elsewhere. No two trainers get the same new one. Raises OSError."""
    runs = runs_in(logdir)
    if again in runs:
        url = runs[again]
        if "://" in logdir and again == 1:
            report(f"unirun: runs in {logdir} have no lock: start only one program that goes on with them")
        return url, tempfile.mkdtemp(prefix="unirun-run-") if "://" in logdir else url
    number = max(runs, default=0) + 1
    while True:
        url = f"{logdir.rstrip('/')}/run_{number:03}"
        if "://" in logdir:
            # Most stores cannot make a directory only if there is none.
            return f"{url}-{secrets.token_hex(4)}", tempfile.mkdtemp(prefix="unirun-run-")
        try:
            Path(url).mkdir(0o700)
            # The umask may have removed permissions of the owner.
            Path(url).chmod(0o700)
            return url, url
        except FileExistsError:
            number += 1


def require(name: str, value: Any, kinds: Any, remedy: str) -> None:
    """`value` is one of `kinds`."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        shown = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
        raise UsageError(f"{name} is {shown}", remedy)


def check_failures(max_failures: Any, retry_exceptions: Any, grow_every: Any) -> None:
    """Check the number of failures that a run survives, and the number of times that it grows."""
    if not isinstance(max_failures, int) or isinstance(max_failures, bool) or max_failures < -1:
        raise UsageError(f"max_failures={max_failures!r}", "give a number from 0 on, or -1 for any")
    require("retry_exceptions", retry_exceptions, (list, tuple, set), "give a list of classes of exceptions")
    for each in retry_exceptions:
        if not (isinstance(each, type) and issubclass(each, Exception)):
            raise UsageError(f"retry_exceptions has {each!r}", "give classes of exceptions")
    require("grow_every", grow_every, (int, float), "give seconds")
    if math.isnan(grow_every) or grow_every < 0:
        raise UsageError(f"grow_every={grow_every!r}", "give seconds")


def environment(env: Any) -> dict[str, str]:
    """Variables of the workers."""
    if env is None:
        return {}
    require("env", env, Mapping, "give a dict of texts")
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise UsageError(f"env has {name!r}: {value!r}", "give texts")
    return dict(env)


def directory(logdir: Any) -> str:
    """An absolute path or a URL; empty for none."""
    if logdir is None:
        return ""
    require("logdir", logdir, (str, os.PathLike), "give a path or a URL")
    found = os.fspath(logdir)
    require("logdir", found, str, "give a path of text")
    return absolute(found) if found else ""


def datasets(dataset: Any) -> dict[str | None, Any]:
    """Datasets by name; None: the only one. Raises `UsageError`, also for a tuple, which RaySGD takes as several."""
    if isinstance(dataset, tuple):
        raise UsageError(
            f"dataset is a tuple of {len(dataset)}",
            "give several datasets as a dict by name, {'train': a, 'val': b}, and the samples of one as a list",
        )
    found = dict(dataset) if isinstance(dataset, Mapping) else {} if dataset is None else {None: dataset}
    for name, each in found.items():
        if name is not None:
            require("the name of a dataset", name, str, "give a text")
        if isinstance(each, Files):
            # They may be listed in a file of the hosts of the workers.
            continue
        from unirun.train.data.sources import source_of

        source_of("dataset" if name is None else name, each, shuffle=False, seed=0, block=1)
    return found


def checked_rank(called: tuple[Any, ...], most: int) -> tuple[int, Any]:
    """The rank and the function that `execute_single` is given. Raises `UsageError`."""
    rank, *rest = called
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < most:
        raise UsageError(
            f"execute_single: rank {rank!r}", f"give a number from 0 to {most - 1}, or leave it out"
        )
    if not rest or not callable(rest[0]):
        raise UsageError(
            "execute_single: there is no function", "write execute_single(rank, function, *args)"
        )
    return rank, rest[0]


def name_of(function: Any) -> str:
    """The name of a function in messages."""
    return str(getattr(function, "__name__", function))


def takes_config(function: Any, *, given: bool) -> bool:
    """Return True if a training function takes a config, which is `given` or not.

    Raises `UsageError` for what is none.
    """
    if not callable(function) or isinstance(function, type):
        call = ": pass f, not what f() has returned" if function is None else ""
        raise UsageError(f"{function!r} is no function", f"give a function of nothing, or of config{call}")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        # Not written in Python.
        return given
    needed = [
        p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if len(needed) > 1 or any(p.kind is p.KEYWORD_ONLY for p in needed):
        names = ", ".join(p.name for p in needed)
        raise UsageError(
            f"{name_of(function)} takes {names}", "write it with one argument, config, or with none"
        )
    # One that is taken by its name alone may have its value, as in ``partial(f, config=…)``.
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    return bool(needed) or any(p.name == "config" and p.kind not in by_name for p in parameters)


def checkpoint_of(given: Any, *, local: bool) -> str | dict[str, Any] | None:
    """An absolute path or a URL as text, or a state. Of a `local` trainer it must be there. Raises `UsageError`."""
    if given is None or isinstance(given, dict):
        return given
    if not isinstance(given, str | os.PathLike):
        raise UsageError(f"checkpoint is a {type(given).__name__}", "give a path, a URL or a dict")
    url = absolute(os.fspath(given)).rstrip("/")
    folder, _, number = url.rpartition("/")
    if (step := natural(number)) is None:
        raise UsageError(
            f"{url} is no checkpoint", "give what latest_checkpoint or best_checkpoint_path returns"
        )
    if local:
        _check_kind("checkpoint", url)
        Folder(folder).require(step)
    return url

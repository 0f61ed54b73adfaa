"""A job that was built, its submission, and the handle on it: status, logs, end, result, calls from outside.

`submit` plans the job here and launches it in a process of its own (`unirun.launcher.submitted`): this process, which
may have threads and devices, is never forked.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import os
import secrets
import signal
import site
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import cloudpickle

from unirun.collocation import count_slots, local_inventory, local_topology
from unirun.errors import (
    EXIT_FAILURE,
    JobError,
    JobFailed,
    RendezvousError,
    StoreError,
    UsageError,
    WireError,
)
from unirun.launcher.planned import PlannedJob, plan
from unirun.observe.jobdir import JobDir, all_jobs, choose_job, job_at
from unirun.observe.status import ENDED, JobStatus, read_status, runs
from unirun.rendezvous.masters import call_master, follow_to_end
from unirun.spec.builder import EntryDraft, Loaded
from unirun.spec.job import JobSpec
from unirun.spec.parse import parse_job
from unirun.spec.read import id_stem, nearest
from unirun.spec.yaml import refuse_extremes
from unirun.values import WorkerId
from unirun.wire.messages import Attach, Stop

if TYPE_CHECKING:
    from unirun.roles.calls.group import RoleGroup
    from unirun.roles.visitor import Visitor


# The handle on a submitted job: its status, logs, end and result.

MASTER_START_TIMEOUT = 30.0
"""Seconds in which the master of a submitted job must answer."""

RESULT = "result.pkl"
"""The file in a job's directory with what the trainer's ``fit`` returned."""


class JobHandle:
    """A submitted job. It reads the job's directory, and works as long as that exists.

    ::

        handle = job.submit("ppo", blocking=False)
        print(handle.status().phase)  # running
        print(handle["rollout"].generate("hello"))  # a call of the role's workers
        code = handle.wait(timeout=3600)  # seconds
    """

    def __init__(self, job: JobDir) -> None:
        self._job = job
        self._visitor: Visitor | None = None

    def __getitem__(self, role: str) -> RoleGroup:
        """All workers that `role` has now. Their methods are called as by a trainer.

        The first use connects this process to the job, and waits until that has a master. Raises `UsageError` for a
        role that the job does not have, `JobError` when the job has ended or nobody leads it.
        """
        return self._visit().role_group(role)

    def _visit(self) -> Visitor:
        if self._visitor is None:
            from unirun.roles.visitor import Visitor

            self.await_start()
            self._visitor = Visitor(self._job)
        return self._visitor

    def close(self) -> None:
        """Leave the job, which goes on. Calls that are open, or are made later, raise `CallError`."""
        visitor, self._visitor = self._visitor, None
        if visitor is not None:
            visitor.close()

    def __enter__(self) -> JobHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"JobHandle({self.run_id!r})"

    @property
    def run_id(self) -> str:
        """The job's id, which ``unirun status``, ``logs`` and ``stop`` take."""
        return self._job.run_id

    def status(self) -> JobStatus:
        """The state of the job: phase, roles, workers, failures. Raises `JobError` if its directory is gone."""
        return read_status(self._job)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the job's end, at most `timeout` seconds (None: no limit). Returns its exit code; 1 if it is lost.

        Raises `TimeoutError` if it has not ended by then; the job goes on.
        """
        return self._await_end(None, timeout)

    def stop(self) -> int:
        """Stop the job as SIGTERM does, and wait for its end.

        Returns its exit code: 143, or its own if it had ended before.
        """
        return self._await_end(Stop(int(signal.SIGTERM), "stopped by the program that submitted it"), None)

    def logs(self, role: str | None = None, rank: int | None = None) -> str:
        """The output of the latest incarnation of each worker; of all workers, of one `role`, or of one `rank` of it.

        Each line begins with its worker, ``[actor:2]``. The stdout of a worker comes first, then its stderr.
        Raises `JobError` if there is no such worker.
        """
        return "".join(self._lines(role, rank))

    @property
    def result(self) -> Any:
        """Wait for the job's end, and return what the trainer's `fit` returned. Raises `JobFailed`."""
        self.raise_if_failed()
        path = self._job.path / RESULT
        # None leaves no file.
        return cloudpickle.loads(path.read_bytes()) if path.exists() else None

    def raise_if_failed(self) -> None:
        """Wait for the job's end. Raises `JobFailed` if its exit code is not 0."""
        code = self.wait()
        if code:
            status = self.status()
            raise JobFailed(
                f"job {self.run_id} {status.phase} with exit code {code}: {status.reason}",
                f"see unirun logs {self.run_id}",
                code=code,
            )

    def await_start(self) -> None:
        """Wait until the job's master is there. Raises `JobError` when it is not within seconds."""
        deadline = time.monotonic() + MASTER_START_TIMEOUT
        while True:
            try:
                with call_master(self._job) as master:
                    # A stream that ends without a message would be recorded as refused.
                    master.send(Attach())
                return
            except (WireError, RendezvousError, StoreError) as error:
                if self.status().phase in ENDED:
                    return
                if time.monotonic() >= deadline:
                    raise JobError(f"the master of job {self.run_id} does not answer: {error}") from error
            time.sleep(0.02)

    def _await_end(self, stop: Stop | None, timeout: float | None) -> int:
        code = follow_to_end(self._job, stop, timeout).code
        return EXIT_FAILURE if code is None else code

    def _lines(self, role: str | None, rank: int | None) -> Iterator[str]:
        roles = self.status().roles
        names = [each.name for each in roles]
        if role is not None and role not in names:
            raise JobError(f"job {self.run_id} has no role {role!r}", nearest(role, names))
        chosen = [each for each in roles if role in (None, each.name)]
        if rank is not None and not any(rank == worker.rank for each in chosen for worker in each.workers):
            raise JobError(
                f"job {self.run_id} has no rank {rank} of {role or 'any role'}", "ranks begin at 0"
            )
        for each in chosen:
            for worker in each.workers:
                if rank not in (None, worker.rank):
                    continue
                folder = self._job.worker_logs(WorkerId(each.name, worker.rank, worker.incarnation))
                for name in ("stdout.log", "stderr.log"):
                    yield from _prefixed(f"[{each.name}:{worker.rank}] ", folder / name)


def _prefixed(prefix: str, path: Path) -> Iterator[str]:
    try:
        text = path.read_text(errors="backslashreplace")
    except FileNotFoundError:
        # It has not started yet.
        return
    if text:
        yield from (f"{prefix}{line}\n" for line in text.removesuffix("\n").split("\n"))


# `attach`: a process outside a job calls its workers.


def attach(job: str | None = None) -> JobHandle:
    """The handle on a job of this user that runs: its role groups, its status, its output.

    ::

        with unirun.attach("ppo-1a2b") as job:
            print(job["rollout"].generate("hello"))

    `job` is its id or the beginning of it; by default the newest that runs. Calls are those of a trainer, with the same
    promises, over sockets that prove the job's token. They go through restarts of workers and deaths of masters.
    Leaving changes nothing in the job. Raises `JobError` when there is no such job.
    """
    jobs = {each.run_id: each for each in all_jobs()}
    return JobHandle(jobs[choose_job(job, tuple(jobs), lambda run_id: runs(jobs[run_id]))])


# Imports the classes and functions that a job names, as its workers will.


def importable(module: Any) -> Any:
    """The name under which workers can import `module`: for ``__main__`` that of its file."""
    main = sys.modules["__main__"]
    if module != "__main__":
        return module
    if main.__spec__ is not None:
        return main.__spec__.name.removesuffix(".__main__")
    file = getattr(main, "__file__", None)
    return Path(file).stem if file else module


def entry_of(function: Any) -> EntryDraft:
    """The module and name of a function, given as the object or as ``pkg.mod:name``."""
    if isinstance(function, str):
        module, _, attribute = function.partition(":")
        return EntryDraft(importable(module), attribute)
    name = getattr(function, "__qualname__", function)
    return EntryDraft(importable(getattr(function, "__module__", None)), name)


def load(module: Any, name: Any) -> Loaded:
    """Import the class or function `name` of `module`. Errors are in the result."""
    if not all(isinstance(part, str) and part for part in (module, name)):
        return Loaded(error="it has no name")
    try:
        with _working_directory_on_path():
            home = _main_module(module) or importlib.import_module(module)
            found = getattr(home, name, None)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of the user's code is a fault of the job
        return Loaded(error=f"{type(error).__name__}: {error}")
    if found is None:
        names = [each for each, value in vars(home).items() if callable(value)]
        close = difflib.get_close_matches(name, names, n=1)
        return Loaded(error=f"{module} has no {name!r}" + (f", did you mean {close[0]!r}?" if close else ""))
    if not isinstance(found, type):
        return Loaded("function") if callable(found) else Loaded(error="it is neither a class nor a function")
    match getattr(found, "__unirun_kind__", ""):
        case "workload":
            return Loaded("workload")
        case "trainer":
            return Loaded("trainer")
    return Loaded()


def _main_module(module: str) -> ModuleType | None:
    """``__main__``, when it is the file that `module` names: running it a second time could submit a second job."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None or module in sys.modules:
        return None
    if module.rpartition(".")[2] != Path(file).stem:
        return None
    found = importlib.util.find_spec(module)
    same = found is not None and found.origin is not None and os.path.samefile(found.origin, file)
    return main if same else None


@contextlib.contextmanager
def _working_directory_on_path() -> Iterator[None]:
    """Workers find modules in their working directory, so this process searches there, too."""
    folder = os.getcwd()
    if folder in sys.path:
        # As the script's own folder it has a place, before installed packages.
        yield
        return
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def python_path() -> str:
    """The PYTHONPATH with which another interpreter finds the modules that this one does.

    Besides this process's PYTHONPATH it has the folder of the script, and all that was added to ``sys.path`` since.
    """
    installed = {
        os.path.realpath(path) for path in (*sysconfig.get_paths().values(), *site.getsitepackages())
    }
    standard = os.path.realpath(sysconfig.get_path("stdlib"))
    installed |= {os.path.join(standard, "lib-dynload"), site.getusersitepackages()}
    bundle = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    folders = [os.path.abspath(path) for path in sys.path]
    kept = [f for f in folders if os.path.realpath(f) not in installed and os.path.basename(f) != bundle]
    return os.pathsep.join(dict.fromkeys(kept))


class Job:
    """A job that `DLJobBuilder.build` has checked. `mapping` is the equivalent job file, as a dict."""

    def __init__(self, mapping: Mapping[str, Any], node_num: int) -> None:
        self.mapping, self.node_num = dict(mapping), node_num

    @property
    def spec(self) -> JobSpec:
        """The spec of the job. Its id is a placeholder for the one that `submit` makes."""
        return parse_job(self.mapping, count_slots=lambda _: 1, run_id="job")

    def submit(
        self, job_name: str | None = None, *, blocking: bool = True, max_restarts: int | None = None
    ) -> JobHandle:
        """Start the job in processes of its own. By default, show what it writes and wait for its end.

        `job_name` is the first part of the job's id (default: the trainer's module). `max_restarts` is how many times
        each role may be started again (default 3). With ``blocking=False`` it returns when the job has started; the job
        goes on without this process.

        Raises `PlacementError` if this host has no room for it, `JobError` if there is no safe directory for it,
        `JobFailed` if it cannot be started or, when blocking, does not succeed, and `UsageError` inside a worker of
        another job and for more than one node.
        """
        if "UNIRUN_JOB" in os.environ:
            raise UsageError(
                "a job is submitted inside a worker of another one",
                'put what submits it under: if __name__ == "__main__":',
            )
        if self.node_num != 1:
            raise UsageError(
                f"node_num({self.node_num}): this version of unirun runs on one node", "use node_num(1)"
            )
        mapping = dict(self.mapping)
        if job_name is not None:
            mapping["name"] = job_name
        if max_restarts is not None:
            mapping["max_restarts"] = max_restarts
        planned = _planned(mapping, job_name)
        # Raises here, not in the other process, when there is no safe directory for the job.
        job = job_at(planned.spec.run_id)
        return _follow(planned, job) if blocking else _detach(planned, job)


def _planned(mapping: Mapping[str, Any], job_name: str | None) -> PlannedJob:
    """The job with an id and its placement on this host. Raises `SpecError`, `PlacementError`."""
    refuse_extremes("config", mapping)
    inventory = local_inventory()
    stem = job_name or _first_module(mapping)
    spec = parse_job(
        mapping,
        count_slots=lambda kind: count_slots(kind, inventory),
        run_id=f"{id_stem(stem)}-{secrets.token_hex(3)}",
    )
    return plan(spec, inventory, local_topology)


def _first_module(mapping: Mapping[str, Any]) -> str:
    """The module of the trainer, or of the first role's function."""
    function = next((role["function"] for role in mapping["roles"].values() if "function" in role), "job")
    return str(mapping.get("trainer", function)).partition(":")[0]


def _command(*options: str) -> list[str]:
    return [sys.executable, "-m", "unirun.launcher.submitted", str(os.getpid()), *options]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": python_path()}


def _follow(planned: PlannedJob, job: JobDir) -> JobHandle:
    """Show the job to its end; an interrupt is passed on to it, and raised here when it has ended."""
    interrupted = False
    # In a session of its own it gets Ctrl-C from here alone: twice would mean SIGKILL to the workers.
    process = subprocess.Popen(
        _command(), env=_environment(), stdin=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(planned.to_json())
        while True:
            try:
                code = process.wait()
                break
            except KeyboardInterrupt:
                interrupted = True
                process.send_signal(signal.SIGINT)
    finally:
        if process.poll() is None:
            process.terminate()
    if interrupted:
        raise KeyboardInterrupt
    if code and not job.path.exists():
        raise JobFailed("the job could not be started", "see the messages above", code=code)
    handle = JobHandle(job)
    handle.raise_if_failed()
    return handle


def _detach(planned: PlannedJob, job: JobDir) -> JobHandle:
    done = subprocess.run(
        _command("--detach"),
        env=_environment(),
        input=planned.to_json(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise JobFailed(f"the job could not be started: {done.stderr.strip()}", code=done.returncode)
    handle = JobHandle(job)
    handle.await_start()
    return handle

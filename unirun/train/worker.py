"""`TrainWorker`: one rank of a `Trainer`. Functions run in its main thread, one after the other; it stays warm."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any

import psutil

from unirun.errors import TrainingFailed, UsageError
from unirun.roles import BaseWorkload, MasterHandle, init, trainer_invocation
from unirun.roles.interruption import Interrupted, main_thread
from unirun.roles.nested import mapped
from unirun.roles.process_groups import process_groups
from unirun.train.checkpoints import Folder, Info
from unirun.train.checkpoints.state import unwrapped
from unirun.train.checkpoints.writer import CheckpointWriter
from unirun.train.functions import enter
from unirun.train.lockstep import Reported
from unirun.train.losses import loader_loss
from unirun.train.session import Session
from unirun.train.setup import configure_logging, find_backend
from unirun.train.task import Attempt, Program, RunTask, show_cell
from unirun.wire.frames import finite
from unirun.wire.progress import page
from unirun.wire.reports import Metrics

OVER = 1 << 62
"""After every attempt."""

CALLS = 8
"""Calls that run beside the function at most."""


class TrainWorker(BaseWorkload):
    """One rank."""

    def __init__(self, master_handle: MasterHandle, config: Any) -> None:
        super().__init__(master_handle, config)
        configure_logging(config.logging)
        self._backend = find_backend(config.backend, timeout=config.group_timeout)()
        self._session: Session | None = None
        self._attempt = 0
        self._begun = threading.Condition()
        self._ending: threading.Thread | None = None
        self._ended: dict[int, str] = {}
        self._met = (0, 0)
        self._calling = False
        self._instance: Any = None

    def setup(self) -> None:
        """Let the backend begin, and listen for interrupts."""
        self._main = main_thread()
        init().peers.when_changed(self._look)
        self._backend.on_start(self.rank, self.world_size)

    def on_generation(self, generation: int) -> None:
        """The ranks are together, again after a loss."""
        if generation:
            self._backend.on_failure(self.rank, self.world_size)

    def teardown(self) -> None:
        """The worker is stopped. Threads that wait for a report would keep the process."""
        with self._begun:
            session, self._session = self._session, None
            self._attempt = OVER
            self._begun.notify_all()
        if session is not None:
            session.interrupt("the worker has ended")
            session.close()
        self._backend.on_shutdown()

    # Called by the driver, one at a time.

    def run(self, turn: Attempt, order: RunTask) -> Any:
        """Run the training function. Returns what it returns."""
        show_cell(order.function, order.cell)
        args = (dict(order.config),) if order.takes_config else ()
        return self._call(
            turn,
            lambda: self._session_of(order),
            lambda: self._backend.encode_data(_returned(order.function(*args))),
        )

    def idle(self) -> None:
        """Answered when nothing runs."""

    def execute(
        self,
        turn: Attempt,
        function: Program,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        alone: bool = False,
    ) -> Any:
        """Call a function, with the object of `prepare` first if there is one: in all ranks, or in this one `alone`."""
        own = () if self._instance is None else (self._instance,)
        return self._call(
            turn,
            self._session_of_call,
            lambda: _returned(function(*own, *args, **kwargs)),
            alone=alone,
        )

    def prepare(
        self,
        turn: Attempt,
        hook: Program | None,
        kind: Program | None,
        fresh: Collection[int],
        *,
        alone: bool,
    ) -> None:
        """Call the hook in the ranks `fresh`, and make an object for `execute`."""

        def prepared() -> None:
            if hook is not None and self.rank in fresh:
                hook()
            self._instance = None if kind is None else kind()

        self._call(turn, self._session_of_call, prepared, alone=alone)

    # Called by the driver while the function runs.

    @trainer_invocation(concurrency=CALLS)
    def take(self, attempt: int, number: int) -> Reported | str:
        """The next report of an attempt, or its end; the reason when it was interrupted."""
        session = self._of(attempt)
        try:
            return session.take(number) if session is not None else "another attempt has begun"
        except Interrupted as error:
            return str(error)

    @trainer_invocation(concurrency=CALLS)
    def commit(self, attempt: int, number: int) -> list[Info] | None:
        """Make a checkpoint count, once it is written. Returns all that are kept; None if the attempt is over, or if it
        ends before that."""
        session = self._of(attempt)
        try:
            return session.commit(number).result() if session is not None else None
        except CancelledError:
            return None

    @trainer_invocation(concurrency=CALLS)
    def interrupt(self, attempt: int, reason: str) -> None:
        """End the function, if it still runs in this attempt, or begins later."""
        with self._begun:
            if attempt > self._attempt:
                self._ended[attempt] = reason
            session = self._session
            if session is None or self._attempt != attempt:
                return
            session.interrupt(reason)
            if self._calling:
                self._main.wake(session.check)
                # In a thread: a group over nccl may take long to end.
                self._ending = threading.Thread(target=_end_groups, name="unirun-interrupt", daemon=True)
                self._ending.start()

    @trainer_invocation(concurrency=CALLS)
    def kill(self) -> None:
        """End this process: the function cannot be interrupted."""
        os.kill(os.getpid(), signal.SIGKILL)

    @trainer_invocation(concurrency=CALLS)
    def checkpoints(self, url: str, below: int | None) -> tuple[list[Info], int]:
        """The checkpoints of a run (with `below`, those with a lower number) without damaged ones at the end, and the
        number of the next one. The files of the last one have their sizes; `verify` reads them."""
        folder = Folder(url)
        return folder.infos(below), max(folder.numbers(), default=0) + 1

    @trainer_invocation(concurrency=CALLS)
    def verify(self, url: str, number: int) -> None:
        """Read this rank's share of a checkpoint. Raises `CheckpointDamaged` when that is not as it was written, and
        `UsageError` when there is none."""
        folder = Folder(url)
        folder.verify(folder.require(number), self.rank, self.world_size)

    def clear(self, url: str) -> None:
        """Delete checkpoints that were not finished. Nothing runs."""
        self._clear()
        Folder(url).clear()

    @trainer_invocation(concurrency=CALLS)
    def describe(self) -> dict[str, Any]:
        """Describe this process and its use of resources: devices, memory in bytes, seconds of processor time."""
        process = psutil.Process()
        return {
            "pid": process.pid,
            "devices": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            "memory": process.memory_info().rss,
            "cpu": sum(process.cpu_times()[:2]),
        }

    def _of(self, attempt: int) -> Session | None:
        """The session of an attempt, once it has begun; None when it is over."""
        with self._begun:
            self._begun.wait_for(lambda: self._attempt >= attempt)
            return self._session if self._attempt == attempt else None

    def _session_of_call(self) -> Session:
        return Session(self.rank, self.world_size, self.local_rank, is_run=False)

    def _session_of(self, order: RunTask) -> Session:
        folder, strategy = Folder(order.url), order.strategy
        writer = CheckpointWriter(
            folder, strategy, self.rank, self.world_size, order.number, order.kept, _gloo_group, _end_group
        )
        resume: Any = order.resume
        if isinstance(resume, int):
            resume = folder, folder.manifest(resume)
        elif isinstance(resume, tuple):
            other = Folder(resume[0])
            resume = other, other.require(resume[1])
        return Session(
            self.rank,
            self.world_size,
            self.local_rank,
            config=order.config,
            datasets=order.datasets,
            writer=writer,
            resume=resume,
            saves=order.number - 1,
            tell=lambda values: init().peers.tell(Metrics(finite(values), time.time())),
        )

    def _call(
        self, turn: Attempt, make: Callable[[], Session], program: Callable[[], Any], *, alone: bool = False
    ) -> Any:
        """Call `program` in this attempt. It finds the session that `make` returns, and it can be interrupted."""
        self._clear()
        if not alone:
            self._meet(turn)
        session = make()
        with self._begun:
            self._attempt, self._session, self._calling = turn.attempt, session, True
            # It may have been interrupted before it has begun.
            if reason := self._ended.get(turn.attempt, ""):
                session.interrupt(reason)
            self._ended = {number: why for number, why in self._ended.items() if number > turn.attempt}
            self._begun.notify_all()
        session.attempt = turn.attempt
        enter(session)
        page().begin()
        try:
            result = self._main.run(program, session.check)
            session.finish()
            return result
        except Interrupted as error:
            raise TrainingFailed(str(error)) from None
        except SystemExit as error:
            if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
                # The worker is told to end.
                raise
            session.interrupt(f"rank {self.rank} has left")
            raise TrainingFailed(
                f"the function called sys.exit({error.code!r}) in rank {self.rank}", "return instead"
            ) from error
        except BaseException as error:
            session.interrupt(f"rank {self.rank} has failed: {type(error).__name__}")
            lost = loader_loss(f"{self.role}:{self.rank}", error)
            if lost is not None and session.is_run:
                raise lost from error
            raise
        finally:
            enter(None)
            try:
                session.end_loaders()
                session.leave_as_told()
            finally:
                with self._begun:
                    self._calling = False
                    ending, self._ending = self._ending, None
                if ending is not None:
                    # It must not end the groups that are formed from here on.
                    ending.join()

    def _clear(self) -> None:
        """End what is left of the attempt before."""
        with self._begun:
            session, self._session = self._session, None
        if session is not None:
            session.close()

    def _meet(self, turn: Attempt) -> None:
        """Form the process group again, if something has failed in it since it was formed."""
        if turn.failed_attempts and self._met != (turn.generation, turn.failed_attempts):
            self._anew(f"again/{turn.failed_attempts}")
            self._backend.on_failure(self.rank, self.world_size)
        self._met = turn.generation, turn.failed_attempts

    def _look(self) -> None:
        """The job has changed: if another rank was lost, the run is over here."""
        peers = init().peers
        lost = peers.known(peers.role).generation > peers.generation
        session = self._session
        if lost and session is not None and self._main.runs(session.check) and not session.interrupted:
            session.interrupt("another rank was lost")
            self._main.wake(session.check)


def _returned(result: Any) -> Any:
    """`result` without the wrappers of DistributedDataParallel, as the driver is in no process group."""
    return mapped(unwrapped, result)


def _end_groups() -> None:
    """Let all waits in process groups fail."""
    from torch import distributed

    process_groups().end_all()
    if distributed.is_initialized() and "nccl" in str(distributed.get_backend()):
        group: Any = distributed.distributed_c10d._get_default_group()
        group.abort()


def _gloo_group() -> Any:
    """A group of all ranks in which checkpoints are coordinated."""
    from torch import distributed

    if not distributed.is_initialized():
        raise UsageError("a sharded checkpoint needs a process group", "use backend='torch'")
    return distributed.new_group(backend="gloo")


def _end_group(group: Any) -> None:
    """The group is not needed any more. It may have ended with the others."""
    from torch import distributed

    if distributed.is_initialized():
        with contextlib.suppress(ValueError):
            distributed.destroy_process_group(group)

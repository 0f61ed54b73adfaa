"""Losses of workers, in words."""

from __future__ import annotations

import pytest

from unirun.errors import InvocationTimeout, RemoteTraceback, WorkerLost
from unirun.train.losses import is_loss, kind_of, loader_loss, loss_of


@pytest.mark.parametrize(
    ("exit_", "message", "words"),
    [
        ("killed by SIGSEGV", "", "was killed by SIGSEGV"),
        ("killed by SIGKILL", "", "was killed by SIGKILL, perhaps for lack of memory"),
        (
            "killed by SIGKILL",
            "the kernel killed it: out of memory",
            "was killed by SIGKILL, the kernel killed it: out of memory",
        ),
        ("killed by SIGTERM", "", "was killed by SIGTERM"),
        ("exit code 3", "", "ended with exit code 3"),
        ("exit code 1", "LookupError: no", "ended with exit code 1 (LookupError: no)"),
        ("", "", "was lost"),
    ],
)
def test_a_loss_says_how_the_process_ended(exit_: str, message: str, words: str) -> None:
    assert loss_of("worker:1", exit_, message) == f"worker:1 {words}"


def kind(rank: int, exit_: str) -> str:
    return kind_of(loss_of(f"worker:{rank}", exit_))


def test_what_ends_every_rank_is_one_kind_whichever_was_first_and_a_kill_is_one_of_its_rank() -> None:
    assert kind(0, "exit code 3") == kind(1, "exit code 3")
    assert kind(0, "exit code 3") != kind(0, "exit code 4")
    for exit_ in ("killed by SIGKILL", "killed by SIGTERM", ""):
        assert kind(0, exit_) != kind(1, exit_)
    assert kind(0, "killed by SIGSEGV") == kind(1, "killed by SIGSEGV")
    assert kind(0, "killed by SIGKILL") != kind(0, "killed by SIGTERM")


def test_a_kill_is_of_one_kind_whatever_the_kernel_says_of_it() -> None:
    known = loss_of("worker:0", "killed by SIGKILL", "the kernel killed it: out of memory")
    assert kind_of(known) == kind(0, "killed by SIGKILL")


def test_a_killed_process_of_a_loader_is_of_its_rank() -> None:
    kinds = set()
    for worker in ("worker:0", "worker:1"):
        found = loader_loss(worker, RuntimeError("DataLoader worker (pid 4) is killed by signal: Killed. "))
        assert found is not None
        kinds.add(kind_of(found.problem))
    assert len(kinds) == 2


def test_a_loss_is_of_a_worker_of_the_run() -> None:
    def raised(error: Exception, where: str = "") -> Exception:
        error.__cause__ = RemoteTraceback(where, "…") if where else None
        return error

    assert is_loss(raised(WorkerLost("gone", worker="worker:1")))
    assert is_loss(raised(WorkerLost("its loader is gone", worker="worker:1"), "worker:1"))
    assert is_loss(raised(InvocationTimeout("late", missing=(), results={})))
    assert not is_loss(raised(WorkerLost("gone", worker="rollout:1"), "worker:1"))
    assert not is_loss(raised(InvocationTimeout("late", missing=(), results={}), "worker:1"))
    assert not is_loss(raised(ValueError("no"), "worker:1"))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            "DataLoader worker (pid 4) is killed by signal: Killed. ",
            "was killed by SIGKILL, perhaps for lack of memory",
        ),
        ("DataLoader worker (pid(s) 4, 17) exited unexpectedly", "exited unexpectedly"),
        (
            "DataLoader worker (pid 4) exited unexpectedly with exit code 3. Details are lost",
            "exited unexpectedly with exit code 3. Details are lost",
        ),
        (
            "DataLoader worker (pid 4) is killed by signal: Bus error. It is possible that dataloader's workers are out "
            "of shared memory. Please try to raise your shared memory limit.",
            "is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory. Please "
            "try to raise your shared memory limit",
        ),
    ],
)
def test_a_process_of_a_loader_that_ends_is_a_loss_of_its_rank(said: str, words: str) -> None:
    found = loader_loss("worker:1", RuntimeError(said))
    assert found is not None
    assert (found.worker, found.problem) == (
        "worker:1",
        f"worker:1 lost a process of a DataLoader, which {words}",
    )


@pytest.mark.parametrize(
    "error",
    [RuntimeError("no"), ValueError("DataLoader worker (pid 4) exited unexpectedly"), KeyboardInterrupt()],
)
def test_no_other_error_is(error: BaseException) -> None:
    assert loader_loss("worker:1", error) is None

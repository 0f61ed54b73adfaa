"""A search for hyperparameters goes on after its driver was killed: trials that it has left running are tried again."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import optuna

DRIVER = "driver"
"""The attribute of a trial that names the process which runs it."""


def resume(study: optuna.Study, n_trials: int) -> int:
    """Try the parameters of trials again that a killed driver has left running. Returns how many of `n_trials` are left
    to do: all but those that are complete or pruned.

    ::

        study = optuna.create_study(study_name="digits", storage="sqlite:///study.db", load_if_exists=True)
        study.optimize(trainable, n_trials=trainable.resume(study, 20))

    A trial that was left becomes a failed one, and a new one has its parameters. Trials of drivers on other hosts, or
    in other containers, stay as they are; for these there is the heartbeat of Optuna's storages.
    """
    from optuna.trial import TrialState

    trials = study.get_trials(deepcopy=False)
    drivers = {tuple(trial.user_attrs.get(DRIVER, ())) for trial in trials} - {()}
    ended = {driver for driver in drivers if _has_ended(*driver)}
    if drivers and ended == drivers:
        # One of them was killed before it could say that it runs the trial.
        ended.add(())
    for trial in trials:
        if trial.state == TrialState.RUNNING and tuple(trial.user_attrs.get(DRIVER, ())) in ended:
            # In this order, so that nothing is lost when this process is killed as well.
            parameters = {**trial.system_attrs.get("fixed_params", {}), **trial.params}
            study.enqueue_trial(parameters, user_attrs=trial.user_attrs)
            study.tell(trial.number, state=TrialState.FAIL)
    if study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
        _ask_one_at_a_time(study)
    done = sum(trial.state in (TrialState.COMPLETE, TrialState.PRUNED) for trial in trials)
    return max(n_trials - done, 0)


def this_process() -> list[Any]:
    """The identity of this process: its pid, where that is its pid, and what distinguishes it there from others."""
    return [os.getpid(), _place(), _life(os.getpid())]


def _ask_one_at_a_time(study: optuna.Study) -> None:
    """Let no two threads have the same of the trials that wait, which they may with SQLite (optuna #4002)."""
    ask, lock = study.ask, threading.Lock()

    def ask_alone(*args: Any, **kwargs: Any) -> optuna.Trial:
        with lock:
            return ask(*args, **kwargs)

    study.ask = ask_alone  # type: ignore[method-assign]


def _has_ended(pid: int, place: str, life: str) -> bool:
    """Return True if a process has ended. One in another place counts as alive."""
    return place == _place() and _life(pid) != life


def _place() -> str:
    """The namespace in which a pid names a process: a host, or a container on it."""
    return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"


def _life(pid: int) -> str:
    """The mark that distinguishes process `pid` from others that have had its pid; empty when it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "" if stat[0] in "ZX" else f"{boot} {stat[19]}"

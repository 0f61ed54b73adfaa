"""Losses of workers: which errors are one, and how a process ended, in words. Pure functions."""

from __future__ import annotations

import re

from unirun.errors import InvocationTimeout, RemoteTraceback, WorkerLost
from unirun.values import Value

LOSS_REPORT_TIMEOUT = 2.0
"""Seconds within which the job reports how a worker has ended."""

LOADER = re.compile(r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (.*)", re.DOTALL)
"""The errors of torch for a process of a DataLoader that has ended. They have no type of their own."""

KILLED = "killed by SIGKILL"

PERHAPS = "perhaps for lack of memory"
"""The note on a kill whose reason is not known."""

FROM_OUTSIDE = re.compile(
    r"was lost|(?:lost a process of a DataLoader, which )?(?:is|was) killed by SIG(?:KILL|TERM)"
)
"""The beginnings of descriptions of ends whose causes are outside of the process."""


def loss_of(worker: str, exit_: str, message: str = "") -> str:
    """The loss of a worker in words: ``worker:1 ended with exit code 3``. `exit_` is the job's text for its end
    (``exit code 3``, ``killed by SIGSEGV``), `message` the first line of its error, or a note on a kill. Both may be
    empty."""
    if not exit_:
        return f"{worker} was lost"
    end = f"was {exit_}" if exit_.startswith("killed") else f"ended with {exit_}"
    if KILLED in end:
        return f"{worker} {end}, {message or PERHAPS}"
    return f"{worker} {end} ({message})" if message else f"{worker} {end}"


def kind_of(loss: str) -> str:
    """A text that is equal for losses with the same cause. The same exit code or signal in another rank has the same
    cause, as the function runs in all of them. SIGKILL, SIGTERM and unknown ends come from outside, so another rank has
    another cause; a note on these does not count."""
    worker, _, end = loss.partition(" ")
    outside = FROM_OUTSIDE.match(end)
    return f"{worker} {outside[0]}" if outside is not None else end


def is_loss(error: BaseException) -> bool:
    """Return True if a worker of this run was lost. The function may itself call workers, and raise the loss
    of one: then the worker that the error names is not the one that has raised it."""
    cause = error.__cause__
    if isinstance(error, WorkerLost) and isinstance(cause, RemoteTraceback):
        return error.worker == cause.worker
    return isinstance(error, WorkerLost | InvocationTimeout) and not isinstance(cause, RemoteTraceback)


def loader_loss(worker: str, error: BaseException) -> WorkerLost | None:
    """The loss of `worker` when `error` says that a process of its DataLoader has ended: the kernel kills these first
    where memory is short. None for any other error."""
    said = LOADER.match(str(error)) if type(error) is RuntimeError else None
    if said is None:
        return None
    end = said[1].strip().rstrip(".")
    if end == "is killed by signal: Killed":
        end = f"was {KILLED}, {PERHAPS}"
    return WorkerLost(
        f"{worker} lost a process of a DataLoader, which {end}", "see the log of that rank", worker=worker
    )


# `Repeats`: equal failures in a row, and when there are enough of them.

LIMIT = 3
"""Equal failures in a row, without progress between them, after which another attempt is pointless."""


class Repeats(Value):
    """The last failure, how often it came in a row, and how many failures there were in `total` in that time. Progress,
    such as a step or a checkpoint, ends both.

    ::

        repeats = repeats.after("WorkerLost in actorTrain, exit code 3", progress=steps > steps_before)
        if repeats.hopeless:
            raise …
    """

    failure: str = ""
    count: int = 0
    total: int = 0

    def after(self, failure: str, *, progress: bool) -> Repeats:
        """One more failure. Equal failures have equal texts, so these have no times and no process ids. `progress`:
        whether there was any since the failure before."""
        again = failure == self.failure and not progress
        return Repeats(failure, self.count + 1 if again else 1, 1 if progress else self.total + 1)

    @property
    def hopeless(self) -> bool:
        """True after `LIMIT` equal failures in a row: the next attempt would fail like these."""
        return self.count >= LIMIT

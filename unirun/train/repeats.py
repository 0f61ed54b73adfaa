"""`Repeats`: equal failures in a row, and when there are enough of them."""

from __future__ import annotations

from unirun.values import Value

LIMIT = 3
"""Equal failures in a row, without progress between them, after which another attempt is pointless."""


class Repeats(Value):
    """The last failure, and how often it came in a row. Progress, such as a step or a checkpoint, ends the row.

    ::

        repeats = repeats.after("WorkerLost in actorTrain, exit code 3", progress=steps > steps_before)
        if repeats.hopeless:
            raise …
    """

    failure: str = ""
    count: int = 0

    def after(self, failure: str, *, progress: bool) -> Repeats:
        """One more failure. Equal failures have equal texts, so these have no times and no process ids. `progress`:
        whether there was any since the failure before."""
        again = failure == self.failure and not progress
        return Repeats(failure, self.count + 1 if again else 1)

    @property
    def hopeless(self) -> bool:
        """True after `LIMIT` equal failures in a row: the next attempt would fail like these."""
        return self.count >= LIMIT

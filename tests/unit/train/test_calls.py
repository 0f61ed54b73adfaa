"""A call of a trainer that ends early also ends in the workers."""

from __future__ import annotations

from typing import Any

import pytest

from unirun.errors import EncodingError
from unirun.train.running import Attempts


class RecordingAttempts(Attempts):
    """Notes which attempts it ends; there are no workers."""

    def __init__(self) -> None:
        self.ended: list[Any] = []

    def end(self, turn: Any, reason: str) -> None:
        """Note it."""
        self.ended.append((turn, reason))


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (KeyboardInterrupt(), [("turn", "the call has ended: KeyboardInterrupt")]),
        (EncodingError("a lock cannot be sent"), []),
    ],
    ids=["Ctrl-C while it is sent: a worker may have begun", "arguments that cannot be sent: none has"],
)
def test_a_call_that_ends_before_it_is_sent_whole(error: BaseException, ended: list[Any]) -> None:
    def begin() -> Any:
        raise error

    turn: Any = "turn"
    attempts = RecordingAttempts()
    with pytest.raises(type(error)):
        attempts._finish(turn, begin)
    assert attempts.ended == ended

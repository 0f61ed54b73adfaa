"""Stacks of ranks that a command asks for, of nodes that answer at any time, or not at all."""

from __future__ import annotations

import math
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import JobError, RendezvousError
from unirun.launcher import asking
from unirun.launcher.asking import ANSWER_TIMEOUT, ask_stacks
from unirun.wire.messages import AskStacks, StacksAsked
from unirun.wire.reports import Message, Stacks

NODES = ("n0", "n1", "n2")
WORDS = st.lists(st.tuples(st.integers(0, 5), st.sampled_from(NODES)), max_size=6)


class FakeMaster:
    """Says each word so many seconds after the one before, and nothing after the last."""

    def __init__(self, *words: tuple[int, Message]) -> None:
        self._words, self.now = deque(words), 100.0

    def __enter__(self) -> FakeMaster:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def send(self, message: Message) -> None:
        """Do nothing."""

    def receive(self, timeout: float) -> Message:
        """The next word. Raises `RendezvousError` if it does not come in time."""
        after = self._words[0][0] if self._words else math.inf
        self.now += min(after, timeout)
        if after > timeout:
            raise RendezvousError("nothing has come")
        return self._words.popleft()[1]


def asked(master: FakeMaster) -> tuple[Any, Any]:
    """The stacks that a command gets of this master, and the nodes that have not answered."""
    job: Any = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asking, "call_master", lambda _: master)
        patch.setattr(asking, "time", SimpleNamespace(monotonic=lambda: master.now))
        return ask_stacks(job, AskStacks())


@given(st.integers(0, 5), WORDS)
def test_all_answers_have_one_time_together(first: int, words: list[tuple[int, str]]) -> None:
    """And a node is there whatever number of times it answers."""
    stacks: list[Any] = [Stacks(node, 0, (f"rank of {node}",)) for _, node in words]  # type: ignore[arg-type]
    said = [(after, each) for (after, _), each in zip(words, stacks, strict=True)]
    found, missing = asked(FakeMaster((first, StacksAsked(NODES)), *said))
    now, expected, left = first, list[str](), {*NODES}
    for after, node in words:
        now += after
        if not left or now > ANSWER_TIMEOUT:
            break
        left.discard(node)
        expected.append(f"rank of {node}")
    assert (found, missing) == (expected, sorted(left))


def test_a_master_that_says_nothing_is_an_error() -> None:
    with pytest.raises(
        JobError, match="the master has not answered: nothing has come; try again in a moment"
    ):
        asked(FakeMaster())

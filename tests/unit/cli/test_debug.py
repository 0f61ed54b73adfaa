"""The conversation of ``unirun debug``: what the user types and interrupts, and what the rank says."""

from __future__ import annotations

import builtins
import signal
from collections import deque
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.cli.debug import Conversation
from unirun.errors import RendezvousError
from unirun.wire.blocking import BlockingStream
from unirun.wire.messages import DebugInput
from unirun.wire.reports import DebugEnded, DebugOutput, Message

WORDS = ("text", "prompt", "prompt", "nothing", "ctrl-c", "ctrl-c")


class FakeMaster:
    """The stream to a master: words of the rank and keys of the user come in the order of `words`, then its end."""

    def __init__(self, words: list[str]) -> None:
        self._words = deque(words)
        self.told: list[str] = []
        self.expected: list[str] = []
        # The rank has said something; it was interrupted since the last prompt; the user has left.
        self._met = self._interrupted = False
        self.left = False

    def receive(self, timeout: float) -> Message:
        """The next word."""
        word = self._words.popleft() if self._words else "end"
        if word == "end":
            return DebugEnded()
        if word == "ctrl-c":
            signal.raise_signal(signal.SIGINT)
            self._interrupts()
        if word in ("nothing", "ctrl-c"):
            raise RendezvousError("nothing")
        self._met = True
        if word == "prompt":
            self.expected.append("line")
            self._interrupted = False
        return DebugOutput("text", asks=word == "prompt")

    def _interrupts(self) -> None:
        """The first time the program stops, the second time the user leaves; also before the rank has answered."""
        self.left = self._interrupted or not self._met
        self.expected.append("detach" if self.left else "interrupt")
        self._interrupted = True

    def send(self, message: Message) -> None:
        """Record a message to the rank."""
        assert isinstance(message, DebugInput)
        self.told.append(message.control)


@given(st.lists(st.sampled_from(WORDS), max_size=12))
def test_the_first_ctrl_c_stops_the_program_once_and_the_second_one_leaves(words: list[str]) -> None:
    master = FakeMaster(words)
    usual = signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "input", lambda prompt: "p 1")
        assert Conversation(cast("BlockingStream", master), "actor:1").run() == 0
    assert master.told == master.expected
    assert signal.getsignal(signal.SIGINT) is usual

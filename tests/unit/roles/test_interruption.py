"""`MainThread`: a function that runs in the main thread is interrupted once, and then left alone."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.roles.interruption import INTERRUPT, Interrupted, MainThread, main_thread


class Lost:
    """Says that a peer is lost, once it is."""

    def __init__(self) -> None:
        self.due = False
        self.asked = 0

    def check(self) -> None:
        self.asked += 1
        if self.due:
            raise Interrupted


@pytest.fixture
def main() -> MainThread:
    return MainThread()


def timers() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if isinstance(each, threading.Timer)]


def test_a_function_that_waits_is_interrupted(main: MainThread) -> None:
    lost = Lost()

    def wake() -> None:
        lost.due = True
        main.wake(lost.check)

    threading.Timer(0.01, wake).start()
    with pytest.raises(Interrupted):
        main.run(lambda: time.sleep(WAIT_TIMEOUT), lost.check)


def test_a_function_within_another_is_the_one_that_is_interrupted(main: MainThread) -> None:
    outer, inner = Lost(), Lost()

    def function() -> bool:
        outer.due = inner.due = False

        def wait() -> None:
            inner.due = True
            main.wake(outer.check)
            main.wake(inner.check)
            time.sleep(WAIT_TIMEOUT)

        with pytest.raises(Interrupted):
            main.run(wait, inner.check)
        return main.runs(outer.check)

    assert main.run(function, outer.check)
    assert outer.asked == 1


def test_signals_end_when_the_function_has_noticed_that_nothing_is_due(main: MainThread) -> None:
    lost = Lost()

    def function() -> int:
        main.wake(lost.check)
        eventually(lambda: lost.asked > 1, "it was asked")
        return lost.asked

    asked = main.run(function, lost.check)
    eventually(lambda: not timers(), "no timer is left")
    assert lost.asked == asked == 2


def test_a_function_that_has_gone_on_is_interrupted_later(main: MainThread) -> None:
    lost = Lost()

    def function() -> None:
        for asked in (2, 3):
            main.wake(lost.check)
            eventually(lambda asked=asked: lost.asked == asked, "it was asked")  # type: ignore[misc]
            assert main.runs(lost.check)
        lost.due = True
        main.wake(lost.check)
        eventually(lambda: False, "it is interrupted")

    with pytest.raises(Interrupted):
        main.run(function, lost.check)


def test_a_function_that_is_called_again_gets_no_signal_of_the_one_before(main: MainThread) -> None:
    lost = Lost()
    lost.due = True
    with pytest.raises(Interrupted):
        main.run(lambda: None, lost.check)
    lost.due = False

    def interrupted() -> None:
        lost.due = True
        main.wake(lost.check)
        time.sleep(WAIT_TIMEOUT)

    with pytest.raises(Interrupted):
        main.run(interrupted, lost.check)
    lost.due, before = False, lost.asked
    main.run(lambda: eventually(lambda: not timers(), "no timer is left"), lost.check)
    assert lost.asked == before + 1


def test_signals_end_with_a_function_that_has_not_noticed(main: MainThread) -> None:
    lost = Lost()

    def function() -> None:
        main.wake(lost.check)

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {INTERRUPT})
    try:
        main.run(function, lost.check)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    eventually(lambda: not timers(), "no timer is left")
    assert lost.asked == 1


def test_each_use_puts_the_handler_back_that_a_script_has_replaced() -> None:
    before = signal.getsignal(INTERRUPT)
    try:
        first = main_thread()
        for _ in range(2):
            signal.signal(INTERRUPT, signal.SIG_IGN)
            assert main_thread() is first
            assert signal.getsignal(INTERRUPT) == first._signalled
    finally:
        signal.signal(INTERRUPT, before)


def test_a_signal_in_an_import_waits(main: MainThread) -> None:
    """The module would stay half-made. The signal comes again after it."""
    lost = Lost()
    source = f"import signal, threading\nsignal.pthread_kill(threading.get_ident(), {INTERRUPT})\n"

    def function() -> None:
        code = compile(source, "<frozen importlib._bootstrap>", "exec")
        exec(code, {})  # noqa: S102 - it plays the import system
        assert lost.asked == 1
        signal.pthread_kill(threading.get_ident(), INTERRUPT)
        assert lost.asked == 2

    main.run(function, lost.check)

"""A signal to the command ends its job."""

from __future__ import annotations

import signal

import pytest

from tests.waiting import WAIT_TIMEOUT

from .harness import START_TIMEOUT, Script, Unirun

PAUSE = "import signal; print('up', flush=True); signal.pause()"


STUBBORN = """
    import signal
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    print("up", flush=True)
    while True:
        signal.pause()
"""


class TestASignalToTheCommand:
    @pytest.mark.parametrize(
        ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
    )
    def test_a_signal_stops_the_workers_and_sets_the_exit_code(
        self, unirun: Unirun, script: Script, signum: signal.Signals, code: int
    ) -> None:
        train = script(
            """
            import os, signal, sys
            def leave(number, _):
                print("got", signal.Signals(number).name, os.environ["RANK"], flush=True)
                sys.exit()
            for name in ("SIGTERM", "SIGINT", "SIGHUP"):
                signal.signal(getattr(signal, name), leave)
            print("up", flush=True)
            signal.pause()
            """
        )
        job = unirun.start("--roles", "a=2", "--start-method", "exec", train)
        job.lines("up$", 2)
        job.signal(signum)
        result = job.end()
        assert result.code == code, result.err
        assert [line for line in result.lines if line != "up"] == [f"got {signum.name} {n}" for n in range(2)]
        assert (unirun.status()["phase"], unirun.status()["code"]) == ("stopped", code)
        assert "root cause" not in result.err

    def test_sigint_ends_a_worker_that_raises_keyboard_interrupt_without_a_report(
        self, unirun: Unirun, script: Script
    ) -> None:
        job = unirun.start("--roles", "a=2", script(PAUSE))
        job.lines("up$", 2)
        job.signal(signal.SIGINT)
        result = job.end()
        assert (result.code, unirun.status()["phase"]) == (130, "stopped"), result.err
        assert "root cause" not in result.err

    def test_a_signal_is_followed_by_sigkill_after_the_grace_period(
        self, unirun: Unirun, script: Script
    ) -> None:
        job = unirun.start(
            "--roles", "a=2", "--shutdown-timeout", 0.5, "--start-method", "exec", script(STUBBORN)
        )
        job.lines("up$", 2)
        job.signal(signal.SIGTERM)
        result = job.end(WAIT_TIMEOUT)
        assert result.code == 143
        assert result.err.count("did not end in its grace period and is killed") == 2

    def test_sigterm_that_comes_again_leaves_the_grace_period_and_ctrl_c_ends_it(
        self, unirun: Unirun, script: Script
    ) -> None:
        job = unirun.start("--shutdown-timeout", 600, "--start-method", "exec", script(STUBBORN))
        job.lines("up$")
        job.signal(signal.SIGTERM)
        job.lines("SIGTERM: stopping; SIGKILL follows")
        job.signal(signal.SIGTERM)
        job.lines("SIGTERM: stopping already")
        job.signal(signal.SIGINT)
        result = job.end(WAIT_TIMEOUT)
        assert (result.code, result.err.count("SIGINT: killing")) == (143, 1)

    def test_a_second_ctrl_c_kills_at_once(self, unirun: Unirun, script: Script) -> None:
        job = unirun.start(
            "--roles", "a=2", "--shutdown-timeout", 600, "--start-method", "exec", script(STUBBORN)
        )
        job.lines("up$", 2)
        job.signal(signal.SIGINT)
        job.lines("SIGINT: stopping")
        job.signal(signal.SIGINT)
        result = job.end(WAIT_TIMEOUT)
        assert result.code == 130
        assert (result.err.count("SIGINT: stopping"), result.err.count("SIGINT: killing")) == (1, 1)

    def test_a_signal_while_the_job_ends_by_itself_counts_as_the_first(
        self, unirun: Unirun, script: Script
    ) -> None:
        slow = """
            import os, signal, sys, time
            def stop(*_):
                print("asked", flush=True)
                while not os.path.exists("go"):
                    time.sleep(0.01)
                print("cleaned up", flush=True)
                sys.exit(0)
            signal.signal(signal.SIGTERM, stop)
            print("up", flush=True)
            signal.pause()
        """
        lead = script("import time, os\nwhile not os.path.exists('up'): time.sleep(0.01)", "lead.py")
        argv = [
            "--roles",
            "lead=1,slow=1",
            "--primary",
            "lead",
            "--script",
            f"slow={script(slow, 'slow.py')}",
        ]
        job = unirun.start(*argv, lead)
        job.lines(r"\] up")
        (unirun.root / "up").touch()
        job.lines(r"\] asked")
        job.signal(signal.SIGINT)
        job.lines("SIGINT: stopping; SIGKILL follows")
        (unirun.root / "go").touch()
        end = job.end(WAIT_TIMEOUT)
        assert end.code == 0
        assert "cleaned up" in end.out

    def test_a_signal_before_the_workers_start_ends_the_job(self, unirun: Unirun, script: Script) -> None:
        job = unirun.start("--roles", "a=2", script(PAUSE))
        job.lines("logs in")
        job.signal(signal.SIGINT)
        result = job.end(WAIT_TIMEOUT)
        assert (result.code, unirun.status()["phase"]) == (130, "stopped"), result.err

    def test_a_signal_ignored_by_nohup_is_ignored(self, unirun: Unirun, script: Script) -> None:
        job = unirun.start(
            *("--start-method", "exec", script(PAUSE)),
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
        )
        job.lines("up$")
        job.signal(signal.SIGHUP)
        job.signal(signal.SIGTERM)
        assert job.end(WAIT_TIMEOUT).code == 143

    def test_a_users_signal_is_passed_on_when_it_is_named_and_the_job_goes_on(
        self, unirun: Unirun, script: Script
    ) -> None:
        train = script(
            """
            import os, signal, sys
            signal.signal(signal.SIGUSR1, lambda *_: sys.exit(print("saved")))
            # In one piece: the signal may come between a text and the end of its line.
            os.write(1, b"up\\n")
            while True:
                signal.pause()
            """
        )
        job = unirun.start("--signals-to-handle", "SIGUSR1,SIGTERM", "--start-method", "exec", train)
        job.lines("up$")
        job.signal(signal.SIGUSR2)
        job.signal(signal.SIGUSR1)
        result = job.end(START_TIMEOUT)
        assert (result.code, result.lines) == (0, ["saved", "up"])
        assert unirun.status()["phase"] == "succeeded"

"""Linux process control, tested on real processes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading

import pytest

from tests.waiting import WAIT_TIMEOUT
from unirun.launcher import process


def run(code: str, *args: str) -> str:
    """Output of a separate Python process, whose changes to itself must not affect the tests."""
    command = [
        sys.executable,
        "-c",
        f"from unirun.launcher.process import *\nimport os, sys, time\n{code}",
        *args,
    ]
    return subprocess.run(command, stdout=subprocess.PIPE, timeout=WAIT_TIMEOUT, check=True, text=True).stdout


def ends(handle: int) -> bool:
    return bool(select.select([handle], [], [], WAIT_TIMEOUT)[0])


@pytest.mark.starts_processes
def test_a_child_dies_with_its_parent() -> None:
    """The child is watched by its pidfd, as it outlives the parent."""
    code = """
parent = os.getpid()
child = os.fork()
if child == 0:
    die_with_parent(parent)
    print(os.getpid(), flush=True)
    time.sleep(100)
sys.stdin.readline()
os.kill(os.getpid(), 9)
"""
    command = [sys.executable, "-c", f"from unirun.launcher.process import *\nimport os, sys, time\n{code}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        handle = os.pidfd_open(int(parent.stdout.readline()))
        parent.stdin.write(b"go\n")
        parent.stdin.close()
        assert ends(handle)
        os.close(handle)
        assert parent.wait(WAIT_TIMEOUT) == -signal.SIGKILL


@pytest.mark.starts_processes
def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    output = run("""
child = os.fork()
if child == 0:
    die_with_parent(1 << 22)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""")
    assert output == "137\n"


@pytest.mark.starts_processes
def test_spare_descriptors_raises_the_soft_limit_to_the_hard_one() -> None:
    code = """
import resource
from unirun.launcher.process import spare_descriptors
limit = resource.RLIMIT_NOFILE
hard = resource.getrlimit(limit)[1]
resource.setrlimit(limit, (200, hard))
assert spare_descriptors() == 200
assert resource.getrlimit(limit) == (hard, hard)
assert spare_descriptors() == hard
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=WAIT_TIMEOUT)


@pytest.mark.starts_processes
def test_kill_children_kills_adopted_orphans_and_their_descendants() -> None:
    output = run("""
import subprocess
adopt_orphans()
inner = "import subprocess as s; p = s.Popen(['sleep', '100'], start_new_session=True, stdout=-3); print(p.pid)"
orphan = int(subprocess.run([sys.executable, "-c", inner], stdout=subprocess.PIPE, text=True).stdout)
keep = subprocess.Popen(["sleep", "100"])
assert set(children()) == {orphan, keep.pid}, children()
kill_children(keep={keep.pid})
assert children() == [keep.pid]
kill_children()
print(children())
""")
    assert output == "[]\n"


def test_kill_group_ignores_a_missing_group() -> None:
    process.kill_group(1 << 22, signal.SIGTERM)


@pytest.mark.starts_processes
def test_set_title_is_cut_to_15_bytes() -> None:
    assert run("set_title('rollout-workers:123456'); print(open('/proc/self/comm').read())").strip() == (
        "rollout-workers"
    )


@pytest.mark.starts_processes
def test_environment_of_is_the_initial_environment() -> None:
    with subprocess.Popen(["sleep", "100"], env={"RANK": "3", "X": "a=b"}) as child:
        # A fork has its parent's environment until it has become the new program.
        while process.environment_of(child.pid).get("RANK") != "3":
            assert child.poll() is None
        assert process.environment_of(child.pid) == {"RANK": "3", "X": "a=b"}
        child.kill()
    assert process.environment_of(1 << 22) == {}


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("signal.signal(signal.SIGUSR1, lambda *_: None)", True),
        ("signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1]); wait()", True),
        # The thread does not block it, so the kernel would end the process there.
        ("wait(); signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])", False),
        ("", False),
    ],
    ids=["handler", "blocked", "blocked-in-one-thread", "neither"],
)
def test_a_signal_that_a_process_handles_or_awaits_is_told_from_others(before: str, expected: bool) -> None:
    code = f"""
import signal, threading
over = threading.Event()
def wait():
    threading.Thread(target=over.wait).start()
{before}
print(flush=True)
input()
over.set()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        taken = [process.takes_signal(child.pid, each) for each in (signal.SIGUSR1, signal.SIGUSR2)]
        child.kill()
    assert taken == [expected, False]
    with pytest.raises(ProcessLookupError):
        process.takes_signal(child.pid, signal.SIGUSR1)


@pytest.mark.starts_processes
def test_a_process_has_ended_also_while_nobody_has_collected_it() -> None:
    with subprocess.Popen(["sleep", "100"]) as child:
        assert not process.process_has_ended(child.pid)
        child.kill()
        handle = os.pidfd_open(child.pid)
        assert ends(handle)
        os.close(handle)
        assert process.process_has_ended(child.pid)
    assert process.process_has_ended(child.pid)


def test_a_process_has_ended_whose_number_has_become_that_of_a_thread() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        assert thread.native_id is not None
        assert process.process_has_ended(thread.native_id)
    finally:
        over.set()
        thread.join()

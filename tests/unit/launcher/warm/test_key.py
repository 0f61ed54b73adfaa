"""The comparison of a fork of a warm process with a new process, and the differences."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from unirun.launcher.orders import PRELOAD, PRELOAD_CALLS
from unirun.launcher.warm.key import (
    OF_SHELLS,
    Description,
    counts_in_warm,
    differences,
    unlike,
    variables_that_count,
)
from unirun.wire.reports import Borrow

ROOT = Path(__file__).parents[4]

THERE = Description(
    pid=1,
    began=0.0,
    idle=1.0,
    modules=("torch", "journal"),
    path=("/lib",),
    imported={"torch": "/venv/torch/__init__.py"},
    names=("ASKED", "HOME"),
    variables={"HOME": "/home/me", "OMP_NUM_THREADS": "1"},
    state={"Python": "/venv/bin/python", "nice": "0"},
)

WANTED = Borrow(
    cwd="/home/me",
    modules=("torch", "journal", "more"),
    env={"HOME": "/home/me", "OMP_NUM_THREADS": "1", "MINE": "x", "TORCH_LOGS": "all", "PYTHONPATH": "/lib"},
    umask=0o22,
    descriptors=1024,
    inherited=(),
)


ALL_NAMES = replace(THERE, names=None, variables=variables_that_count(WANTED.env, None))


def why_not(there: Description, wanted: Borrow) -> list[str]:
    """Compare for a job whose process has the same state."""
    return unlike(there, wanted, THERE.state)


def with_env(**env: str) -> Borrow:
    return replace(WANTED, env={**WANTED.env, **env})


class TestAForkFits:
    def test_a_fork_fits_when_nothing_relevant_differs(self) -> None:
        assert why_not(THERE, WANTED) == []

    @pytest.mark.parametrize("name", ["MINE", "TORCH_NCCL_TRACE", "TORCH_DISTRIBUTED_DEBUG", "UNIRUN_HOME"])
    def test_a_fork_fits_whatever_the_variables_that_are_read_later(self, name: str) -> None:
        assert why_not(THERE, with_env(**{name: "another"})) == []

    @pytest.mark.parametrize(
        "what", [{"umask": 0o77}, {"cwd": "/tmp"}, {"descriptors": 9}, {"inherited": (4, 5)}]
    )
    def test_a_fork_fits_whatever_it_takes_over_afterwards(self, what: dict[str, object]) -> None:
        assert why_not(THERE, replace(WANTED, **what)) == []

    def test_a_fork_fits_in_another_shell(self) -> None:
        assert why_not(ALL_NAMES, with_env(**dict.fromkeys(OF_SHELLS, "another"))) == []


class TestAForkDoesNotFit:
    @pytest.mark.parametrize(
        ("there", "wanted", "reason"),
        [
            (
                THERE,
                replace(WANTED, modules=("torch",)),
                "it has imported journal, which this job does not --preload",
            ),
            (THERE, with_env(PYTHONPATH=""), "PYTHONPATH is '', there '/lib'"),
            (THERE, with_env(PYTHONPATH="lib"), "PYTHONPATH is '/home/me/lib', there '/lib'"),
            (THERE, with_env(HOME="/root"), "HOME is '/root', there '/home/me'"),
            (THERE, with_env(OMP_NUM_THREADS="2"), "OMP_NUM_THREADS is '2', there '1'"),
            (THERE, with_env(ASKED=""), "ASKED is '', there not set"),
            (THERE, with_env(LD_PRELOAD="a.so"), "LD_PRELOAD is 'a.so', there not set"),
            (
                THERE,
                with_env(OMPI_COMM_WORLD_LOCAL_SIZE="4"),
                "OMPI_COMM_WORLD_LOCAL_SIZE is '4', there not set",
            ),
            (ALL_NAMES, with_env(NEW="1"), "NEW is '1', there not set"),
        ],
    )
    def test_a_fork_that_does_not_fit_gives_the_reason(
        self, there: Description, wanted: Borrow, reason: str
    ) -> None:
        assert why_not(there, wanted) == [reason]

    @pytest.mark.parametrize(
        ("state", "reason"),
        [
            ({"Python": "/bin/python", "nice": "0"}, "Python is '/bin/python', there '/venv/bin/python'"),
            ({"Python": "/venv/bin/python", "nice": "3"}, "nice is '3', there '0'"),
            ({"Python": "/venv/bin/python"}, "nice is not set, there '0'"),
        ],
    )
    def test_a_fork_of_a_process_in_another_state_does_not_fit(
        self, state: dict[str, str], reason: str
    ) -> None:
        assert unlike(THERE, WANTED, state) == [reason]

    def test_a_fork_does_not_fit_when_a_variable_is_unset(self) -> None:
        env = {name: value for name, value in WANTED.env.items() if name != "OMP_NUM_THREADS"}
        assert why_not(THERE, replace(WANTED, env=env)) == ["OMP_NUM_THREADS is not set, there '1'"]

    def test_the_reason_that_a_fork_does_not_fit_cuts_a_long_value(self) -> None:
        (reason,) = why_not(THERE, with_env(ASKED="x" * 10_000))
        assert len(reason) < 200


NAMES = st.sampled_from(("HOME", "OMP_X", "LD_X", "MINE", "OTHER", "GOTO_NUM_THREADS", "TORCH_NCCL_X", "PWD"))
ENVS = st.dictionaries(NAMES, st.sampled_from(("", "1", "2")))


@given(started=ENVS, asked=st.frozensets(NAMES), env=ENVS, every=st.booleans())
def test_a_fork_fits_exactly_when_the_relevant_variables_are_equal(
    started: dict[str, str], asked: frozenset[str], env: dict[str, str], every: bool
) -> None:
    """By the description of a warm process: variables read by imports, those read at import; or all."""
    names = None if every else tuple(asked)
    there = replace(THERE, path=(), names=names, variables=variables_that_count(started, names))
    # A copy of the environment reads each variable, also those that a shell sets.
    read = {*started, *env} - OF_SHELLS if every else asked
    counting = {"HOME", *read, *filter(counts_in_warm, {**started, **env})}
    same = all(started.get(name) == env.get(name) for name in counting)
    assert (not why_not(there, replace(WANTED, env=env))) == same


@given(here=ENVS, there=ENVS)
def test_differences_name_each_unequal_key(here: dict[str, str], there: dict[str, str]) -> None:
    named = [text.partition(" is ")[0] for text in differences(here, there)]
    assert named == sorted(name for name in {*here, *there} if here.get(name) != there.get(name))


CHANGES = {
    "nice": "os.nice(3)",
    "limit Max core file size": "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))",
    "limit Max stack size": "resource.setrlimit(resource.RLIMIT_STACK, (1 << 22, resource.getrlimit(resource.RLIMIT_STACK)[1]))",
    "limit Max open files": "resource.setrlimit(resource.RLIMIT_NOFILE, (99, 99))",
    "oom_score_adj": "Path('/proc/self/oom_score_adj').write_text('500')",
    "coredump_filter": "Path('/proc/self/coredump_filter').write_text('1')",
    "personality": "libc.personality(0x40000)",
    "THP_enabled": "libc.prctl(41, 1, 0, 0, 0)",
    "NoNewPrivs": "libc.prctl(38, 1, 0, 0, 0)",
    "timerslack_ns": "libc.prctl(29, 77777, 0, 0, 0)",
    "I/O priority": "libc.syscall({'x86_64': 251}.get(os.uname().machine, 30), 1, 0, 3 << 13)",
    "memory policy": "libc.syscall({'x86_64': 238}.get(os.uname().machine, 237), 3, (ctypes.c_ulong * 1)(1), 2)",
    "scheduling policy": "os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))",
    "ignored signals": "signal.signal(signal.SIGALRM, signal.SIG_IGN)",
    "SigBlk": "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])",
    "Seccomp_filters": """
        libc.prctl(38, 1, 0, 0, 0)
        allow = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7FFF0000))
        libc.prctl(22, 2, struct.pack("HxxxxxxP", 1, ctypes.addressof(allow)), 0, 0)
        """,
}
"""Changes that a process makes to itself."""

OF_ROOT = {
    "Uid": "os.setresuid(65534, 65534, 65534); libc.prctl(4, 1, 0, 0, 0)",
    "Groups": "os.setgroups([77])",
    "CapBnd": "libc.prctl(24, 10, 0, 0, 0)",
    "namespace uts": "libc.unshare(0x04000000)",
    "namespace net": "libc.unshare(0x40000000)",
}

LOOK = """
import ctypes, json, os, resource, signal, struct, sys, textwrap
from pathlib import Path
from unirun.launcher.warm.key import differences, state_of
libc = ctypes.CDLL(None)
for line in sys.stdin:
    if os.fork() == 0:
        before = state_of()
        exec(textwrap.dedent(json.loads(line)))
        print(json.dumps([text.partition(" is ")[0] for text in differences(state_of(), before)]), flush=True)
        os._exit(0)
    if os.wait()[1] != 0:
        sys.exit(1)
"""

ChangedBy = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def changed_by() -> Iterator[ChangedBy]:
    """The differences that are seen after each change, made in a fork."""
    looker = subprocess.Popen(
        [sys.executable, "-c", LOOK], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    stdin, stdout = looker.stdin, looker.stdout
    assert stdin is not None
    assert stdout is not None

    def ask(change: str) -> list[str]:
        print(json.dumps(change), file=stdin, flush=True)
        names: list[str] = json.loads(stdout.readline())
        return names

    yield ask
    looker.communicate()


class TestTheStateOfAProcess:
    @pytest.mark.starts_processes
    @pytest.mark.parametrize("name", CHANGES)
    def test_process_state_has_all_that_a_fork_cannot_undo(self, name: str, changed_by: ChangedBy) -> None:
        if name == "memory policy" and not Path("/proc/self/numa_maps").exists():
            pytest.skip("this kernel knows one node")
        assert name in changed_by(CHANGES[name])

    @pytest.mark.starts_processes
    @pytest.mark.skipif(os.getuid() != 0, reason="only root may")
    @pytest.mark.parametrize("name", OF_ROOT)
    def test_process_state_has_what_only_root_may_change(self, name: str, changed_by: ChangedBy) -> None:
        assert name in changed_by(OF_ROOT[name])

    @pytest.mark.starts_processes
    @pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="there is one processor")
    def test_process_state_has_the_cpu_affinity(self, changed_by: ChangedBy) -> None:
        assert "Cpus_allowed_list" in changed_by("os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])")

    @pytest.mark.starts_processes
    @pytest.mark.parametrize(
        "change",
        [
            "os.umask(0o77)",
            "os.chdir('/')",
            "os.setsid() if os.getpgrp() != os.getpid() else None",
            "resource.setrlimit(resource.RLIMIT_NOFILE, (99, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))",
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
            "libc.prctl(36, 1, 0, 0, 0)",
            "",
        ],
    )
    def test_process_state_omits_what_a_fork_sets_itself(self, change: str, changed_by: ChangedBy) -> None:
        assert changed_by(change) == []


HOOK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static char *ask(const char *by, const char *name) {
  static int out = -1;
  if (out < 0) out = open(OUT, O_WRONLY | O_CREAT | O_APPEND, 0600);
  if (write(out, name, strlen(name)) < 0 || write(out, "\\n", 1) < 0) abort();
  return ((char *(*)(const char *))dlsym(RTLD_NEXT, by))(name);
}
char *getenv(const char *name) { return ask("getenv", name); }
char *secure_getenv(const char *name) { return ask("secure_getenv", name); }
"""

ASKED_IN_VAIN = {
    "PATH": "Python looks for itself there when it is started without a directory",
    "TORCH_DISTRIBUTED_DEBUG": "read again in each worker",
    "__PYVENV_LAUNCHER__": "of macOS",
}


@pytest.mark.starts_processes
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")
def test_every_variable_that_libraries_read_when_torch_is_imported_is_compared(tmp_path: Path) -> None:
    """Variables read by Python code are recorded in the warm process."""
    (tmp_path / "hook.c").write_text(HOOK)
    command = ["gcc", "-shared", "-fPIC", f'-DOUT="{tmp_path}/out"', "-o", "hook.so", "hook.c", "-ldl"]
    subprocess.run(command, cwd=tmp_path, check=True)
    subprocess.run(
        [sys.executable, "-c", f"import {', '.join((*PRELOAD, *PRELOAD_CALLS))}"],
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": str(tmp_path / "hook.so")},
        check=True,
    )
    asked = {*(tmp_path / "out").read_text().split()}
    assert "PYTHONHOME" in asked or "OMP_NUM_THREADS" in asked
    assert {name for name in asked if not counts_in_warm(name)} - {*ASKED_IN_VAIN} == set()

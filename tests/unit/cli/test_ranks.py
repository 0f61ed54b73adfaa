"""``unirun stacks``, ``debug``, ``profile`` and ``inject``: refusals, the ranks that are meant, conversations, flame graphs."""

from __future__ import annotations

import builtins
import itertools
import json
import os
import signal
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.cli.in_process import run_cli
from tests.unit.rendezvous.fake_master import FakeJob
from unirun.cli import ranks
from unirun.cli.commands import call
from unirun.cli.ranks import FLAME, FOLDED, Bar, Conversation, bars, fault_of, flame, ranks_of
from unirun.errors import JobError, RendezvousError, UsageError
from unirun.observe.status import JobStatus, RoleStatus, WorkerStatus, write_status
from unirun.rendezvous.creation import create_job
from unirun.values import WorkerId
from unirun.wire.blocking import BlockingStream
from unirun.wire.handshake import new_token
from unirun.wire.messages import AskStacks, Attach, DebugInput, Inject, Injected, Profile
from unirun.wire.reports import DebugEnded, DebugOutput, Message, Profiled, RankProgress, RankStacks


@pytest.mark.parametrize(
    ("who", "question", "shown"),
    [
        (None, AskStacks(), ["actor:0", "actor:1", "actor:2", "critic:0"]),
        ("actor", AskStacks("actor"), ["actor:0", "actor:1", "actor:2"]),
        ("actor:1-2", AskStacks("actor"), ["actor:1", "actor:2"]),
        ("actor:1", AskStacks("actor", 1), ["actor:1"]),
    ],
)
def test_of_several_ranks_those_are_shown_that_were_asked_for(
    who: str | None,
    question: AskStacks,
    shown: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The master asks one rank, or a whole role."""
    asked: list[AskStacks] = []

    def answers(_: Any, wanted: AskStacks) -> tuple[list[RankStacks], list[str]]:
        asked.append(wanted)
        ranks = [(role.name, worker.rank) for role in status().roles for worker in role.workers]
        meant = [
            (role, rank) for role, rank in ranks if wanted.role in ("", role) and wanted.rank in (-1, rank)
        ]
        return [RankStacks(RankProgress(WorkerId(role, rank, 0)), 1) for role, rank in meant], []

    job = SimpleNamespace(run_id="job-1")
    for name, value in {
        "find_here": lambda *_: job,
        "refuse_elsewhere": lambda *_: None,
        "read_status": lambda _: status(),
        "ask_stacks": answers,
    }.items():
        monkeypatch.setattr(ranks, name, value)
    assert ranks.stacks(SimpleNamespace(store=None, job="job-1", who=who, json=True, threads=False)) == 0
    assert [
        json.loads(line)["worker"].rpartition(".")[0] or json.loads(line)["worker"]
        for line in capsys.readouterr().out.splitlines()
    ] == shown
    assert asked == [question]


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


COUNTS = {"main;a": 2, "main;a;b": 3, "main;c": 5, "other": 1}


def test_a_frame_is_above_those_that_it_calls_and_as_wide_as_all_of_them() -> None:
    assert sorted(bars(COUNTS), key=lambda bar: (bar.first, bar.depth)) == [
        Bar("main", 0, 10, 0),
        Bar("a", 0, 5, 1),
        Bar("b", 2, 3, 2),
        Bar("c", 5, 5, 1),
        Bar("other", 10, 1, 0),
    ]


def test_a_stack_may_be_deeper_than_that_of_this_process() -> None:
    deep = ";".join(["f"] * 2 * sys.getrecursionlimit())
    assert max(bar.depth for bar in bars({deep: 1})) == 2 * sys.getrecursionlimit() - 1


names = st.lists(st.sampled_from(["a", "b", "<c & d>"]), min_size=1, max_size=5).map(";".join)


@given(st.dictionaries(names, st.integers(1, 1000), max_size=20))
def test_boxes_of_one_depth_do_not_overlap_and_the_picture_is_xml(counts: dict[str, int]) -> None:
    for depth in range(6):
        row = sorted((bar.first, bar.samples) for bar in bars(counts) if bar.depth == depth)
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(row))
    assert sum(bar.samples for bar in bars(counts) if bar.depth == 0) == sum(counts.values())
    ElementTree.fromstring(flame(counts, "<job>"))


def test_the_picture_names_every_frame_with_its_share() -> None:
    text = flame(COUNTS, "actor:0")
    assert "actor:0: 11 samples" in text
    assert "a: 5 samples, 45.5 %" in text


def status(phase: str = "running") -> JobStatus:
    """A job of three actors and one critic."""
    sizes = {"actor": 3, "critic": 1}
    roles = (
        RoleStatus(
            name, "running", 0, 0, 0, tuple(WorkerStatus(n, "running", "n0", 0, 1, "") for n in range(size))
        )
        for name, size in sizes.items()
    )
    return JobStatus("job-1", "job", phase, "", 100.0, None, None, tuple(roles))


@pytest.mark.parametrize(
    ("who", "ranks"),
    [
        ("actor", [0, 1, 2]),
        ("actor:2", [2]),
        ("actor:0-1", [0, 1]),
        ("critic", [0]),
    ],
)
def test_a_role_or_ranks_of_it_are_meant(who: str, ranks: list[int]) -> None:
    assert ranks_of(who, status()) == [(who.partition(":")[0], rank) for rank in ranks]


@pytest.mark.parametrize(
    ("who", "problem"),
    [
        ("rollout", "job job-1 has no role 'rollout'; its roles are actor, critic"),
        ("actor:3", "'actor:3' names ranks that are not there; actor has ranks 0 to 2"),
        ("actor:2-1", "'actor:2-1' names ranks that are not there"),
        ("actor:", "'actor:' names no ranks"),
        ("actor:x", "'actor:x' names no ranks"),
    ],
)
def test_ranks_that_are_not_there_are_refused(who: str, problem: str) -> None:
    with pytest.raises(UsageError) as refused:
        ranks_of(who, status())
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("sigkill", ("sigkill", 0.0)),
        ("hang-gil", ("hang-gil", 0.0)),
        ("exit=3", ("exit", 3.0)),
        ("exit=0", ("exit", 0.0)),
        ("slow=2x", ("slow", 2.0)),
        ("slow=1.5", ("slow", 1.5)),
    ],
)
def test_a_fault_has_a_name_and_perhaps_an_amount(text: str, fault: tuple[str, float]) -> None:
    assert fault_of(text) == fault


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ((), "the following arguments are required: --fault"),
        (
            ("--fault", "sigpwr"),
            "--fault 'sigpwr' is unknown; it is one of sigkill, sigstop, segv, slow=FACTOR",
        ),
        (("--fault", "exit"), "--fault 'exit' is unknown"),
        (("--fault", "hang=1"), "--fault 'hang=1' is unknown"),
        (("--fault", "exit=256"), "--fault 'exit=256' has no exit code"),
        (("--fault", "exit=-1"), "--fault 'exit=-1' has no exit code"),
        (("--fault", "slow=1x"), "--fault 'slow=1x' has no factor"),
        (("--fault", "slow=fast"), "--fault 'slow=fast' has no factor"),
        (("--fault", "sigkill", "--for", "5s"), "--for and --seed are for a schedule"),
        (("--fault", "sigkill", "--seed", "1"), "--for and --seed are for a schedule"),
        (("--fault", "sigkill", "--every", "0s"), "--every 0s is no schedule"),
        (("--fault", "sigkill", "--every", "often"), "--every 'often' is no duration"),
        (
            ("--fault", "sigkill", "--every", "2m", "--for", "119s"),
            "--for 119s is over before the first fault, which comes after 2m; give --for 2m or longer",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(options: tuple[str, ...], problem: str) -> None:
    with pytest.raises(UsageError) as refused:
        call("inject", ["job-1", "actor", *options])
    assert problem in str(refused.value)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("UNIRUN_STORE", raising=False)
    return tmp_path / "home"


def test_a_job_that_is_over_gets_no_fault(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job, lock = create_job("job-1", new_token())
    write_status(job, status("failed"))
    os.close(lock)
    assert run_cli("inject", "job-1", "actor", "--fault", "sigkill") == JobError.exit_code
    assert "job job-1 has ended; there is nothing to inject a fault into" in capsys.readouterr().err


def test_a_job_of_another_user_gets_no_fault(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, lock = create_job("job-1", new_token())
    write_status(job, status())
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(JobError, match="belongs to user .*; set UNIRUN_HOME to a directory of your own"):
        call("inject", ["job-1", "actor", "--fault", "sigkill"])
    os.close(lock)


@pytest.mark.parametrize(("lasting", "count"), [("0.02s", 1), ("0.05s", 2)])
def test_a_schedule_injects_one_fault_at_the_end_of_each_interval_that_it_has(
    home: Path, lasting: str, count: int
) -> None:
    asked: list[Inject] = []

    def script(stream: BlockingStream) -> None:
        assert stream.receive() == Attach()
        fault = stream.receive()
        assert isinstance(fault, Inject)
        asked.append(fault)
        stream.send(Injected(fault.role, fault.rank))

    with FakeJob() as job:
        write_status(job.job_dir, replace(status(), run_id="run-1"))
        job.leader(script=script)
        options = ("--fault", "sigkill", "--every", "0.02s", "--for", lasting, "--seed", "1")
        assert run_cli("inject", "run-1", "actor", *options) == 0
    assert len(asked) == count


def test_faults_of_a_schedule_come_at_its_times_however_long_answers_take(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, asked = SimpleNamespace(now=100.0), []

    def sleep(seconds: float) -> None:
        clock.now += seconds

    def script(stream: BlockingStream) -> None:
        stream.receive()
        fault = stream.receive()
        assert isinstance(fault, Inject)
        asked.append(clock.now)
        clock.now += 7.0
        stream.send(Injected(fault.role, fault.rank))

    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    with FakeJob() as job:
        write_status(job.job_dir, replace(status(), run_id="run-1"))
        job.leader(script=script)
        options = ("--fault", "sigkill", "--every", "10s", "--for", "35s", "--seed", "1")
        assert run_cli("inject", "run-1", "actor", *options) == 0
    assert asked == [110.0, 120.0, 130.0]


def test_a_profile_is_written_whatever_the_names_of_files_are(home: Path, tmp_path: Path) -> None:
    def script(stream: BlockingStream) -> None:
        assert (stream.receive(), stream.receive()) == (Attach(), Profile("actor", 0, 5.0))
        stream.send(Profiled(0, (("main (/caf\udce9/train.py)", 3),), without_trace="no torch"))

    with FakeJob() as job:
        write_status(job.job_dir, replace(status(), run_id="run-1"))
        job.leader(script=script)
        assert run_cli("profile", "run-1", "actor:0", "-o", str(tmp_path)) == 0
    assert (tmp_path / FOLDED).read_text() == "main (/caf\\udce9/train.py) 3\n"
    assert "main (/caf\\udce9/train.py): 3 samples, 100.0 %" in (tmp_path / FLAME).read_text()


def test_each_rank_has_an_answer_of_its_own(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def script(stream: BlockingStream) -> None:
        stream.receive()
        faults = [stream.receive() for _ in range(3)]
        for fault in reversed(faults):
            assert isinstance(fault, Inject)
            stream.send(Injected(fault.role, fault.rank, "actor:1 has no process" if fault.rank == 1 else ""))

    with FakeJob() as job:
        write_status(job.job_dir, replace(status(), run_id="run-1"))
        job.leader(script=script)
        assert run_cli("inject", "run-1", "actor", "--fault", "sigkill") == 0
    assert capsys.readouterr().out.splitlines() == [
        "sigkill → actor:0",
        "actor:1 has no process",
        "sigkill → actor:2",
    ]

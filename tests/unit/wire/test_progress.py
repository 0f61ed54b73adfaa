"""The page with the progress of a worker, as its agent reads it."""

from __future__ import annotations

import asyncio
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.effort import examples
from tests.unit.wire.endpoints import Endpoint, hears
from unirun.wire import progress
from unirun.wire.progress import (
    PAGE_BYTES,
    PAGE_NAME,
    TEXT_LIMIT,
    Page,
    Snapshot,
    open_page,
    read_page,
    want_evidence,
)
from unirun.wire.reports import ProgressPage


@pytest.fixture
def number() -> Iterator[int]:
    """The descriptor of a page."""
    made = os.memfd_create(PAGE_NAME)
    os.ftruncate(made, PAGE_BYTES)
    yield made
    os.close(made)


@pytest.fixture
def page(number: int) -> Iterator[Page]:
    with mmap.mmap(number, PAGE_BYTES) as memory:
        made = Page(memory)
        yield made
        made.fields.release()


def quiet(found: Snapshot) -> float:
    return (time.monotonic_ns() - found.last) / 1e9


def test_a_new_page_has_no_step(page: Page, number: int) -> None:
    found = read_page(number)
    assert (found.step, found.count, found.calls, found.idle, found.text) == (-1, 0, 0, 0, "")
    assert quiet(found) < 5


def test_steps_are_those_of_the_user_or_counted(page: Page, number: int) -> None:
    page.step(7)
    page.step(None)
    found = read_page(number)
    assert (found.step, found.count) == (8, 2)


def test_a_worker_is_idle_between_its_calls(page: Page, number: int) -> None:
    with page.call():
        assert not read_page(number).idle
        with page.idle():
            assert read_page(number).idle
        assert not read_page(number).idle
    found = read_page(number)
    assert (found.idle, found.calls) == (1, 1)


def test_the_first_step_after_a_step_back_is_kept_with_the_one_before(page: Page, number: int) -> None:
    for step in (3, 4, 4, 5):
        page.step(step)
    found = read_page(number)
    assert (found.first, found.before, found.step) == (3, -1, 5)
    page.step(2)
    page.step(None)
    again = read_page(number)
    assert (again.first, again.before, again.step) == (2, 5, 3)
    assert found.first_at < again.first_at <= again.last
    page.begin()
    page.step(None)
    assert (read_page(number).first, read_page(number).before) == (0, 3)


def test_an_allowance_ends_with_its_block_and_counts_as_progress(page: Page, number: int) -> None:
    before = read_page(number)
    with page.allowance(100):
        assert 99 < (read_page(number).allowed - time.monotonic_ns()) / 1e9 <= 100
        with page.allowance(float("inf")):
            assert read_page(number).allowed > time.monotonic_ns() + 10**18
    found = read_page(number)
    assert found.allowed == 0
    assert found.last > before.last


@pytest.mark.parametrize("seconds", [1e10, 1e300, float("inf"), float("nan")])
def test_an_allowance_may_have_any_length(page: Page, number: int, seconds: float) -> None:
    with page.allowance(seconds):
        assert read_page(number).allowed == progress.FOR_EVER


class Work(RuleBasedStateMachine):
    """A worker whose calls, waits and allowances are nested in any way. The reference is what its agent has to read."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000_000_000
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(progress, "time", SimpleNamespace(monotonic_ns=lambda: self.now))
        self.number = os.memfd_create(PAGE_NAME)
        os.ftruncate(self.number, PAGE_BYTES)
        self.memory = mmap.mmap(self.number, PAGE_BYTES)
        self.page = Page(self.memory)
        self.open: list[tuple[AbstractContextManager[None], str, int]] = []
        self.last, self.calls, self.count = self.now, 0, 0
        self.step, self.first, self.before = -1, -1, -1

    @rule(seconds=st.sampled_from((0.001, 5.0, 60.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += int(seconds * 1e9)

    @rule(seconds=st.sampled_from((10.0, 30.0, float("inf"))))
    def may_take_its_time(self, seconds: float) -> None:
        until = self.now + int(seconds * 1e9) if seconds < float("inf") else progress.FOR_EVER
        self._enters(self.page.allowance(seconds), "allowance", until)

    @rule()
    def waits(self) -> None:
        self._enters(self.page.idle(), "idle")

    @rule()
    def answers(self) -> None:
        """A call comes to a worker that waits for one."""
        if self._doing() == "idle":
            self._enters(self.page.call(), "call")
            self.last, self.calls = self.now, self.calls + 1

    @rule()
    def leaves(self) -> None:
        if self.open:
            context, kind, _ = self.open.pop()
            context.__exit__(None, None, None)
            self.last, self.count = self.now, self.count + (kind == "call")

    @rule(number=st.none() | st.integers(0, 9))
    def comes_to_a_step(self, number: int | None) -> None:
        self.page.step(number)
        number = self.step + 1 if number is None else number
        if number < self.step:
            self.before = self.step
        if number < self.step or self.first < 0:
            self.first = number
        self.step, self.last, self.count = number, self.now, self.count + 1

    @rule()
    def begins_another_piece_of_work(self) -> None:
        self.page.begin()
        self.before, self.step, self.first = self.step, -1, -1
        self.last, self.count = self.now, 0

    def _enters(self, context: AbstractContextManager[None], kind: str, until: int = 0) -> None:
        context.__enter__()
        self.open.append((context, kind, until))

    def _doing(self) -> str:
        return next((kind for _, kind, _ in reversed(self.open) if kind != "allowance"), "")

    @invariant()
    def the_agent_reads_what_it_does(self) -> None:
        found = read_page(self.number)
        assert found.allowed == max((until for *_, until in self.open), default=0)
        assert bool(found.idle) == (self._doing() == "idle")
        assert (found.last, found.calls, found.count) == (self.last, self.calls, self.count)
        assert (found.step, found.first, found.before) == (self.step, self.first, self.before)

    def teardown(self) -> None:
        while self.open:
            self.leaves()
        self.patch.undo()
        self.page.fields.release()
        self.memory.close()
        os.close(self.number)


TestWork = Work.TestCase
TestWork.settings = examples(60)


def test_a_text_that_is_too_long_is_left_out(page: Page, number: int) -> None:
    for text in ("ä" * 10, "x" * TEXT_LIMIT):
        page.write(text)
        assert read_page(number).text == text
    page.write("x" * (TEXT_LIMIT + 1))
    assert read_page(number).text == ""


class Watched(mmap.mmap):
    """The memory of a page; `look` is called while a text is written."""

    look: Callable[[], None]

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value[:1].ljust(len(value), b"?"))
        self.look()
        super().__setitem__(key, value)


def test_an_agent_reads_no_text_that_is_half_written(number: int) -> None:
    with Watched(number, PAGE_BYTES) as memory:
        page, seen = Page(memory), list[str]()
        memory.look = lambda: seen.append(read_page(number).text)
        for text in ("one", "another", ""):
            page.write(text)
            assert read_page(number).text == text
        page.fields.release()
    assert seen == ["", "", ""]


def test_an_agent_reads_a_text_of_any_bytes(page: Page, number: int) -> None:
    """The page belongs to the worker, which may write anything."""
    page.write("abc")
    os.pwrite(number, b"\xff", PAGE_BYTES - TEXT_LIMIT)
    assert read_page(number).text == "\ufffdbc"
    page.fields[progress.TEXT] = -1
    assert read_page(number).text == ""


def test_a_process_has_one_page_and_its_forks_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNIRUN_SOCKET", raising=False)
    monkeypatch.setattr(progress, "_page", None)
    made = progress.page()
    progress.progress(4)
    progress.progress()
    assert progress.page() is made
    assert (made.fields[progress.STEP], made.fields[progress.COUNT]) == (5, 2)
    with progress.allowance(float("inf")):
        assert made.fields[progress.ALLOWED] == progress.FOR_EVER
    progress._forget_in_fork()
    assert progress.page().fields[progress.STEP] == -1


def test_a_worker_announces_its_page_to_its_agent(
    agent: Endpoint, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    # A worker leads its session.
    monkeypatch.setattr(os, "getsid", lambda _: os.getpid())
    with hears(agent, 2) as heard:
        made = progress._announced()
    (_, announced) = heard
    assert isinstance(announced, ProgressPage)
    assert not os.get_inheritable(announced.number)
    made.step(7)
    opened = open_page(os.getpid(), announced.number)
    assert read_page(opened).step == 7
    os.close(opened)
    assert os.fstat(announced.number).st_size == PAGE_BYTES
    made.fields.release()
    made._memory.close()


def test_a_process_without_an_agent_has_a_page_that_is_its_own(
    agent: Endpoint, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker works on without its agent. The child of a worker does not report in its name."""

    def own() -> None:
        made = progress._announced()
        made.step(7)
        assert (made.fields[progress.STEP], len(made._memory)) == (7, PAGE_BYTES)
        made.fields.release()
        made._memory.close()

    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(os, "getsid", lambda _: os.getpid())
    own()
    with hears(agent, 0) as heard:
        del environ["UNIRUN_RANK"]
        own()
    assert heard == []
    monkeypatch.setattr(os, "getsid", lambda _: os.getppid())
    with agent.listen() as listener:
        listener.setblocking(False)
        own()
        with pytest.raises(BlockingIOError):
            listener.accept()
    environ.clear()
    own()


def test_the_agent_opens_a_page_and_asks_for_evidence(page: Page, number: int) -> None:
    opened = open_page(os.getpid(), number)
    want_evidence(opened)
    assert read_page(opened).evidence == 1
    os.close(opened)


def test_the_agent_opens_nothing_else() -> None:
    with open(os.devnull) as file, pytest.raises(OSError, match="no page of progress"):
        open_page(os.getpid(), file.fileno())


def test_a_page_that_was_cut_is_none(number: int) -> None:
    os.ftruncate(number, 10)
    with pytest.raises(ValueError, match="10 bytes are no page"):
        read_page(number)


def test_a_report_takes_less_than_ten_microseconds(page: Page) -> None:
    began = time.thread_time()
    for step in range(10_000):
        page.step(step)
    assert time.thread_time() - began < 0.1


def test_a_worker_whose_tasks_wait_for_others_is_not_late_while_its_loop_runs(
    page: Page, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LOOP_BEAT_INTERVAL", 0.001)

    async def wait(until: asyncio.Event) -> None:
        with page.awaiting(asyncio.get_running_loop()):
            await until.wait()

    async def later(than: int) -> int:
        while read_page(number).last <= than:
            await asyncio.sleep(0.001)
        return read_page(number).last

    async def main() -> None:
        first, second = asyncio.Event(), asyncio.Event()
        tasks = [asyncio.create_task(wait(each)) for each in (first, second)]
        seen = await asyncio.wait_for(later(read_page(number).last), 10)
        first.set()
        await tasks[0]
        # The second one still waits.
        seen = await asyncio.wait_for(later(read_page(number).last), 10)
        blocked = read_page(number).last
        time.sleep(0.05)
        assert read_page(number).last == blocked, "a loop that does not run has reported progress"
        second.set()
        await tasks[1]
        over = read_page(number).last
        await asyncio.sleep(0.05)
        assert read_page(number).last == over >= seen, "nothing waits any more"

    asyncio.run(main())
    # Another loop begins anew, whatever the first one has left.
    asyncio.run(main())

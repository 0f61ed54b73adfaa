"""The tasks of a master that keep its term and bring its state to the store, beside everything else it does."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from unirun.errors import Fenced, StoreError
from unirun.failover.context import ContextStore, Ledger
from unirun.failover.draft import Command
from unirun.failover.state import JobState, Verdict
from unirun.rendezvous.election import Term
from unirun.values import WorkerId
from unirun.wire.reporting import report, report_error
from unirun.wire.reports import MasterReply, MasterRequest

T = TypeVar("T")

NOTE_DELAY = 0.5
"""Seconds, at least, in which changes that no command waits for are gathered into one write."""

NOTE_BYTES_PER_SECOND = 20_000
"""The most that such writes take of a store, which keeps every value until it is compacted: the context of a large job
is written less often."""

RETRY_DELAY = 0.2
MAX_RETRY_DELAY = 1.0
"""Seconds until the store is tried again, at first and at most."""

END_WRITE_TIMEOUT = 15.0
"""Seconds that the end of a job waits for a store that takes nothing: by then every agent that can see the store
follows whoever leads, so what another may have decided meanwhile is not undone."""

STOP_WRITE_TIMEOUT = 1.0
"""The same for an end that somebody has asked for."""


class StateWriter:
    """Takes the steps of a master, writes what was decided, and then lets `carry_out` do what follows.

    As long as the store is away nothing that hangs on a decision is done; `trouble` says so, and `changed` is called
    when it is another. Only a job's end is not held up for ever: when nothing could be written for a while,
    `end_unwritten` is called with the verdict, once. From then on the end goes on as `unwritten`: no command waits, and
    nothing is started any more.

    `error` is what has ended the writer, if anything has that is not the end of its term.
    """

    def __init__(
        self,
        state: JobState,
        term: Term,
        contexts: ContextStore,
        carry_out: Callable[[list[Command]], None],
        changed: Callable[[], None],
        end_unwritten: Callable[[Verdict], None],
    ) -> None:
        self._latest = state
        self._news_since: float | None = None
        self._ledger = Ledger(state)
        self._term, self._contexts = term, contexts
        self._carry_out, self._changed, self._end_unwritten = carry_out, changed, end_unwritten
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="unirun-store")
        self._troubles: dict[str, str] = {}
        self._waits_since = 0.0
        self.unwritten = False
        self._waits = asyncio.Event()
        self._wishes: deque[Callable[[], Coroutine[Any, Any, None]]] = deque()
        self.deposed = False
        self.error: Exception | None = None

    @property
    def trouble(self) -> str:
        """The reason why decisions cannot be written; empty when they can."""
        return next(iter(self._troubles.values()), "")

    @property
    def certain(self) -> JobState:
        """The state of the job, without decisions that are not written yet."""
        return self._latest if self._ledger.due is None else self._ledger.kept

    def add(self, state: JobState, commands: list[Command]) -> None:
        """Take the state and the commands of a step."""
        if self._news_since is None and state is not self._latest:
            self._news_since = time.monotonic()
            self._wake.set()
        self._latest = state
        if self._ledger.due is None:
            self._waits_since = time.monotonic()
        self._carry_out(self._ledger.add(state, commands))
        if self._ledger.due is not None:
            self._wake.set()
            self._waits.set()
        if self.unwritten:
            self._carry_out(self._ledger.waive())

    def ask(self, worker: WorkerId, ask: MasterRequest, reply: Callable[[MasterReply], None]) -> None:
        """A worker wants something of the store; `reply` is called when it is done, however long that takes."""
        self._do(partial(self._contexts.answer, worker, ask), reply)

    def mark(self, nodes: Sequence[str], then: Callable[[], object]) -> None:
        """Write that these nodes are silent; `then` is called when it is done."""
        self._do(partial(self._contexts.mark_silent, nodes), lambda _: then())

    def unmark(self, nodes: Sequence[str] = ()) -> None:
        """Write that these nodes are not silent any more; all when none is named."""
        self._do(partial(self._contexts.unmark_silent, nodes), lambda _: None)

    def _do(self, do: Callable[[], T], then: Callable[[T], object]) -> None:
        """Do something with the store beside the writes; all such wishes in their order."""

        async def carry_out() -> None:
            then(await self._persistently("write", do))

        self._wishes.append(carry_out)
        self._wake.set()

    @asynccontextmanager
    async def working(self, over: asyncio.Event) -> AsyncIterator[None]:
        """Write, and keep the term; `over` is set when that has ended. At the end, what is left is written."""
        works = (self._write, self._keep_term, self._end_in_any_case)
        tasks = [asyncio.ensure_future(self._until_ended(work, over)) for work in works]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if not self.deposed:
                await self._in_thread(self._finish)
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _until_ended(self, work: Callable[[], Coroutine[Any, Any, None]], over: asyncio.Event) -> None:
        """A master that cannot write, or not keep its term, does not go on without."""
        try:
            await work()
            return
        except Fenced as error:
            report(f"unirun-master: {error}")
        except Exception as error:  # noqa: BLE001 - the master reports it when it ends
            if self.unwritten:
                report_error(error)
                return
            self.error = self.error or error
        self.deposed = True
        over.set()

    async def _keep_term(self) -> None:
        while True:
            await asyncio.sleep(self._term.ttl / 3)
            await self._persistently("term", self._term.keep)

    async def _write(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                # Not wait_for, which, in Python 3.11, forgets that it was cancelled when it has just come to its end.
                async with asyncio.timeout(self._until_note()):
                    await self._wake.wait()
            self._wake.clear()
            while (target := self._ledger.due) is not None:
                await self._bring_to(target)
            while self._wishes:
                await self._wishes.popleft()()
            if self._until_note() == 0.0:
                self._news_since = None
                await self._bring_to(self._latest)

    def _until_note(self) -> float | None:
        """Seconds until what can wait is written; None when there is nothing."""
        if self._news_since is None:
            return None
        delay = max(NOTE_DELAY, self._contexts.size / NOTE_BYTES_PER_SECOND)
        return max(0.0, self._news_since + delay - time.monotonic())

    async def _bring_to(self, target: JobState) -> None:
        """Write `target`, however long that takes."""
        await self._persistently("write", lambda: self._contexts.write(target))
        self._waits_since = time.monotonic()
        self._carry_out(self._ledger.written(target))
        self._changed()

    async def _persistently(self, what: str, do: Callable[[], T]) -> T:
        """Do something with the store until it is done."""
        delay = RETRY_DELAY
        while True:
            try:
                result = await self._in_thread(do)
            except Fenced:
                raise
            except StoreError as error:
                self._set_trouble(what, f"{error}; decisions wait until it can be written")
                await asyncio.sleep(delay)
                delay = min(2 * delay, MAX_RETRY_DELAY)
            else:
                self._set_trouble(what, "")
                return result

    async def _in_thread(self, do: Callable[[], T]) -> T:
        """One thing at a time; what was begun is finished even when nobody waits for it any more."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, do)

    def _set_trouble(self, what: str, text: str) -> None:
        before = self.trouble
        self._troubles.pop(what, None)
        if text:
            self._troubles[what] = text
        if self.trouble != before:
            report(f"unirun-master: store: {self.trouble or 'it is back'}")
            self._changed()

    async def _end_in_any_case(self) -> None:
        """Wait until an end of the job has waited too long for the store; then let it be carried out."""
        while not self.unwritten and ((left := self._until_unwritten()) is None or left > 0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._waits.wait()
            self._waits.clear()
        verdict = self._latest.verdict
        if self.unwritten or verdict is None:
            return
        self.unwritten = True
        self._carry_out(self._ledger.waive())
        self._end_unwritten(verdict)

    def _until_unwritten(self) -> float | None:
        """Seconds until the end is carried out though it is not written; None when none waits."""
        if self._ledger.due is None or self._latest.verdict is None:
            return None
        patience = STOP_WRITE_TIMEOUT if self._latest.asked_to_stop else END_WRITE_TIMEOUT
        return self._waits_since + patience - time.monotonic()

    def _finish(self) -> None:
        try:
            self._contexts.write(self._latest)
            self._term.resign()
        except StoreError as error:
            report(f"unirun-master: the end is not in the store: {error}")
        except Exception as error:  # noqa: BLE001 - the job is over; nobody is left who could do better
            report_error(error)

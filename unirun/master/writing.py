"""The tasks of a master that keep its term and bring its state to the store, beside everything else it does."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from unirun.errors import Fenced, StoreError
from unirun.master.answering import answer
from unirun.master.events import Command
from unirun.master.keeper import Keeper
from unirun.master.ledger import Ledger
from unirun.master.state import JobPhase, JobState
from unirun.rendezvous.election import Term
from unirun.wire.asking import WorkerAnswer, WorkerAsk

T = TypeVar("T")

NOTE_DELAY = 0.5
"""Seconds in which news that nobody waits for is gathered into one write."""

END_PATIENCE = 15.0
"""Seconds that the end of a job waits for a store that is away: by then every agent that can see the store follows
whoever leads, so what another may have decided meanwhile is not undone."""

RETRY_DELAY = 0.2
MAX_RETRY_DELAY = 2.0
"""Seconds until the store is tried again, at first and at most."""

STOP_PATIENCE = 1.0
"""Seconds that a store has to write what follows from somebody's wish to end the job."""


class Writer:
    """Takes the steps of a master, writes what was decided, and then lets `carry_out` do what follows.

    As long as the store is away nothing that hangs on a decision is done; `trouble` says so, and `changed` is called
    when it is another. Only a job that ends does so without it: at once when somebody wants it to, else in a while.
    """

    def __init__(
        self,
        state: JobState,
        term: Term,
        keeper: Keeper,
        carry_out: Callable[[list[Command]], None],
        changed: Callable[[], None],
    ) -> None:
        self._latest = state
        self._noted: JobState | None = None
        self._news_since: float | None = None
        self._ledger = Ledger(state)
        self._term, self._keeper = term, keeper
        self._carry_out, self._changed = carry_out, changed
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="unirun-store")
        self._troubles: dict[str, str] = {}
        self._trouble_since = 0.0
        self._silent = False
        self._hurry: asyncio.TimerHandle | None = None
        self._asks: deque[tuple[WorkerAsk, Callable[[WorkerAnswer], None]]] = deque()
        self.deposed = False

    @property
    def trouble(self) -> str:
        """What keeps decisions from being written; empty when nothing does."""
        return next(iter(self._troubles.values()), "")

    @property
    def certain(self) -> JobState:
        """How the job stands, without decisions that are not written yet."""
        return self._latest if self._ledger.due is None else self._ledger.kept

    def add(self, state: JobState, commands: list[Command]) -> None:
        """After each step."""
        if self._news_since is None and state is not self._latest:
            self._news_since = time.monotonic()
            self._wake.set()
        self._latest = state
        self._carry_out(self._ledger.add(state, commands))
        if self._ledger.due is not None:
            self._wake.set()
            self._waive_the_end()

    def ask(self, ask: WorkerAsk, reply: Callable[[WorkerAnswer], None]) -> None:
        """A worker wants something of the store; `reply` is called when it is done, however long that takes."""
        self._asks.append((ask, reply))
        self._wake.set()

    @asynccontextmanager
    async def working(self, over: asyncio.Event) -> AsyncIterator[None]:
        """Write, and keep the term; `over` is set when that has ended. At the end, what is left is written."""
        works = (self._write, self._keep_term)
        tasks = [asyncio.ensure_future(self._until_deposed(work, over)) for work in works]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            if self._hurry is not None:
                self._hurry.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if not self.deposed:
                await self._in_thread(self._finish)
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _until_deposed(
        self, work: Callable[[], Coroutine[Any, Any, None]], over: asyncio.Event
    ) -> None:
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - whatever it is, this master can write no more
            if isinstance(error, Fenced):
                print(f"unirun-master: {error}", file=sys.stderr, flush=True)
            else:
                traceback.print_exc()
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
                if not await self._bring_to(target):
                    first = self._ledger.first_due
                    if first is None or not await self._bring_to(first):
                        raise StoreError("one step changes more than a store takes at once")
            while self._asks:
                ask, reply = self._asks.popleft()
                reply(await self._persistently("write", lambda ask=ask: answer(self._keeper, ask)))  # type: ignore[misc]
            if self._until_note() == 0.0:
                await self._note(self._latest)

    def _until_note(self) -> float | None:
        """Seconds until what can wait is written; None when there is nothing."""
        if self._news_since is None:
            return None
        return max(0.0, self._news_since + NOTE_DELAY - time.monotonic())

    async def _note(self, latest: JobState) -> None:
        """Write what can wait: it is there for who reads."""
        self._news_since = None
        before, noted = self._ledger.kept, self._noted
        await self._persistently("write", lambda: self._keeper.note(before, noted, latest))
        self._noted = latest
        self._carry_out(self._ledger.written(latest))

    async def _bring_to(self, target: JobState) -> bool:
        """Write `target`, however long that takes; False when it is too much at once."""
        before = self._ledger.kept
        written = await self._persistently("write", lambda: self._keeper.write(before, target))
        if written:
            self._carry_out(self._ledger.written(target))
            self._changed()
        return written

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
                self._waive_the_end()
                await asyncio.sleep(delay)
                delay = min(2 * delay, MAX_RETRY_DELAY)
            else:
                self._silent = False
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
        if self.trouble and not before:
            self._trouble_since = time.monotonic()
        if self.trouble != before:
            print(f"unirun-master: store: {self.trouble or 'it is back'}", file=sys.stderr, flush=True)
            self._changed()

    def _waive_the_end(self) -> None:
        """Whoever wants a job to end waits neither for a store that is away, nor long for one that does not answer;
        and no end waits for one that stays away."""
        verdict, first = self._latest.verdict, self._ledger.first_due
        if first is None or verdict is None:
            return
        if verdict.phase is not JobPhase.STOPPED:
            if self.trouble and time.monotonic() > self._trouble_since + END_PATIENCE:
                self._carry_out(self._ledger.waive())
        elif self.trouble or self._silent:
            self._carry_out(self._ledger.waive())
        elif self._hurry is None:
            self._hurry = asyncio.get_running_loop().call_later(STOP_PATIENCE, self._waive, first)

    def _waive(self, first: JobState) -> None:
        self._hurry = None
        self._silent = self._ledger.first_due is first
        if not self.deposed:
            self._waive_the_end()

    def _finish(self) -> None:
        try:
            self._keeper.note(self._ledger.kept, self._noted, self._latest)
            self._term.resign()
        except StoreError as error:
            print(f"unirun-master: the end is not in the store: {error}", file=sys.stderr, flush=True)

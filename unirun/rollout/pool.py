"""`Pool`: agents that make groups of trajectories, many at a time, in one event loop.

::

    async def agent(data, client):
        answer = await client.complete(data["input_ids"], max_tokens=64)
        return float(answer.token_ids[-1] == data["answer"])

    completer = EngineCompleter(EngineClient("engine"))
    pool = Pool(completer, agent, group_size=8, batch=32, max_head_offpolicyness=2)
    async for group in pool.run(prompts):
        ...

An agent is called once for each episode. What it asks its `client` for is recorded, and trained on with the reward that
it returns.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from unirun.errors import EpisodeFailed, QueueTimeout, UsageError
from unirun.rollout.chatting import Chats, Message, Parse, Reply, calls_in_tags
from unirun.rollout.completing import (
    Completer,
    Completion,
    Group,
    Outcomes,
    Trajectory,
    Turn,
    oldest,
    trajectories,
)
from unirun.wire.reporting import report

if TYPE_CHECKING:
    from unirun.weights.gate import Bound

Data = Mapping[str, Any]
"""A prompt: a row of a dataset, as the agent gets it."""

MAX_FAILED_GROUPS = 16
"""Groups in a row, without one that is made, whose episodes have all raised, before the error of the last is raised."""

EPISODE_TIMEOUT = 3600.0
"""Seconds that an episode may take, unless told otherwise."""

ADVANCE_TIMEOUT = 600.0
"""Seconds for which `Pool.run` waits for a new version while no group may begin, unless told otherwise."""


class Recorder:
    """The client that an agent gets: a `Completer` that keeps all turns of the episode.

    `tokenizer` and `env` are those of the pool; `env` is the episode's own. `group` is the id of its group.
    """

    def __init__(
        self,
        completer: Completer,
        noted: Callable[[Completion], None],
        *,
        conversation: str,
        group: str = "",
        tokenizer: Any = None,
        env: Any = None,
        sampling: Data | None = None,
    ) -> None:
        """`noted` is called with each completion."""
        self._completer, self._noted, self._conversation = completer, noted, conversation
        self._sampling = dict(sampling or {})
        self.group, self.tokenizer, self.env = group, tokenizer, env
        self.turns: list[Turn] = []
        self._chats: Chats | None = None

    async def complete(
        self, token_ids: Sequence[int], *, conversation: str = "", **sampling: Any
    ) -> Completion:
        """The tokens after `token_ids`. `sampling` has vLLM's names, and goes before that of the pool. Requests of one
        episode are one conversation, unless another is given."""
        prompt = tuple(token_ids)
        found = await self._completer.complete(
            prompt, conversation=conversation or self._conversation, **{**self._sampling, **sampling}
        )
        self.turns.append(Turn(prompt, found))
        self._noted(found)
        return found

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] = (),
        parse: Parse = calls_in_tags,
        **sampling: Any,
    ) -> Reply:
        """The answer to `messages` of OpenAI's form, by the template of the tokenizer. ::

            reply = await client.chat(messages, tools=tools, max_tokens=256)
            messages.append(reply.message)

        A request that begins with an earlier one and its answer keeps the tokens of both, so that all are one
        trajectory. `parse` finds the calls of tools in the text. Raises `UsageError` for a tokenizer without a
        template.
        """
        chats = self._chats = self._chats or Chats(self.tokenizer)
        given, offered = [dict(each) for each in messages], [*tools]
        prompt = chats.prompt(given, offered)
        return chats.answered(given, offered, prompt, await self.complete(prompt, **sampling), parse)


Run = Callable[[Data, Recorder], Awaitable[float | Sequence[Trajectory] | None]]
"""An agent: the reward of one episode, or None if nothing is to be learned from it. One with a reward for each turn
returns the trajectories themselves."""


class Pool:
    """Runs an agent for prompts, `group_size` episodes for each, and returns groups of their trajectories.

    `advance(version)` tells it which weights are trained; it learns from the answers which ones generate. What follows
    for each episode and group:

    - An agent that returns None: the episode is no part of its group.
    - An agent that raises, or takes more than `episode_timeout` seconds: the same; it is counted and reported. When
      `MAX_FAILED_GROUPS` groups have failed in a row, the error is raised.
    - A group without an episode, or that `should_accept` does not want: it is rejected.
    - A group that has a token older than `max_head_offpolicyness` versions: its episodes are cancelled.
    """

    def __init__(
        self,
        completer: Completer,
        agent: Run,
        *,
        group_size: int = 1,
        batch: int | None = None,
        max_head_offpolicyness: int | None = None,
        max_concurrent_rollouts: int = 64,
        episode_timeout: float = EPISODE_TIMEOUT,
        advance_timeout: float = ADVANCE_TIMEOUT,
        should_accept: Callable[[Group], bool] = lambda group: True,
        sampling: Data | None = None,
        tokenizer: Any = None,
        env: Callable[[], Any] = lambda: None,
        dump: Callable[[Group], None] = lambda group: None,
    ) -> None:
        """`batch` groups are trained on in each step, none with a token that is older than `max_head_offpolicyness`
        versions; give both, or none for no bound. At most `max_concurrent_rollouts` groups are made at a time.

        `sampling` are the parameters of all requests, `env` makes the environment of each episode, `dump` is called
        with each group that is accepted. `run` waits at most `advance_timeout` seconds for `advance`. Raises
        `UsageError`.
        """
        if (batch is None) != (max_head_offpolicyness is None):
            raise UsageError("batch and max_head_offpolicyness belong together", "give both or none")
        if group_size < 1 or max_concurrent_rollouts < 1 or (batch or 1) < 1:
            raise UsageError("group_size, batch and max_concurrent_rollouts are 1 or more")
        if episode_timeout <= 0 or advance_timeout <= 0:
            raise UsageError("episode_timeout and advance_timeout are more than 0")
        self._completer, self._agent, self._size = completer, agent, group_size
        self._bound: Bound | None = None
        if batch is not None and max_head_offpolicyness is not None:
            # Its package imports torch.
            from unirun.weights.gate import Bound

            self._bound = Bound(batch, max_head_offpolicyness, max_concurrent_rollouts)
        self._gate = _Gate(self._bound, max_concurrent_rollouts)
        self._most, self._timeout = max_concurrent_rollouts, episode_timeout
        self._patience = advance_timeout
        self._should_accept, self._sampling = should_accept, sampling
        self._tokenizer, self._env, self._dump = tokenizer, env, dump
        self._version = 0
        self._serial, self._numbers = secrets.token_hex(6), itertools.count()
        self._flights: set[_Flight] = set()
        # Seconds without any, and the time since which there are none now.
        self._idle, self._idle_since = 0.0, time.monotonic()
        self._counts: Counter[str] = Counter()
        self._told: Counter[str] = Counter()
        self._failed_in_a_row = 0

    @property
    def outcomes(self) -> Outcomes:
        """The numbers of groups and episodes so far."""
        episodes = sum(len(flight.episodes) for flight in self._flights)
        return Outcomes(open=len(self._flights), episodes=episodes, **self._counts)

    @property
    def idle_seconds(self) -> float:
        """The seconds so far in which no group was made."""
        return self._idle + (0.0 if self._flights else time.monotonic() - self._idle_since)

    @property
    def version(self) -> int:
        """The newest version of the weights that is known here."""
        return self._version

    def advance(self, version: int) -> None:
        """Weights of `version` are trained now: groups that are too old for it are cancelled, others may begin."""
        self._seen(version)
        self._gate.advance(version)

    def reject(self, group: Group) -> None:
        """A group that `run` has returned is not trained on, and another one may be made in its place."""
        self._undo("rejected")

    def _undo(self, outcome: str) -> None:
        """A group that was accepted has this outcome after all."""
        self._counts["accepted"] -= 1
        self._counts[outcome] += 1
        self._gate.made -= 1
        self._gate.look()

    async def run(self, prompts: Iterable[Data] | AsyncIterable[Data]) -> AsyncGenerator[Group, None]:
        """Finished groups of these prompts, in the order in which they finish.

        A prompt is taken when the group of the one before has begun, so one of them waits until its own may begin.
        Groups in progress, and finished ones that the caller has not received yet, are together at most twice
        `max_concurrent_rollouts`. Raises what `prompts` raises, `EpisodeFailed` for an agent that always fails, and
        `QueueTimeout` when the caller does not call `advance`.
        """
        gate = self._gate
        ready: asyncio.Queue[Group | None] = asyncio.Queue()

        async def deliver(group: Group) -> None:
            gate.made += 1
            gate.untaken += 1
            ready.put_nowait(group)

        feeding = asyncio.create_task(self.feed(prompts, gate.admit, deliver))
        feeding.add_done_callback(lambda _: ready.put_nowait(None))
        try:
            while (group := await self._next(ready)) is not None:
                gate.untaken -= 1
                gate.look()
                if self._bound is not None and self._bound.is_stale(group.version, self._version):
                    # It has waited here, or its engine was behind.
                    self._undo("stale")
                else:
                    yield group
            await feeding
        finally:
            feeding.cancel()
            await asyncio.wait({feeding})
            while not ready.empty():
                if ready.get_nowait() is not None:
                    # The caller has ended the run before it.
                    gate.untaken -= 1
                    self._undo("rejected")

    async def _next(self, ready: asyncio.Queue[Group | None]) -> Group | None:
        while True:
            try:
                async with asyncio.timeout(self._patience):
                    return await ready.get()
            except TimeoutError:
                # A group may have come at the very end of the time.
                if self._gate.is_shut and ready.empty():
                    raise QueueTimeout(
                        f"all groups that may be made with version {self._gate.version} are made, and no other version "
                        f"has come for {self._patience:g} s",
                        "call pool.advance(version) after each batch, and pool.reject(group) for one that is in none",
                        queue="pool",
                    ) from None

    async def evaluate(self, prompts: Iterable[Data], **sampling: Any) -> list[Group]:
        """Groups for evaluation, not for training: they do not count for the bound. `sampling` overrides that of the
        pool."""
        places = asyncio.Semaphore(self._most)

        async def one(data: Data) -> Group | None:
            async with places:
                return await self.group(data, sampling=sampling, counts=False)

        groups: list[asyncio.Task[Group | None]] = []
        try:
            groups += (asyncio.create_task(one(data)) for data in prompts)
            found = await asyncio.gather(*groups)
        finally:
            for each in groups:
                each.cancel()
        return [group for group in found if group is not None]

    async def feed(
        self,
        prompts: Iterable[Data] | AsyncIterable[Data],
        admit: Callable[[], Awaitable[AbstractContextManager[Any]]],
        deliver: Callable[[Group], Awaitable[None]],
    ) -> None:
        """Make a group of each prompt, as `admit` lets it begin, and give those that are accepted to `deliver`, in the
        block of their admission. For a queue: ``admit=queue.admit_async``."""
        source = prompts if isinstance(prompts, AsyncIterable) else _each(prompts)
        try:
            async with asyncio.TaskGroup() as tasks:
                async for data in source:
                    admission = await admit()
                    task = tasks.create_task(self._admitted(data, admission, deliver))
                    # A task that is cancelled before its first step does not come to the block.
                    task.add_done_callback(partial(_leave, admission))
        except BaseExceptionGroup as errors:
            # The first one has ended all others.
            problem = _first(errors)
            raise problem from problem.__cause__

    async def _admitted(
        self,
        data: Data,
        admission: AbstractContextManager[Any],
        deliver: Callable[[Group], Awaitable[None]],
    ) -> None:
        with admission:
            group = await self.group(data)
            if group is not None:
                self._dump(group)
                await deliver(group)

    async def group(self, data: Data, *, sampling: Data | None = None, counts: bool = True) -> Group | None:
        """Run the episodes of one prompt; None if its group is not accepted. Without `counts` it is never cancelled for
        its age. Raises `EpisodeFailed` for an agent that always fails."""
        name = f"{data.get('id', '')}:{self._serial}-{next(self._numbers)}"
        flight = _Flight(name)
        more = {**(self._sampling or {}), **(sampling or {})}
        flight.episodes = [
            asyncio.create_task(self._episode(data, flight, number, more)) for number in range(self._size)
        ]
        if counts:
            self._idle = self.idle_seconds
            self._flights.add(flight)
        try:
            found = await asyncio.gather(*flight.episodes, return_exceptions=True)
        finally:
            self._flights.discard(flight)
            if counts:
                self._idle_since = time.monotonic()
            for each in flight.episodes:
                each.cancel()
        group, outcome = self._judged(data, flight, found)
        if counts:
            self._counts[outcome] += 1
        return group

    def _judged(
        self, data: Data, flight: _Flight, found: Sequence[tuple[Trajectory, ...] | BaseException]
    ) -> tuple[Group | None, str]:
        """The group of episodes that have ended, and what has become of it."""
        failures = [each for each in found if isinstance(each, Exception)]
        for failure in failures:
            self._tell(failure)
        if flight.stale:
            return None, "stale"
        made = tuple(each for episode in found if not isinstance(episode, BaseException) for each in episode)
        if len(failures) < len(found):
            self._failed_in_a_row = 0
        else:
            self._failed_in_a_row += 1
            if self._failed_in_a_row >= MAX_FAILED_GROUPS:
                raise EpisodeFailed(
                    f"the agent has failed in all episodes of {MAX_FAILED_GROUPS} prompts: {failures[-1]!r}",
                    "correct it, or see the engines' logs",
                ) from failures[-1]
        if not made or flight.oldest is None:
            return None, "rejected"
        group = Group(flight.name, data, made, flight.oldest)
        return (group, "accepted") if self._should_accept(group) else (None, "rejected")

    def _tell(self, failure: Exception) -> None:
        """Count a failed episode, and report it: the first one of each kind, and then ever more rarely."""
        self._counts["failed"] += 1
        kind = type(failure).__name__
        self._told[kind] += 1
        times = self._told[kind]
        if times & (times - 1) == 0:
            report(f"unirun: an episode has failed ({times} times so far): {kind}: {failure}")

    async def _episode(
        self, data: Data, flight: _Flight, number: int, sampling: Data
    ) -> tuple[Trajectory, ...]:
        """The trajectories of one episode; none if the agent returns None."""

        def noted(completion: Completion) -> None:
            self._counts["tokens"] += len(completion.token_ids)
            self._note(flight, completion)

        client = Recorder(
            self._completer,
            noted,
            conversation=f"{flight.name}/{number}",
            group=flight.name,
            tokenizer=self._tokenizer,
            env=self._env(),
            sampling=sampling,
        )
        scope = asyncio.timeout(self._timeout)
        try:
            async with scope:
                reward = await self._agent(data, client)
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise EpisodeFailed(
                f"an episode has taken more than {self._timeout:g} s", "see episode_timeout"
            ) from error
        if reward is None:
            return ()
        if isinstance(reward, Sequence):
            return tuple(reward)
        return trajectories(client.turns, float(reward))

    def _note(self, flight: _Flight, completion: Completion) -> None:
        """Take over what is known of the versions after a completion."""
        first = oldest([completion])
        if first is None:
            return
        flight.oldest = first if flight.oldest is None else min(flight.oldest, first)
        self._seen(max(completion.versions))
        if self._is_stale(flight):
            flight.cancel()

    def _seen(self, version: int) -> None:
        if version > self._version:
            self._version = version
            for flight in [each for each in self._flights if self._is_stale(each)]:
                flight.cancel()

    def _is_stale(self, flight: _Flight) -> bool:
        return (
            flight in self._flights
            and self._bound is not None
            and flight.oldest is not None
            and self._bound.is_stale(flight.oldest, self._version)
        )


class _Flight:
    """A group that is being made: the tasks of its episodes, and the oldest version that has made a token of it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.episodes: list[asyncio.Task[tuple[Trajectory, ...]]] = []
        self.oldest: int | None = None
        self.stale = False

    def cancel(self) -> None:
        """It is too old."""
        self.stale = True
        for episode in self.episodes:
            episode.cancel()


class _Gate:
    """The admissions of a pool: groups that are being made (`open`), that were `made` and not rejected later, and of
    these those that nobody has taken yet."""

    def __init__(self, bound: Bound | None, most: int) -> None:
        self._bound, self._most = bound, most
        self._news = asyncio.Event()
        self.version = 0
        self.open, self.made, self.untaken = 0, 0, 0

    @property
    def is_shut(self) -> bool:
        """True if nothing is being made, and nothing may be, until a version comes."""
        return not self.open and self._room() <= 0

    async def admit(self) -> ExitStack:
        """Wait until a group may begin. It is being made until the end of the block of the result."""
        while self._room() <= 0:
            self._news.clear()
            await self._news.wait()
        self.open += 1
        admission = ExitStack()
        admission.callback(self._end)
        return admission

    def _end(self) -> None:
        self.open -= 1
        self.look()

    def _room(self) -> int:
        room = min(self._most - self.open, 2 * self._most - self.open - self.untaken)
        if self._bound is None:
            return room
        return min(room, self._bound.room(self.made + self.open, self.open, self.version))

    def advance(self, version: int) -> None:
        """These weights are trained now."""
        self.version = max(self.version, version)
        self.look()

    def look(self) -> None:
        """There may be room."""
        self._news.set()


def _leave(admission: AbstractContextManager[Any], task: asyncio.Task[None]) -> None:
    """Give an admission back, if its task has not."""
    admission.__exit__(None, None, None)


async def _each(prompts: Iterable[Data]) -> AsyncIterator[Data]:
    for data in prompts:
        yield data


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    found = errors.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found

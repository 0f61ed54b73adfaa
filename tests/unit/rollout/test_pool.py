"""Groups of episodes: what becomes of each, how many are open, and which are too old."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from tests.unit.rollout.fake_completer import FakeCompleter
from tests.waiting import WAIT_TIMEOUT
from unirun.errors import EpisodeFailed, QueueTimeout, UsageError
from unirun.rollout.completing import Group, Outcomes
from unirun.rollout.pool import MAX_FAILED_GROUPS, Pool, Recorder


def play(story: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(WAIT_TIMEOUT):
            await story()

    asyncio.run(whole())


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


def prompts(count: int) -> list[dict[str, Any]]:
    return [{"id": f"p{number}", "input_ids": [10 * number]} for number in range(count)]


async def last_digit(data: Any, client: Recorder) -> float | None:
    answer = await client.complete(data["input_ids"], max_tokens=1)
    return float(answer.token_ids[-1] % 10)


async def all_of(groups: AsyncIterator[Group]) -> list[Group]:
    return [group async for group in groups]


def test_each_prompt_is_a_group_of_so_many_episodes() -> None:
    async def story() -> None:
        engine = FakeCompleter()
        pool = Pool(engine, last_digit, group_size=3, sampling={"temperature": 0.7, "max_tokens": 9})
        found = await all_of(pool.run(prompts(2)))
        assert [len(group.trajectories) for group in found] == [3, 3]
        assert {group.id.partition(":")[0] for group in found} == {"p0", "p1"}
        assert found[0].rewards == (1.0,) * 3
        conversations = [conversation for _, conversation, _ in engine.requests]
        assert len({*conversations}) == 6
        assert all(sampling == {"temperature": 0.7, "max_tokens": 1} for _, _, sampling in engine.requests)
        assert pool.outcomes == Outcomes(accepted=2, tokens=6)

    play(story)


def test_ids_are_never_used_twice() -> None:
    async def story() -> None:
        engine = FakeCompleter()
        found = [
            group.id for _ in range(2) for group in await all_of(Pool(engine, last_digit).run(prompts(2) * 3))
        ]
        assert len({*found}) == 12

    play(story)


def test_an_episode_without_a_reward_or_with_an_error_drops_out_of_its_group() -> None:
    numbers = iter(range(100))

    async def agent(data: Any, client: Recorder) -> float | None:
        number = next(numbers)
        await client.complete(data["input_ids"])
        if number == 1:
            raise ValueError("no answer")
        return None if number == 2 else 1.0

    async def story() -> None:
        pool = Pool(FakeCompleter(), agent, group_size=4)
        (group,) = await all_of(pool.run(prompts(1)))
        assert len(group.trajectories) == 2
        assert (pool.outcomes.accepted, pool.outcomes.failed) == (1, 1)

    play(story)


def test_a_group_that_is_not_accepted_gives_its_place_to_another_one() -> None:
    async def story() -> None:
        pool = Pool(
            FakeCompleter(),
            last_digit,
            batch=2,
            max_head_offpolicyness=0,
            should_accept=lambda group: group.data["id"] not in ("p0", "p1", "p2"),
        )
        found = pool.run(prompts(9))
        assert {(await anext(found)).data["id"], (await anext(found)).data["id"]} == {"p3", "p4"}
        assert pool.outcomes.rejected == 3
        await found.aclose()

    play(story)


def test_no_more_begin_than_the_bound_allows_until_the_version_advances() -> None:
    async def story() -> None:
        engine = FakeCompleter()
        pool = Pool(engine, last_digit, batch=2, max_head_offpolicyness=1)
        found = pool.run(prompts(9))
        first = [await anext(found) for _ in range(4)]
        assert len(engine.requests) == 4
        pool.advance(1)
        assert len([await anext(found) for _ in range(2)]) == 2
        # A group that the trainer drops gives back its place in the batch.
        pool.reject(first[0])
        await anext(found)
        assert len(engine.requests) == 7
        await found.aclose()

    play(story)


def test_who_waits_for_a_group_is_told_when_nobody_advances_the_version() -> None:
    async def story() -> None:
        engine = FakeCompleter()
        pool = Pool(engine, last_digit, batch=2, max_head_offpolicyness=0, advance_timeout=0.05)
        found = pool.run(prompts(9))
        assert len([await anext(found) for _ in range(2)]) == 2
        with pytest.raises(QueueTimeout, match=r"with version 0 are made.*\n?.*pool.advance"):
            await anext(found)
        # Episodes that take longer are no reason, nor is a step that takes longer than that.
        engine.hold()
        pool = Pool(engine, last_digit, batch=2, max_head_offpolicyness=0, advance_timeout=0.05)
        found = pool.run(prompts(9))
        first = asyncio.create_task(anext(found))
        await asyncio.sleep(0.15)
        engine.release()
        assert {(await first).data["id"], (await anext(found)).data["id"]} == {"p0", "p1"}
        await asyncio.sleep(0.15)
        engine.version = 1
        pool.advance(1)
        assert (await anext(found)).version == 1
        await found.aclose()

    play(story)


def test_a_group_that_comes_at_the_very_end_of_the_time_is_given() -> None:
    class Late(asyncio.Queue[Group | None]):
        """Its first group comes when the time for it is over."""

        async def get(self) -> Group | None:
            try:
                return await super().get()
            except asyncio.CancelledError:
                self.put_nowait(late)
                raise

    late = Group("late", {}, (), 0)

    async def story() -> None:
        pool = Pool(FakeCompleter(), last_digit, batch=1, max_head_offpolicyness=0, advance_timeout=0.01)
        pool._gate.made = 1
        assert pool._gate.is_shut
        assert await pool._next(Late()) == late

    play(story)


def test_time_without_any_group_is_idle() -> None:
    async def story() -> None:
        engine = FakeCompleter()
        engine.hold()
        pool = Pool(engine, last_digit)
        first = pool.idle_seconds
        await until(lambda: pool.idle_seconds > first)
        found = asyncio.create_task(all_of(pool.run(prompts(2))))
        await until(lambda: engine.waiting == 2)
        busy = pool.idle_seconds
        await asyncio.sleep(0.02)
        assert pool.idle_seconds == busy
        engine.release()
        await found
        await until(lambda: pool.idle_seconds > busy)

    play(story)


def test_no_more_are_open_than_allowed() -> None:
    async def story() -> None:
        engine = FakeCompleter()
        engine.hold()
        pool = Pool(engine, last_digit, group_size=2, max_concurrent_rollouts=3)
        found = asyncio.create_task(all_of(pool.run(prompts(5))))
        await until(lambda: engine.waiting == 6)
        assert (pool.outcomes.open, pool.outcomes.episodes) == (3, 6)
        engine.release()
        assert len(await found) == 5

    play(story)


def test_prompts_wait_for_groups_to_be_taken() -> None:
    taken: list[int] = []

    def endless() -> Iterator[dict[str, Any]]:
        for number in range(10**6):
            taken.append(number)
            yield {"id": str(number), "input_ids": [1]}

    async def story() -> None:
        found = Pool(FakeCompleter(), last_digit, max_concurrent_rollouts=2).run(endless())
        await anext(found)
        for _ in range(100):
            await asyncio.sleep(0)
        # Two that nobody has taken, two more, and the one that waits.
        assert len(taken) <= 6
        await found.aclose()

    play(story)


@pytest.mark.parametrize("bound", [{}, {"batch": 1, "max_head_offpolicyness": 3}])
def test_groups_that_nobody_takes_leave_their_places_at_the_end_of_a_run(bound: dict[str, Any]) -> None:
    async def story() -> None:
        pool = Pool(FakeCompleter(), last_digit, max_concurrent_rollouts=4, advance_timeout=0.1, **bound)
        for version in range(1, 5):
            found = pool.run(prompts(4))
            await anext(found)
            await until(lambda: not pool.outcomes.open)
            await found.aclose()
            pool.advance(version)
        assert (pool.outcomes.accepted, pool.outcomes.rejected) == (4, 12)

    play(story)


def test_a_group_with_a_token_that_is_too_old_is_cancelled_and_another_one_made() -> None:
    async def story() -> None:
        engine, gate = FakeCompleter(), asyncio.Event()

        async def agent(data: Any, client: Recorder) -> float | None:
            await client.complete(data["input_ids"])
            if data["id"] == "p0":
                await gate.wait()
            return 1.0

        pool = Pool(engine, agent, group_size=2, batch=1, max_head_offpolicyness=1)
        found = pool.run(prompts(4))
        assert (await anext(found)).data["id"] == "p1"
        engine.version = 1
        pool.advance(1)
        assert (await anext(found)).version == 1
        pool.advance(2)
        await until(lambda: pool.outcomes.stale == 1)
        assert (await anext(found)).data["id"] == "p3"
        assert await all_of(found) == []
        assert pool.outcomes == Outcomes(accepted=3, stale=1, tokens=8)

    play(story)


def test_a_group_of_an_engine_that_is_behind_is_not_given_out_when_it_is_too_old() -> None:
    async def story() -> None:
        engine = FakeCompleter()
        pool = Pool(engine, last_digit, batch=1, max_head_offpolicyness=1)
        found = pool.run(prompts(5))
        assert (await anext(found)).data["id"] == "p0"
        await until(lambda: pool.outcomes.accepted == 2)
        pool.advance(1)
        await until(lambda: pool.outcomes.accepted == 3)
        # Its groups are still of version 0.
        engine.version = 2
        pool.advance(2)
        assert [group.version async for group in found] == [2, 2]
        assert (pool.outcomes.accepted, pool.outcomes.stale) == (3, 2)

    play(story)


def test_answers_alone_tell_which_groups_are_too_old() -> None:
    async def story() -> None:
        engine = FakeCompleter()

        async def agent(data: Any, client: Recorder) -> float | None:
            await client.complete(data["input_ids"])
            engine.version = 5
            await client.complete(data["input_ids"])
            return 1.0

        pool = Pool(engine, agent, batch=4, max_head_offpolicyness=3)
        assert await pool.group(prompts(1)[0]) is None
        assert (pool.outcomes.stale, pool.version) == (1, 5)

    play(story)


def test_an_agent_that_always_fails_ends_the_run_with_its_error() -> None:
    async def agent(data: Any, client: Recorder) -> float | None:
        raise KeyError("answer")

    async def story() -> None:
        pool = Pool(FakeCompleter(), agent, max_concurrent_rollouts=4)
        with pytest.raises(EpisodeFailed, match="KeyError") as caught:
            await all_of(pool.run(prompts(100)))
        assert isinstance(caught.value.__cause__, KeyError)
        assert MAX_FAILED_GROUPS <= pool.outcomes.failed < MAX_FAILED_GROUPS + 4

    play(story)


def test_the_time_that_an_agent_gives_to_something_is_not_that_of_the_episode(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def agent(data: Any, client: Recorder) -> float | None:
        raise TimeoutError("the tool does not answer")

    async def story() -> None:
        assert await Pool(FakeCompleter(), agent).group(prompts(1)[0]) is None

    play(story)
    assert "(1 times so far): TimeoutError: the tool does not answer" in capfd.readouterr().err


def test_an_episode_has_a_deadline() -> None:
    async def agent(data: Any, client: Recorder) -> float | None:
        await asyncio.Event().wait()
        return 1.0

    async def story() -> None:
        pool = Pool(FakeCompleter(), agent, episode_timeout=0.01)
        assert await all_of(pool.run(prompts(2))) == []
        assert (pool.outcomes.failed, pool.outcomes.rejected) == (2, 2)

    play(story)


def test_an_evaluation_is_not_counted_at_the_gate_nor_among_the_groups() -> None:
    async def story() -> None:
        engine = FakeCompleter()
        pool = Pool(engine, last_digit, batch=1, max_head_offpolicyness=0, sampling={"temperature": 1.0})
        found = pool.run(prompts(5))
        await anext(found)
        groups = await pool.evaluate(prompts(3), temperature=0.0, max_tokens=9)
        assert len(groups) == 3
        assert engine.requests[-1][2] == {"temperature": 0.0, "max_tokens": 1}, "the request goes before"
        assert pool.outcomes.accepted == 1
        await found.aclose()

    play(story)


def test_an_evaluation_that_fails_ends_what_is_open() -> None:
    async def agent(data: Any, client: Recorder) -> float:
        if data["id"] != "p0":
            raise ValueError("no answer")
        await client.complete(data["input_ids"])
        return 1.0

    async def story() -> None:
        engine = FakeCompleter()
        engine.hold()
        with pytest.raises(EpisodeFailed):
            await Pool(engine, agent).evaluate(prompts(1 + MAX_FAILED_GROUPS))
        for _ in range(9):
            await asyncio.sleep(0)
        assert engine.waiting == 0

    play(story)


def test_an_evaluation_whose_prompts_fail_begins_nothing() -> None:
    def broken() -> Iterator[Any]:
        yield from prompts(2)
        raise ValueError("the file is damaged")

    async def story() -> None:
        engine = FakeCompleter()
        engine.hold()
        with pytest.raises(ValueError, match="damaged"):
            await Pool(engine, last_digit).evaluate(broken())
        for _ in range(9):
            await asyncio.sleep(0)
        assert engine.waiting == 0

    play(story)


def test_each_episode_has_an_environment_of_its_own() -> None:
    seen: list[object] = []

    async def agent(data: Any, client: Recorder) -> float | None:
        seen.append(client.env)
        await client.complete(data["input_ids"])
        return 0.0

    async def story() -> None:
        await all_of(Pool(FakeCompleter(), agent, group_size=2, env=object).run(prompts(2)))
        assert len({*map(id, seen)}) == 4

    play(story)


def test_an_error_of_the_prompts_is_raised_and_ends_what_is_open() -> None:
    def broken() -> Iterator[dict[str, Any]]:
        yield from prompts(1)
        raise OSError("the file is gone")

    async def story() -> None:
        engine = FakeCompleter()
        engine.hold()
        pool = Pool(engine, last_digit, max_concurrent_rollouts=1)
        with pytest.raises(OSError, match="is gone"):
            await all_of(pool.run(broken()))
        assert (engine.waiting, pool.outcomes.open) == (0, 0)
        engine.release()
        assert len(await all_of(pool.run(prompts(2)))) == 2

    play(story)


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch": 4},
        {"group_size": 0},
        {"max_concurrent_rollouts": 0},
        {"episode_timeout": 0.0},
        {"advance_timeout": 0.0},
    ],
)
def test_settings_that_do_not_fit_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Pool(FakeCompleter(), last_digit, **wrong)


def test_five_thousand_episodes_are_open_in_one_event_loop() -> None:
    async def story() -> None:
        engine = FakeCompleter()
        engine.hold()
        pool = Pool(engine, last_digit, group_size=5, max_concurrent_rollouts=1000)
        found = asyncio.create_task(all_of(pool.run(prompts(1000))))
        await until(lambda: engine.waiting == 5000)
        assert pool.outcomes.episodes == 5000
        engine.release()
        assert sum(len(group.trajectories) for group in await found) == 5000

    play(story)

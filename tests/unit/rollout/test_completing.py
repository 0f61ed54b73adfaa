"""Completions in chunks, on stubs of engines in the same event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.testbed.engine import tokens
from tests.unit.launcher.instant_loop import InstantLoop
from unirun.errors import UsageError
from unirun.rollout import EngineCompleter, completing
from unirun.rollout.choosing import Answer, Span
from unirun.values import WorkerId

from .test_client import Engines, play, until


def test_a_request_in_chunks_has_the_tokens_log_probabilities_and_versions_of_all() -> None:
    async def story(engines: Engines) -> None:
        engines.stubs[0].transfer.version = "3"
        async with engines.client() as client:
            found = await EngineCompleter(client, new_tokens_per_chunk=4).complete([1, 2], max_tokens=10)
        expected: list[int] = []
        for count in (4, 4, 2):
            expected += tokens([1, 2, *expected], count, "3")
        assert list(found.token_ids) == expected
        assert (found.logprobs, found.versions, found.finish_reason) == ((-1.0,) * 10, (3,) * 10, "length")

    play(1, story)


class Drawing:
    """A client of an engine that draws each token by all before it and a random number. Some tokens end a text, after
    `min_tokens` others."""

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int, min_tokens: int, seed: int, **more: Any
    ) -> Answer:
        made, reason = list[int](), "length"
        while len(made) < max_tokens and reason == "length":
            made.append(hash((*token_ids, *made, seed + len(made))) % 1000)
            reason = "stop" if made[-1] % 4 == 0 and len(made) > min_tokens else "length"
        logprobs = {"content": [{"logprob": -token / 1000} for token in made]}
        choice = {"token_ids": made, "finish_reason": reason, "logprobs": logprobs}
        return Answer({"choices": [choice]}, WorkerId("engine", 0, 0), None)


@given(chunk=st.integers(1, 8), most=st.integers(1, 20), least=st.integers(0, 20), seed=st.integers(0, 9))
def test_a_completion_in_chunks_is_the_one_in_one_piece(chunk: int, most: int, least: int, seed: int) -> None:
    client: Any = Drawing()
    sampling: dict[str, Any] = {"max_tokens": most, "min_tokens": min(least, most), "seed": seed}
    whole = asyncio.run(EngineCompleter(client).complete([1, 2], **sampling))
    assert len(whole.token_ids) >= min(least, most)
    parts = EngineCompleter(client, new_tokens_per_chunk=chunk)
    assert asyncio.run(parts.complete([1, 2], **sampling)) == whole
    assert not parts._homes, "no other request goes on with one that has no conversation"


def test_each_request_says_how_long_it_may_take_who_gets_it_and_which_ones_begin_alike() -> None:
    asked: list[dict[str, Any]] = []

    class Noting(Drawing):
        async def generate(self, token_ids: Sequence[int], **how: Any) -> Answer:
            asked.append(how)
            return await super().generate(token_ids, **how)

    client: Any = Noting()
    completer = EngineCompleter(client, new_tokens_per_chunk=2, schedule_policy="round_robin", timeout=7.0)
    for prompt in ([1, 2], [1, 2], [3]):
        sampling: dict[str, Any] = {"seed": 1, "stop": ["."], "max_tokens": 5, "min_tokens": 5}
        asyncio.run(completer.complete(prompt, **sampling))
    first, again, other = asked
    assert {each: first[each] for each in ("timeout", "policy", "logprobs", "max_tokens")} == {
        "timeout": pytest.approx(7.0, abs=1.0),
        "policy": "round_robin",
        "logprobs": 0,
        "max_tokens": 5,
    }
    assert isinstance(first["prompt"], int)
    assert first["prompt"] == again["prompt"] != other["prompt"]


@pytest.mark.parametrize("chunk", [None, 2, 4])
def test_a_completion_ends_when_the_engine_takes_no_more_tokens(chunk: int | None) -> None:
    class Short(Drawing):
        """An engine that takes seven tokens, as vLLM does with ``--max-model-len 7``."""

        async def generate(self, token_ids: Sequence[int], *, max_tokens: int, **how: Any) -> Answer:
            assert len(token_ids) < 7, "vLLM answers 400"
            count = min(max_tokens, 7 - len(token_ids))
            return await super().generate(token_ids, max_tokens=count, **how | {"min_tokens": count})

    client: Any = Short()
    completer = EngineCompleter(client, new_tokens_per_chunk=chunk)
    found = asyncio.run(completer.complete([1, 2], max_tokens=10, seed=0))
    assert (len(found.token_ids), found.finish_reason) == (5, "length")


def test_all_chunks_of_a_request_have_one_time() -> None:
    left: list[float] = []

    class Slow(Drawing):
        async def generate(self, token_ids: Sequence[int], **how: Any) -> Answer:
            left.append(how["timeout"])
            loop.skip(3.0)
            return await super().generate(token_ids, **how)

    client: Any = Slow()
    completer = EngineCompleter(client, new_tokens_per_chunk=1, timeout=7.0)
    with closing(InstantLoop()) as loop:
        loop.run_until_complete(completer.complete([1], max_tokens=4, min_tokens=4, seed=0))
    assert left == [7.0, 4.0, 1.0, 0.0]


def test_weights_that_nobody_has_labelled_are_version_0() -> None:
    async def story(engines: Engines) -> None:
        async with engines.client() as client:
            assert (await EngineCompleter(client).complete([1], max_tokens=3)).versions == (0, 0, 0)

    play(1, story)


def test_when_an_engine_dies_at_most_one_chunk_is_generated_again() -> None:
    async def story(engines: Engines) -> None:
        async with engines.client() as client:
            asked = asyncio.create_task(
                EngineCompleter(client, new_tokens_per_chunk=4).complete([1], max_tokens=40)
            )
            await until(lambda: sum(stub.made for stub in engines.stubs) >= 20)
            engines.stubs[0 if engines.stubs[0].made else 1].close()
            assert len((await asked).token_ids) == 40
        assert sum(stub.made for stub in engines.stubs) <= 44

    play(2, story, latency=0.02)


def test_a_conversation_stays_on_its_engine_while_the_version_is_the_same() -> None:
    async def story(engines: Engines) -> None:
        async with engines.client() as client:
            completer = EngineCompleter(client, schedule_policy="round_robin")

            async def ask(conversation: str = "") -> int:
                before = [len(stub.seen) for stub in engines.stubs]
                await completer.complete([1], max_tokens=2, conversation=conversation)
                return [len(stub.seen) for stub in engines.stubs] != [before[0] + 1, *before[1:]]

            assert [await ask() for _ in range(4)] == [0, 1, 0, 1]
            assert [await ask("talk") for _ in range(3)] == [0, 0, 0]
            engines.stubs[0].transfer.version = "1"
            assert await ask("talk") == 0, "the new version is not known yet"
            assert await ask("talk") == 0
            assert [await ask("other"), await ask("other")] == [1, 1]
            engines.stubs[0].transfer.version = "2"
            await ask()
            assert await ask("talk") == 1, "its keys and values are gone"

    play(2, story)


class Changes:
    """A client of an engine that gets another version while it answers."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self._answers = iter(answers)
        self.stays: list[WorkerId | None] = []

    async def generate(self, token_ids: Sequence[int], *, stay: WorkerId | None, **more: Any) -> Answer:
        self.stays.append(stay)
        versions = next(self._answers)
        spans = tuple(Span(version, place, place + 1) for place, version in enumerate(versions))
        logprobs = {"content": [{"logprob": -1.0} for _ in versions]}
        choice = {"token_ids": [4] * len(versions), "finish_reason": "stop", "logprobs": logprobs}
        return Answer({"choices": [choice]}, WorkerId("engine", 0, 0), versions[0], spans)


def test_a_conversation_has_the_version_of_its_last_token() -> None:
    async def story() -> None:
        found = await completer.complete([1], max_tokens=2, conversation="talk")
        assert found.versions == (1, 2)
        await completer.complete([1], max_tokens=1, conversation="other")
        await completer.complete([1], max_tokens=1, conversation="talk")

    client: Any = Changes("12", "2", "2")
    completer = EngineCompleter(client)
    asyncio.run(story())
    assert client.stays == [None, None, WorkerId("engine", 0, 0)]


def test_settings_that_are_none_are_refused() -> None:
    async def story(engines: Engines) -> None:
        async with engines.client() as client:
            with pytest.raises(UsageError, match="new_tokens_per_chunk"):
                EngineCompleter(client, new_tokens_per_chunk=0)
            with pytest.raises(UsageError, match="round_robin, least_requests, least_token_usage"):
                EngineCompleter(client, schedule_policy="fair")

    play(1, story)


class Places:
    """A client of two engines. A request without a place goes to the first one."""

    def __init__(self) -> None:
        self.stays: list[WorkerId | None] = []

    async def generate(self, token_ids: Sequence[int], *, stay: WorkerId | None, **more: Any) -> Answer:
        self.stays.append(stay)
        choice = {"token_ids": [1], "finish_reason": "stop", "logprobs": None}
        return Answer({"choices": [choice]}, stay or WorkerId("engine", 0, 0), None)


@given(st.lists(st.sampled_from("abcde"), max_size=30), st.integers(1, 4))
def test_the_conversations_that_were_asked_for_last_are_remembered(asked: list[str], most: int) -> None:
    places: Any = Places()
    completer, latest = EngineCompleter(places), list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(completing, "REMEMBERED", most)
        for name in asked:
            asyncio.run(completer.complete([1], conversation=name))
            assert (places.stays[-1] is not None) == (name in latest)
            latest = [*(each for each in latest if each != name), name][-most:]

"""Completions in chunks, on stubs of engines in the same event loop."""

from __future__ import annotations

import asyncio

import pytest

from tests.testbed.engine import tokens
from unirun.errors import UsageError
from unirun.rollout import EngineCompleter

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


def test_settings_that_are_none_are_refused() -> None:
    async def story(engines: Engines) -> None:
        async with engines.client() as client:
            with pytest.raises(UsageError, match="new_tokens_per_chunk"):
                EngineCompleter(client, new_tokens_per_chunk=0)
            with pytest.raises(UsageError, match="round_robin, least_requests, least_token_usage"):
                EngineCompleter(client, schedule_policy="fair")

    play(1, story)

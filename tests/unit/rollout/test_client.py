"""A client of several engines, which are stubs in the same event loop, gets each answer once, whatever becomes of them."""

from __future__ import annotations

import asyncio
import errno
import json
import random
import resource
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import unirun
from tests.testbed.engine import Stub, decoded, encoded, tokens
from tests.waiting import WAIT_TIMEOUT
from unirun import rollout
from unirun.errors import ServerError, ServerTimeout, UsageError
from unirun.rollout import AddressFile, Engine, EngineClient, EngineList
from unirun.rollout import client as client_module
from unirun.wire.progress import LAST, LOOP_BEAT_INTERVAL, page


class Engines:
    """Stubs, and what their client is told of them."""

    def __init__(self, count: int, latency: float = 0.0) -> None:
        self.stubs = [Stub(latency=latency) for _ in range(count)]
        self.urls = [stub.start() for stub in self.stubs]
        self.source = EngineList.at(*self.urls)

    def client(self, **options: Any) -> EngineClient:
        return EngineClient("engine", engines=self.source, **{"timeout": WAIT_TIMEOUT, **options})

    def tell(self, *ready: bool, incarnation: int = 0) -> None:
        self.source.set(
            Engine(rank, incarnation, url, its)
            for (rank, url), its in zip(enumerate(self.urls), ready, strict=True)
        )

    def close(self) -> None:
        for stub in self.stubs:
            stub.close()


def play(count: int, story: Callable[[Engines], Awaitable[None]], latency: float = 0.0) -> None:
    """The story with so many engines."""

    async def whole() -> None:
        engines = Engines(count, latency)
        try:
            await story(engines)
        finally:
            engines.close()

    asyncio.run(whole())


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_TIMEOUT):
        while not holds():
            await asyncio.sleep(0.001)


def test_tokens_in_and_tokens_out_with_the_engine_and_the_version() -> None:
    async def story(engines: Engines) -> None:
        engines.stubs[0].transfer.version = "7"
        async with engines.client() as client:
            answer = await client.generate([1, 2, 3], max_tokens=5, temperature=0.0)
        assert answer.token_ids == tokens([1, 2, 3], 5, "7")
        assert (str(answer.engine), answer.engine.incarnation, answer.version) == ("engine:0", 0, "7")
        assert [(span.version, span.start, span.end) for span in answer.spans] == [("7", 0, 5)]
        assert answer.finish_reason == "length"

    play(1, story)


def test_a_rank_that_waits_for_an_engine_is_not_late() -> None:
    async def story(engines: Engines) -> None:
        fields = page().fields
        async with engines.client() as client:
            asked = asyncio.create_task(client.generate([1], max_tokens=8))
            await until(lambda: engines.stubs[0].made > 0)
            fields[LAST] = 0
            await until(lambda: fields[LAST] > 0)
            assert not asked.done()
            await asked
        fields[LAST] = 0
        await asyncio.sleep(2 * LOOP_BEAT_INTERVAL)
        assert fields[LAST] == 0

    play(1, story, latency=0.6)


def test_an_output_during_which_the_weights_changed_tells_the_version_of_each_token() -> None:
    async def story(engines: Engines) -> None:
        (stub,) = engines.stubs
        async with engines.client() as client:
            asked = asyncio.create_task(client.generate([1], max_tokens=8))
            await until(lambda: stub.made > 0)
            await client.post("/pause?mode=keep", {})
            await client.post("/update_weight_version", {"new_version": "2"})
            await client.post("/resume", {})
            answer = await asked
        first, second = answer.spans
        assert (first.version, second.version, second.end) == ("default", "2", 8)
        assert answer.version == "default"
        assert answer.token_ids == tokens([1], first.end) + tokens([1], 8, "2", second.start)

    play(1, story, latency=0.4)


def test_completions_and_chats_have_the_parameters_of_the_server() -> None:
    async def story(engines: Engines) -> None:
        async with engines.client() as client:
            text = await client.complete("hello", max_tokens=4, n=2)
            ids = await client.complete([5, 6], max_tokens=3, return_token_ids=True)
            chat = await client.chat([{"role": "user", "content": "hello"}], max_tokens=4)
        assert text.text == decoded(tokens(encoded("hello"), 4))
        assert len(text.choices) == 2
        assert ids.token_ids == tokens([5, 6], 3)
        assert chat.text == decoded(tokens(encoded("user: hello\n"), 4))
        assert chat.version is None  # vLLM says it only for tokens

    play(1, story)


def test_requests_at_a_time_are_spread_evenly() -> None:
    async def story(engines: Engines) -> None:
        async with engines.client() as client:
            answers = await asyncio.gather(*(client.generate([each]) for each in range(30)))
        assert [sum(each.engine.rank == rank for each in answers) for rank in range(3)] == [10, 10, 10]

    play(3, story, latency=0.1)


def test_a_request_that_its_engine_had_not_answered_when_it_died_is_sent_to_another() -> None:
    async def story(engines: Engines) -> None:
        async with engines.client() as client:
            asked = [asyncio.create_task(client.generate([each])) for each in range(20)]
            await until(lambda: engines.stubs[0].running == 10)
            engines.stubs[0].close()
            answers = await asyncio.gather(*asked)
        assert [each.token_ids for each in answers] == [tokens([each], 16) for each in range(20)]
        assert {each.engine.rank for each in answers} == {1}

    play(2, story, latency=0.2)


def test_a_request_that_its_engine_has_aborted_is_sent_to_another() -> None:
    async def story(engines: Engines) -> None:
        first, _ = engines.stubs
        async with engines.client() as client:
            asked = [asyncio.create_task(client.generate([each])) for each in range(6)]
            await until(lambda: first.running == 3)
            first.abort()
            answers = await asyncio.gather(*asked)
        assert [each.token_ids for each in answers] == [tokens([each], 16) for each in range(6)]
        assert {each.engine.rank for each in answers} == {1}

    play(2, story, latency=0.1)


def test_a_client_may_want_what_an_aborted_request_has() -> None:
    async def story(engines: Engines) -> None:
        (stub,) = engines.stubs
        async with engines.client(partial=True) as client:
            asked = asyncio.create_task(client.generate([1]))
            await until(lambda: stub.made > 0)
            stub.abort()
            answer = await asked
        assert answer.finish_reason == "abort"
        assert answer.token_ids == tokens([1], len(answer.token_ids))
        assert 0 < len(answer.token_ids) < 16

    play(1, story, latency=0.2)


def test_requests_to_an_engine_that_hangs_are_sent_to_another_when_it_is_no_longer_ready() -> None:
    async def story(engines: Engines) -> None:
        engines.stubs[0].latency = 10 * WAIT_TIMEOUT
        async with engines.client() as client:
            asked = [asyncio.create_task(client.generate([each])) for each in range(6)]
            await until(lambda: engines.stubs[0].running == 3)
            engines.tell(False, True)
            answers = await asyncio.gather(*asked)
            assert {each.engine.rank for each in answers} == {1}
            await until(lambda: engines.stubs[0].running == 0)  # their connections are closed

    play(2, story, latency=0.05)


def test_an_engine_that_answers_500_or_is_not_ready_yet_loses_its_requests_to_others() -> None:
    async def story(engines: Engines) -> None:
        engines.stubs[0].broken = True
        engines.stubs[1].ready = False
        async with engines.client() as client:
            answers = await asyncio.gather(*(client.generate([each]) for each in range(20)))
        assert {each.engine.rank for each in answers} == {2}
        # Once it has failed it is doubted, though it has the fewest requests.
        assert len(engines.stubs[0].seen) <= 20

    play(3, story, latency=0.02)


async def told(*answers: bytes, heads: list[bytes] | None = None) -> tuple[asyncio.Server, str]:
    """A server that sends these bytes to the requests of its connections, one after the other, and closes each. It
    puts their heads into `heads`."""
    left = iter(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split()[0]))
        if heads is not None:
            heads.append(head)
        writer.write(next(left))
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def response(body: bytes, length: int | None = None) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (
        len(body) if length is None else length,
        body,
    )


def test_half_an_answer_is_none() -> None:
    async def story() -> None:
        whole = b'{"choices": [{"token_ids": [1, 2]}]}'
        server, url = await told(response(whole[:20], len(whole)), b"", response(whole))
        async with server, EngineClient("engine", engines=EngineList.at(url), timeout=WAIT_TIMEOUT) as client:
            assert (await client.generate([1])).token_ids == [1, 2]

    asyncio.run(story())


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"<html>", "did not answer: this is no JSON object"),
        (b'{"choices": [{"weight_versions": [7]}]}', "tells the versions of its weights in an unknown way"),
    ],
)
def test_an_answer_that_cannot_be_read_is_an_error(answer: bytes, words: str) -> None:
    async def story() -> None:
        server, url = await told(response(answer))
        async with server, EngineClient("engine", engines=EngineList.at(url), timeout=WAIT_TIMEOUT) as client:
            with pytest.raises(ServerError, match=words):
                await client.generate([1])

    asyncio.run(story())


def test_the_version_of_sglang_is_in_the_metadata() -> None:
    async def story() -> None:
        body = b'{"choices": [{"text": "a"}], "metadata": {"weight_version": "12"}}'
        server, url = await told(response(body))
        async with server, EngineClient("engine", engines=EngineList.at(url), timeout=WAIT_TIMEOUT) as client:
            assert (await client.complete("hello")).version == "12"

    asyncio.run(story())


def test_requests_wait_for_an_engine() -> None:
    async def story(engines: Engines) -> None:
        engines.tell(False)
        async with engines.client() as client:
            asked = [asyncio.create_task(client.generate([each])) for each in range(3)]
            await asyncio.sleep(0.02)
            assert engines.stubs[0].seen == []
            engines.tell(True, incarnation=1)
            assert [each.engine.incarnation for each in await asyncio.gather(*asked)] == [1, 1, 1]

    play(1, story)


def test_a_program_waits_for_the_first_engine_that_is_ready_and_its_requests_have_all_of_their_time() -> None:
    async def story(engines: Engines) -> None:
        engines.tell(False, False)
        async with engines.client() as client:
            waiting = asyncio.create_task(client.ready())
            engines.tell(False, False, incarnation=1)
            assert not (await asyncio.wait({waiting}, timeout=0.05))[0]
            engines.tell(False, True, incarnation=1)
            await asyncio.wait_for(waiting, WAIT_TIMEOUT)
            assert (await client.generate([1], max_tokens=1)).engine.rank == 1

    play(2, story)


def test_a_program_that_waits_for_an_engine_is_told_that_the_client_was_closed() -> None:
    async def story() -> None:
        source = EngineList([Engine(0, 0, "http://e0", False)])
        client = EngineClient("engine", engines=source)
        waiting = asyncio.create_task(client.ready())
        await asyncio.sleep(0)
        await client.close()
        source.set([Engine(0, 1, "http://e0", False)])
        with pytest.raises(UsageError, match="the client of engine is closed"):
            await waiting

    asyncio.run(asyncio.wait_for(story(), WAIT_TIMEOUT))


class Unknown(EngineList):
    """A list of engines that is unknown after `forget`, as when its master is gone."""

    known = True

    def forget(self) -> None:
        self.known = False
        self.set(())

    def engines(self) -> tuple[Engine, ...]:
        if not self.known:
            raise UsageError("the file of addresses is none")
        return super().engines()

    async def changed(self, known: tuple[Engine, ...], timeout: float) -> tuple[Engine, ...]:
        await super().changed(known, timeout)
        return self.engines()


def test_requests_that_wait_are_told_at_once_that_engines_are_not_known_any_more() -> None:
    async def story() -> None:
        source = Unknown([Engine(0, 0, "http://e0", False)])
        async with EngineClient("engine", engines=source, timeout=100 * WAIT_TIMEOUT) as client:
            asked = [asyncio.create_task(client.generate([each])) for each in range(3)]
            await until(lambda: client._watch is not None)
            source.forget()
            async with asyncio.timeout(WAIT_TIMEOUT):
                found = await asyncio.gather(*asked, return_exceptions=True)
            assert ["file of addresses" in str(each) for each in found] == [True] * 3

    asyncio.run(story())


def test_a_wrong_request_is_an_error_at_once_with_the_words_of_the_server() -> None:
    async def story(engines: Engines) -> None:
        async with engines.client() as client:
            with pytest.raises(
                ServerError, match=r"engine:0 \(.*/generate\) refused \(400\): List should have"
            ) as caught:
                await client.generate([])
            assert (caught.value.server, caught.value.status) == (engines.urls[0], 400)
        assert engines.stubs[0].seen + engines.stubs[1].seen == ["/inference/v1/generate"]

    play(2, story)


def test_a_route_that_the_server_does_not_have_is_an_error() -> None:
    async def story(engines: Engines) -> None:
        async with engines.client() as client:
            with pytest.raises(ServerError, match=r"refused \(404\): Not Found"):
                await client.post("/v1/nothing", {})

    play(1, story)


def test_a_server_without_the_route_for_tokens_is_told_with_the_remedy() -> None:
    async def story(engines: Engines) -> None:
        engines.stubs[0].scale_out = False
        async with engines.client() as client:
            with pytest.raises(
                ServerError, match="Scale-out endpoints are disabled.*; start vLLM with --enable-scale-out"
            ):
                await client.generate([1])
            answer = await client.complete([1], return_token_ids=True)
        assert answer.token_ids == tokens([1], 16)

    play(1, story)


def test_a_request_on_which_engines_fail_again_and_again_is_an_error() -> None:
    async def story(engines: Engines) -> None:
        for stub in engines.stubs:
            stub.broken = True
        async with engines.client(attempts=3) as client:
            with pytest.raises(ServerError, match="as the last of 3 attempts; .* perhaps it is this request"):
                await client.generate([1])
        assert sum(len(stub.seen) for stub in engines.stubs) == 3

    play(2, story)


def test_every_request_has_a_deadline_whatever_it_waits_for() -> None:
    async def story(engines: Engines) -> None:
        async with engines.client(timeout=0.1) as client:
            with pytest.raises(ServerTimeout, match=r"engine:0 \(.*\) did not answer within 0.1 s") as caught:
                await client.generate([1])
            assert caught.value.server == engines.urls[0]
            engines.stubs[0].close()
            with pytest.raises(
                ServerTimeout, match="within 0.2 s: engine:0 failed; before, engine:0: Connection refused"
            ):
                await client.generate([1], timeout=0.2)
            engines.tell(False)
            with pytest.raises(ServerTimeout, match="within 0.1 s: engine:0 not ready") as caught:
                await client.generate([1])
            assert isinstance(caught.value, TimeoutError)
            assert caught.value.server == "engine"

    play(1, story, latency=WAIT_TIMEOUT)


def test_a_call_that_is_cancelled_closes_its_request() -> None:
    async def story(engines: Engines) -> None:
        (stub,) = engines.stubs
        async with engines.client() as client:
            asked = asyncio.create_task(client.generate([1]))
            await until(lambda: stub.running == 1)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            await until(lambda: stub.running == 0)
        assert stub.seen == ["/inference/v1/generate"]

    play(1, story, latency=WAIT_TIMEOUT)


def test_the_end_of_the_client_ends_its_requests() -> None:
    async def story(engines: Engines) -> None:
        async with engines.client() as client:
            asked = asyncio.create_task(client.generate([1]))
            await until(lambda: engines.stubs[0].running == 1)
        with pytest.raises(UsageError, match="the client of engine is closed"):
            await asked
        with pytest.raises(UsageError, match="closed"):
            await client.generate([1])
        await until(lambda: engines.stubs[0].running == 0)

    play(1, story, latency=WAIT_TIMEOUT)


def test_proxies_of_the_environment_are_not_for_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")

    async def story(engines: Engines) -> None:
        async with engines.client() as client:
            assert (await client.generate([1])).token_ids

    play(1, story)


def test_changes_of_the_engines_can_be_followed() -> None:
    async def story(engines: Engines) -> None:
        seen = []
        async with engines.client() as client:
            async with asyncio.timeout(WAIT_TIMEOUT):
                async for each in client.changes():
                    seen.append([engine.ready for engine in each])
                    if len(seen) == 3:
                        break
                    engines.tell(len(seen) == 2, True)
            assert client.engines == engines.source.engines()
        assert seen == [[True, True], [False, True], [True, True]]

    play(2, story)


def test_a_stream_is_refused() -> None:
    async def story(engines: Engines) -> None:
        async with engines.client() as client:
            with pytest.raises(UsageError, match="does not stream"):
                await client.complete("hello", stream=True)

    play(1, story)


@pytest.mark.parametrize("seed", range(3))
def test_no_request_is_lost_and_none_is_answered_twice_while_engines_die_and_start(seed: int) -> None:
    chance = random.Random(seed)

    async def story(engines: Engines) -> None:
        incarnations, alive = [0] * 3, [True] * 3

        def tell() -> None:
            told = zip(range(3), incarnations, engines.urls, alive, strict=True)
            engines.source.set(Engine(*each) for each in told)

        async with engines.client(attempts=20) as client:
            asked = [asyncio.create_task(client.generate([each + 1])) for each in range(60)]
            for _ in range(12):
                await asyncio.sleep(chance.random() * 0.02)
                rank = chance.randrange(3)
                if alive[rank]:
                    engines.stubs[rank].close()
                else:
                    port = int(engines.urls[rank].rpartition(":")[2])
                    engines.stubs[rank] = Stub(latency=0.02)
                    engines.stubs[rank].start(port=port)
                    incarnations[rank] += 1
                alive[rank] = not alive[rank]
                if chance.random() < 0.7:  # sometimes the client finds out by itself
                    tell()
            for rank in range(3):
                if not alive[rank]:
                    engines.stubs[rank] = Stub(latency=0.02)
                    engines.stubs[rank].start(port=int(engines.urls[rank].rpartition(":")[2]))
                    incarnations[rank], alive[rank] = incarnations[rank] + 1, True
            tell()
            answers = await asyncio.gather(*asked)
        assert [each.token_ids for each in answers] == [tokens([each + 1], 16) for each in range(60)]

    play(3, story, latency=0.02)


def test_outside_a_job_the_servers_have_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNIRUN_ADDRS_FILE", raising=False)
    with pytest.raises(UsageError, match="UNIRUN_ADDRS_FILE is not set"):
        EngineClient("engine")


def test_in_a_job_the_servers_are_those_of_the_role(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "addresses.json"
    monkeypatch.setenv("UNIRUN_ADDRS_FILE", str(path))
    assert EngineClient("engine").engines == ()
    entry = {"rank": 0, "incarnation": 0, "addr": "h:1", "ready": True}
    path.write_text(json.dumps({"engine": [entry], "other": [{**entry, "addr": "h:2"}]}))
    assert [each.url for each in EngineClient("other").engines] == ["http://h:2"]


def test_without_httpx_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx2", None)
    with pytest.raises(UsageError, match=r"pip install 'torch-unirun\[engines\]'"):
        EngineClient("engine", engines=EngineList())


@pytest.mark.parametrize("wrong", [{"timeout": 0}, {"attempts": 0}])
def test_a_client_has_time_and_attempts(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="timeout must be more than 0, and attempts 1 or more"):
        EngineClient("engine", engines=EngineList(), **wrong)


@pytest.mark.parametrize(("key", "expected"), [("secret", ["Bearer secret"]), ("", [])])
def test_requests_have_the_key_of_the_servers(key: str, expected: list[str]) -> None:
    async def story() -> None:
        heads: list[bytes] = []
        server, url = await told(response(b"{}"), heads=heads)
        async with server, EngineClient("engine", engines=EngineList.at(url), api_key=key) as client:
            await client.post("/pooling", {}, timeout=WAIT_TIMEOUT)
        lines = [line.partition(": ") for line in heads[0].decode().split("\r\n")]
        assert [value for name, _, value in lines if name.lower() == "authorization"] == expected

    asyncio.run(story())


def test_a_pool_of_connections_has_a_bounded_number_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "AT_ONCE", 2)

    async def story(engines: Engines) -> None:
        async with engines.client() as client:
            await asyncio.gather(*(client.generate([each]) for each in range(5)))
            (line,) = client._lines.values()
            assert len(line._pools) == 3

    play(1, story, latency=0.05)


def test_a_failure_has_the_words_of_the_system_or_of_its_error() -> None:
    try:
        try:
            raise OSError(errno.ECONNRESET, "")
        except OSError as error:
            raise ValueError("lost") from error
    except ValueError as error:
        assert client_module._words(error) == "Connection reset by peer"
    assert client_module._words(ValueError("lost")) == "lost"
    assert client_module._words(ValueError()) == "ValueError"


def test_the_file_of_a_job_says_what_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "addresses.json"

    def write(*ready: bool) -> None:
        entries = [{"rank": 0, "incarnation": 0, "addr": "h:1", "ready": its} for its in ready]
        path.with_suffix(".new").write_text(json.dumps({"engine": entries}))
        path.with_suffix(".new").replace(path)

    async def story() -> None:
        file = AddressFile(str(path), "engine")
        assert file.engines() == ()
        assert await file.changed((), 0.01) == ()
        waiting = asyncio.create_task(file.changed((), WAIT_TIMEOUT))
        write(False)
        (engine,) = await waiting
        assert not engine.ready
        assert await file.changed((engine,), 0.01) == (engine,)
        waiting = asyncio.create_task(file.changed((engine,), WAIT_TIMEOUT))
        write(True)
        assert [each.ready for each in await waiting] == [True]

    asyncio.run(asyncio.wait_for(story(), WAIT_TIMEOUT))


def test_each_request_to_a_role_that_the_file_of_a_job_does_not_have_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "addresses.json"
    path.write_text('{"judge": []}')

    async def story() -> None:
        async with EngineClient("engine", engines=AddressFile(str(path), "engine")) as client:
            found = await asyncio.gather(*(client.generate([1]) for _ in range(2)), return_exceptions=True)
        assert ["has no address" in str(each) for each in found] == [True] * 2

    asyncio.run(asyncio.wait_for(story(), WAIT_TIMEOUT))


@pytest.mark.parametrize("url", ["localhost:8000", "http://localhost:port"])
def test_each_request_to_what_is_no_server_is_an_error(url: str) -> None:
    async def story() -> None:
        async with EngineClient("engine", engines=EngineList.at(url), timeout=WAIT_TIMEOUT) as client:
            found = await asyncio.gather(*(client.generate([1]) for _ in range(2)), return_exceptions=True)
        assert ["is no server" in str(each) for each in found] == [True] * 2

    asyncio.run(asyncio.wait_for(story(), WAIT_TIMEOUT))


def test_without_a_free_descriptor_the_engines_are_those_that_were_known(tmp_path: Path) -> None:
    path = tmp_path / "addresses.json"
    path.write_text('{"engine": []}')
    file = AddressFile(str(path), "engine")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        assert file.engines() == ()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    path.write_text('{"engine": [{"rank": 0, "incarnation": 0, "addr": "h:1", "ready": true}]}')
    (engine,) = asyncio.run(file.changed((), WAIT_TIMEOUT))
    assert engine.url == "http://h:1"


def test_it_is_a_public_name() -> None:
    assert unirun.EngineClient is EngineClient


@pytest.mark.parametrize("name", rollout.__all__)
def test_each_name_of_the_package_is_that_of_its_module(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = getattr(rollout, name)
    monkeypatch.delitem(vars(rollout), name)
    assert getattr(rollout, name) is before
    assert before.__name__ == name


@pytest.mark.starts_processes
def test_it_does_not_import_torch() -> None:
    program = "import sys, unirun; unirun.EngineClient; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT_TIMEOUT, check=True
    )
    assert done.stdout.split() == ["False", "False"]

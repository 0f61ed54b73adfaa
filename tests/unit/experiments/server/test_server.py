"""The built-in server: requests go on over a change of the weights, with the version of each token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.experiments.models.test_stage import CONFIG, place
from tests.waiting import WAIT_TIMEOUT, eventually, eventually_async
from unirun.errors import UsageError, WeightsError
from unirun.experiments import GenerationConfig
from unirun.experiments.models.generation import Continuation
from unirun.experiments.models.stage import Stage
from unirun.experiments.server import routes as routes_module
from unirun.experiments.server.generator import Generator
from unirun.experiments.server.routes import Routes, Sampling, _body, _Refused
from unirun.weights.integrations.sending import Param, file_for
from unirun.weights.publishing import Blocks

LONG = 400


def network(seed: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    settings = {name: value for name, value in CONFIG.items() if name != "model_type"}
    settings |= {"initializer_range": 0.5, "eos_token_id": None, "max_position_embeddings": 2 * LONG}
    found: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **settings))  # type: ignore[no-untyped-call]
    return found.eval()


class Server:
    """A generator with weights of its own, and other ones in a file."""

    def __init__(self) -> None:
        self.old, self.new = network(1), network(2)
        stage = Stage(deepcopy(self.old), place()).eval()
        stage.requires_grad_(False)
        self.generator = Generator(place(), stage, 4)
        self.routes = Routes(self.generator, model="tiny", vocabulary=32, longest=2 * LONG)
        self._blocks = Blocks()
        self.generator.start()

    def file(self, tensors: dict[str, torch.Tensor]) -> tuple[str, str]:
        params = [Param(name, each.dtype, tuple(each.shape)) for name, each in tensors.items()]
        packing, block = file_for(params, self._blocks, "server")
        for name, view in packing.tensors(block).items():
            view.copy_(tensors[name])
        return block.path, block.token

    def update(self, label: str, tensors: dict[str, torch.Tensor], *, clear_cache: bool = True) -> None:
        path, token = self.file(tensors)
        for done in (
            self.generator.check(path, token),
            self.generator.pause("keep", clear_cache=clear_cache),
            self.generator.begin_update(),
            self.generator.load(path, token),
            self.generator.finish_update(label),
            self.generator.resume(),
        ):
            result(done)

    def close(self) -> None:
        self.generator.stop()
        self.generator.join(WAIT_TIMEOUT)
        self._blocks.close()


def result(done: Future[Any]) -> Any:
    return done.result(WAIT_TIMEOUT)


def sequence(count: int = LONG, **how: Any) -> Continuation:
    return Continuation(torch.tensor([1, 2, 3]), GenerationConfig(max_new_tokens=count, **how), seed=7)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@torch.no_grad()
def logprobs_of(model: Any, output: Continuation) -> torch.Tensor:
    """Of all tokens of an output, with these weights."""
    logits = model(output.sequence()[None], use_cache=False).logits[0]
    found = logits.log_softmax(-1)[len(output.prompt) - 1 : -1]
    chosen: torch.Tensor = found.gather(1, torch.tensor(output.tokens)[:, None])[:, 0]
    return chosen


def test_a_sequence_that_was_interrupted_has_the_log_probabilities_of_the_versions_that_made_each_token(
    server: Server,
) -> None:
    outputs = [sequence() for _ in range(6)]
    ends = [server.generator.generate(each) for each in outputs]
    for version, (model, count) in enumerate(((server.new, 5), (server.old, 60), (server.new, 150)), 1):
        eventually(lambda count=count: len(outputs[0].tokens) > count, "tokens are made")  # type: ignore[misc]
        server.update(str(version), model.state_dict())
    assert [result(end) for end in ends] == ["length"] * 6
    models = {"default": server.old, "1": server.new, "2": server.old, "3": server.new}
    for output in outputs[:4]:
        spans = server.generator.spans(output)
        assert [span["version"] for span in spans] == ["default", "1", "2", "3"]
        assert (spans[0]["start"], spans[-1]["end"]) == (0, LONG)
        for span in spans:
            part = slice(span["start"], span["end"])
            expected = logprobs_of(models[span["version"]], output)[part]
            torch.testing.assert_close(torch.tensor(output.logprobs[part]), expected, rtol=1e-3, atol=1e-4)


def test_without_clear_cache_a_sequence_keeps_the_keys_and_values_of_the_old_weights(server: Server) -> None:
    output = sequence(greedy=True)
    end = server.generator.generate(output)
    eventually(lambda: len(output.tokens) > 5, "tokens are made")
    server.update("1", server.new.state_dict(), clear_cache=False)
    assert result(end) == "length"
    start = server.generator.spans(output)[-1]["start"]
    made, fresh = torch.tensor(output.logprobs[start:]), logprobs_of(server.new, output)[start:]
    assert (made - fresh).abs().max() > 1e-3


def test_weights_that_do_not_fit_change_nothing(server: Server) -> None:
    state = server.new.state_dict()
    name = next(iter(state))
    wrong = {**{key: each for key, each in state.items() if key != name}, "other": torch.zeros(1)}
    with pytest.raises(WeightsError) as caught:
        server.update("1", wrong)
    assert {fault.where for fault in caught.value.faults} == {name, "other"}
    output = sequence(10, greedy=True)
    result(server.generator.generate(output))
    torch.testing.assert_close(
        torch.tensor(output.logprobs), logprobs_of(server.old, output), rtol=1e-3, atol=1e-4
    )


def test_weights_are_taken_in_an_update_alone(server: Server) -> None:
    file = server.file(server.new.state_dict())
    for _ in range(2):
        with pytest.raises(UsageError, match="an update has not begun"):
            result(server.generator.load(*file))
        with pytest.raises(UsageError, match="an update has not begun"):
            result(server.generator.finish_update("early"))
        assert server.generator.label in ("default", "1")
        sequence_of_now = sequence(5, greedy=True)
        result(server.generator.generate(sequence_of_now))
        now = server.old if server.generator.label == "default" else server.new
        assert torch.allclose(
            logprobs_of(now, sequence_of_now), torch.tensor(sequence_of_now.logprobs), atol=1e-4
        )
        server.update("1", server.new.state_dict())


def test_a_pause_aborts_waits_for_or_keeps_what_runs(server: Server) -> None:
    aborted, waited, kept = sequence(), sequence(50), sequence(50)
    end = server.generator.generate(aborted)
    eventually(lambda: aborted.tokens, "a token is made")
    result(server.generator.pause("abort", clear_cache=True))
    assert result(end) == "abort"
    result(server.generator.resume())
    end = server.generator.generate(waited)
    result(server.generator.pause("wait", clear_cache=True))
    assert (end.done(), len(waited.tokens)) == (True, 50)
    end = server.generator.generate(kept)
    assert not end.done(), "what comes in a pause waits for its end"
    result(server.generator.resume())
    assert result(end) == "length"


@pytest.mark.parametrize("clear_cache", [False, True])
def test_what_one_pause_has_kept_is_waited_for_by_the_next_one(server: Server, clear_cache: bool) -> None:
    kept = sequence(50)
    end = server.generator.generate(kept)
    eventually(lambda: kept.tokens, "a token is made")
    result(server.generator.pause("keep", clear_cache=clear_cache))
    result(server.generator.pause("wait", clear_cache=True))
    assert (end.done(), len(kept.tokens)) == (True, 50)


def test_who_waits_for_what_runs_is_told_when_the_pause_does_not_come_to_its_end(server: Server) -> None:
    end = server.generator.generate(sequence())
    for act in (server.generator.resume, lambda: server.generator.pause("keep", clear_cache=False)):
        paused = server.generator.pause("wait", clear_cache=True)
        result(act())
        with pytest.raises(UsageError, match="the pause was ended, or became one that keeps .*; pause again"):
            result(paused)
    paused = server.generator.pause("wait", clear_cache=True)
    result(server.generator.pause("abort", clear_cache=True))
    assert (result(paused), result(end)) == (None, "abort")


def test_a_request_for_which_nobody_waits_leaves_its_slot(server: Server) -> None:
    ends = [server.generator.generate(sequence()) for _ in range(8)]
    for end in ends:
        end.cancel()
    eventually(lambda: not server.generator.running, "all have left")
    assert result(server.generator.generate(sequence(3))) == "length"


def asked(server: Server, story: Callable[[Callable[..., Awaitable[Any]]], Awaitable[None]]) -> None:
    """The story, with a function that sends a request to the routes."""

    async def ask(
        path: str, body: Any = None, method: str = "POST", leaves: asyncio.Event | None = None
    ) -> tuple[int, Any]:
        sent: list[Any] = []
        messages = [{"type": "http.request", "body": json.dumps(body or {}).encode()}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await (leaves or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        name, _, query = path.partition("?")
        scope = {"type": "http", "method": method, "path": name, "query_string": query.encode()}
        await server.routes(scope, receive, send)
        status, answer = sent[0]["status"], json.loads(sent[1]["body"])
        assert status == 200 or answer["error"]["code"] == status
        return status, answer

    asyncio.run(story(ask))  # type: ignore[arg-type]


def test_the_routes_answer_as_those_of_vllm(server: Server) -> None:
    async def story(ask: Any) -> None:
        assert await ask("/health", method="GET") == (200, {})
        assert await ask("/weight_info", method="GET") == (200, {"weight_version": "default"})
        body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3, "n": 2, "logprobs": 0}}
        status, found = await ask("/inference/v1/generate", body)
        first = found["choices"][0]
        assert (status, len(found["choices"]), len(first["token_ids"])) == (200, 2, 3)
        assert first["weight_versions"] == [{"version": "default", "start": 0, "end": 3}]
        assert [each["token_id"] for each in first["logprobs"]["content"]] == first["token_ids"]
        status, found = await ask(
            "/v1/completions", {"prompt": [1], "max_tokens": 2, "return_token_ids": True}
        )
        assert (status, len(found["choices"][0]["token_ids"])) == (200, 2)
        status, found = await ask("/v1/completions", {"prompt": [1], "max_tokens": 2, "logprobs": 0})
        assert (status, len(found["choices"][0]["logprobs"]["token_logprobs"])) == (200, 2)
        names = ("/v1/completions", "id"), ("/inference/v1/generate", "request_id"), ("/v1/completions", "id")
        asks = {"id": {"prompt": [1], "max_tokens": 1}, "request_id": body}
        assert len({(await ask(path, asks[name]))[1][name] for path, name in names}) == len(names)
        assert (await ask("/pause?mode=keep&clear_cache=false"))[0] == 200
        assert await ask("/is_paused", method="GET") == (200, {"is_paused": True})
        assert (await ask("/resume"))[0] == 200

    asked(server, story)


def test_outputs_of_a_request_are_those_of_as_many_requests_with_seeds_of_their_own(server: Server) -> None:
    async def story(ask: Any) -> None:
        async def outputs(seed: int, n: int) -> list[list[int]]:
            how = {"max_tokens": 8, "n": n, "seed": seed}
            _, found = await ask("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": how})
            return [each["token_ids"] for each in found["choices"]]

        several = await outputs(5, 3)
        assert several == [(await outputs(seed, 1))[0] for seed in (5, 6, 7)]
        assert len({*map(tuple, several)}) == 3

    asked(server, story)


class Letters:
    """A tokenizer with a token for each letter; those above are special. A chat is its texts, and an ``x``."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, tokens: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(ord("a") + token) for token in tokens if token < 26 or not skip_special_tokens)

    def apply_chat_template(self, messages: Any, *, add_generation_prompt: bool, **how: bool) -> list[int]:
        assert how == {"tokenize": True, "return_dict": False}
        return self.encode("".join(each["content"] for each in messages) + "x" * add_generation_prompt)


@given(
    st.text("abc", max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=3), max_size=3),
    st.integers(0, 6),
)
def test_a_text_ends_before_the_first_stop_string_that_ends_behind_its_least_length(
    text: str, stops: list[str], least: int
) -> None:
    generator: Any = None
    routes = Routes(generator, model="tiny", vocabulary=128, longest=LONG, tokenizer=Letters())
    how = GenerationConfig(max_new_tokens=LONG, min_new_tokens=least)
    output = Continuation(torch.tensor([1]), how, seed=0, stop_strings=stops)
    ends = [at for at in range(1, len(text) + 1) for stop in stops if at > least and text[:at].endswith(stop)]
    for token in Letters().encode(text):
        if not output.ended:
            output.add(token, 0.0, 0, Letters().decode)
    first = min(ends, default=len(text))
    assert (len(output.tokens), output.ended) == (first, bool(ends))
    longest = max((len(stop) for stop in stops if ends and text[:first].endswith(stop)), default=0)
    assert routes._text(output, Sampling(stop=tuple(stops))) == text[: first - longest]


ROOM, WORDS = 12, 8
"""The longest sequence, and the size of the vocabulary, of routes over no network."""


@given(
    st.lists(st.integers(-1, WORDS), max_size=ROOM + 1),
    st.builds(
        Sampling,
        n=st.integers(1, 3),
        max_tokens=st.none() | st.integers(1, ROOM + 1),
        temperature=st.sampled_from([0.0, 0.5, 1.0]),
        top_k=st.integers(-1, 3),
        seed=st.none() | st.sampled_from([0, 7, 2**63 - 1]),
        stop_token_ids=st.lists(st.integers(-1, WORDS), max_size=2).map(tuple),
        ignore_eos=st.booleans(),
    ),
)
def test_a_request_is_taken_if_all_of_it_has_room_and_refused_else(
    prompt: list[int], sampling: Sampling
) -> None:
    generator: Any = None
    routes = Routes(generator, model="tiny", vocabulary=WORDS, longest=ROOM, stops=(2,))
    whole = len(prompt) + (sampling.max_tokens or 1)
    if not prompt or whole > ROOM or not all(token in range(WORDS) for token in prompt):
        with pytest.raises(_Refused) as caught:
            routes._sequences(prompt, sampling)
        assert caught.value.status == 400
        return
    found = routes._sequences(prompt, sampling)
    assert len(found) == sampling.n
    for each in found:
        assert each.prompt.tolist() == prompt
        assert each.how.max_new_tokens == (sampling.max_tokens or ROOM - len(prompt))
        assert each.how.greedy is (sampling.temperature == 0.0)
        assert each.how.temperature == (sampling.temperature or 1.0)
        assert each.how.top_k == max(sampling.top_k, 0)
        ends = {*sampling.stop_token_ids, *([] if sampling.ignore_eos else [2])}
        assert each.stop == ends & {*range(WORDS)}
    seeds = [each.seed for each in found]
    first = sampling.seed if sampling.seed is not None else seeds[0]
    assert seeds == [(first + number) % 2**63 for number in range(sampling.n)]


@given(st.lists(st.binary(max_size=5), min_size=1, max_size=5))
def test_a_request_is_read_up_to_its_limit_in_however_many_parts_it_comes(parts: list[bytes]) -> None:
    messages = [{"body": part, "more_body": place + 1 < len(parts)} for place, part in enumerate(parts)]

    async def receive() -> Any:
        return messages.pop(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes_module, "MAX_BODY_BYTES", 8)
        whole = b"".join(parts)
        if len(whole) <= 8:
            assert asyncio.run(_body(receive)) == whole
        else:
            with pytest.raises(_Refused) as caught:
                asyncio.run(_body(receive))
            assert caught.value.status == 413


def test_the_routes_of_text_make_what_that_of_tokens_does(server: Server) -> None:
    letters, how = Letters(), {"temperature": 0.0, "max_tokens": 30}
    server.routes = Routes(server.generator, model="tiny", vocabulary=32, longest=64, tokenizer=letters)

    async def story(ask: Any) -> None:
        async def made(text: str) -> list[int]:
            body = {"token_ids": letters.encode(text), "sampling_params": how}
            _, found = await ask("/inference/v1/generate", body)
            return list(found["choices"][0]["token_ids"])

        async def shown(path: str, body: dict[str, Any], prompts: list[str]) -> list[str]:
            """The texts of an answer, which are those of its tokens; the latter are those of the prompts."""
            status, found = await ask(path, {**body, "return_token_ids": True, "stream": False})
            assert status == 200
            outputs = [each["token_ids"] for each in found["choices"]]
            assert outputs == [expected[prompt] for prompt in prompts]
            assert [each["index"] for each in found["choices"]] == [*range(len(prompts))]
            given, count = sum(map(len, prompts)), sum(map(len, outputs))
            usage = {"prompt_tokens": given, "completion_tokens": count, "total_tokens": given + count}
            assert found["usage"] == usage
            texts = [
                each["message"]["content"] if "message" in each else each["text"] for each in found["choices"]
            ]
            assert texts == [letters.decode(each, skip_special_tokens=True) for each in outputs]
            refused, error = await ask(path, {**body, "stream": True})
            assert (refused, error["error"]["message"]) == (400, "stream: the server does not stream")
            status, found = await ask(path, {**body, "logprobs": False})
            assert (status, [each.get("logprobs") for each in found["choices"]]) == (200, [None] * len(texts))
            return texts

        expected = {prompt: await made(prompt) for prompt in ("ab", "cde", "abcx")}
        tokens = [letters.encode("ab"), letters.encode("cde")]
        for prompt in (["ab", "cde"], tokens):
            both = await shown("/v1/completions", {"prompt": prompt, **how}, ["ab", "cde"])
        for one in ("ab", tokens[0]):
            assert await shown("/v1/completions", {"prompt": one, **how}, ["ab"]) == both[:1]
        messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "bc"}]
        for name in ("max_tokens", "max_completion_tokens"):
            body = {"messages": messages, "temperature": 0.0, name: 30}
            await shown("/v1/chat/completions", body, ["abcx"])
        _, found = await ask(
            "/v1/chat/completions", {"messages": messages, "temperature": 0.0, "logprobs": True}
        )
        assert found["usage"]["total_tokens"] == 64
        content = found["choices"][0]["logprobs"]["content"]
        assert "".join(each["token"] for each in content).startswith(letters.decode(expected["abcx"]))
        assert all(each["logprob"] <= 0.0 for each in content)
        assert {len(each) for each in both} != {30}, "some of the tokens are special"

    asked(server, story)


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/v1/completions"])
def test_sequences_of_a_client_that_has_gone_are_given_up(server: Server, path: str) -> None:
    async def story(ask: Any) -> None:
        leaves, how = asyncio.Event(), {"max_tokens": LONG, "n": 2}
        body = {"prompt": [1], **how} if "completions" in path else {"token_ids": [1], "sampling_params": how}
        answer = asyncio.create_task(ask(path, body, leaves=leaves))
        await eventually_async(lambda: server.generator.running == 2, "they are continued")
        # What it holds until the client goes, it holds for ever without that.
        result(server.generator.pause("keep", clear_cache=False))
        leaves.set()
        assert (await answer)[0] == 499
        await eventually_async(lambda: not server.generator.running, "no request is left")

    asked(server, story)


def test_all_that_wait_hear_that_generation_has_failed(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    result(server.generator.pause("keep", clear_cache=False))
    ends = [server.generator.generate(sequence()) for _ in range(6)]
    eventually(lambda: server.generator.running == 6, "all have come")

    def fails() -> None:
        raise MemoryError("no memory on the device")

    monkeypatch.setattr(server.generator._slots, "step", fails)
    server.generator.resume()
    assert [result(end) for end in ends] == ["abort"] * 6
    assert isinstance(server.generator.failed.exception(WAIT_TIMEOUT), MemoryError)

    async def story(ask: Any) -> None:
        assert (await ask("/health", method="GET"))[0] == 503

    asked(server, story)


@pytest.mark.parametrize("fails", [False, True])
def test_who_asks_at_the_end_or_after_it_does_not_wait_for_it(
    server: Server, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client whose request was aborted may send it again before the server is gone."""

    def step() -> None:
        raise MemoryError("no memory on the device")

    end = server.generator.generate(sequence())
    paused = server.generator.pause("wait", clear_cache=True)
    if fails:
        monkeypatch.setattr(server.generator._slots, "step", step)
    else:
        server.generator.stop()
    assert result(end) == "abort"
    # A generator that is stopped has come to the end of the pause.
    assert isinstance(paused.exception(WAIT_TIMEOUT), UsageError) is fails
    for _ in range(2):
        assert result(server.generator.generate(sequence())) == "abort"
        assert result(server.generator.pause("wait", clear_cache=True)) is None
        server.generator.join(WAIT_TIMEOUT)
    assert not server.generator.running


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/finish_weight_update", {}, "an update has not begun"),
        ("/inference/v1/generate", {"token_ids": [], "sampling_params": {}}, "the prompt is empty"),
        ("/inference/v1/generate", {"token_ids": [32], "sampling_params": {}}, "not from 0 to 31"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"beam": 2}}, "beam"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 800}}, "800"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"stop": "x"}}, "no tokenizer"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"stop": ""}}, "length >= 1"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"stop": [""]}}, "length >= 1"),
        ("/v1/completions", {"prompt": "text"}, "no tokenizer"),
        ("/v1/chat/completions", {"messages": [1]}, "no tokenizer"),
        ("/pause?mode=later", {}, "mode=later"),
        ("/update_weights", {}, "update_info"),
    ],
)
def test_wrong_requests_are_refused_with_the_reason(server: Server, path: str, body: Any, words: str) -> None:
    async def story(ask: Any) -> None:
        status, found = await ask(path, body)
        # What the request cannot help is no fault of it.
        assert status == (500 if path == "/finish_weight_update" else 400)
        assert words in found["error"]["message"]

    asked(server, story)

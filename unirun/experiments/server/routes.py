"""`Routes`: the ASGI application of the built-in server. It answers as vLLM does, on the routes that unirun uses.

| route | use |
| --- | --- |
| ``GET /health``, ``/v1/models``, ``/weight_info``, ``/is_paused`` | the state of the server |
| ``POST /inference/v1/generate`` | tokens for tokens, with log-probabilities and the versions of the weights |
| ``POST /v1/completions``, ``/v1/chat/completions`` | the same for text, with the model's tokenizer |
| ``POST /pause?mode=&clear_cache=``, ``/resume`` | see `Generator.pause` |
| ``POST /init_weight_transfer_engine``, ``/start_weight_update``, … | new weights, in the phases of vLLM |
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import parse_qs

import msgspec
import torch

from unirun.errors import UnirunError
from unirun.experiments.models.api import GenerationConfig
from unirun.experiments.models.generation import Continuation, stop_of
from unirun.experiments.server.generator import Generator
from unirun.values import Value
from unirun.weights.integrations.vllm_guard import Message, Receive, Scope, Send

T = TypeVar("T")

MAX_BODY_BYTES = 64 << 20
"""Bytes of a request that are read."""

Count = Annotated[int, msgspec.Meta(ge=1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0.0, le=1.0)]
StopString = Annotated[str, msgspec.Meta(min_length=1)]


class Sampling(Value):
    """The settings of one request, those of vLLM's ``SamplingParams`` that the server has. Others are refused."""

    n: Count = 1
    max_tokens: Count | None = 16
    min_tokens: Natural = 0
    temperature: Annotated[float, msgspec.Meta(ge=0.0)] = 1.0
    top_p: Share = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1)] = 0
    seed: int | None = None
    stop: StopString | tuple[StopString, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: Natural | bool | None = None

    @property
    def wants_logprobs(self) -> bool:
        """True if an answer has the log-probability of each token."""
        return self.logprobs is not None and self.logprobs is not False


class _Generate(Value, forbid_unknown_fields=False):
    token_ids: list[int]
    sampling_params: Sampling
    model: str | None = None
    return_token_ids: bool = False
    stream: Literal[False] = False


class _Update(Value):
    """The place of new weights."""

    path: str
    token: str


class _InitInfo(Value):
    init_info: _Update


class _UpdateInfo(Value):
    update_info: _Update


class _Finish(Value):
    weight_version: str | None = None


class _Refused(Exception):
    """A request is answered with `status`, which is no success."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class Routes:
    """The application over `generator`, whose network has the name `model`, the size `vocabulary`, and takes sequences
    of at most `longest` tokens, which end with any of the tokens `stops`."""

    def __init__(
        self,
        generator: Generator,
        *,
        model: str,
        vocabulary: int,
        longest: int,
        stops: Sequence[int] = (),
        tokenizer: Any = None,
    ) -> None:
        self._generator, self._model, self._vocabulary, self._longest = generator, model, vocabulary, longest
        self._stops, self._tokenizer = tuple(stops), tokenizer
        self._requests = 0
        # Seeds of requests that have none.
        self._seeds = random.SystemRandom()
        self._routes: Mapping[tuple[str, str], Callable[[bytes, Mapping[str, str]], Any]] = {
            ("GET", "/health"): self._health,
            ("GET", "/v1/models"): self._models,
            ("GET", "/weight_info"): self._weight_info,
            ("GET", "/is_paused"): self._is_paused,
            ("POST", "/inference/v1/generate"): self._generate,
            ("POST", "/v1/completions"): self._complete,
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/pause"): self._pause,
            ("POST", "/resume"): self._resume,
            ("POST", "/init_weight_transfer_engine"): self._init,
            ("POST", "/start_weight_update"): self._start,
            ("POST", "/update_weights"): self._update,
            ("POST", "/finish_weight_update"): self._finish,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, answer = await self._answered(scope, receive)
        headers = [(b"content-type", b"application/json")]
        raw = msgspec.json.encode(answer)
        headers.append((b"content-length", str(len(raw)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": raw})

    async def _answered(self, scope: Scope, receive: Receive) -> tuple[int, Any]:
        try:
            route = self._routes.get((scope["method"], scope["path"]))
            if route is None:
                raise _Refused(404, "Not Found")
            query = {name: each[-1] for name, each in parse_qs(scope["query_string"].decode()).items()}
            return 200, await _unless_gone(route(await _body(receive), query), receive)
        except _Refused as refused:
            return refused.status, _error(str(refused), refused.status)
        except msgspec.MsgspecError as error:
            return 400, _error(str(error), 400)
        except UnirunError as error:
            return 500, _error(str(error), 500)

    async def _health(self, body: bytes, query: Mapping[str, str]) -> Any:
        if self._generator.failed.done():
            raise _Refused(503, f"generation has failed: {self._generator.failed.exception()}")
        return {}

    async def _models(self, body: bytes, query: Mapping[str, str]) -> Any:
        card = {"id": self._model, "object": "model", "owned_by": "unirun", "max_model_len": self._longest}
        return {"object": "list", "data": [card]}

    async def _weight_info(self, body: bytes, query: Mapping[str, str]) -> Any:
        return {"weight_version": self._generator.label}

    async def _is_paused(self, body: bytes, query: Mapping[str, str]) -> Any:
        return {"is_paused": self._generator.paused}

    async def _pause(self, body: bytes, query: Mapping[str, str]) -> Any:
        mode, clear = query.get("mode", "abort"), query.get("clear_cache", "true")
        if mode not in ("abort", "wait", "keep") or clear not in ("true", "false"):
            raise _Refused(400, f"mode={mode}, clear_cache={clear}: write abort, wait or keep, true or false")
        await asyncio.wrap_future(self._generator.pause(mode, clear_cache=clear == "true"))  # type: ignore[arg-type]
        return {"status": "paused"}

    async def _resume(self, body: bytes, query: Mapping[str, str]) -> Any:
        await asyncio.wrap_future(self._generator.resume())
        return {"status": "resumed"}

    async def _init(self, body: bytes, query: Mapping[str, str]) -> Any:
        info = _decoded(body, _InitInfo).init_info
        await asyncio.wrap_future(self._generator.check(info.path, info.token))
        return {"message": "Weight transfer initialized"}

    async def _start(self, body: bytes, query: Mapping[str, str]) -> Any:
        await asyncio.wrap_future(self._generator.begin_update())
        return {"message": "Weight update started"}

    async def _update(self, body: bytes, query: Mapping[str, str]) -> Any:
        info = _decoded(body, _UpdateInfo).update_info
        await asyncio.wrap_future(self._generator.load(info.path, info.token))
        return {"message": "Weights updated"}

    async def _finish(self, body: bytes, query: Mapping[str, str]) -> Any:
        label = _decoded(body or b"{}", _Finish).weight_version
        await asyncio.wrap_future(self._generator.finish_update(label))
        return {"message": "Weight update finished"}

    async def _generate(self, body: bytes, query: Mapping[str, str]) -> Any:
        request = _decoded(body, _Generate)
        outputs = await self._continued(request.token_ids, request.sampling_params)
        choices = []
        for index, (output, reason) in enumerate(outputs):
            choice: dict[str, Any] = {"index": index, "finish_reason": reason, "stop_reason": None}
            choice |= {"token_ids": output.tokens, "weight_versions": self._generator.spans(output)}
            if request.sampling_params.wants_logprobs:
                pairs = zip(output.tokens, output.logprobs, strict=True)
                content = [{"token_id": token, "logprob": logprob} for token, logprob in pairs]
                choice["logprobs"] = {"content": content}
            choices.append(choice)
        found = self._head("", [request.token_ids], choices, [output for output, _ in outputs])
        return {**found, "output_mode": "tokens"}

    async def _complete(self, body: bytes, query: Mapping[str, str]) -> Any:
        given, sampling, more = _split(body, "prompt")
        prompts = self._prompts(given)
        found = await asyncio.gather(*(self._continued(prompt, sampling) for prompt in prompts))
        choices: list[dict[str, Any]] = []
        outputs: list[Continuation] = []
        for output, reason in (each for some in found for each in some):
            text = self._text(output, sampling)
            choice: dict[str, Any] = {"index": len(choices), "text": text, "finish_reason": reason}
            choice["weight_versions"] = self._generator.spans(output)
            if more.get("return_token_ids"):
                choice["token_ids"] = output.tokens
            if sampling.wants_logprobs:
                choice["logprobs"] = {"token_logprobs": output.logprobs}
            choices.append(choice)
            outputs.append(output)
        return self._head("text_completion", prompts, choices, outputs)

    async def _chat(self, body: bytes, query: Mapping[str, str]) -> Any:
        messages, sampling, more = _split(body, "messages")
        if self._tokenizer is None:
            raise _Refused(400, f"{self._model} has no tokenizer: send tokens to /inference/v1/generate")
        try:
            prompt = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:
            # Whatever the template, or a missing one, raises.
            raise _Refused(400, f"the chat template does not take these messages: {error}") from error
        outputs = await self._continued(prompt, sampling)
        choices = []
        for index, (output, reason) in enumerate(outputs):
            message = {"role": "assistant", "content": self._text(output, sampling)}
            choice: dict[str, Any] = {"index": index, "message": message, "finish_reason": reason}
            choice["weight_versions"] = self._generator.spans(output)
            if more.get("return_token_ids"):
                choice["token_ids"] = output.tokens
            if sampling.wants_logprobs:
                words = (self._tokenizer.decode([token]) for token in output.tokens)
                pairs = zip(words, output.logprobs, strict=True)
                content = [{"token": word, "logprob": logprob, "top_logprobs": []} for word, logprob in pairs]
                choice["logprobs"] = {"content": content}
            choices.append(choice)
        return self._head("chat.completion", [prompt], choices, [output for output, _ in outputs])

    def _prompts(self, given: Any) -> list[list[int]]:
        """The tokens of each prompt of a completion, which has one or several, as text or tokens."""
        several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
        found = []
        for prompt in given if several else [given]:
            if isinstance(prompt, str):
                if self._tokenizer is None:
                    raise _Refused(400, f"{self._model} has no tokenizer: send tokens instead of text")
                prompt = self._tokenizer.encode(prompt)
            found.append(msgspec.convert(prompt, list[int]))
        return found

    def _text(self, output: Continuation, sampling: Sampling) -> str:
        """The text of an output, without the stop string or stop token that has ended it."""
        if self._tokenizer is None:
            return ""
        tokens, least = output.tokens, output.how.min_new_tokens
        text, before = (
            str(self._tokenizer.decode(some, skip_special_tokens=True)) for some in (tokens, tokens[:least])
        )
        return text[: stop_of(text, _strings(sampling), len(before))]

    async def _continued(self, prompt: Sequence[int], sampling: Sampling) -> list[tuple[Continuation, str]]:
        """The outputs for a prompt, each with the reason of its end."""
        sequences = self._sequences(prompt, sampling)
        ends = [asyncio.wrap_future(self._generator.generate(each)) for each in sequences]
        try:
            reasons = await asyncio.gather(*ends)
        finally:
            for each in ends:
                each.cancel()
        return [*zip(sequences, reasons, strict=True)]

    def _sequences(self, prompt: Sequence[int], sampling: Sampling) -> list[Continuation]:
        if not prompt:
            raise _Refused(400, "the prompt is empty")
        if not all(0 <= token < self._vocabulary for token in prompt):
            raise _Refused(400, f"the prompt has a token that is not from 0 to {self._vocabulary - 1}")
        room = self._longest - len(prompt)
        tokens = room if sampling.max_tokens is None else sampling.max_tokens
        if tokens > room or room < 1:
            words = f"{len(prompt)} tokens and {tokens} new ones are more than {self._longest}"
            raise _Refused(400, f"{words}, the maximum length of {self._model}")
        if _strings(sampling) and self._tokenizer is None:
            raise _Refused(400, f"stop: {self._model} has no tokenizer; use stop_token_ids")
        how = GenerationConfig(
            max_new_tokens=tokens,
            min_new_tokens=sampling.min_tokens,
            greedy=sampling.temperature == 0.0,
            temperature=sampling.temperature or 1.0,
            top_p=sampling.top_p,
            top_k=max(sampling.top_k, 0),
        )
        seed = self._seeds.getrandbits(62) if sampling.seed is None else sampling.seed
        stop = [*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._stops)]
        return [
            Continuation(
                torch.tensor(prompt),
                how,
                seed=(seed + number) % 2**63,
                stop=[token for token in stop if 0 <= token < self._vocabulary],
                stop_strings=_strings(sampling),
            )
            for number in range(sampling.n)
        ]

    def _head(
        self,
        kind: str,
        prompts: Sequence[Sequence[int]],
        choices: Sequence[Any],
        outputs: Sequence[Continuation],
    ) -> dict[str, Any]:
        """An answer with these choices."""
        self._requests += 1
        given, made = sum(map(len, prompts)), sum(len(output.tokens) for output in outputs)
        usage = {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}
        name = "request_id" if not kind else "id"
        head = {name: str(self._requests), "model": self._model, "usage": usage, "choices": choices}
        return {**head, "object": kind} if kind else head


def _strings(sampling: Sampling) -> Sequence[str]:
    return (sampling.stop,) if isinstance(sampling.stop, str) else sampling.stop


def _split(body: bytes, key: str) -> tuple[Any, Sampling, dict[str, Any]]:
    """The prompt of a request of OpenAI's form, its settings, and its other fields."""
    fields = _decoded(body, dict[str, Any])
    if not fields.get(key):
        raise _Refused(400, f"{key} is missing or empty")
    if fields.pop("stream", False):
        raise _Refused(400, "stream: the server does not stream")
    prompt = fields.pop(key)
    more = {name: fields.pop(name, None) for name in ("model", "return_token_ids", "user")}
    if key == "messages":
        # An answer has all the room that there is, unless another length is asked for.
        fields["max_tokens"] = fields.pop("max_completion_tokens", fields.get("max_tokens"))
    return prompt, msgspec.convert(fields, Sampling), more


def _decoded(body: bytes, kind: type[T]) -> T:
    return msgspec.json.decode(body, type=kind)


async def _body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if sum(map(len, parts)) > MAX_BODY_BYTES:
            raise _Refused(413, f"a request has at most {MAX_BODY_BYTES} bytes")
        if not message.get("more_body"):
            return b"".join(parts)


async def _unless_gone(answer: Any, receive: Receive) -> Any:
    """The result of `answer`, which is cancelled when the client goes."""

    async def gone() -> Message:
        while (message := await receive())["type"] != "http.disconnect":
            pass
        return message

    tasks = answering, leaving = asyncio.ensure_future(answer), asyncio.ensure_future(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise _Refused(499, "the client has gone")
        return await answering
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(answering, leaving, return_exceptions=True)


def _error(words: str, status: int) -> dict[str, Any]:
    """The form of vLLM's errors."""
    return {"error": {"message": words, "type": "BadRequestError", "param": None, "code": status}}

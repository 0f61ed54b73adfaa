"""A stub of ``vllm serve``: its routes, and every way in which a server can misbehave. It needs nothing but the standard library.

    python tests/testbed/engine.py --port 8000 [--ready-after 1 --crash-after 3 …]

It answers what vLLM 0.32 answers to the same requests, as far as a test looks at it. Tokens follow from the prompt, their
place and the label of the weights (`tokens`), so that a test can say what an answer must be. An output takes ``--latency``
seconds, in `STEPS` steps: weights that change meanwhile change its later tokens, as in a server that was paused to ``keep``
its requests. `Stub` is the same server inside a test.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs, urlsplit

STEPS = 4
"""An output takes as many steps at most; the weights, and a pause, are looked at before each."""

VOCABULARY = 32_000

DEFAULT = "default"
"""vLLM's label of weights that nobody has labelled."""

Answer = tuple[int, dict[str, Any]]


def tokens(prompt: Sequence[int], count: int, version: str = DEFAULT, start: int = 0) -> list[int]:
    """Tokens `start` to `count` of the output for `prompt` with the weights labelled `version`."""
    seed = zlib.crc32(f"{list(prompt)} {version}".encode())
    return [zlib.crc32(f"{seed} {place}".encode()) % VOCABULARY for place in range(start, count)]


def encoded(text: str) -> list[int]:
    """The tokens of a text: its bytes."""
    return list(text.encode())


def decoded(output: Sequence[int]) -> str:
    """The text of tokens: a lower-case letter for each."""
    return "".join(chr(ord("a") + token % 26) for token in output)


def fields(body: Any, needed: Mapping[str, type], optional: Mapping[str, type] = {}) -> str:
    """The fault of the fields of a request; empty when there is none."""
    if not isinstance(body, dict):
        return "not an object"
    known = {**needed, **optional}
    wrong = [f"unknown field {key}" for key in body if key not in known]
    wrong += [f"missing field {key}" for key in needed if key not in body]
    wrong += [
        f"{key} is no {known[key].__name__}"
        for key in body
        if key in known and not isinstance(body[key], known[key])
    ]
    return ", ".join(wrong)


class NotFound(LookupError):
    """There is no such route."""


class Transfer:
    """vLLM's routes for new weights (``VLLM_SERVER_DEV_MODE=1``), in the order that it demands.

    `do` is called in each phase, with its name and what the trainer has sent; it raises when the weights do not fit.
    """

    BODIES: Mapping[str, dict[str, type]] = {
        "/init_weight_transfer_engine": {"init_info": dict},
        "/start_weight_update": {},
        "/update_weights": {"update_info": dict},
        "/finish_weight_update": {},
        "/update_weight_version": {"new_version": str},
        "/pause": {},
        "/resume": {},
    }

    def __init__(self, do: Callable[[str, dict[str, Any]], None] = lambda phase, values: None) -> None:
        self.do, self.paused, self.updating, self.version = do, "", False, DEFAULT
        self.cleared = False
        """The last pause has made it forget keys and values of the old weights."""

    def answer(self, path: str, query: Mapping[str, list[str]], body: Any) -> dict[str, Any]:
        """Raises `NotFound`, `LookupError` for what the server does not understand, `RuntimeError` for what it cannot do
        now."""
        if path not in self.BODIES:
            raise NotFound("Not Found")
        needed = self.BODIES[path]
        optional = {"weight_version": str} if path == "/finish_weight_update" else {}
        # Fields that it does not know are ignored.
        known = (
            {key: body[key] for key in body if key in {**needed, **optional}}
            if isinstance(body, dict)
            else body
        )
        if wrong := fields(known, needed, optional):
            raise LookupError(wrong)
        if path == "/pause":
            (mode,), (clear,) = query.get("mode", ["abort"]), query.get("clear_cache", ["true"])
            if mode not in ("abort", "wait", "keep") or clear not in ("true", "false"):
                raise LookupError(f"query.mode: {mode}, query.clear_cache: {clear}")
            self.paused, self.cleared = mode, clear == "true"
        elif path == "/resume":
            self.paused = ""
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        elif path == "/init_weight_transfer_engine":
            self.do("init", body["init_info"])
        elif path == "/start_weight_update":
            if self.updating:
                raise RuntimeError(
                    "start_weight_update called while a weight update is already active. Call finish_weight_update first."
                )
            self.do("start", {})
            self.updating = True
        elif path == "/update_weights":
            if not self.updating:
                raise RuntimeError("start_weight_update must be called before update_weights.")
            try:
                self.do("update", body["update_info"])
            except BaseException:
                # Another update may start, but layers that were loaded are in no state for it.
                self.updating = False
                raise
        else:
            if not self.updating:
                raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
            self.do("finish", {})
            self.updating = False
            self.version = body.get("weight_version", self.version)
        return {"message": "done"}


class Stub:
    """The server. `ready` and `broken` may be changed while it runs.

    `seen` has the path of each request; `running` is the number of outputs that are being made, `made` that of all tokens.
    """

    def __init__(
        self, *, latency: float = 0.0, ready: bool = True, flaps: int = 0, scale_out: bool = True
    ) -> None:
        self.latency, self.ready, self.flaps, self.scale_out = latency, ready, flaps, scale_out
        self.broken = False
        self.update = 0.0
        self.transfer = Transfer()
        self.seen: list[str] = []
        self.running = self.made = 0
        self._aborts = 0
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._connections: set[Connection] = set()
        self._accepting: set[asyncio.Task[object]] = set()
        self._listener: socket.socket | None = None

    def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen, and return the URL."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=1024)
        self._listener.setblocking(False)
        # The server of asyncio leaves a connection open that was accepted at the moment when it closes.
        asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener)
        return f"http://{f'[{host}]' if ':' in host else host}:{self._listener.getsockname()[1]}"

    def _accept(self, listener: socket.socket) -> None:
        with suppress(BlockingIOError):
            while True:
                accepted, _ = listener.accept()
                loop = asyncio.get_running_loop()
                made = loop.create_task(loop.connect_accepted_socket(lambda: Connection(self), accepted))
                self._accepting.add(made)
                made.add_done_callback(self._accepting.discard)

    @property
    def closed(self) -> bool:
        return self._listener is None

    def abort(self) -> None:
        """End all outputs at their next step, with the reason ``abort``."""
        self._aborts += 1

    def close(self) -> None:
        """Close the port and all connections, whatever runs."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for connection in list(self._connections):
            connection.abort()

    async def answer(self, method: str, target: str, raw: bytes) -> Answer:
        """The status and the JSON of the answer to one request."""
        parts = urlsplit(target)
        self.seen.append(parts.path)
        if self.broken:
            return _error(500, "EngineCore encountered an issue.", "InternalServerError")
        if parts.path == "/health":
            return (200 if self._healthy() else 503), {}
        if not self.ready:
            return _error(503, "The server is not ready.", "ServiceUnavailableError")
        if parts.path.startswith("/inference/") and not self.scale_out:
            words = (
                "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
            )
            return _error(403, words, "Forbidden")
        try:
            body = json.loads(raw) if raw else {}
            return 200, await self._answer(method, parts.path, parse_qs(parts.query), body)
        except LookupError as error:
            return _error(404 if isinstance(error, NotFound) else 400, str(error.args[0]), "BadRequestError")
        except (AssertionError, TypeError, ValueError) as error:
            return _error(400, str(error), "BadRequestError")
        except RuntimeError as error:
            return _error(500, str(error), "InternalServerError")

    def _healthy(self) -> bool:
        """While there are flaps left, every second answer of a ready server is that it is not."""
        if self.ready and self.flaps:
            self.flaps -= 1
            return self.flaps % 2 == 1
        return self.ready

    async def _answer(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> dict[str, Any]:
        if method == "GET":
            return self._told(path)
        if path == "/v1/completions":
            return await self._completed(body)
        if path == "/v1/chat/completions":
            return await self._chatted(body)
        if path == "/inference/v1/generate":
            return await self._generated(body)
        if path == "/abort_requests":
            self.abort()
            return {"status": "aborted", "aborted": self.running}
        if path == "/reset_prefix_cache":
            return {"success": True}
        if path == "/update_weights":
            await asyncio.sleep(self.update)
        done = self.transfer.answer(path, query, body)
        if path == "/pause":
            await self._pause()
        elif path == "/resume":
            self._resumed.set()
        return done

    def _told(self, path: str) -> dict[str, Any]:
        known: dict[str, dict[str, Any]] = {
            "/v1/models": {"object": "list", "data": [{"id": "stub", "object": "model", "owned_by": "vllm"}]},
            "/version": {"version": "0.32.0"},
            "/load": {"server_load": self.running},
            "/is_paused": {"is_paused": not self._resumed.is_set()},
            "/weight_info": {"weight_version": self.transfer.version},
            "/get_world_size": {"world_size": 1},
        }
        if path not in known:
            raise NotFound("Not Found")
        return known[path]

    async def _pause(self) -> None:
        """``abort`` ends requests, ``wait`` waits for them, ``keep`` goes on with them after the pause."""
        if self.transfer.paused == "abort":
            self.abort()
        while self.transfer.paused == "wait" and self.running:
            await asyncio.sleep(0.005)
        self._resumed.clear()

    async def _output(self, prompt: list[int], count: int) -> tuple[list[int], list[dict[str, Any]], str]:
        """The tokens, the versions of the weights that made them, and the reason of the end."""
        await self._resumed.wait()
        self.running += 1
        try:
            aborts, output, spans = self._aborts, list[int](), list[dict[str, Any]]()
            step = max(1, -(-count // STEPS))
            while len(output) < count:
                if self.latency:
                    await asyncio.sleep(self.latency / STEPS)
                if self._aborts > aborts:
                    return output, spans, "abort"
                await self._resumed.wait()
                version, start = self.transfer.version, len(output)
                output += tokens(prompt, min(count, start + step), version, start)
                self.made += len(output) - start
                if spans and spans[-1]["version"] == version:
                    spans[-1]["end"] = len(output)
                else:
                    spans.append({"version": version, "start": start, "end": len(output)})
            return output, spans, "length"
        finally:
            self.running -= 1

    async def _generated(self, body: Any) -> dict[str, Any]:
        optional = {
            "model": str,
            "request_id": str,
            "return_token_ids": bool,
            "priority": int,
            "stream": bool,
        }
        if wrong := fields(body, {"token_ids": list, "sampling_params": dict}, optional):
            raise LookupError(wrong)
        prompt, sampling = body["token_ids"], body["sampling_params"]
        assert prompt, "List should have at least 1 item after validation, not 0"
        assert all(isinstance(token, int) and token >= 0 for token in prompt), (
            "Input should be a valid integer"
        )
        choices = []
        for index in range(sampling.get("n", 1)):
            output, spans, reason = await self._output(prompt, sampling.get("max_tokens", 16))
            choice = {"index": index, "finish_reason": reason, "stop_reason": None, "token_ids": output}
            content = [
                {"token_id": token, "logprob": -1.0, "rank": 1, "top_logprobs": []} for token in output
            ]
            logprobs = {"content": content} if "logprobs" in sampling else None
            choices.append({**choice, "logprobs": logprobs, "weight_versions": spans})
        asked = body.get("return_token_ids")
        return {
            "request_id": body.get("request_id", "0"),
            "output_mode": "tokens",
            "model": "stub",
            "usage": _usage(prompt, choices),
            "prompt_token_ids": prompt if asked else None,
            "choices": choices,
        }

    async def _completed(self, body: Any) -> dict[str, Any]:
        given = body["prompt"] if isinstance(body, dict) and "prompt" in body else None
        if not given or not isinstance(given, str | list):
            raise LookupError("Either prompt or prompt_embeds must be provided and non-empty.")
        prompts = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
        choices: list[dict[str, Any]] = []
        for prompt in prompts:
            ids = encoded(prompt) if isinstance(prompt, str) else prompt
            for _ in range(body.get("n", 1)):
                output, _, reason = await self._output(ids, body.get("max_tokens", 16))
                choice = {"index": len(choices), "text": decoded(output), "logprobs": None}
                asked = body.get("return_token_ids")
                shown = {"token_ids": output if asked else None, "prompt_token_ids": ids if asked else None}
                choices.append({**choice, "finish_reason": reason, "stop_reason": None, **shown})
        usage = _usage([token for prompt in prompts for token in prompt], choices)
        return {
            "id": "cmpl-0",
            "object": "text_completion",
            "model": "stub",
            "choices": choices,
            "usage": usage,
        }

    async def _chatted(self, body: Any) -> dict[str, Any]:
        messages = body["messages"] if isinstance(body, dict) and "messages" in body else None
        if not isinstance(messages, list) or not messages:
            raise LookupError("messages: Field required")
        prompt = encoded("".join(f"{each['role']}: {each['content']}\n" for each in messages))
        choices: list[dict[str, Any]] = []
        asked = body.get("return_token_ids")
        for index in range(body.get("n", 1)):
            output, _, reason = await self._output(prompt, body.get("max_tokens", 16))
            message = {"role": "assistant", "content": decoded(output)}
            shown = {"token_ids": output if asked else None}
            choices.append({"index": index, "message": message, "finish_reason": reason, **shown})
        return {
            "id": "chatcmpl-0",
            "object": "chat.completion",
            "model": "stub",
            "choices": choices,
            "usage": _usage(prompt, choices),
            "prompt_token_ids": prompt if asked else None,
        }


def _usage(prompt: Sequence[object], choices: list[dict[str, Any]]) -> dict[str, int]:
    made = sum(len(each.get("token_ids") or each.get("text") or "") for each in choices)
    return {
        "prompt_tokens": len(prompt),
        "completion_tokens": made,
        "total_tokens": len(prompt) + made,
    }


def _error(status: int, message: str, kind: str) -> Answer:
    return status, {"error": {"message": message, "type": kind, "param": None, "code": status}}


class Connection(asyncio.Protocol):
    """One client's: a request at a time, HTTP/1.1 with ``Content-Length``. A request ends with its connection."""

    def __init__(self, stub: Stub) -> None:
        self._stub, self._buffer = stub, b""
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._stub._connections.add(self)
        if self._stub.closed:
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._stub._connections.discard(self)
        if self._task is not None:
            self._task.cancel()

    def abort(self) -> None:
        assert self._transport is not None
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._task is None or self._task.done():
            self._next()

    def _next(self) -> None:
        """Begin with the next request, when all of it is there."""
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        length = int(headers.get("content-length", 0))
        if len(rest) < length:
            return
        self._buffer = rest[length:]
        method, target, _ = first.split(" ")
        last = headers.get("connection", "").lower() == "close"
        self._task = asyncio.ensure_future(self._respond(method, target, rest[:length], last))

    async def _respond(self, method: str, target: str, raw: bytes, last: bool) -> None:
        status, answer = await self._stub.answer(method, target, raw)
        body = json.dumps(answer).encode()
        transport = self._transport
        assert transport is not None
        if transport.is_closing():
            return
        head = f"HTTP/1.1 {status} \r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        transport.write(head.encode() + body)
        if last:
            transport.close()
        elif self._buffer:
            self._next()


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, of which those for a time are in seconds after the start. Others, which vLLM has, do nothing."""
    parser = argparse.ArgumentParser(description="A stub of vllm serve.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: a free one, which is printed")
    parser.add_argument("--ready-after", type=float, default=0.0, help="/health answers 503 until then")
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument(
        "--flap", type=int, default=0, help="so many answers of /health alternate, then it is ready"
    )
    parser.add_argument("--crash-after", type=float, help="end with --exit-code, or 1")
    parser.add_argument("--exit-code", type=int, help="of a crash and of SIGTERM")
    parser.add_argument("--ignore-term", action="store_true", help="and SIGINT")
    parser.add_argument(
        "--leak-child", action="store_true", help="a process in a session of its own, which stays"
    )
    parser.add_argument("--answer-500-after", type=float, help="to every request, /health too")
    parser.add_argument("--close-port-after", type=float, help="with all connections; the process stays")
    parser.add_argument("--latency", type=float, default=0.0, help="of each output")
    parser.add_argument("--version", default=DEFAULT, help="the label of the weights at the start")
    parser.add_argument("--log-line", action="append", default=[], help="printed at the start")
    parser.add_argument("--update", type=float, default=0.0, help="seconds that new weights take")
    parser.add_argument("--tear", help="when this file is there, it is removed and new weights fail")
    parser.add_argument("--enable-scale-out", action="store_true", help="have /inference/v1/generate")
    return parser.parse_known_args(argv)[0]


def leak() -> int:
    """Leave a process in a session of its own that ends only when it is killed. Returns its pid."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            signal.pause()
    return pid


def say(line: str) -> None:
    """A line of the log."""
    print(line, flush=True)


async def serve(options: argparse.Namespace) -> None:
    """Run until a signal or an option ends the process."""
    loop = asyncio.get_running_loop()
    stub = Stub(latency=options.latency, ready=False, flaps=options.flap, scale_out=options.enable_scale_out)
    stub.transfer.version = options.version
    stub.update = options.update

    def tear(phase: str, values: dict[str, Any]) -> None:
        if phase == "update" and options.tear and os.path.exists(options.tear):
            os.unlink(options.tear)
            raise RuntimeError("a tensor does not fit")

    stub.transfer.do = tear
    url = stub.start(options.host, options.port)
    say(f"Started server process [{os.getpid()}] on {url}")

    def ready() -> None:
        stub.ready = True
        say("Application startup complete.")

    def broken() -> None:
        stub.broken = True

    def crash() -> None:
        say("EngineDeadError: EngineCore encountered an issue.")
        os._exit(1 if options.exit_code is None else options.exit_code)

    def end() -> None:
        if options.ignore_term:
            return
        if not stub.running:
            os._exit(options.exit_code or 0)
        stub.abort()  # and answer, as vLLM does
        loop.call_later(options.latency / STEPS + 0.02, os._exit, options.exit_code or 0)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    if not options.never_ready:
        loop.call_later(options.ready_after, ready) if options.ready_after else ready()
    for seconds, act in (
        (options.crash_after, crash),
        (options.answer_500_after, broken),
        (options.close_port_after, stub.close),
    ):
        if seconds is not None:
            loop.call_later(seconds, act)
    await asyncio.Event().wait()


if __name__ == "__main__":
    chosen = arguments()
    for text in chosen.log_line:
        say(text)
    if chosen.leak_child:
        say(f"child {leak()}")
    sys.exit(asyncio.run(serve(chosen)))

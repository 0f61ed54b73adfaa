"""The command of the built-in server: the ends that it comes to, and what becomes of a request then."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.unit.experiments.models.test_stage import CONFIG
from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.experiments.server import __main__ as command
from unirun.experiments.server.generator import Generator

LONG = 2000
"""Tokens of a request that does not come to its end by itself before the server does."""


@pytest.fixture(autouse=True)
def settings_of_the_process() -> Iterator[None]:
    interval, descriptors = sys.getswitchinterval(), resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    sys.setswitchinterval(interval)
    resource.setrlimit(resource.RLIMIT_NOFILE, descriptors)


def listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), WAIT_TIMEOUT):
        return True
    return False


def asked(port: int) -> Any:
    """The answer to a request for tokens."""
    eventually(lambda: listens(port), "the server listens")
    connection = HTTPConnection("127.0.0.1", port, timeout=WAIT_TIMEOUT)
    body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": LONG, "ignore_eos": True}}
    try:
        connection.request("POST", "/inference/v1/generate", json.dumps(body))
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Generator], object]], Any]:
    """Serves in this thread, and has `end` called during a request. Returns the exit code and the answer."""

    def serve(end: Callable[[Generator], object]) -> tuple[int, Any]:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port: int = free.getsockname()[1]
        options = command.options_of([str(tmp_path), "--load-format", "dummy", "--port", str(port)])
        made = command.routes_of(options)
        monkeypatch.setattr(command, "routes_of", lambda _: made)

        def ends() -> None:
            eventually(lambda: made[1].running, "tokens are drawn")
            end(made[1])

        with ThreadPoolExecutor(2) as threads:
            answer, ending = threads.submit(asked, port), threads.submit(ends)
            code = command.serve(options)
            ending.result(WAIT_TIMEOUT)
            return code, answer.result(WAIT_TIMEOUT)

    return serve


def test_a_signal_ends_requests_with_what_they_have(served: Callable[..., Any]) -> None:
    code, answer = served(lambda _: os.kill(os.getpid(), signal.SIGTERM))
    (choice,) = answer["choices"]
    assert (code, choice["finish_reason"]) == (0, "abort")
    assert len(choice["token_ids"]) < LONG


def test_the_server_ends_when_generation_has_failed(
    served: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(generator: Generator) -> None:
        def step() -> None:
            raise MemoryError("no memory on the device")

        generator._slots.step = step  # type: ignore[method-assign, assignment]

    code, answer = served(fails)
    assert (code, answer["choices"][0]["finish_reason"]) == (1, "abort")
    assert "generation has failed: MemoryError('no memory on the device')" in capfd.readouterr().err

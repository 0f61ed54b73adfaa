"""The command of the built-in server: what it loads, the ends that it comes to, and what becomes of a request then."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.experiments.models.test_stage import CONFIG
from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.experiments.server import __main__ as command
from unirun.experiments.server.generator import Generator
from unirun.experiments.server.routes import Routes

LONG = 2000
"""Tokens of a request that does not come to its end by itself before the server does."""


@pytest.fixture(autouse=True)
def settings_of_the_process() -> Iterator[None]:
    interval, descriptors = sys.getswitchinterval(), resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    sys.setswitchinterval(interval)
    resource.setrlimit(resource.RLIMIT_NOFILE, descriptors)


def loaded(model: Path, *options: str) -> tuple[Routes, dict[str, torch.Tensor]]:
    """The application of the command with these options, and the tensors that it generates with."""
    routes, generator = command.routes_of(command.options_of([str(model), *options]))
    return routes, generator._named


def test_the_network_is_that_of_the_folder_or_a_random_one_of_its_kind(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {name: value for name, value in CONFIG.items() if name != "model_type"}
    config = AutoConfig.for_model("llama", **settings, eos_token_id=5, max_position_embeddings=300)
    network: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    network.bfloat16().save_pretrained(tmp_path)
    expected = network.state_dict()

    routes, tensors = loaded(tmp_path)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name
        assert tensors[name].dtype == torch.bfloat16
    assert (routes._stops, routes._longest, routes._vocabulary) == ((5,), 300, 32)
    routes, tensors = loaded(tmp_path, "--dtype", "float32", "--max-model-len", "100")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert (routes._stops, routes._longest) == ((5,), 100)
    first, same, other = (
        loaded(tmp_path, "--load-format", "dummy", "--seed", seed)[1]["lm_head.weight"] for seed in "112"
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert not torch.equal(first, expected["lm_head.weight"])


def listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), WAIT_TIMEOUT):
        return True
    return False


def asked(port: int) -> Any:
    """The answer to a request for tokens."""
    eventually(lambda: listens(port), "the server listens")
    connection = HTTPConnection("127.0.0.1", port, timeout=WAIT_TIMEOUT)
    connection.request("POST", "/pause", headers={"X-Forwarded-For": "127.0.0.1"})
    refused = connection.getresponse()
    assert (refused.status, b"closed to other hosts" in refused.read()) == (403, True)
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
            # A server that does not end by itself must not hold this thread.
            last = threading.Timer(WAIT_TIMEOUT, os.kill, (os.getpid(), signal.SIGTERM))
            last.start()
            try:
                code = command.serve(options)
            finally:
                last.cancel()
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

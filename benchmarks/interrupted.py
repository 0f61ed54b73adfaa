"""Generation of the built-in server that is interrupted: by new weights, waits for the longest sequence, a death."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.figure import BenchmarkError
from benchmarks.job import DEADLINE, environment
from unirun.experiments.models.generation import Continuation, Slots
from unirun.rollout.choosing import Answer
from unirun.rollout.client import EngineClient, EngineList
from unirun.rollout.completing import EngineCompleter
from unirun.weights.integrations.sending import Param, file_for
from unirun.weights.integrations.vllm import VLLMClient
from unirun.weights.publishing import Blocks

LONGEST = 4096
CONFIG: Mapping[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": LONGEST,
    "eos_token_id": None,
}
"""10 MB in float32."""

SERVERS, OPEN, LONG = 2, 64, 1024
"""Servers, requests that are open at both together, and the tokens of each."""

START_TIMEOUT = 120.0
"""Seconds in which a server has to answer."""

GROWN = 0.5
"""Seconds for which requests run before new weights come."""

ROUNDS = 3
"""Updates that are measured on the same servers."""

ARRIVAL = 0.02
"""Seconds in which a request comes to a server that stands still."""


@contextmanager
def servers(folder: Path) -> Iterator[list[tuple[str, int]]]:
    """Built-in servers with random weights: the URL and the process of each."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    options = ["--load-format", "dummy", "--max-num-seqs", str(OPEN + 8)]
    with ExitStack() as running:
        found: list[tuple[str, int]] = []
        for _ in range(SERVERS):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            command = [sys.executable, "-m", "unirun.experiments.server", str(folder), "--port", str(port)]
            env = {**environment(folder), "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen([*command, *options], env=env)
            running.callback(process.wait)
            running.callback(process.kill)
            found.append((f"http://127.0.0.1:{port}", process.pid))
        for url, _ in found:
            _await(url)
        yield found


def _await(url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.05)
    raise BenchmarkError(f"{url} does not answer")


class Update(NamedTuple):
    """Seconds from the pause until all servers go on with a new version (`paused`), and then those of the prefill of
    what is open (`prefill`); and of a prefill without new weights before it (`before`)."""

    paused: float
    prefill: float
    before: float


def update_of(urls: Sequence[str]) -> Update:
    """New weights for all servers while `OPEN` requests run: the medians of some rounds."""
    blocks = Blocks()
    weights = _weights()
    packing, block = file_for(
        [Param(n, t.dtype, tuple(t.shape)) for n, t in weights.items()], blocks, "bench"
    )
    for name, view in packing.tensors(block).items():
        view.copy_(weights[name])
    clients = [VLLMClient(url) for url in urls]

    def load(client: VLLMClient) -> None:
        client.load(block.path, block.token, "1")

    try:
        for client in clients:
            client.check(block.path, block.token)
        with ThreadPoolExecutor(OPEN) as asking:
            asked = [
                asking.submit(_generate, urls[n % len(urls)], [1, 2, 3, 4 + n], LONG) for n in range(OPEN)
            ]
            time.sleep(GROWN)
            found = []
            for _ in range(ROUNDS):
                _, before = _paused(clients, None)
                paused, prefill = _paused(clients, load)
                found.append(Update(paused, prefill, before))
            if any(each.done() for each in asked):
                raise BenchmarkError("requests had ended before the update")
            for client in clients:
                # It ends all requests.
                with client.paused("abort"):
                    pass
        return Update(*map(statistics.median, zip(*found, strict=True)))
    finally:
        blocks.close()


def _paused(clients: Sequence[VLLMClient], act: Callable[[VLLMClient], object] | None) -> tuple[float, float]:
    """Seconds from the pause until all servers go on, and then those until all have answered a request that came in the
    pause.

    It is answered after the first step that follows the pause, in which all keys and values are computed anew. The time
    in which it comes does not count.
    """

    def one(client: VLLMClient) -> tuple[float, float]:
        began = time.perf_counter()
        with client.paused("keep"):
            paused = time.perf_counter()
            probe = asking.submit(_generate, client.url, [1], 1)
            time.sleep(ARRIVAL)
            waited = time.perf_counter() - paused
            if act is not None:
                act(client)
        resumed = time.perf_counter()
        probe.result()
        return resumed - began - waited, time.perf_counter() - resumed

    with ThreadPoolExecutor(len(clients)) as asking, ThreadPoolExecutor(len(clients)) as pool:
        pauses, prefills = zip(*pool.map(one, clients), strict=True)
        return max(pauses), max(prefills)


def _weights() -> dict[str, torch.Tensor]:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {name: value for name, value in CONFIG.items() if name != "model_type"}
    network: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **settings))  # type: ignore[no-untyped-call]
    return {name: each.detach() for name, each in network.state_dict().items()}


def _generate(url: str, tokens: Sequence[int], count: int) -> dict[str, Any]:
    sampling = {"max_tokens": count, "temperature": 1.0}
    body = json.dumps({"token_ids": [*tokens], "sampling_params": sampling}).encode()
    request = urllib.request.Request(f"{url}/inference/v1/generate", body)
    with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
        found: dict[str, Any] = json.loads(answer.read())
        return found


class Answers(EngineClient):
    """A client that notes when each answer came, and from which engine."""

    def __init__(self, urls: Sequence[str]) -> None:
        super().__init__("engine", engines=EngineList.at(*urls))
        self.came: list[tuple[float, tuple[int, ...], int]] = []
        """The time, the beginning of the prompt, and the rank of the engine."""

    async def generate(self, token_ids: Sequence[int], **more: Any) -> Answer:
        """See `EngineClient`."""
        found = await super().generate(token_ids, **more)
        self.came.append((time.perf_counter(), tuple(token_ids[:4]), found.engine.rank))
        return found


CHUNK = 8


class Move(NamedTuple):
    """Seconds from the death of a server until its requests run elsewhere (`running`), and then those of a chunk."""

    running: float
    chunk: float


def move_of(found: Sequence[tuple[str, int]]) -> Move:
    """The death of the first server. Its requests run elsewhere when the last one of them has its next chunk from the
    other server, less the time of a chunk there: the median of the third ones. The second chunk of a request that came
    early has the prefills of later ones in it."""

    async def run() -> Move:
        async with asyncio.timeout(DEADLINE), Answers([url for url, _ in found]) as client:
            completer = EngineCompleter(client, new_tokens_per_chunk=CHUNK)
            asked = [
                asyncio.create_task(completer.complete([1, 2, 3, 4 + n], max_tokens=LONG))
                for n in range(OPEN)
            ]
            while len(last := {name: rank for _, name, rank in client.came}) < OPEN:
                await asyncio.sleep(0.01)
            killed = time.perf_counter()
            os.kill(found[0][1], signal.SIGKILL)
            moved = {name for name, rank in last.items() if rank == 0}
            if not moved or any(each.done() for each in asked):
                raise BenchmarkError("the server had no request when it died")
            times: dict[tuple[int, ...], list[float]] = {name: [] for name in moved}
            while any(len(some) < 3 for some in times.values()):
                await asyncio.sleep(0.01)
                times = {name: [] for name in moved}
                for when, name, rank in client.came:
                    if when > killed and name in moved and rank == 1:
                        times[name].append(when)
            for each in asked:
                each.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            chunk = statistics.median(third - second for _, second, third, *_ in times.values())
            running = max(some[0] for some in times.values()) - killed - chunk
            if running <= 0:
                raise BenchmarkError(
                    f"requests run elsewhere {-running:.3f} s before the death: a chunk took {chunk:.3f} s"
                )
            return Move(running, chunk)

    return asyncio.run(run())


# Sequences of one process, with new weights after each batch of those that have ended.

BATCH = 32
"""Sequences that are trained on in a step."""


def run_slots(slots: Slots, rows: Sequence[Continuation], count: int, *, waits: bool) -> None:
    """Continue all rows, `count` at a time, with new weights after each `BATCH`: sequences are interrupted and computed
    anew with these, or with `waits` none begins until the longest one has ended."""
    left, running, ended, waiting = deque(rows), 0, 0, False
    while left or running:
        while left and running < count and not waiting:
            slots.add(left.popleft())
            running += 1
        finished = len(slots.step())
        running -= finished
        due = ended // BATCH < (ended + finished) // BATCH
        ended += finished
        if due and waits:
            waiting = True
        elif due:
            for row in slots.clear():
                slots.add(row)
        if not running:
            waiting = False

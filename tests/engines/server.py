"""``vllm serve``, as a process of a test or of a job, and requests to it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.engines.environment import binaries
from tests.engines.llama import LONGEST
from unirun.spec.engines import DEVELOPMENT, RECEIVING

START_TIMEOUT = 600.0
"""Seconds; it takes half a minute on a busy machine."""

ANSWER_TIMEOUT = 120.0
"""Seconds for one request."""

NAME = "policy"
KV_CACHE = 1 << 26


def port() -> int:
    """A port that is free now."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        number: int = bound.getsockname()[1]
        return number


OPTIONS = (
    *("--served-model-name", NAME, "--dtype", "float32", "--enforce-eager"),
    *("--max-model-len", str(LONGEST), "--kv-cache-memory-bytes", str(KV_CACHE)),
)

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # Two engines have two processors here.
    "OMP_NUM_THREADS": "1",
}


class Engine:
    """Requests to one engine."""

    def __init__(self, url: str) -> None:
        self.url = url

    def answers(self) -> bool:
        """Return True if it is ready for requests."""
        try:
            self.ask("/health", within=5.0)
        except OSError:
            return False
        return True

    def ask(self, path: str, body: Mapping[str, Any] | None = None, within: float = ANSWER_TIMEOUT) -> Any:
        """GET, or POST of `body`. Raises OSError."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=within) as answer:
            raw = answer.read()
            return json.loads(raw) if raw else None

    def generate(self, prompt: Sequence[int], count: int) -> dict[str, Any]:
        """The greedy answer of `count` tokens: its ``token_ids``, and its ``weight_versions``."""
        sampling = {"temperature": 0.0, "max_tokens": count, "ignore_eos": True}
        body = {"model": NAME, "token_ids": [*prompt], "sampling_params": sampling}
        (choice,) = self.ask("/inference/v1/generate", body)["choices"]
        found: dict[str, Any] = choice
        return found

    def running(self) -> bool:
        """Return True while it generates."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=ANSWER_TIMEOUT) as answer:
            lines = answer.read().decode().splitlines()
        return any(
            line.startswith("vllm:num_requests_running{") and float(line.split()[-1]) for line in lines
        )


class Server(Engine):
    """One engine that a test starts, in a session of its own. Its output goes to a file in `folder`."""

    def __init__(self, model: Path, folder: Path, *options: str, at: int = 0) -> None:
        self.port = at or port()
        super().__init__(f"http://127.0.0.1:{self.port}")
        self.log = folder / f"vllm-{self.port}.log"
        command = [
            *(str(binaries() / "vllm"), "serve", str(model), "--host", "127.0.0.1", "--port", str(self.port)),
            # For /inference/v1/generate, the only route whose answers are labelled with versions.
            *("--enable-scale-out", *OPTIONS),
            *RECEIVING,
            *options,
        ]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **ENVIRONMENT, **DEVELOPMENT},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self) -> Server:
        """Return when it answers."""
        deadline = time.monotonic() + START_TIMEOUT
        while self.process.poll() is None:
            if self.answers():
                return self
            assert time.monotonic() < deadline, f"not within {START_TIMEOUT:g} s:\n{self.words()}"
            time.sleep(0.1)
        raise AssertionError(f"it has ended with {self.process.returncode}:\n{self.words()}")

    def words(self) -> str:
        """The end of its output."""
        return self.log.read_text(errors="replace")[-4000:]

    def kill(self) -> None:
        """Kill all processes of its session, as a crash does, and remove the shared memory that they leave."""
        names = self._shared_memory()
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(ANSWER_TIMEOUT)
        for name in names:
            name.unlink(missing_ok=True)

    def _shared_memory(self) -> set[Path]:
        """The files in /dev/shm that its processes have mapped, but for models."""
        found = set()
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.getsid(int(place.name)) == self.process.pid:
                    found |= set(re.findall(r"/dev/shm/(?:psm_|sem\.)\S+", (place / "maps").read_text()))
        return {Path(name) for name in found}

    def close(self) -> None:
        """End it, and wait."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(ANSWER_TIMEOUT)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

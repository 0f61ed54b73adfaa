"""Rollout workers with an engine in memory, whose first one dies, and a consumer that takes their groups."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import unirun
from unirun.atomic import create, replace
from unirun.experiments import (
    AgentAbstraction,
    DatasetAbstraction,
    EnvServiceAbstraction,
    GserverManager,
    ModelName,
    RolloutWorker,
    register_agent,
    register_tokenizer,
)
from unirun.experiments.rollout_worker import TRAJECTORIES, RolloutWorkerProcess
from unirun.rollout import Completer, Completion, Recorder

BATCH, ETA = 4, 1


class Letters:
    """A token for each character."""

    pad_token_id, eos_token_id = 0, 1

    def encode(self, text: str) -> list[int]:
        """Tokens."""
        return [ord(each) for each in text]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text."""
        return "".join(map(chr, tokens))


class Pairs:
    """An agent of groups of two."""

    group_size = 2

    async def run(self, data: Any, client: Recorder) -> float:
        """One turn."""
        answer = await client.complete(data["input_ids"])
        return float(len(answer.token_ids))


class Fifty(Pairs):
    """An agent of groups of fifty."""

    group_size = 50


class Missing:
    """An agent whose file is not there."""

    def __init__(self) -> None:
        Path("/nowhere/prompts.txt").read_text()


register_tokenizer("rolling-letters", Letters)
register_agent("rolling-missing", Missing)
register_agent("rolling-pairs", Pairs)
register_agent("rolling-fifty", Fifty)


class Memory:
    """An engine that makes two tokens with the version in a file, once the one that `ends` is there."""

    def __init__(self, file: Path, ends: bool) -> None:
        self._file, self._left = file, 3 if ends else 10**9
        self._begun = file.with_name("begun")
        if ends:
            self._begun.touch()

    async def complete(
        self, token_ids: Sequence[int], *, conversation: str = "", **sampling: Any
    ) -> Completion:
        """See `Completer`. The worker is killed in the fourth request."""
        while not self._begun.exists():
            await asyncio.sleep(0.01)
        self._left -= 1
        if self._left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        version = int(self._file.read_text())
        return Completion((65, 66), (-0.5, -0.25), (version, version), "length")


class Rolling(RolloutWorkerProcess):
    """A rollout worker whose engine is in memory."""

    def settings(self) -> tuple[RolloutWorker, GserverManager]:
        """See there."""
        actor, rows = ModelName("actor"), [{"prompt": f"{number}+1="} for number in range(10)]
        return RolloutWorker(
            1,
            actor,
            "rolling-letters",
            8,
            10,
            EnvServiceAbstraction("null"),
            AgentAbstraction("rolling-pairs"),
            [DatasetAbstraction("prompt", {"rows": rows})],
        ), GserverManager(actor, 1, "round_robin", ETA, BATCH, 10, 8)

    async def completer(self) -> Completer:
        """See there."""
        return Memory(version_file(self.config), self.rank == 0 and unirun.init().incarnation == 0)


class Broken(Rolling):
    """One whose agent cannot be made."""

    def settings(self) -> tuple[RolloutWorker, GserverManager]:
        """See there."""
        worker, manager = super().settings()
        return dataclasses.replace(worker, agent=AgentAbstraction("rolling-missing")), manager


class Many(Rolling):
    """One that has a hundred groups of fifty open, whose engines are those of the job."""

    def settings(self) -> tuple[RolloutWorker, GserverManager]:
        """See there."""
        worker, manager = super().settings()
        many = dataclasses.replace(manager, max_concurrent_rollouts=100, max_head_offpolicyness=100)
        agent = AgentAbstraction("rolling-fifty")
        return dataclasses.replace(worker, agent=agent, rollout_request_timeout=3600), many

    async def completer(self) -> Completer:
        """Those of every rollout worker."""
        return await RolloutWorkerProcess.completer(self)


class Consumer(unirun.BaseWorkload):
    """Takes groups."""

    eta, concurrent = ETA, 8

    def setup(self) -> None:
        """The queue."""
        self.queue = unirun.Queue(
            TRAJECTORIES,
            producer="rollout_worker",
            consumer="model_worker",
            batch=BATCH,
            max_head_offpolicyness=self.eta,
            max_concurrent_rollouts=self.concurrent,
        )

    def take(self, version: int) -> list[tuple[int, str, list[int]]]:
        """The version, id and tokens of each group of a batch."""
        self.queue.advance(version)
        items = self.queue.get_batch(BATCH, timeout=60)
        found = [(item.version, item.value.ids[0], item.value["packed_input_ids"].tolist()) for item in items]
        self.queue.done()
        return found


class ConsumerOfMany(Consumer):
    """Waits for a group; rollout workers may begin many."""

    eta, concurrent = 100, 100

    def begin(self) -> None:
        """Let them begin."""
        self.queue.advance(0)
        threading.Thread(target=self.queue.get, kwargs={"timeout": 3600}, daemon=True).start()


class Watcher(unirun.BaseTrainer):
    """Ends when there is a file."""

    def init(self) -> None:
        """Nothing."""

    def fit(self) -> None:
        """Wait for it."""
        self.RG_MODEL_WORKER.begin()
        print("begun", flush=True)
        while not Path(self.config.root, "enough").exists():
            time.sleep(0.05)


class Taker(unirun.BaseTrainer):
    """Has the consumer take some batches."""

    def init(self) -> None:
        """Nothing."""

    def fit(self) -> None:
        """Take them."""
        ids, ages = list[str](), list[int]()
        for version in range(8):
            replace(version_file(self.config), str(version))
            (batch,) = self.RG_MODEL_WORKER.take(version)
            for made_with, name, tokens in batch:
                ids.append(name)
                ages.append(version - made_with)
                assert tokens[-2:] == [65, 66], tokens
        print(f"{len(ids)} groups, {len({*ids})} ids, ages {min(ages)} to {max(ages)}", flush=True)


def version_file(config: Any) -> Path:
    """Has the version of the weights."""
    path = Path(config.root) / "version"
    create(path, "0")
    return path

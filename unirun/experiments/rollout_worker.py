"""`RolloutWorkerProcess`: a process in which an agent makes trajectories, many at a time, for the model workers.

It takes the prompts of its datasets in a random order, again and again, asks the generation servers, and puts each
group that is accepted into the queue `trajectories`, as a sample of one id. The gate of the queue says when a group may
begin.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from unirun.errors import PeerLost, UsageError
from unirun.experiments.agents import run_of
from unirun.experiments.buffer import trajectories
from unirun.experiments.config import AGENTS, DATASETS, ENVIRONMENTS, GserverManager, RolloutWorker
from unirun.experiments.datasets import Dataset, DatasetUtility, Joined, load_tokenizer
from unirun.experiments.experiment import import_modules, resolve, trial_of
from unirun.experiments.sample import SequenceSample
from unirun.launcher.process import spare_descriptors
from unirun.observe.events import LineLog
from unirun.roles import BaseWorkload
from unirun.rollout.client import EngineClient
from unirun.rollout.completing import Completer, EngineCompleter, Group, Outcomes
from unirun.rollout.pool import Data, Pool
from unirun.wire.reporting import report, report_error

TRAJECTORIES = "trajectories"
"""The folder of a trial with what its rollout workers have made, for people."""

SERVERS = "generation_server"
"""The role of the engines."""

REPORT_INTERVAL = 1.0
"""Seconds between two reports of what becomes of groups."""

STOP_TIMEOUT = 5.0
"""Seconds in which the episodes that are open are cancelled at the end."""


def sample_of(group: Group) -> SequenceSample:
    """A group as a sample of one id, with a sequence for each trajectory: `packed_input_ids`, `prompt_mask` (true for
    tokens that the model has not made), `packed_logprobs`, `versions`, and `rewards`."""
    each = group.trajectories
    return SequenceSample.of(
        {
            "packed_input_ids": [[torch.tensor(t.token_ids, dtype=torch.long) for t in each]],
            "prompt_mask": [[~torch.tensor(t.trained, dtype=torch.bool) for t in each]],
            "packed_logprobs": [[torch.tensor(t.logprobs, dtype=torch.float32) for t in each]],
            "versions": [[torch.tensor(t.versions, dtype=torch.long) for t in each]],
            "rewards": [[torch.tensor(t.reward, dtype=torch.float32) for t in each]],
        },
        [group.id],
        row=[{key: value for key, value in group.data.items() if key != "input_ids"}],
    )


def prompts(
    dataset: Dataset, tokenizer: Any, rank: int, world_size: int, seed: int, incarnation: int = 0
) -> Iterator[Data]:
    """The prompts of one of so many workers, without end: each worker has a part of each epoch, in a random order. One
    that was started again does not begin with the same."""
    if len(dataset) < world_size:
        raise UsageError(
            f"the datasets of the rollout workers have {len(dataset)} prompts for {world_size} workers",
            "give one for each",
        )
    shuffle = random.Random(seed * 1000 + incarnation)
    places = [*range(len(dataset))]
    while True:
        shuffle.shuffle(places)
        for place in places[rank::world_size]:
            yield data_of(dataset[place], tokenizer)


def data_of(sample: SequenceSample, tokenizer: Any) -> dict[str, Any]:
    """A sample of a dataset as an agent gets it."""
    tokens: list[int] = sample["packed_prompts"].tolist()
    row = sample.metadata["row"][0] if "row" in sample.metadata else {}
    return {**row, "id": sample.ids[0], "prompt": tokenizer.decode(tokens), "input_ids": tokens}


class RolloutWorkerProcess(BaseWorkload):
    """One of the rollout workers of a trial. It works by itself, in a thread with an event loop."""

    def setup(self) -> None:
        """Read the configuration and the datasets, and begin. Raises `UsageError` for what a restart cannot mend, which
        ends the trial."""
        self._trial = trial_of(self.config)
        import_modules(self._trial.modules, self._trial.folder)
        self._mine, self._manager = self.settings()
        # Each open episode has a connection.
        spare_descriptors()
        try:
            self._read()
        except UsageError:
            raise
        except Exception as error:  # noqa: BLE001 - what users have written may raise anything
            # Its log has all of it.
            report_error(error)
            raise UsageError(
                f"the rollout workers cannot begin: {type(error).__name__}: {error}",
                f"correct the agent, the environment or the datasets; unirun logs {self.name} has the traceback",
            ) from None
        self._lines = LineLog(self._folder() / f"{self.rank}.jsonl")
        self._queue = trajectories(self._manager)
        self._task: asyncio.Task[None] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._work, name="rollouts", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        """Make what the settings name. The environment is made here to see that it can be."""
        mine = self._mine
        self._tokenizer = load_tokenizer(mine.tokenizer_path)
        util = DatasetUtility(self._tokenizer, mine.base_seed)
        made = [DATASETS.find(each.type_)(util, **each.args) for each in mine.datasets]
        self._dataset: Dataset = made[0] if len(made) == 1 else Joined(made)
        self._agent: Any = AGENTS.find(mine.agent.type_)(**mine.agent.args)
        self._run = run_of(self._agent)
        data_of(self._dataset[0], self._tokenizer)
        ENVIRONMENTS.find(mine.env.type_)(**mine.env.args)

    def settings(self) -> tuple[RolloutWorker, GserverManager]:
        """Those of this worker, and those of all."""
        config = resolve(self._trial.experiment, self._trial.overrides)
        return config.rollout_worker[self.rank], config.gserver_manager[0]

    def _folder(self) -> Path:
        folder = Path(self._trial.root) / TRAJECTORIES
        folder.mkdir(exist_ok=True)
        return folder

    async def completer(self) -> Completer:
        """The generation servers, once one is ready. The first start of a server may take longer than a request, and
        its role has a limit for that."""
        client = EngineClient(SERVERS)
        await client.ready()
        return EngineCompleter(
            client,
            timeout=self._mine.rollout_request_timeout,
            new_tokens_per_chunk=self._mine.new_tokens_per_chunk,
            schedule_policy=self._manager.schedule_policy,
        )

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._task = self._loop.create_task(self._roll())
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            return
        except PeerLost as error:
            # The job ends.
            report(f"unirun: no more trajectories are made: {error}")
        except BaseException as error:  # noqa: BLE001 - it ends the worker, not this thread
            self._leave(error)

    async def _roll(self) -> None:
        pool = self._pool(await self.completer())
        place = self.rank, self.world_size, self._mine.base_seed, self.master_handle.context.incarnation
        source = prompts(self._dataset, self._tokenizer, *place)
        telling = asyncio.create_task(self._tell(pool))
        try:
            await pool.feed(source, self._queue.admit_async, self._put)
        finally:
            telling.cancel()

    def _pool(self, completer: Completer) -> Pool:
        env, agent = self._mine.env, self._agent
        make = ENVIRONMENTS.find(env.type_)
        return Pool(
            completer,
            self._run,
            group_size=getattr(agent, "group_size", 1),
            batch=self._manager.train_batch_size,
            max_head_offpolicyness=self._manager.max_head_offpolicyness,
            max_concurrent_rollouts=self._manager.max_concurrent_rollouts,
            should_accept=getattr(agent, "should_accept", lambda group: True),
            sampling=getattr(agent, "sampling", {}),
            tokenizer=self._tokenizer,
            env=lambda: make(**env.args),
            dump=self._dump,
        )

    async def _put(self, group: Group) -> None:
        await self._queue.put_async(sample_of(group), version=group.version)

    def _dump(self, group: Group) -> None:
        """Write a group as a line, for people."""
        self._lines.append(
            {
                "id": group.id,
                "version": group.version,
                "trajectories": [
                    {
                        "reward": each.reward,
                        "tokens": len(each),
                        "text": self._tokenizer.decode(each.token_ids),
                    }
                    for each in group.trajectories
                ],
            }
        )

    async def _tell(self, pool: Pool) -> None:
        before, idle, since = pool.outcomes, pool.idle_seconds, time.monotonic()
        while True:
            await asyncio.sleep(REPORT_INTERVAL)
            now, waited, at = pool.outcomes, pool.idle_seconds, time.monotonic()
            found = figures(before, now, at - since)
            self.master_handle.report({**found, "rollout/idle_share": (waited - idle) / (at - since)})
            before, idle, since = now, waited, at

    def teardown(self) -> None:
        """Cancel the episodes that are open."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._cancel)
            self._thread.join(STOP_TIMEOUT)
        self._lines.close()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


def figures(before: Outcomes, now: Outcomes, seconds: float) -> dict[str, float]:
    """The figures of a rollout worker: numbers so far, those that are open now, and tokens in each second since
    `before`."""
    found = {
        f"rollout/{name}": float(getattr(now, name)) for name in now.__struct_fields__ if name != "tokens"
    }
    return {**found, "rollout/tokens_per_s": (now.tokens - before.tokens) / seconds}

"""`AsyncModelWorkerProcess`: a model worker of an asynchronous trial, with trajectories, and weights for servers."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from unirun.experiments.buffer import BUFFER_RANK, Arrivals, Buffer, Intake, trajectories
from unirun.experiments.config import DATASETS, INTERFACES
from unirun.experiments.datasets import Dataset, DatasetUtility, load_tokenizer
from unirun.experiments.graph import MFCDef
from unirun.experiments.model_worker import ModelWorkerProcess, joined
from unirun.experiments.models.api import FinetuneSpec
from unirun.experiments.sample import SequenceSample
from unirun.roles import trainer_invocation
from unirun.weights.channel import WeightsChannel
from unirun.weights.queue import Queue

POLICY = "policy"
"""The channel of the weights that generation servers have."""

THREADS = 2
"""Calls of one method that do not wait for what the main thread computes."""


class AsyncModelWorkerProcess(ModelWorkerProcess):
    """It publishes the weights that are trained. The one with rank `BUFFER_RANK` takes the trajectories of rollout
    workers into the buffer, and gives them to the others."""

    _buffer: Buffer | None = None
    _intake: Intake | None = None
    _queue: Queue | None = None

    def setup(self) -> None:
        """As that of every model worker."""
        super().setup()
        self._manager = self._experiment.gserver_manager[0]
        self._channel = WeightsChannel(POLICY) if self._experiment.generation_server else None
        # Held while weights are copied, which is not in the main thread.
        self._publishing = threading.Lock()

    def teardown(self) -> None:
        """Take no more trajectories."""
        if self._intake is not None:
            self._intake.close()

    def _read_dataset(self) -> Dataset | None:
        """The data of the rollout workers: an epoch is as long. Opens the buffer, too, whose errors end the trial."""
        if self.rank != BUFFER_RANK:
            return None
        self._buffer = Buffer(self._recovery.buffer)
        rollout = self._experiment.rollout_worker[0]
        util = DatasetUtility(load_tokenizer(rollout.tokenizer_path), rollout.base_seed)
        return joined([DATASETS.find(each.type_)(util, **each.args) for each in rollout.datasets])

    @property
    def _trained(self) -> MFCDef:
        """The call that trains the model whose weights the servers have."""
        role = self._manager.model_name.role
        return next(call for call in self._resolved.graph.trained if call.role == role)

    @trainer_invocation(target="ALL")
    def restore(self, attempt: int, step: int | None, spec: FinetuneSpec) -> dict[str, int]:
        """As that of every model worker, when nothing of an earlier attempt is being published."""
        with self._publishing:
            return super().restore(attempt, step, spec)

    @trainer_invocation(target="ALL", concurrency=THREADS)
    def take(self, attempt: int, step: int, oldest: int, ids: Sequence[str]) -> tuple[int, SequenceSample]:
        """Read these trajectories of the buffer for `step`, as `load` does samples; a call that runs here does not wait
        for it."""
        self._check(attempt)
        assert self._buffer is not None
        self._store.drop(oldest)
        sample = self._buffer.read(ids)
        self._store.put(step, sample)
        return self.rank, sample.meta()

    @trainer_invocation(target="ALL", concurrency=THREADS)
    def accepted(self, attempt: int, number: int, seconds: float) -> Arrivals:
        """The trajectories that have arrived from `number` on; waits for one up to so many seconds."""
        self._check(attempt)
        assert self._buffer is not None
        if self._intake is not None:
            self._intake.raise_error()
        number, found = self._buffer.since(number, seconds)
        counts = (self._intake.accepted, self._intake.rejected) if self._intake is not None else (0, 0)
        return number, found, counts

    @trainer_invocation(target="ALL")
    def receive(self, attempt: int, version: int, kept: int) -> None:
        """Take trajectories from rollout workers from now on. `version` steps were trained, and the trajectories of
        the steps after them, `kept` ones, are in the buffer."""
        self._check(attempt)
        assert self._buffer is not None
        if self._intake is None:
            chosen = self._trained.interface_impl
            interface = INTERFACES.find(chosen.type_)(**chosen.args)
            self._queue = trajectories(self._manager)
            self._queue.keep(kept)
            self._queue.advance(version)
            self._intake = Intake(self._buffer, self._queue, interface.accepts)
            self._intake.start()

    @trainer_invocation(target="ALL", concurrency=THREADS)
    def release(self, attempt: int, ids: Sequence[str], *, dropped: bool) -> None:
        """These trajectories are not needed any more. Those that are `dropped` were not trained on: others are made in
        their place."""
        self._check(attempt)
        assert self._buffer is not None
        count = self._buffer.release(ids)
        if dropped and self._queue is not None:
            self._queue.keep(-count)

    @trainer_invocation(target="ALL", concurrency=THREADS)
    def publish(self, attempt: int, version: int) -> None:
        """Give the weights that were trained in `version` steps to the generation servers, and let rollout workers
        begin more. A call of the next step that runs here, which does not change these weights, does not delay it."""
        with self._publishing:
            self._check(attempt)
            channel = self._channel
            # All have published it already, if a step was made again.
            if channel is not None and (channel.version is None or channel.version < version):
                channel.publish(self._published(), version)
        if self._queue is not None:
            self._queue.advance(version)

    @trainer_invocation(target="ALL")
    def published(self, attempt: int) -> int | None:
        """The version that this process has published last; None before the first."""
        self._check(attempt)
        return self._channel.version if self._channel is not None else None

    @trainer_invocation(target="ALL")
    def withdraw(self, attempt: int) -> None:
        """Give no weights to the generation servers until the next version."""
        self._check(attempt)
        if self._channel is not None:
            self._channel.withdraw()

    def _published(self) -> dict[str, torch.Tensor]:
        """The tensors of the model that is trained and served, of which each is published by one data-parallel rank, or
        by all of those that have parts of it."""
        shard = self._shards.get(self._trained.model_name)
        if shard is None:
            return {}
        self._fetch(shard)
        tensors, first = shard.model.running().tensors(), not shard.model.place.data
        return {key: tensor for key, tensor in tensors.items() if first or _is_cut(tensor)}


def _is_cut(tensor: torch.Tensor) -> bool:
    """Return True if data-parallel ranks have different parts of it (FSDP2)."""
    return isinstance(tensor, DTensor) and "data" in (tensor.device_mesh.mesh_dim_names or ())

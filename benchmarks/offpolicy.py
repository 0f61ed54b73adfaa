"""A trial on engines and train steps that sleep for their time: asynchronous, and the same with calls in turn.

``python -m benchmarks.offpolicy async|sync FOLDER`` writes the job file of one. Two processes generate, each with
`SLOTS` sequences at a time, and two train. The lengths of sequences are spread 1 : 16.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import os
import random
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from unirun.experiments import (
    AgentAbstraction,
    Allocation,
    DatasetAbstraction,
    EnvServiceAbstraction,
    Experiment,
    ExperimentConfig,
    ExperimentSaveEvalControl,
    ExperimentScheduling,
    GserverManager,
    MFCDef,
    MicroBatchSpec,
    Model,
    ModelAbstraction,
    ModelBackend,
    ModelBackendAbstraction,
    ModelInterface,
    ModelInterfaceAbstraction,
    ModelInterfaceType,
    ModelName,
    Place,
    RolloutWorker,
    Scheduling,
    SequenceSample,
    TasksGroup,
    model_workers,
    register_agent,
    register_backend,
    register_dataset,
    register_experiment,
    register_interface,
    register_model,
    register_tokenizer,
    topology,
)
from unirun.experiments.buffer import trajectories
from unirun.experiments.experiment import Trial, import_modules, resolve, trial_of
from unirun.experiments.starting import job_file, job_mapping
from unirun.roles import BaseWorkload

SLOTS, BATCH, STEPS, ETA = 8, 32, 24, 2
LONGEST, UNIT = 16, 0.05
"""The longest sequence, beside the shortest one, which takes so many seconds."""

TRAIN_SECONDS = UNIT * BATCH * 5.4 / (2 * SLOTS)
"""As long as both engines generate a batch, with all slots in use: the mean length is 15 ÷ log 16."""

STAMPS = "stamps"
"""The file with the time of each train step, in the folder of the trial."""

ACTOR, ENGINE = ModelName("actor"), ModelName("engine")


def seconds_of(number: int) -> float:
    """The time that a sequence takes: each doubling of it is as often as the others."""
    return UNIT * float(LONGEST ** random.Random(number).random())


def makespan(times: list[float]) -> float:
    """The time of an engine for these sequences, of which each takes the slot that is free first."""
    slots = [0.0] * SLOTS
    for each in times:
        heapq.heapreplace(slots, slots[0] + each)
    return max(slots)


class Rollouts(BaseWorkload):
    """An engine that generates all the time, as far as the gate lets it."""

    def setup(self) -> None:
        """Begin, in a thread."""
        trial = trial_of(self.config)
        import_modules(trial.modules, trial.folder)
        self._queue = trajectories(resolve(trial.experiment, trial.overrides).gserver_manager[0])
        self._stamps, self._numbers = Path(trial.root, STAMPS), itertools.count(self.rank, self.world_size)
        threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True).start()

    async def _run(self) -> None:
        await asyncio.gather(*(self._slot() for _ in range(SLOTS)))

    async def _slot(self) -> None:
        while True:
            with await self._queue.admit_async(timeout=3600):
                number = next(self._numbers)
                version = len(self._stamps.read_bytes().splitlines()) if self._stamps.exists() else 0
                await asyncio.sleep(seconds_of(number))
                await self._queue.put_async(sequence(number), version=version, timeout=3600)


def sequence(number: int) -> SequenceSample:
    """A sample whose content does not count."""
    return SequenceSample.of({"packed_input_ids": [torch.tensor([number])]}, [str(number)])


class Rows:
    """Prompts, of which only the number counts."""

    keys = ("packed_input_ids",)
    fingerprint = ""

    def __init__(self, util: object) -> None:
        """Enough for all steps."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> SequenceSample:
        return sequence(index)


class Network(torch.nn.Module):
    """A model without parameters, which is its engine, too."""

    def __init__(self, place: Place) -> None:
        super().__init__()

    def tensors(self) -> dict[str, torch.Tensor]:
        """None."""
        return {}

    def state(self) -> dict[str, Any]:
        """None."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing to do."""


class Backend(ModelBackend):
    """The network is its own engine."""

    def initialize(self, model: Model, spec: object) -> Model:
        """Nothing to do."""
        engine: Any = model.module
        model.engine = engine
        return model


class Sleeps(ModelInterface):
    """Calls that sleep for their time."""

    reductions: ClassVar[Mapping[str, str]] = {}

    def __init__(self, stamps: str) -> None:
        self._stamps = stamps

    def accepts(self, trajectories: SequenceSample) -> bool:
        """All."""
        return True

    def generate(self, model: Model, sample: SequenceSample, spec: MicroBatchSpec) -> SequenceSample:
        """The sequences of one engine."""
        time.sleep(makespan([seconds_of(int(each)) for each in sample.ids]))
        lengths = sample.seqlens["packed_input_ids"]
        return SequenceSample.packed({"tokens": sample["packed_input_ids"]}, {"tokens": lengths}, sample.ids)

    def train_step(self, model: Model, sample: SequenceSample, spec: MicroBatchSpec) -> dict[str, float]:
        """Note the time of the step."""
        time.sleep(TRAIN_SECONDS)
        if not model.place.rank:
            with open(self._stamps, "a") as file:
                file.write(f"{time.time()}\n")
        return {}


class Agent:
    """It is named in the settings, and `Rollouts` does without."""

    async def run(self, data: Mapping[str, Any], client: object) -> float | None:
        """Not called."""
        raise NotImplementedError


register_agent("sleeping", Agent)
register_tokenizer("sleeping", object)
register_dataset("sleeping-rows", Rows)
register_model("sleeping", Network)
register_backend("sleeping", Backend)
register_interface("sleeping", Sleeps)


@dataclass
class Sleeping(Experiment):
    """Generation in two rollout workers, or in two model workers by a call."""

    asynchronous: bool = True
    stamps: str = ""

    def scheduling_setup(self) -> ExperimentScheduling:
        """Four workers."""
        cpu = Scheduling(gpu=0)
        if self.asynchronous:
            return ExperimentScheduling(TasksGroup(2, cpu), rollout_worker=TasksGroup(2, cpu))
        return ExperimentScheduling(TasksGroup(4, cpu))

    def initial_setup(self) -> ExperimentConfig:
        """One call, or two."""
        parts = ModelAbstraction("sleeping"), ModelBackendAbstraction("sleeping")
        sleeps, kind, rows = (
            ModelInterfaceAbstraction("sleeping", {"stamps": self.stamps}),
            ModelInterfaceType,
            [DatasetAbstraction("sleeping-rows")],
        )
        control, two = ExperimentSaveEvalControl(total_train_epochs=1), topology(data=2)
        keys = ("packed_input_ids",)
        if self.asynchronous:
            env, agent = EnvServiceAbstraction("null"), AgentAbstraction("sleeping")
            return ExperimentConfig(
                exp_ctrl=control,
                model_rpcs=[MFCDef("train", BATCH, kind.TRAIN_STEP, sleeps, ACTOR, keys)],
                model_worker=model_workers({ACTOR: Allocation(*parts, two)}),
                gserver_manager=[GserverManager(ACTOR, 0, "round_robin", ETA, BATCH, 1, 4 * BATCH)],
                rollout_worker=[
                    RolloutWorker(1, ACTOR, "sleeping", 8, 60, env, agent, rows) for _ in range(2)
                ],
            )
        return ExperimentConfig(
            exp_ctrl=control,
            model_rpcs=[
                MFCDef("generate", BATCH, kind.GENERATE, sleeps, ENGINE, keys, ("tokens",)),
                MFCDef("train", BATCH, kind.TRAIN_STEP, sleeps, ACTOR, ("tokens",)),
            ],
            model_worker=model_workers(
                {ACTOR: Allocation(*parts, two), ENGINE: Allocation(*parts, two, 2)}, datasets=rows
            ),
        )


register_experiment("sleeping", Sleeping)


def main(side: str, root: Path) -> None:
    """Write the job file."""
    overrides = (f"asynchronous={str(side == 'async').lower()}", f"stamps={root / STAMPS}")
    folder = str(Path(__file__).parents[1])
    about = Trial("sleeping", side, str(root), (__name__,), overrides, folder=folder)
    experiment, config = Sleeping(side == "async", str(root / STAMPS)), resolve("sleeping", overrides)
    mapping = job_mapping(about, config, experiment.scheduling_setup())
    if side == "async":
        mapping["roles"]["rollout_worker"]["workload"] = f"{__name__}:Rollouts"
    root.mkdir(parents=True, exist_ok=True)
    with job_file(root, config, mapping, f"sleeping-{side}-{os.getpid()}"):
        pass


if __name__ == "__main__":
    from benchmarks import offpolicy

    # Under its own name, which processes of the trial import.
    offpolicy.main(sys.argv[1], Path(sys.argv[2]))

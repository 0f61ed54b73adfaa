"""A short PPO on sums in which processes are killed, once for each entry of KILL.

``KILL=PLACE:N:RANK,…`` kills the process of that rank when it is at that place for the N-th time or later. Places are
the names of calls, ``load``, ``load on`` (a load after a valid checkpoint), ``checkpoint``, ``restore``, ``save``,
``evaluate`` and ``evaluator``. ``trainer@…`` kills the trainer instead. A file in the directory KILLED notes each kill.
``LOST_AFTER=PLACE:N:RANK``: after that kill, the next load says once that a worker was lost, though all live.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from experiments.ppo import PPO, Actor, Critic, Verifier
from experiments.sums import Questions
from msgspec.structs import replace

from unirun.errors import PeerLost
from unirun.experiments import (
    DatasetAbstraction,
    ExperimentConfig,
    Model,
    ModelBackendAbstraction,
    ModelInterface,
    ModelInterfaceAbstraction,
    SequenceSample,
    register_backend,
    register_dataset,
    register_experiment,
    register_interface,
)
from unirun.experiments.models.backends import TrainBackend

_times = Counter[str]()
"""The number of times that this process was at each place."""


def kill(where: str, rank: int) -> None:
    """Kill a process, if KILL names this place and rank, and the entry was not used yet."""
    _times[where] += 1
    for chosen in filter(None, os.environ.get("KILL", "").split(",")):
        who, _, what = chosen.rpartition("@")
        place, time, owner = what.split(":")
        if (place, owner) == (where, str(rank)) and _times[where] >= int(time) and once(chosen):
            (trainer() if who == "trainer" else psutil.Process()).kill()


def trainer() -> psutil.Process:
    """The trainer of this trial: the agent started it, as it did this process."""
    agent = psutil.Process().parents()[1]
    (found,) = (each for each in agent.children(recursive=True) if each.name() == "trainer:0")
    return found


def once(name: str) -> bool:
    """Return True if this is asked for the first time in this trial."""
    try:
        os.close(os.open(f"{os.environ['KILLED']}/{name}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


@dataclass
class Killing(PPO):
    """Six steps of a small PPO."""

    samples: int = 48
    batch: int = 8
    epochs: int = 1
    ckpt_freq_steps: int = 2
    failing: str = ""

    def initial_setup(self) -> ExperimentConfig:
        """With interfaces that may die."""
        config = super().initial_setup()
        config.exp_ctrl.save_freq_steps = 2
        config.auto_eval = True
        config.evaluator.role = "actor"
        config.evaluator.dataset = config.model_worker[0].shards[0].eval_dataset
        for worker in config.model_worker:
            worker.datasets = [DatasetAbstraction("killing", each.args) for each in worker.datasets]
            for shard in worker.shards:
                if shard.backend.type_ == "ddp":
                    shard.backend = ModelBackendAbstraction("killing", shard.backend.args)
        config.model_rpcs = [
            replace(call, interface_impl=_killing(call.name, call.interface_impl, failing=self.failing))
            for call in config.model_rpcs
        ]
        return config


def _killing(call: str, chosen: ModelInterfaceAbstraction, *, failing: str) -> ModelInterfaceAbstraction:
    args = {"call": call, "type_": chosen.type_, "args": chosen.args, "failing": failing}
    return ModelInterfaceAbstraction("killing", args)


class KillingInterface(ModelInterface):
    """Another interface, and the end of the process after a call, or before a model is saved."""

    def __init__(self, call: str, type_: str, args: dict[str, Any], *, failing: str) -> None:
        kinds = {"ppo_actor": Actor, "ppo_critic": Critic, "sums_verifier": Verifier}
        self._call, self._real = call, kinds[type_](**args)
        self._failing = failing

    def generate(self, model: Model, *args: Any) -> Any:
        """The same, then perhaps the end."""
        found = self._real.generate(model, *args)
        kill(self._call, model.place.rank)
        return found

    def inference(self, model: Model, *args: Any) -> Any:
        """The same, then perhaps the end."""
        found = self._real.inference(model, *args)
        kill(self._call, model.place.rank)
        return found

    def train_step(self, model: Model, *args: Any) -> Any:
        """The same, then perhaps the end."""
        if self._failing == "exit":
            os._exit(3)
        if self._failing == "always" or (self._failing and once(f"{self._failing}:{model.place.rank}")):
            raise ValueError("this is wrong")
        found = self._real.train_step(model, *args)
        kill(self._call, model.place.rank)
        return found

    def evaluate(self, model: Model, *args: Any) -> Any:
        """The same, then perhaps the end."""
        found = self._real.evaluate(model, *args)
        kill("evaluate" if os.environ["ROLE_NAME"] == "model_worker" else "evaluator", model.place.rank)
        return found

    def save(self, model: Model, path: Path) -> None:
        """Perhaps the end, else the same."""
        kill("save", model.place.rank)
        self._real.save(model, path)


_written: list[Path] = []
"""The paths at which this process has written checkpoints."""


class KillingBackend(TrainBackend):
    """A backend that trains, and the end of the process when it has written or read its part of a checkpoint."""

    def save(self, model: Model, path: Path) -> None:
        """The same, then perhaps the end."""
        super().save(model, path)
        _written.append(path)
        kill("checkpoint", model.place.rank)

    def load(self, model: Model, path: Path) -> None:
        """The same, then perhaps the end."""
        super().load(model, path)
        kill("restore", model.place.rank)


class KillingQuestions(Questions):
    """Questions, and the end of the process that reads one."""

    def __getitem__(self, index: int) -> SequenceSample:
        """The same, then perhaps the end."""
        found = super().__getitem__(index)
        rank = int(os.environ["RANK"])
        kill("load", rank)
        if any(Path(path.parent, "recover.json").exists() for path in _written):
            kill("load on", rank)
        after = os.environ.get("LOST_AFTER")
        if after and Path(os.environ["KILLED"], after).exists() and once("lost"):
            raise PeerLost("another worker did not answer", worker="model_worker:9")
        return found


register_dataset("killing", KillingQuestions)
register_backend("killing", KillingBackend)
register_interface("killing", KillingInterface)
register_experiment("killing", Killing)

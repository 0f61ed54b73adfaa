"""PPO on sums, small and short, in which workers kill themselves: each once, where KILL names it.

``KILL=refInf:3:1,save:1:0,evaluator:1:0``: rank 1 of the reference when its process has made its call for the third
time, rank 0 of a model before it is saved for the first time, and the process that evaluates saved models. A file in the directory KILLED says that it was done.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.ppo import PPO, Actor, Critic, Verifier
from msgspec.structs import replace

from unirun.experiments import (
    ExperimentConfig,
    Model,
    ModelInterface,
    ModelInterfaceAbstraction,
    register_experiment,
    register_interface,
)


def kill(where: str, time: int, rank: int) -> None:
    """Die here, if this is where, and it has not happened yet."""
    name = f"{where}:{time}:{rank}"
    if name in os.environ.get("KILL", "").split(",") and once(name):
        os.kill(os.getpid(), signal.SIGKILL)


def once(name: str) -> bool:
    """Whether this is asked for the first time in this trial."""
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
        self._times, self._failing = Counter[str](), failing

    def _kill(self, where: str, model: Model) -> None:
        self._times[where] += 1
        kill(where, self._times[where], model.place.rank)

    def generate(self, model: Model, *args: Any) -> Any:
        """The same, then perhaps the end."""
        found = self._real.generate(model, *args)
        self._kill(self._call, model)
        return found

    def inference(self, model: Model, *args: Any) -> Any:
        """The same, then perhaps the end."""
        found = self._real.inference(model, *args)
        self._kill(self._call, model)
        return found

    def train_step(self, model: Model, *args: Any) -> Any:
        """The same, then perhaps the end."""
        if self._failing == "always" or (self._failing and once(f"{self._failing}:{model.place.rank}")):
            raise ValueError("this is wrong")
        found = self._real.train_step(model, *args)
        self._kill(self._call, model)
        return found

    def evaluate(self, model: Model, *args: Any) -> Any:
        """The same, then perhaps the end."""
        found = self._real.evaluate(model, *args)
        self._kill("evaluate" if os.environ["ROLE_NAME"] == "model_worker" else "evaluator", model)
        return found

    def save(self, model: Model, path: Path) -> None:
        """Perhaps the end, else the same."""
        self._kill("save", model)
        self._real.save(model, path)


register_interface("killing", KillingInterface)
register_experiment("killing", Killing)

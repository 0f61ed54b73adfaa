"""PPO on sums, small and short, in which workers kill themselves: each once, where KILL names it.

``KILL=refInf:3:1,save:1:0``: rank 1 of the reference when its process has made its call for the third time, and rank 0
of a model before it is saved for the first time. A file in the directory KILLED says that it was done.
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
    if name not in os.environ.get("KILL", "").split(","):
        return
    try:
        os.close(os.open(f"{os.environ['KILLED']}/{name}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Killing(PPO):
    """Six steps of a small PPO."""

    samples: int = 48
    batch: int = 8
    epochs: int = 1
    ckpt_freq_steps: int = 2
    failing: bool = False

    def initial_setup(self) -> ExperimentConfig:
        """With interfaces that may die."""
        config = super().initial_setup()
        config.model_rpcs = [
            replace(call, interface_impl=_killing(call.name, call.interface_impl, failing=self.failing))
            for call in config.model_rpcs
        ]
        return config


def _killing(call: str, chosen: ModelInterfaceAbstraction, *, failing: bool) -> ModelInterfaceAbstraction:
    args = {"call": call, "type_": chosen.type_, "args": chosen.args, "failing": failing}
    return ModelInterfaceAbstraction("killing", args)


class KillingInterface(ModelInterface):
    """Another interface, and the end of the process after a call, or before a model is saved."""

    def __init__(self, call: str, type_: str, args: dict[str, Any], *, failing: bool) -> None:
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
        if self._failing:
            raise ValueError("this is wrong")
        found = self._real.train_step(model, *args)
        self._kill(self._call, model)
        return found

    def evaluate(self, model: Model, *args: Any) -> Any:
        """The same, then perhaps the end."""
        found = self._real.evaluate(model, *args)
        self._kill("evaluate", model)
        return found

    def save(self, model: Model, path: Path) -> None:
        """Perhaps the end, else the same."""
        self._kill("save", model)
        self._real.save(model, path)


register_interface("killing", KillingInterface)
register_experiment("killing", Killing)

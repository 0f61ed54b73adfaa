"""An asynchronous experiment on one number, with rollout workers that make trajectories by themselves.

``KILL=PLACE:N:RANK,…`` kills that process when it is at that place for the N-th time, as in ``killing.py``; places are
``put`` (of a rollout worker), ``restore``, ``train`` and ``checkpoint``.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from killing import kill

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
    topology,
)
from unirun.experiments.buffer import trajectories
from unirun.experiments.experiment import Trial, import_modules, resolve, trial_of
from unirun.experiments.starting import job_file, job_mapping
from unirun.roles import BaseWorkload

ACTOR, REF = ModelName("actor"), ModelName("ref")


def trained() -> int:
    """The version of the weights that were trained last."""
    path = Path(os.environ["TRAINED"])
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line)["step"] + 1 for line in lines), default=0)


class Rollouts(BaseWorkload):
    """Puts groups of two sequences, of which each third is without variance, as fast as it may."""

    def setup(self) -> None:
        """Begin, in a thread."""
        trial = trial_of(self.config)
        import_modules(trial.modules, trial.folder)
        self._queue = trajectories(resolve(trial.experiment, trial.overrides).gserver_manager[0])
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        number = 0
        while True:
            with self._queue.admit(timeout=3600):
                number += 1
                same, version = number % 3 == 0, trained()
                data = {
                    "packed_input_ids": [torch.arange(5), torch.arange(5)],
                    "prompt_mask": [torch.arange(5) < 2] * 2,
                    "packed_logprobs": [torch.full((5,), -0.5)] * 2,
                    "versions": [torch.full((5,), version)] * 2,
                    "rewards": [torch.tensor(1.0), torch.tensor(1.0 if same else 0.0)],
                }
                each = f"p{number}:{self.rank}-{os.getpid()}"
                sample = SequenceSample.of({key: [value] for key, value in data.items()}, [each], told=[same])
                self._queue.put(sample, version=version, timeout=3600)
                kill("put", self.rank)


class Rows:
    """Prompts, of which only the number counts."""

    keys = ("packed_prompts",)

    def __init__(self, util: object, *, count: int) -> None:
        self._count, self.fingerprint = count, f"rows {count}"

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> SequenceSample:
        return SequenceSample.of({"packed_prompts": [torch.tensor([index])]}, [str(index)])


class Network(torch.nn.Module):
    """One number, which is the engine, too."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.w = torch.zeros((), dtype=torch.float64)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of it."""
        return {"w": self.w}

    def state(self) -> dict[str, Any]:
        """All of it."""
        return {"w": self.w.clone()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from it."""
        self.w.copy_(state["w"])


class Backend(ModelBackend):
    """The network is its own engine."""

    def initialize(self, model: Model, spec: object) -> Model:
        """Nothing to do."""
        engine: Any = model.module
        model.engine = engine
        return model

    def save(self, model: Model, path: Path) -> None:
        """The same, then perhaps the end."""
        super().save(model, path)
        kill("checkpoint", model.place.rank)

    def load(self, model: Model, path: Path) -> None:
        """The same, then perhaps the end."""
        super().load(model, path)
        kill("restore", model.place.rank)


class Adds(ModelInterface):
    """Adds what it gets to the number, and writes down which trajectories it has got."""

    reductions: ClassVar[Mapping[str, str]] = {"groups": "sum"}

    def accepts(self, trajectories: SequenceSample) -> bool:
        """Not those that are all alike."""
        return bool(trajectories["rewards"].std() > 0)

    def inference(self, model: Model, sample: SequenceSample, spec: MicroBatchSpec) -> SequenceSample:
        """A number for each token."""
        found = {"packed_ref_logprobs": sample["packed_input_ids"].double()}
        return SequenceSample.packed(
            found, {"packed_ref_logprobs": sample.seqlens["packed_input_ids"]}, sample.ids
        )

    def train_step(self, model: Model, sample: SequenceSample, spec: MicroBatchSpec) -> dict[str, float]:
        """One more step."""
        network: Any = model.running()
        assert not any(sample.metadata["told"])
        network.w += sample["packed_ref_logprobs"].sum() / 40
        line = {"step": model.version, "rank": model.place.rank, "ids": sample.ids, "pid": os.getpid()}
        with open(os.environ["TRAINED"], "a") as file:
            file.write(json.dumps(line) + "\n")
        time.sleep(0.02)
        kill("train", model.place.rank)
        return {"groups": float(len(sample)), "w": float(network.w)}


class Agent:
    """It is named in the settings, and `Rollouts` does without."""

    async def run(self, data: Mapping[str, Any], client: object) -> float | None:
        """Not called."""
        raise NotImplementedError


register_agent("stub", Agent)
register_dataset("stub-rows", Rows)
register_model("stub", Network)
register_backend("stub", Backend)
register_interface("stub", Adds)


@dataclass
class Stub(Experiment):
    """The settings of the experiment."""

    steps: int = 8
    batch: int = 4
    eta: int = 1
    rollouts: int = 2

    def scheduling_setup(self) -> ExperimentScheduling:
        """Two model workers."""
        cpu = Scheduling(gpu=0)
        return ExperimentScheduling(TasksGroup(2, cpu), rollout_worker=TasksGroup(self.rollouts, cpu))

    def initial_setup(self) -> ExperimentConfig:
        """Two calls."""
        kind, n, adds = ModelInterfaceType, self.batch, ModelInterfaceAbstraction("stub")
        rows = DatasetAbstraction("stub-rows", {"count": self.batch * self.steps})
        parts = ModelAbstraction("stub"), ModelBackendAbstraction("stub")
        keys = ("packed_input_ids", "rewards", "packed_ref_logprobs")
        return ExperimentConfig(
            exp_ctrl=ExperimentSaveEvalControl(total_train_epochs=1, ckpt_freq_steps=2),
            model_rpcs=[
                MFCDef("refInf", n, kind.INFERENCE, adds, REF, keys[:1], keys[2:]),
                MFCDef("train", n, kind.TRAIN_STEP, adds, ACTOR, keys, log_return_value=True),
            ],
            model_worker=model_workers(
                {ACTOR: Allocation(*parts, topology(data=2)), REF: Allocation(*parts, topology(), 1)}
            ),
            gserver_manager=[GserverManager(ACTOR, 0, "round_robin", self.eta, n, 1, 4 * n)],
            rollout_worker=[
                RolloutWorker(
                    1,
                    ACTOR,
                    "characters",
                    8,
                    60,
                    EnvServiceAbstraction("null"),
                    AgentAbstraction("stub"),
                    [rows],
                )
                for _ in range(self.rollouts)
            ],
        )


register_experiment("stub", Stub)


def main(root: str, run_id: str, *, resume: bool) -> None:
    """Write the job file of a trial whose rollout workers are those of this module."""
    about = Trial("stub", "one", root, ("stub_rollouts",), folder=str(Path(__file__).parent), resume=resume)
    experiment = Stub()
    config = resolve("stub", ())
    mapping = job_mapping(about, config, experiment.scheduling_setup())
    mapping["roles"]["rollout_worker"]["workload"] = "stub_rollouts:Rollouts"
    Path(root).mkdir(parents=True, exist_ok=True)
    with job_file(Path(root), config, mapping, run_id):
        pass


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], resume=sys.argv[3:] == ["resume"])

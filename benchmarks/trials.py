"""Experiments of the suite `experiments`, and their pure parts. Each measurement prints one JSON object.

    python -m benchmarks.trials packing     10 000 sequences over 8 ranks
    python -m benchmarks.trials graph       an experiment of 100 calls and 1 024 shards, checked and resolved
    unirun experiment start -e waiting --module benchmarks.trials apart=true     calls that wait, each on its own worker

`waiting` has uneven calls on their own workers, whose time is spent as that of a device is: the processor waits.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from unirun.experiments import (
    Allocation,
    DatasetAbstraction,
    Experiment,
    ExperimentConfig,
    ExperimentSaveEvalControl,
    ExperimentScheduling,
    MFCDef,
    MicroBatchSpec,
    Model,
    ModelAbstraction,
    ModelBackendAbstraction,
    ModelInterface,
    ModelInterfaceAbstraction,
    ModelInterfaceType,
    ModelName,
    Scheduling,
    SequenceSample,
    TasksGroup,
    model_workers,
    register_experiment,
    register_interface,
    register_tokenizer,
    topology,
)
from unirun.experiments.sample import balanced

SEQUENCES, RANKS = 10_000, 8
CALLS, SHARDS = 100, 1024
NULL = ModelAbstraction("null"), ModelBackendAbstraction("null")

WAITS = {
    "gen": ("actor", 0.06, ("packed_prompts",), ("tokens",)),
    "rew": ("reward", 0.04, ("tokens",), ("rewards",)),
    "ref": ("ref", 0.08, ("tokens",), ("logprobs",)),
    "values": ("critic", 0.12, ("tokens",), ("values",)),
    "train": ("actor", 0.12, ("tokens", "rewards", "logprobs", "values"), ()),
    "teach": ("critic", 0.08, ("tokens", "rewards", "values"), ()),
}
"""The calls of a step: model, seconds, inputs and outputs."""


class Bytes:
    """A token for each character."""

    pad_token_id, eos_token_id = 0, 1

    def encode(self, text: str, /) -> list[int]:
        """Tokens."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int], /) -> str:
        """Text."""
        return bytes(tokens).decode()


class Waiting(ModelInterface):
    """The interface that waits, and makes a number for each sequence."""

    def __init__(self, seconds: float, keys: tuple[str, ...]) -> None:
        self._seconds, self._keys = seconds, keys

    def inference(self, model: Model, sample: SequenceSample, spec: MicroBatchSpec) -> SequenceSample:
        """Make the sample."""
        time.sleep(self._seconds)
        return SequenceSample.of({key: [torch.ones(1)] * len(sample) for key in self._keys}, sample.ids)

    def train_step(self, model: Model, sample: SequenceSample, spec: MicroBatchSpec) -> dict[str, float]:
        """Wait. There are no metrics."""
        time.sleep(self._seconds)
        return {}


@dataclass
class Uneven(Experiment):
    """Each model on its own worker, or all on one."""

    apart: bool = True
    steps: int = 12

    def scheduling_setup(self) -> ExperimentScheduling:
        """A worker for each model, or one."""
        return ExperimentScheduling(
            TasksGroup(4 if self.apart else 1, Scheduling.model_worker_default(gpu=0))
        )

    def initial_setup(self) -> ExperimentConfig:
        """Four models, six calls."""
        calls = []
        for name, (model, seconds, needs, makes) in WAITS.items():
            interface = ModelInterfaceAbstraction("waiting", {"seconds": seconds, "keys": makes})
            kind = ModelInterfaceType.INFERENCE if makes else ModelInterfaceType.TRAIN_STEP
            calls.append(MFCDef(name, 8, kind, interface, ModelName(model), needs, makes))
        models = dict.fromkeys(model for model, *_ in WAITS.values())
        return ExperimentConfig(
            ExperimentSaveEvalControl(benchmark_steps=self.steps),
            calls,
            model_workers(
                {
                    ModelName(model): Allocation(*NULL, topology(), at if self.apart else 0)
                    for at, model in enumerate(models)
                },
                tokenizer="bytes",
                datasets=[DatasetAbstraction("prompt", {"rows": [{"prompt": "abc"}] * 8 * self.steps})],
            ),
        )


register_tokenizer("bytes", Bytes)
register_interface("waiting", Waiting)
register_experiment("waiting", Uneven)


def packing() -> dict[str, float]:
    """The evenness and speed of packing: lengths are spread as those of answers are, most of them short."""
    chance = random.Random(0)
    sizes = [1 + int(chance.lognormvariate(5.5, 1.0)) for _ in range(SEQUENCES)]
    began = time.perf_counter()
    parts = balanced(sizes, RANKS)
    milliseconds = 1e3 * (time.perf_counter() - began)
    largest = max(sum(sizes[index] for index in part) for part in parts)
    return {"ms": milliseconds, "imbalance": largest * RANKS / sum(sizes)}


def graph() -> dict[str, float]:
    """Seconds of `lazy_init`."""
    models = [ModelName(f"model{number}") for number in range(16)]
    layout = topology(data=8, tensor=4, pipe=2)
    calls = []
    for number in range(CALLS):
        needs = tuple(f"key{other}" for other in (number - 1, number - 7) if other >= 0) or (
            "packed_prompts",
        )
        interface = ModelInterfaceAbstraction("waiting", {"seconds": 0.0, "keys": ()})
        calls.append(
            MFCDef(
                f"call{number}",
                512,
                ModelInterfaceType.INFERENCE,
                interface,
                models[number % len(models)],
                needs,
                (f"key{number}",),
            )
        )
    if len(models) * layout.world_size() != SHARDS:
        raise AssertionError("the experiment has another number of shards")
    config = ExperimentConfig(
        ExperimentSaveEvalControl(),
        calls,
        model_workers(
            {name: Allocation(*NULL, layout, 64 * (at // 4)) for at, name in enumerate(models)},
            datasets=[DatasetAbstraction("prompt", {"rows": [{"prompt": "abc"}]})],
        ),
    )
    began = time.perf_counter()
    resolved = config.lazy_init()
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "pairs": float(len(resolved.data_transfer_pairs))}


def main(what: str) -> None:
    """Measure, and print."""
    ways: dict[str, Callable[[], dict[str, float]]] = {"packing": packing, "graph": graph}
    print(json.dumps(ways[what]()))


if __name__ == "__main__":
    main(sys.argv[1])

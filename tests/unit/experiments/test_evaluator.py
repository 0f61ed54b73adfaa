"""The figures of a saved model are those that the master makes of the same interface."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from omegaconf import OmegaConf
from safetensors.torch import save_file

from unirun.experiments.config import register_interface
from unirun.experiments.graph import ModelInterfaceAbstraction
from unirun.experiments.model_worker import EvaluatorProcess
from unirun.experiments.sample import SequenceSample

from .sample_configs import ACTOR, TRAIN, call

FIGURES = {"right": 6.0, "largest": 3.0, "count": 4.0}


class Bare:
    """An interface that is not derived from `ModelInterface`."""

    def evaluate(self, model: Any, sample: SequenceSample) -> dict[str, float]:
        """Sums, and the largest value."""
        return FIGURES


class Largest(Bare):
    """An interface that names reductions."""

    reductions = {"largest": "max"}  # noqa: RUF012


register_interface("tests-bare", Bare)
register_interface("tests-largest", Largest)


class Prepared(EvaluatorProcess):
    """An evaluator whose model is made and whose data is read."""

    def __init__(self, kind: str, interface: Any) -> None:
        handle: Any = None
        super().__init__(handle, OmegaConf.create({}))
        made = call("train", ["prompt"], model=ACTOR, kind=TRAIN)
        self._call = replace(made, interface_impl=ModelInterfaceAbstraction(kind))
        model: Any = SimpleNamespace(running=lambda: SimpleNamespace(tensors=dict[str, torch.Tensor]))
        self._model, self._interface = model, interface
        self._sample = SequenceSample.of({"prompt": [torch.tensor([1])]}, ["0"])


@pytest.mark.parametrize(
    ("kind", "interface", "largest"), [("tests-bare", Bare(), 0.75), ("tests-largest", Largest(), 3.0)]
)
def test_an_interface_need_not_say_how_its_figures_become_one(
    kind: str, interface: Any, largest: float, tmp_path: Path
) -> None:
    save_file({}, tmp_path / "model.safetensors")
    assert Prepared(kind, interface).evaluate(str(tmp_path)) == {"right": 1.5, "largest": largest}

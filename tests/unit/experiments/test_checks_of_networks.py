"""Networks that cannot have their layout are refused before a trial starts, and those that can are tried once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.experiments.models.test_stage import CONFIG
from unirun.errors import Fault
from unirun.experiments.checks import network_faults
from unirun.experiments.config import (
    Allocation,
    ExperimentSaveEvalControl,
    ModelAbstraction,
    ModelBackendAbstraction,
    model_workers,
)
from unirun.experiments.experiment import ExperimentConfig
from unirun.experiments.graph import ProcessTopology, topology

from .sample_configs import ACTOR, CRITIC


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path))
    return tmp_path / "networks"


def config(layout: ProcessTopology | None = None, **models: dict[str, Any]) -> ExperimentConfig:
    ddp, layout = ModelBackendAbstraction("ddp"), layout or topology(tensor=2)
    names = {"actor": ACTOR, "critic": CRITIC}
    workers = model_workers(
        {
            names[role]: Allocation(ModelAbstraction("causal_lm", arguments), ddp, layout)
            for role, arguments in models.items()
        }
    )
    return ExperimentConfig(exp_ctrl=ExperimentSaveEvalControl(), model_worker=workers, model_rpcs=[])


def refused(config: ExperimentConfig) -> list[Fault]:
    """The faults for which networks are refused that can all be read here."""
    found, absent = network_faults(config)
    assert not absent
    return found


def test_a_network_whose_files_are_not_here_is_not_one_that_is_wrong(tmp_path: Path) -> None:
    elsewhere, wrong = {"path": f"{tmp_path}/elsewhere"}, {"config": {"model_type": "nothing"}}
    found, absent = network_faults(config(actor=elsewhere, critic=wrong))
    assert [fault.where for fault in found] == ["models.critic@0"]
    assert [fault.where for fault in absent] == ["models.actor@0"]


def test_all_networks_that_cannot_have_their_layout_are_told(home: Path) -> None:
    gpt2, phi3 = {"model_type": "gpt2"}, {**CONFIG, "model_type": "phi3", "pad_token_id": 0}
    found = [str(fault) for fault in refused(config(actor={"config": gpt2}, critic={"config": phi3}))]
    assert len(found) == 2
    assert found[0].startswith("models.actor@0: the family gpt2 cannot run: GPT2LMHeadModel is not built")
    assert found[1].startswith("models.critic@0: the family phi3 cannot run with tensor=2: ")
    assert not home.exists()


def test_sizes_that_a_layout_does_not_divide_are_told() -> None:
    (fault,) = refused(config(actor={"config": {**CONFIG, "num_key_value_heads": 1}}))
    assert "it has 1 key-value heads, and tensor is 2" in str(fault)


def test_a_network_that_was_right_is_noted(home: Path) -> None:
    one = config(actor={"config": CONFIG})
    assert not refused(one)
    (note,) = home.iterdir()
    assert not refused(one)
    assert not refused(config(actor={"config": {**CONFIG, "rms_norm_eps": 1e-5}}))
    assert len([*home.iterdir()]) == 2
    assert note.exists()


def test_a_network_that_was_right_in_one_layout_or_as_one_kind_is_tried_in_another(home: Path) -> None:
    arguments: dict[str, Any] = {"config": {**CONFIG, "num_key_value_heads": 1}}
    assert not refused(config(topology(data=2), actor=arguments))
    assert not refused(config(topology(data=4), actor=arguments))
    assert len([*home.iterdir()]) == 1
    (fault,) = refused(config(topology(tensor=2), actor=arguments))
    assert "tensor is 2" in str(fault)
    assert not refused(config(topology(pipe=2), actor=arguments))
    assert not refused(config(topology(), actor={**arguments, "critic": True}))
    assert len([*home.iterdir()]) == 3

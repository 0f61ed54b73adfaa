"""An experiment as text and as a picture."""

from __future__ import annotations

import json
import math
from xml.etree import ElementTree

import pytest

from tests.unit.experiments.sample_configs import ACTOR, TRAIN, at, call, config_of, ppo, realloc
from unirun.experiments.experiment import ExperimentConfig
from unirun.experiments.graph import ModelName, OffloadHook, topology
from unirun.experiments.starting import picture, plain, show


@pytest.fixture
def config() -> ExperimentConfig:
    found = ppo(separate=True)
    found.lazy_init()
    return found


def test_the_configuration_is_json_of_which_nothing_is_left_out(config: ExperimentConfig) -> None:
    found, _ = json.JSONDecoder().raw_decode(show(config))
    assert [each["name"] for each in found["model_rpcs"]] == [each.name for each in config.model_rpcs]
    assert len(found["model_worker"]) == 8
    assert found["exp_ctrl"]["total_train_epochs"] == 1
    shard = found["model_worker"][4]["shards"][0]
    assert shard["id"] == {
        "model_name": "actor@1",
        "topo": {"pipe": 1, "data": 2, "tensor": 1},
        "parallelism_rank": 0,
    }
    assert shard["should_instantiate"] is False
    assert "resolved" not in found


def test_a_setting_that_is_not_finite_is_text_as_json_has_no_such_number() -> None:
    assert json.dumps(plain({"clip": math.inf, "lr": 0.5}), allow_nan=False) == '{"clip": "inf", "lr": 0.5}'


def test_after_it_the_placement_the_calls_and_the_data_are_for_people(config: ExperimentConfig) -> None:
    text = show(config)
    _, end = json.JSONDecoder().raw_decode(text)
    assert text[end:].splitlines() == [
        "",
        "",
        "models:",
        "  actor@0          pipe 1 × data 2 × tensor 2       workers 0, 1, 2, 3",
        "  actor@1          pipe 1 × data 2 × tensor 1       workers 4, 5",
        "  critic@0         pipe 2 × data 1 × tensor 1       workers 4, 5",
        "  ref@0            pipe 1 × data 1 × tensor 1       workers 6",
        "  reward@0         pipe 1 × data 1 × tensor 1       workers 7",
        "calls, those of one line at the same time where their workers differ:",
        "  1. actorGen (actor@1)",
        "  2. rewInf (reward@0), refInf (ref@0)",
        "  3. criticInf (critic@0)",
        "  4. actorTrain (actor@0), criticTrain (critic@0)",
        "data:",
        "  actorGen -> rewInf: tokens, mask",
        "  actorGen -> refInf: tokens",
        "  actorGen -> criticInf: tokens, mask, logprobs",
        "  refInf -> criticInf: ref_logprobs",
        "  rewInf -> criticInf: rewards",
        "  actorGen -> actorTrain: tokens, mask, logprobs",
        "  criticInf -> actorTrain: advantages",
        "  actorGen -> criticTrain: tokens, mask",
        "  criticInf -> criticTrain: returns",
        "parameters:",
        "  actor@0 -> actor@1",
    ]


def test_the_picture_has_all_calls_with_their_models(config: ExperimentConfig) -> None:
    assert config.resolved is not None
    root = ElementTree.fromstring(picture(config.resolved))
    assert root.tag.endswith("svg")
    text = "\n".join(root.itertext())
    for name, each in config.resolved.graph.calls.items():
        assert f"{name} ({each.model_name})" in text


def test_a_single_call_has_a_picture_too() -> None:
    config = config_of([call("train", ["prompt"], kind=TRAIN)], {ACTOR: at()})
    assert "train (actor@0)" in picture(config.lazy_init())


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (ModelName("actor", 1), "actor@1"),
        (topology(data=2, order=("data", "pipe", "tensor")), {"data": 2, "pipe": 1, "tensor": 1}),
        (realloc(ACTOR, 0.5), {"source": "actor@0", "target": None, "eta": 0.5}),
        (OffloadHook(), {}),
        (call("a").interface_type, "inference"),
        ({ACTOR: (1, 2.5, None, True)}, {"actor@0": [1, 2.5, None, True]}),
        pytest.param(frozenset({"c", "a", "b"}), ["a", "b", "c"], id="a frozen set"),
        pytest.param({2, "x", None}, ["x", 2, None], id="a set"),
    ],
    ids=str,
)
def test_values_are_shown_as_json_has_them(value: object, shown: object) -> None:
    assert plain(value) == shown
    json.dumps(shown)

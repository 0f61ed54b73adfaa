"""Arguments of what is registered, and files that a trial needs, are checked before anything starts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.experiments.checks import file_faults, length_warnings
from unirun.experiments.config import (
    Allocation,
    AutomaticEvaluator,
    DatasetAbstraction,
    ExperimentSaveEvalControl,
    ModelAbstraction,
    ModelBackendAbstraction,
    model_workers,
    register_dataset,
    register_interface,
)
from unirun.experiments.datasets import DatasetUtility, PromptDataset, register_tokenizer
from unirun.experiments.experiment import ExperimentConfig
from unirun.experiments.graph import MFCDef, ModelInterfaceAbstraction, ModelInterfaceType, topology
from unirun.experiments.models.api import GenerationConfig, ModelInterface

from .sample_configs import ACTOR, GENERATE, TRAIN, config_with, faults_of, texts_of

ROWS = [{"prompt": "a"}] * 3
LLAMA = {"config": {"model_type": "llama", "max_position_embeddings": 64}}


class Clipping(ModelInterface):
    """An interface with arguments."""

    def __init__(self, clip: float, how: Any = None, max_new_tokens: int = 0) -> None: ...

    def train_step(self, *args: Any) -> dict[str, float]:
        """Nothing."""
        return {}

    def generate(self, *args: Any) -> None:
        """Nothing."""


class Sums(PromptDataset):
    """A dataset with rows of its own."""

    def __init__(self, util: DatasetUtility, *, count: int) -> None:
        super().__init__(util, rows=[{"prompt": str(number)} for number in range(count)])


register_interface("tests-clipping", Clipping)
register_dataset("tests-sums", Sums)
register_tokenizer("tests-tokenizer", object)


def of(
    *,
    interface: dict[str, Any] | None = None,
    backend: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    dataset: dict[str, Any] | None = None,
    held_out: dict[str, Any] | None = None,
    kind: ModelInterfaceType = TRAIN,
    tokenizer: str = "tests-tokenizer",
    data: int = 1,
) -> ExperimentConfig:
    """One call of one model, with these arguments."""
    made = ModelInterfaceAbstraction("tests-clipping", {"clip": 0.2} if interface is None else interface)
    call = MFCDef("train", 8, kind, made, ACTOR, ("packed_prompts",))
    place = Allocation(
        ModelAbstraction("causal_lm", model or LLAMA),
        ModelBackendAbstraction("ddp", backend or {}),
        topology(data=data),
        eval_dataset=None if held_out is None else DatasetAbstraction("prompt", held_out),
    )
    source = DatasetAbstraction("prompt", {"rows": ROWS} if dataset is None else dataset)
    return config_with([call], model_workers({ACTOR: place}, tokenizer=tokenizer, datasets=[source]))


def only(config: ExperimentConfig) -> str:
    (fault,) = texts_of(faults_of(config))
    return fault


def files(config: ExperimentConfig) -> list[str]:
    return texts_of(file_faults(config))


def warnings(config: ExperimentConfig) -> list[str]:
    return texts_of(length_warnings(config))


class TestArguments:
    def test_all_that_is_taken_is_right(self) -> None:
        assert faults_of(of(held_out={"rows": ROWS, "max_length": 3})) == ()

    @pytest.mark.parametrize(
        ("config", "told"),
        [
            (
                of(interface={}),
                "model_rpcs.train: interface 'tests-clipping' cannot be made with these arguments: missing a required "
                "argument: 'clip'",
            ),
            (
                of(interface={"clip": 0.1, "klip": 1}),
                "model_rpcs.train: .* unexpected keyword argument 'klip'",
            ),
            (of(backend={"learning_rate": 0.1}), "models.actor@0: backend 'ddp' .* 'learning_rate'"),
            (of(backend={"optimizer": "adamw"}), "models.actor@0: backend 'ddp': optimizer 'adamw'"),
            (of(backend={"warmup": 2.0}), "models.actor@0: backend 'ddp': clip=1.0, warmup=2.0, updates=1"),
            (of(backend={"lr": "high", "clip": "x"}), "models.actor@0: backend 'ddp': .*"),
            (of(backend={"lr": -1.0}), "models.actor@0: backend 'ddp': Invalid learning rate: -1.0"),
            (of(backend={"options": {"beta": 1}}), "models.actor@0: backend 'ddp': .*'beta'"),
            (of(model={"layers": 3}), "models.actor@0: model 'causal_lm' .* 'layers'"),
            (of(dataset={"rows": ROWS, "maximum": 3}), "datasets.0: dataset 'prompt' .* 'maximum'"),
            (of(held_out={"file": "x"}), "models.actor@0.eval_dataset: dataset 'prompt' .* 'file'"),
        ],
    )
    def test_what_is_not_taken_or_is_missing_is_told(self, config: ExperimentConfig, told: str) -> None:
        assert re.fullmatch(told, only(config)), only(config)

    def test_the_arguments_that_there_are_are_told(self) -> None:
        (fault,) = faults_of(of(dataset={"rows": ROWS, "maximum": 3}))
        assert fault.remedy == "it takes: max_length, path, hugging_face, split, rows"

    def test_datasets_of_text_need_a_tokenizer(self) -> None:
        problem = "dataset 'prompt' makes tokens of text, and there is no tokenizer_name_or_path"
        found = texts_of(faults_of(of(tokenizer="", held_out={"rows": ROWS})))
        assert found == [f"{where}: {problem}" for where in ("datasets.0", "models.actor@0.eval_dataset")]

    def test_the_dataset_of_the_evaluator_is_checked_too(self) -> None:
        config = of()
        config.auto_eval, config.exp_ctrl = True, ExperimentSaveEvalControl(save_freq_steps=1)
        config.evaluator = AutomaticEvaluator(DatasetAbstraction("prompt", {"wrong": 1}))
        assert only(config).startswith("evaluator.dataset: dataset 'prompt' cannot be made")

    @pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), "7200", True])
    def test_the_timeout_of_calls_is_a_number_of_seconds(self, value: Any) -> None:
        config = of()
        config.call_timeout = value
        assert only(config) == f"call_timeout: {value!r} is not a number of seconds above 0"


class TestFiles:
    def test_without_any_all_is_right(self) -> None:
        assert files(of(tokenizer="org/name", held_out={"rows": ROWS}, data=3)) == []

    def test_all_that_are_absent_are_told_at_once(self, tmp_path: Path) -> None:
        config = of(
            tokenizer=f"{tmp_path}/tokenizer",
            model={"path": f"{tmp_path}/model", "weights": f"{tmp_path}/model.pt"},
            dataset={"path": f"{tmp_path}/train.jsonl"},
            held_out={"path": str(tmp_path)},
        )
        assert files(config) == [
            f"tokenizer_name_or_path: there is no {tmp_path}/tokenizer",
            f"datasets.0: {tmp_path}/train.jsonl cannot be read: no such file or directory",
            f"models.actor@0.eval_dataset: {tmp_path} cannot be read: is a directory",
            f"models.actor@0: there is no {tmp_path}/model",
            f"models.actor@0: {tmp_path}/model.pt cannot be read: no such file or directory",
        ]

    @pytest.mark.parametrize(
        ("dataset", "told"), [({}, "none"), ({"path": "x", "rows": ROWS}, "path and rows")]
    )
    def test_rows_come_from_one_source(self, dataset: dict[str, Any], told: str) -> None:
        assert files(of(dataset=dataset)) == [f"datasets.0: it has {told} of path, hugging_face and rows"]

    def test_a_dataset_that_makes_its_rows_itself_needs_no_source(self) -> None:
        config = of()
        config.model_worker[0].datasets = [DatasetAbstraction("tests-sums", {"count": 3})]
        assert faults_of(config) == ()
        assert files(config) == []

    def test_held_out_data_has_a_sample_for_each_data_parallel_rank(self, tmp_path: Path) -> None:
        told = "models.actor@0.eval_dataset: it has 3 samples, and the model has 4 data-parallel ranks"
        assert files(of(held_out={"rows": ROWS}, data=4)) == [told]
        path = tmp_path / "held_out.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n\n" for row in ROWS))
        assert files(of(held_out={"path": str(path)}, data=4)) == [told]
        assert files(of(held_out={"path": str(path)}, data=3)) == []


class TestLengths:
    @pytest.mark.parametrize(
        "interface",
        [
            {"max_new_tokens": 32},
            {"how": {"max_new_tokens": 32}},
            {"how": GenerationConfig(max_new_tokens=32)},
        ],
    )
    def test_prompts_and_new_tokens_fit_into_the_positions(self, interface: dict[str, Any]) -> None:
        def config(length: int) -> ExperimentConfig:
            return of(
                kind=GENERATE,
                interface={"clip": 0.2, **interface},
                dataset={"rows": ROWS, "max_length": length},
            )

        assert warnings(config(32)) == []
        assert warnings(config(33)) == [
            "model_rpcs.train: sequences may have 33 tokens (max_length) and 32 new ones (max_new_tokens), "
            "and actor@0 has 64 positions"
        ]
        # Prompts may be shorter.
        assert files(config(33)) == []

    def test_more_new_tokens_than_positions_are_refused_whatever_the_prompt(self) -> None:
        config = of(kind=GENERATE, interface={"clip": 0.2, "max_new_tokens": 65})
        assert files(config) == [
            "model_rpcs.train: it makes up to 65 new tokens (max_new_tokens), and actor@0 has 64 positions"
        ]
        assert warnings(config) == []

    @given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 9))
    def test_a_call_is_refused_for_new_tokens_alone_and_warned_of_for_all(
        self, prompt: int, new: int, positions: int
    ) -> None:
        config = of(
            kind=GENERATE,
            model={"config": {"max_position_embeddings": positions}},
            interface={"clip": 0.2, "max_new_tokens": new},
            dataset={"rows": ROWS, "max_length": prompt},
        )
        assert len(files(config)) == (new > positions)
        assert len(warnings(config)) == (new <= positions < prompt + new)

    def test_sequences_that_are_trained_on_fit_too(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 16}))
        config = of(model={"path": str(tmp_path)}, dataset={"rows": ROWS, "max_length": 17})
        assert files(config) == []
        assert warnings(config) == [
            "model_rpcs.train: sequences may have 17 tokens (max_length), and actor@0 has 16 positions"
        ]

    def test_held_out_data_is_for_its_own_model(self) -> None:
        long = {"rows": ROWS, "max_length": 65}
        told = "model_rpcs.train: sequences may have 65 tokens (max_length), and actor@0 has 64 positions"
        assert warnings(of(held_out=long)) == [told]
        # A call that does not train is not evaluated.
        assert warnings(of(held_out=long, kind=GENERATE)) == []
        config = of()
        config.auto_eval = True
        config.evaluator = AutomaticEvaluator(DatasetAbstraction("prompt", long))
        assert warnings(config) == [told]
        config.evaluator = AutomaticEvaluator(DatasetAbstraction("prompt", long), role="critic")
        assert warnings(config) == []

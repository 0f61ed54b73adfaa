"""The programs and rules of ReaLHF's user guide run here: the command on this host, the rest in this process.

The guide's own example, ``experiments/packed_dpo_exp.py``, is not in it: a small one with its names stands in its place.
Not here: flash attention and DeepSpeed, which the models and backends of the guide are made of.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from unirun.errors import UsageError
from unirun.experiments import (
    DatasetUtility,
    Experiment,
    Model,
    ModelBackend,
    ModelInterface,
    NamedArray,
    PromptAnswerDataset,
    SequenceSample,
    register_dataset,
)
from unirun.experiments.config import BACKENDS, DATASETS, MODELS
from unirun.experiments.experiment import check_names

from ..harness import Unirun
from .programs import Differs, ours, run

COMMAND = "python3 -m apps.main start -e flash-dpo-s1 -f test20231020 --mode slurm"

OURS = (
    Differs("python3 -m apps.main", f"{sys.executable} -m unirun.experiments", "the package has the command"),
    Differs("--mode slurm", "--mode local", "there is no Slurm here; test_slurm.py starts trials there"),
)

PACKAGE = "from experiments import packed_dpo_exp\n"
"""``experiments/__init__.py`` imports the file, as the guide says."""

EXPERIMENT = '''
from dataclasses import dataclass

from torch.nn.functional import logsigmoid

from unirun.experiments import *


class Letters:
    pad_token_id, eos_token_id = 0, 1

    def encode(self, text):
        return [ord(each) - ord("a") + 2 for each in text]


class DPO(ModelInterface):
    """Better answers get likelier than worse ones."""

    def train_step(self, model, data, spec):
        return model.running().train_batch(data, "packed_input_ids", spec, loss, pairs)


def loss(logits, data):
    chances = []
    for out, tokens in zip(
        logits.split(data.lengths("packed_input_ids")), data.sequences("packed_input_ids"), strict=True
    ):
        chances.append(out[:-1].log_softmax(-1).gather(-1, tokens[1:, None]).sum())
    gains = [better - worse for better, worse in zip(chances[::2], chances[1::2], strict=True)]
    return -sum(logsigmoid(gain) for gain in gains), {"right": float(sum(gain > 0 for gain in gains))}


def pairs(data):
    return float(len(data.lengths("packed_input_ids")) // 2)


@dataclass
class PackedDPO(Experiment):
    seed: int = 1

    def scheduling_setup(self):
        return ExperimentScheduling(
            master_worker=TasksGroup(count=1, scheduling=Scheduling.master_worker_default()),
            model_worker=TasksGroup(count=1, scheduling=Scheduling.model_worker_default(gpu=0)),
        )

    def initial_setup(self):
        network = {"model_type": "llama", "vocab_size": 28, "hidden_size": 32, "intermediate_size": 64}
        network |= {"num_hidden_layers": 1, "num_attention_heads": 4, "tie_word_embeddings": False}
        topo = topology()
        shard = StandaloneModelShardAbstraction(
            id=ModelShardID.from_parallelism_rank(ModelName("default", 0), topo, 0),
            model=ModelAbstraction("causal_lm", args=dict(config=network)),
            backend=ModelBackendAbstraction("ddp", args=dict(lr=1e-2)),
        )
        dpo = MFCDef(
            name="dpo",
            n_seqs=2,
            interface_type=ModelInterfaceType.TRAIN_STEP,
            interface_impl=ModelInterfaceAbstraction("dpo"),
            model_name="default",
            input_keys=("packed_input_ids", "prompt_lens"),
        )
        return ExperimentConfig(
            exp_ctrl=ExperimentSaveEvalControl(total_train_epochs=2),
            model_rpcs=[dpo],
            model_worker=[
                ModelWorker(
                    base_seed=self.seed,
                    shards=[shard],
                    tokenizer_name_or_path="letters",
                    datasets=[DatasetAbstraction("rw_pair", args=dict(path="pairs.json"))],
                )
            ],
        )


register_tokenizer("letters", Letters)
register_interface("dpo", DPO)
for s in [*range(1, 6), 42]:
    register_experiment(f"flash-dpo-s{s}", lambda s=s: PackedDPO(seed=s))
'''

ROWS = [
    {"prompt": "to", "pos_answers": ["rch"], "neg_answers": ["day"]},
    {"prompt": "ra", "pos_answers": ["nk", "nks"], "neg_answers": ["in", "y"]},
]
"""The guide's format: a text, a list of texts, and a list of texts of the same length."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A working directory with the package ``experiments`` and a dataset in a ``.json`` file."""
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "__init__.py").write_text(PACKAGE)
    (tmp_path / "experiments" / "packed_dpo_exp.py").write_text(EXPERIMENT)
    (tmp_path / "pairs.json").write_text(json.dumps(ROWS))
    return tmp_path


@pytest.mark.usefixtures("warm_models")
@pytest.mark.timeout(300)
def test_the_command_runs_a_registered_experiment(unirun: Unirun, project: Path) -> None:
    line = shlex.split(ours(COMMAND, *OURS))
    end = unirun.start_program(line, cwd=project).end(within=240)
    assert end.code == 0, end.err
    trial = unirun.home / "experiments" / "flash-dpo-s1" / "test20231020"
    steps = [json.loads(each) for each in (trial / "steps.jsonl").read_text().splitlines()]
    assert [each["step"] for each in steps] == [1, 2]
    assert all(each["dpo/loss"] > 0 for each in steps)


class TestTrialNames:
    def test_any_string_without_an_underscore(self) -> None:
        for name in ("test20231020", "lr 1e-4", "β=0.1,seed=2", "a+b"):
            check_names("flash-dpo-s1", name)

    def test_what_differs(self) -> None:
        """A name is that of a directory; one with ``_`` may be, so it is allowed."""
        check_names("flash-dpo-s1", "my_trial")
        for name in ("a/b", "-x", ".hidden", "a\nb", ""):
            with pytest.raises(UsageError, match="is no name for a trial; use printable characters"):
                check_names("flash-dpo-s1", name)


def test_the_two_methods_of_a_configuration() -> None:
    for method in (Experiment.scheduling_setup, Experiment.initial_setup):
        with pytest.raises(NotImplementedError, match="Experiment must define"):
            method(Experiment())


def test_names_that_differ() -> None:
    """``packed_rw_pair`` is rw_pair, ``flash_mqat_clm_hf`` causal_lm, ``ds_train`` ddp or fsdp2: no name says how an
    implementation works. An unknown one is told with all that there are."""
    for registry, theirs, here in (
        (DATASETS, "packed_rw_pair", "rw_pair"),
        (MODELS, "flash_mqat_clm_hf", "causal_lm"),
        (BACKENDS, "ds_train", "fsdp2"),
    ):
        with pytest.raises(UsageError, match=here):
            registry.find(theirs)


class Letters:
    """A token for each letter."""

    pad_token_id, eos_token_id = 0, 1

    def encode(self, text: str) -> list[int]:
        """Tokens from 2 on."""
        return [ord(each) - ord("a") + 2 for each in text]


class TestDatasets:
    def test_a_dataset_gets_a_utility(self) -> None:
        util = DatasetUtility(tokenizer=Letters(), seed=1)
        # What differs: each worker has all samples, and the master says which a rank reads.
        assert (util.dp_rank, util.world_size) == (0, 1)
        dataset = PromptAnswerDataset(util, rows=[{"prompt": "to", "answer": "rch"}])
        assert len(dataset) == 1
        assert dataset[0]["packed_input_ids"].tolist() == [21, 16, 19, 4, 9, 1]

    def test_an_iterable_dataset_is_refused_with_what_is_in_its_place(self) -> None:
        class Dynamic(IterableDataset[Any]):
            keys = ("packed_input_ids",)

        with pytest.raises(
            UsageError, match="n_seqs is the size of a batch, and mb_spec splits it by tokens"
        ):
            register_dataset("dynamic", Dynamic)


LOADER = """
for data in dataloder:
    data: Dict[torch.Tensor]
    # {"input_ids": torch.IntegerTensor[Size(batch_size, seq_len)],
    #  "attention_mask" torch.BoolTensor[Size(batch_size, seq_len)]}
    ...
"""


def test_a_loader_gives_named_tensors() -> None:
    rows = [{"prompt": "to", "answer": answer} for answer in ("rch", "y", "go")]
    dataset: Any = PromptAnswerDataset(DatasetUtility(Letters()), rows=rows)
    loader = DataLoader(dataset, batch_size=3, collate_fn=SequenceSample.gather)
    found = run(LOADER, {"dataloder": loader, "Dict": dict[str, Any], "torch": torch}, NO_ANNOTATION)
    assert isinstance(found["data"].data, Mapping)
    # What differs: sequences are not padded to one length, so there is no mask of what is padding.
    assert found["data"].lengths("packed_input_ids") == [6, 4, 5]


NO_ANNOTATION = Differs("Dict[torch.Tensor]", "Dict", "Dict has two parameters")


class TestNamedArray:
    def test_it_has_arrays_of_different_shapes_by_name(self) -> None:
        array = NamedArray.from_dict({"tokens": np.zeros((4, 3), np.int64), "reward": np.ones(4)})
        assert array["tokens"].shape == (4, 3)
        assert array.reward.shape == (4,)

    def test_they_can_be_nested_and_an_index_slices_all(self) -> None:
        array = NamedArray.from_dict({"obs": {"image": np.zeros((4, 2))}, "reward": np.ones(4)})
        assert array[1:3].obs.image.shape == (2, 2)
        assert array[1:3].reward.shape == (2,)


def test_a_model_has_a_network_a_tokenizer_a_device_and_a_version() -> None:
    assert {"module", "tokenizer", "device", "version"} <= {*Model.__dataclass_fields__, *vars(Model)}


def test_an_interface_has_five_methods() -> None:
    """They get a `SequenceSample` instead of a `NamedArray`, and a `MicroBatchSpec`: `test_checks_of_calls.py` has the
    error for one that takes other arguments."""
    for name in ("save", "evaluate", "inference", "generate", "train_step"):
        assert callable(getattr(ModelInterface, name))


def test_a_backend_initializes_models() -> None:
    with pytest.raises(NotImplementedError):
        ModelBackend().initialize(None, None)  # type: ignore[arg-type]

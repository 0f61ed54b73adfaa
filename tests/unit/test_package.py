"""The package itself: its names, and the command."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import unirun
from tests.documents import ROOT
from tests.waiting import WAIT_TIMEOUT


def test_dir_of_unirun_lists_names_before_they_are_imported() -> None:
    assert {*unirun.__all__, "__all__"} <= {*dir(unirun)}


@pytest.mark.starts_processes
def test_python_m_unirun_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "unirun", "--version"],
        capture_output=True,
        text=True,
        timeout=WAIT_TIMEOUT,
        check=False,
    )
    assert (done.returncode, done.stdout[:7], done.stderr) == (0, "unirun ", "")


NEED_TORCH = {
    "unirun": ("Admission", "Item", "LocalShard", "Queue", "WeightsChannel"),
    "unirun.train": (
        *("Loader", "Shard", "accelerate", "backward", "device", "enable_reproducibility", "kfold"),
        *("prepare_data_loader", "prepare_model", "prepare_optimizer", "to_cv", "unwrap"),
    ),
    "unirun.rollout": (),
    "unirun.experiments": (
        *("BundledGenerationOutputs", "CollectingAgent", "DatasetUtility", "FinetuneSpec", "Generated"),
        *("GenerationConfig", "Model", "ModelBackend", "ModelInterface", "NamedArray", "PairedDataset"),
        *("PipelinableEngine", "Place", "PromptAnswerDataset", "PromptDataset", "RolloutAgent"),
        *("SequenceSample", "register_tokenizer"),
    ),
}
"""The public names whose modules import torch: what they name is made of tensors, or moves them."""

PROGRAM = """
import importlib, json, sys
for package, needing in json.loads(sys.argv[1]).items():
    for name in sorted({*importlib.import_module(package).__all__} - {*needing}):
        getattr(importlib.import_module(package), name)
        if "torch" in sys.modules:
            sys.exit(f"{package}.{name} imports torch")

from unirun import BaseTrainer, BaseWorkload, DLJobBuilder, trainer_invocation
from unirun.train import Trainer

class Actor(BaseWorkload):
    @trainer_invocation(target="RANK0")
    def update(self): ...

class Loop(BaseTrainer):
    def fit(self):
        self.RG_ACTOR.update()

builder = DLJobBuilder().dl_type("RL").node_num(1).device_per_node(2).config({"lr": 0.1}).trainer("program", "Loop")
builder.workload("actor", "program", "Actor").total(2).per_node(2)
builder.build()
Trainer(num_workers=2)
if "torch" in sys.modules:
    sys.exit("the description of a job imports torch")
"""


@pytest.mark.starts_processes
def test_a_program_that_only_describes_a_job_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "program.py", json.dumps(NEED_TORCH)],
        capture_output=True,
        text=True,
        timeout=WAIT_TIMEOUT,
        check=False,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("package", NEED_TORCH)
def test_names_that_need_torch_are_public(package: str) -> None:
    assert {*NEED_TORCH[package]} <= {*importlib.import_module(package).__all__}


@pytest.mark.starts_processes
def test_the_sdist_has_each_file_of_the_repository(tmp_path: Path) -> None:
    """setuptools writes the list of its files without building it."""
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("this is no clone")
    lists = [
        sys.executable,
        "-c",
        "import setuptools; setuptools.setup()",
        "egg_info",
        "--egg-base",
        str(tmp_path),
    ]
    done = subprocess.run(lists, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_TIMEOUT, check=False)
    assert done.returncode == 0, done.stderr
    listed = {*(tmp_path / "torch_unirun.egg-info" / "SOURCES.txt").read_text().splitlines()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {*tracked.stdout.splitlines()} - listed == set()
    assert not [name for name in listed if "__pycache__" in name]

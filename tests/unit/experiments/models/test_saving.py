"""Models that are written tensor by tensor: the file, and the memory that this takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file

from tests.documents import ROOT
from unirun.experiments import Model, ModelName, Place, topology
from unirun.experiments.models.api import _by_stage, load_whole, save_whole


def of(tensors: dict[str, torch.Tensor]) -> Model:
    """A model on one rank with these tensors."""
    engine: Any = SimpleNamespace(tensors=lambda: tensors)
    place = Place(ModelName("actor"), topology(), 0, torch.device("cpu"))
    return Model(place, torch.nn.Identity(), None, engine)


def test_a_file_has_tensors_of_all_types_and_shapes(tmp_path: Path) -> None:
    kinds = (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.float64,
    )
    shapes = ((3, 5), (), (0, 4), (1,))
    tensors = {
        f"{str(kind).removeprefix('torch.')}.{number}": torch.full(shape, 1.0).to(kind)
        for kind in kinds
        for number, shape in enumerate(shapes)
    }
    tensors["part"] = torch.arange(12.0).reshape(3, 4)[:, ::2]
    tensors["tied"] = tensors["float32.0"]
    save_whole(of(tensors), tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    copy = of({name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
    load_whole(copy, tmp_path)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in copy.running().tensors().items())


SAVES = """
import resource, sys
from pathlib import Path
import torch
from tests.unit.experiments.models.test_saving import of
from unirun.experiments.models.api import save_whole

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

few = of({"a": torch.ones(10)})
save_whole(few, Path(sys.argv[1]))  # imports what it needs
many = of({f"layers.{number}": torch.ones(2 << 20) for number in range(40)})
before = peak()
save_whole(many, Path(sys.argv[1]))
print(peak() - before)
"""


@pytest.mark.starts_processes
def test_a_save_needs_the_memory_of_a_tensor_and_not_that_of_the_model(tmp_path: Path) -> None:
    """The model has 320 MiB, in tensors of 8."""
    command = [sys.executable, "-c", SAVES, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model.safetensors").stat().st_size > 320 << 20
    assert float(done.stdout) < 24


def test_a_tensor_that_several_stages_have_is_saved_by_the_last_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    about = dict.fromkeys(("tied", "first", "both", "last"), ((2,), torch.float32))
    own: list[Any] = [
        {name: about[name] for name in names}
        for names in (("tied", "first"), ("both",), ("both", "tied", "last"))
    ]

    def gather(found: list[Any], mine: object, group: object) -> None:
        assert mine is own[1]
        found[:] = own

    monkeypatch.setattr(dist, "all_gather_object", gather)
    place: Any = SimpleNamespace(group=lambda axis: axis, topo=topology(pipe=3))
    assert [[*some] for some in _by_stage(place, own[1])] == [["first"], [], ["both", "tied", "last"]]

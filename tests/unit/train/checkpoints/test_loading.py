"""A checkpoint is read as new tensors, or into models, optimizers and the like."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.waiting import WAIT_TIMEOUT
from unirun.errors import CheckpointDamaged, UsageError
from unirun.train.checkpoints import CheckpointStrategy, Folder, Manifest
from unirun.train.checkpoints.state import load, put_into
from unirun.train.checkpoints.writer import CheckpointWriter


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(str(tmp_path))


def saved(folder: Folder, state: Mapping[str, Any]) -> Manifest:
    """A checkpoint of one rank, which has it written and committed."""
    number = (folder.numbers() or [0])[-1] + 1
    writer = CheckpointWriter(folder, CheckpointStrategy(), 0, 1, number)
    writer.save(state, {})
    writer.commit(number).result(WAIT_TIMEOUT)
    writer.close()
    return folder.manifest(number)


class Training:
    """A model that learns, with all that belongs to it."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.arange(6.0).reshape(2, 3)).square().sum().backward()
        self.optimizer.step()
        self.scheduler.step()

    def weights(self) -> list[Any]:
        return [value.tolist() for value in self.model.state_dict().values()]


class Versioned(torch.nn.Linear):
    """A module that reads only states of its own version, as torchvision's MNASNet does."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, about: dict[str, Any], *more: Any) -> None:
        assert about["version"] == 2
        super()._load_from_state_dict(state, prefix, about, *more)


def test_a_module_learns_of_which_version_its_state_is(folder: Folder) -> None:
    model, other = (torch.nn.Sequential(Versioned(2, 1)) for _ in range(2))
    load(folder, saved(folder, {"model": model}), {"model": other})
    assert [each.tolist() for each in other.parameters()] == [each.tolist() for each in model.parameters()]


def test_training_goes_on_as_if_it_had_not_been_left(folder: Folder) -> None:
    first, other = Training(1), Training(2)
    first.step()
    manifest = saved(folder, {**first.parts, "epoch": 4})
    first.step()
    state = load(folder, manifest, {**other.parts, "epoch": 0})
    assert state["epoch"] == 4
    other.step()
    assert other.weights() == first.weights()
    assert other.scheduler.get_last_lr() == first.scheduler.get_last_lr() == [0.025]


def test_a_state_in_memory_is_put_in_in_the_same_way(folder: Folder) -> None:
    first, other = Training(1), Training(2)
    first.step()
    put_into(other.parts, load(folder, saved(folder, first.parts), None))
    first.step()
    other.step()
    assert other.weights() == first.weights()


def test_models_and_optimizers_in_lists_tuples_and_dicts_are_changed_too(folder: Folder) -> None:
    def nested(training: Training) -> dict[str, Any]:
        return {
            "models": [training.model],
            "deep": {"optimizers": (training.optimizer, 0), "epoch": 0},
            "scheduler": training.scheduler,
            "losses": [],
        }

    first, other = Training(1), Training(2)
    first.step()
    manifest = saved(folder, {**nested(first), "losses": [0.5]})
    first.step()
    assert load(folder, manifest, nested(other))["losses"] == [0.5]
    other.step()
    assert other.weights() == first.weights()


@pytest.mark.parametrize(
    ("into", "problem"),
    [
        (lambda net: {"models": [net]}, "models has length 1, and 2 in the checkpoint"),
        (lambda net: {"models": net}, "the checkpoint has no state dict as models, it has list"),
        (lambda net: {"models": {"g": net}}, """the checkpoint has no "models['g']"; it has 0, 1"""),
        (lambda net: {"named": [net]}, "named has length 1, and 2 in the checkpoint"),
        (lambda net: {"named": {"d": net}}, """the checkpoint has no "named['d']"; it has 'g', 'h'"""),
        (lambda net: {"epoch": [net]}, "epoch has length 1, and 0 in the checkpoint"),
    ],
    ids=range(6),
)
def test_another_shape_than_the_saved_one_is_told_and_changes_nothing(
    folder: Folder, into: Any, problem: str
) -> None:
    nets = [torch.nn.Linear(1, 1) for _ in range(2)]
    manifest = saved(folder, {"models": nets, "named": dict(zip("gh", nets, strict=True)), "epoch": 1})
    own = torch.nn.Linear(1, 1)
    before = own.weight.item()
    with pytest.raises(UsageError) as raised:
        load(folder, manifest, {**into(own)})
    assert str(raised.value) == f"{problem}; load it under the name with which save_checkpoint has saved it"
    assert own.weight.item() == before


def test_what_is_not_asked_for_is_returned_and_changes_nothing(folder: Folder) -> None:
    first, other = Training(1), Training(2)
    before = other.weights()
    state = load(folder, saved(folder, first.parts), None)
    assert [*state] == ["model", "optimizer", "scheduler"]
    assert [value.tolist() for value in state["model"].values()] == first.weights()
    assert other.weights() == before


def test_a_name_that_was_not_saved_is_told_with_those_that_were(folder: Folder) -> None:
    training = Training(1)
    manifest = saved(folder, {"net": training.model, "epoch": 1})
    with pytest.raises(UsageError) as raised:
        load(folder, manifest, {"model": training.model})
    assert str(raised.value) == (
        "the checkpoint has no 'model'; it has 'epoch', 'net'; "
        "load it under the name with which save_checkpoint has saved it"
    )


def test_a_value_that_was_not_saved_may_be_asked_for(folder: Folder) -> None:
    """Only what is changed must be there."""
    assert load(folder, saved(folder, {"epoch": 1}), {"best": 0.0, "epoch": 0}) == {"epoch": 1}


def test_another_model_than_the_saved_one_is_told(folder: Folder) -> None:
    manifest = saved(folder, {"model": torch.nn.Linear(3, 4)})
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        load(folder, manifest, {"model": torch.nn.Linear(3, 5)})


@pytest.mark.parametrize("data", [b"", b"nothing", b"PK\x03\x04"])
def test_a_state_that_is_none_is_told_as_damaged(folder: Folder, data: bytes) -> None:
    manifest = saved(folder, {"epoch": 1})
    folder.write(1, "state.pt", lambda file: file.write(data))
    with pytest.raises(CheckpointDamaged, match=f"{folder.url}/000001/state.pt cannot be read"):
        load(folder, manifest, None)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), plain, max_size=3))
def test_any_plain_state_comes_back(tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]) -> None:
    folder = Folder(str(tmp_path_factory.mktemp("any")))
    assert load(folder, saved(folder, state), None) == state


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(0),
        torch.tensor(3.5),
        torch.arange(6).reshape(2, 3).T,
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(2, 2, requires_grad=True),
        torch.eye(3).to_sparse(),
    ],
    ids=["empty", "scalar", "transposed", "bfloat16", "with gradient", "sparse"],
)
def test_a_tensor_comes_back_bit_for_bit(folder: Folder, tensor: torch.Tensor) -> None:
    found = load(folder, saved(folder, {"deep": [{"tensor": tensor}]}), None)["deep"][0]["tensor"]
    assert (found.dtype, found.shape, found.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert torch.equal(found.to_dense(), tensor.detach().to_dense())

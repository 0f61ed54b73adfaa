"""A checkpoint loads into a model and its optimizer, whether the saved ones and these are whole or shared out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.unit.train.checkpoints.test_compiled import saved
from unirun.errors import CheckpointDamaged, UsageError
from unirun.train.checkpoints.state import load, put_into, state_at

pytestmark = pytest.mark.leaves

COLLECTIVES = "broadcast_object_list", "scatter_object_list", "gather_object", "all_gather_object"
"""Those by which ranks agree on what each of them reads."""

KINDS = pytest.mark.parametrize("shard", [False, True], ids=["whole", "shared out"])


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Training:
    """A model that learns, whole or shared out."""

    def __init__(self, seed: int, *, shard: bool) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(3, 4)
        if shard:
            fully_shard(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.state = {"nets": [{"model": self.model}], "optimizers": (self.optimizer,), "losses": [0.5, 0.25]}

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.arange(6.0).reshape(2, 3)).square().sum().backward()
        self.optimizer.step()

    def weights(self) -> list[Any]:
        return [whole(each).tolist() for each in self.model.state_dict().values()]


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


@KINDS
@pytest.mark.parametrize("saved_in_parts", [False, True], ids=["of a whole one", "of a shared out one"])
@pytest.mark.parametrize("steps", [0, 1], ids=["before its first step", "after it"])
def test_training_goes_on_as_if_it_had_not_been_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, shard: bool, saved_in_parts: bool, steps: int
) -> None:
    first, other, third = (
        Training(1, shard=saved_in_parts),
        Training(2, shard=shard),
        Training(3, shard=shard),
    )
    first.step()
    folder, manifest = saved(tmp_path, first.state)
    assert manifest.sharded == saved_in_parts
    for _ in range(steps):
        other.step()

    def refuse(*args: Any, **options: Any) -> NoReturn:
        raise AssertionError("each rank reads for itself")

    with monkeypatch.context() as patch:
        for name in COLLECTIVES:
            patch.setattr(dist, name, refuse)
        found = load(folder, manifest, other.state)
        plain = load(folder, manifest, None)
    assert found["losses"] == plain["losses"] == [0.5, 0.25]
    put_into(third.state, plain)
    assert other.weights() == third.weights() == first.weights()
    for each in (first, other, third):
        each.step()
    assert other.weights() == third.weights() == first.weights()


@KINDS
def test_the_state_of_a_checkpoint_is_read_by_its_path_and_is_as_it_was_given(
    tmp_path: Path, *, shard: bool
) -> None:
    training = Training(1, shard=shard)
    folder, _ = saved(tmp_path, {"_state": (training.model, training.optimizer)})
    found = state_at(folder.path(1))
    assert [value.tolist() for value in found[0].values()] == training.weights()
    assert found[1]["param_groups"][0]["lr"] == 0.1
    with pytest.raises(UsageError, match="there is no checkpoint .*/000002"):
        state_at(folder.path(2))
    file = tmp_path / "000001" / ("__0_0.distcp" if shard else "state.pt")
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointDamaged, match=f"{file} is not as it was written"):
        state_at(folder.path(1))

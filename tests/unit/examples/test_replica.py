"""The model of the PPO example that a role trains together: it goes back to the last complete update."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from replica import Replica
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def replica(kept: list[bytes], saved: bytes | None = None) -> Replica:
    torch.manual_seed(0)
    return Replica(nn.Linear(3, 1), lr=0.1, updates=10, save=kept.append, saved=saved)


def weights(of: Replica) -> Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in of.model.parameters()])


def update(of: Replica, number: int, steps: int = 3) -> None:
    """One whole update, whose samples are fixed by its number."""
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(number))
    for _ in range(steps):
        of.step(of.model(inputs).square().mean(), gradient_norm=0.5)
    of.complete((1, number))


def test_an_update_that_was_broken_off_leaves_no_trace() -> None:
    undisturbed, disturbed = replica([]), replica([])
    for each in (undisturbed, disturbed):
        each.begin(1)
        update(each, 1)

    for _ in range(2):
        for _ in range(2):
            disturbed.step(disturbed.model(torch.ones(1, 3)).sum(), gradient_norm=0.5)
        disturbed.agree()
        assert disturbed.done == (1, 1)

    for each in (undisturbed, disturbed):
        update(each, 2)
    assert torch.equal(weights(disturbed), weights(undisturbed))


def test_a_rank_without_colleagues_goes_on_where_its_predecessor_was() -> None:
    kept: list[bytes] = []
    first = replica(kept)
    first.begin(1)
    update(first, 1)

    second = replica([], saved=kept[-1])
    second.agree()
    assert second.done == (1, 1)
    for each in (first, second):
        update(each, 2)
    assert torch.equal(weights(first), weights(second))


def test_the_learning_rate_falls_with_each_update_and_a_new_run_starts_it_again() -> None:
    each = replica([])
    for run in (1, 2):
        each.begin(run)
        before = weights(each)
        each.step(each.model(torch.ones(1, 3)).sum(), gradient_norm=1.0)
        assert (weights(each) - before).abs().max().item() == pytest.approx(0.1, rel=1e-3)
        for number in range(1, 11):
            update(each, number, steps=0)
        before = weights(each)
        each.step(each.model(torch.ones(1, 3)).sum(), gradient_norm=1.0)
        assert torch.equal(weights(each), before)


def test_before_the_first_run_there_is_nothing_to_agree_on() -> None:
    each = replica([])
    before = weights(each)
    each.agree()
    assert each.done == (0, 0)
    assert torch.equal(weights(each), before)


def test_an_update_is_made_once_and_never_without_the_one_before_it() -> None:
    each = replica([])
    each.begin(1)
    assert each.is_due((1, 1))
    update(each, 1)
    assert not each.is_due((1, 1))
    assert each.is_due((1, 2))
    with pytest.raises(RuntimeError, match=r"update \(1, 2\) follows \(0, 0\): all copies"):
        replica([]).is_due((1, 2))

"""A receiver that is a moving average of what is published."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.weights.harness import weights_harness
from unirun.weights.publishing import blend
from unirun.weights.tensors import tensors_of


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float8_e5m2, torch.complex64]
)
def test_numbers_with_a_point_move_by_eta(dtype: torch.dtype) -> None:
    into = [torch.full((3,), 4.0).to(dtype)]
    blend(into, [torch.full((3,), 8.0).to(dtype)], 0.25)
    assert into[0].to(torch.complex64).tolist() == [5.0] * 3


def test_other_numbers_are_copied() -> None:
    into = [torch.tensor([1, 2]), torch.tensor([True, False])]
    blend(into, [torch.tensor([5, 2**24 + 1]), torch.tensor([False, True])], 0.25)
    assert [each.tolist() for each in into] == [[5, 2**24 + 1], [False, True]]


@pytest.mark.starts_processes
@pytest.mark.parametrize("tcp", [False, True], ids=["shared memory", "sockets"])
def test_a_receiver_follows_what_is_published_and_tied_weights_move_once(tmp_path: Path, tcp: bool) -> None:
    def module(value: float) -> torch.nn.Module:
        made = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        made[1].weight = made[0].weight
        for parameter in made.parameters():
            torch.nn.init.constant_(parameter, value)
        return made

    slow = module(0.0)
    with weights_harness(tmp_path) as harness:
        publisher, endpoint = harness.publisher(tcp=tcp)
        receiver = harness.receiver(endpoint, tcp=tcp)
        for version, expected in ((1, 0.5), (2, 0.75)):
            publisher.publish(tensors_of(module(1.0)), version)
            assert receiver.receive(slow, version, eta=0.5) == version
            assert {float(each) for tensor in slow.state_dict().values() for each in tensor.flatten()} == {
                expected
            }

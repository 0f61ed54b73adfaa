"""Tensors that were cut by hand, and names and tensors that are mapped by functions of the user."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.effort import examples
from tests.unit.weights.harness import WeightsHarness, weights_harness
from unirun.errors import UsageError
from unirun.weights.tensors import LocalShard, Weights, tensors_of

pytestmark = pytest.mark.starts_processes


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[WeightsHarness]:
    with weights_harness(tmp_path) as made:
        yield made


def moved(
    harness: WeightsHarness, published: list[Weights], received: list[Weights], tcp: bool = False
) -> None:
    """Publish in so many ranks, receive in so many."""
    endpoints = []
    for rank, weights in enumerate(published):
        publisher, endpoint = harness.publisher(rank, tcp=tcp)
        publisher.publish(tensors_of(weights), 0)
        endpoints.append(endpoint)
    for weights in received:
        assert harness.receiver(*endpoints, tcp=tcp).receive(weights) == 0


def columns(whole: torch.Tensor, ranks: int, rank: int) -> LocalShard:
    """Tensor parallelism along the columns."""
    size = whole.shape[1] // ranks
    return LocalShard(whole[:, rank * size : (rank + 1) * size], shape=whole.shape, start=(0, rank * size))


@pytest.mark.parametrize("tcp", [False, True], ids=["shared memory", "sockets"])
def test_columns_become_rows(harness: WeightsHarness, tcp: bool) -> None:
    whole = torch.randn(6, 8)
    rows = [torch.zeros(2, 8) for _ in range(3)]
    into: list[Weights] = [
        {"w": LocalShard(part, shape=(6, 8), start=(2 * rank, 0))} for rank, part in enumerate(rows)
    ]
    moved(harness, [{"w": columns(whole, 4, rank)} for rank in range(4)], into, tcp)
    assert torch.equal(torch.cat(rows), whole)


@examples(30)
@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_any_grid_of_shards_becomes_any_part(
    harness: WeightsHarness, rows: int, across: int, data: st.DataObject
) -> None:
    whole = torch.arange(12 * 12).view(12, 12)
    height, width = 12 // rows, 12 // across
    published: list[Weights] = [
        {
            "w": LocalShard(
                whole[r * height : (r + 1) * height, c * width : (c + 1) * width],
                shape=(12, 12),
                start=(r * height, c * width),
            )
        }
        for r, c in itertools.product(range(rows), range(across))
    ]
    top, left = data.draw(st.integers(0, 11)), data.draw(st.integers(0, 11))
    part = torch.zeros(
        data.draw(st.integers(1, 12 - top)), data.draw(st.integers(1, 12 - left)), dtype=torch.int64
    )
    moved(harness, published, [{"w": LocalShard(part, shape=(12, 12), start=(top, left))}])
    assert torch.equal(part, whole[top : top + len(part), left : left + part.shape[1]])


def test_stages_and_experts_are_names_that_some_ranks_have(harness: WeightsHarness) -> None:
    layers = {f"layer{n}.expert{e}": torch.randn(3) for n in range(2) for e in range(2)}
    published: list[Weights] = [{name: value} for name, value in layers.items()]
    got = {name: torch.zeros(3) for name in layers}
    some = {name: torch.zeros(3) for name in [*layers][1:3]}
    moved(harness, published, [got, some])
    assert all(torch.equal(got[name], value) for name, value in layers.items())
    assert all(torch.equal(value, layers[name]) for name, value in some.items())


def test_parts_of_a_fused_tensor_and_a_transposed_one_are_written_in_place(harness: WeightsHarness) -> None:
    q, k, v, up = (torch.randn(4, 6) for _ in range(4))
    fused, transposed = torch.zeros(12, 6), torch.zeros(6, 4)
    parts = dict(zip("qkv", fused.chunk(3), strict=True))
    moved(harness, [{"q": q, "k": k, "v": v, "up": up}], [parts | {"up": transposed.t()}])
    assert torch.equal(fused, torch.cat([q, k, v]))
    assert torch.equal(transposed, up.t())


def test_a_publisher_may_rename_and_cast(harness: WeightsHarness) -> None:
    module = torch.nn.Linear(3, 3)
    sent = {f"model.{name}": value.bfloat16() for name, value in module.state_dict().items()}
    got = {name: torch.zeros_like(value) for name, value in sent.items()}
    moved(harness, [sent], [got])
    assert all(torch.equal(got[f"model.{n}"], v.bfloat16()) for n, v in module.state_dict().items())


def test_float8_goes_with_its_scale(harness: WeightsHarness) -> None:
    weight = torch.randn(8, 16)
    scale = weight.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    got = {"w": torch.zeros(8, 16, dtype=torch.float8_e4m3fn), "w.scale": torch.zeros(8, 1)}
    moved(harness, [{"w": (weight / scale).to(torch.float8_e4m3fn), "w.scale": scale}], [got])
    torch.testing.assert_close(got["w"].float() * got["w.scale"], weight, rtol=0.07, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "start"),
    [((4, 8), (1, 0)), ((3, 8), (0, 0)), ((8, 8), (0, -1)), ((8,), (0,)), ((8, 8), (0, 0, 0))],
)
def test_a_part_that_is_not_within_its_tensor_is_refused(
    shape: tuple[int, ...], start: tuple[int, ...]
) -> None:
    with pytest.raises(UsageError, match=r"a part \[4, 8\] at .* is not within"):
        LocalShard(torch.zeros(4, 8), shape=shape, start=start)

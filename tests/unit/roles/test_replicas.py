"""The state of a replica, which a rank that comes gets from another one."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from tests.waiting import WAIT_TIMEOUT
from unirun.errors import UsageError
from unirun.roles import replicas
from unirun.roles.process_groups import c10d
from unirun.roles.replicas import in_memory, newer

pytestmark = pytest.mark.leaves


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_state_that_is_the_newest_is_not_sent() -> None:
    assert newer(3, lambda: pytest.fail("it is not asked for")) is None


@pytest.mark.usefixtures("group")
def test_a_group_for_the_state_of_devices_is_there_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(c10d._world.pg_map)
    monkeypatch.setattr(replicas, "CPU", torch.device("meta"))
    for _ in range(2):
        newer(3, dict)
        assert len(c10d._world.pg_map) == before


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.int16, torch.uint32, torch.complex64, torch.bool]
)
@pytest.mark.parametrize("shape", [(2, 3), (), (0,)])
def test_tensors_of_every_type_can_be_sent(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """gloo knows some types only, and a model in float8 has others."""
    state = in_memory(torch.ones(shape).to(dtype))
    assert replicas._shared(0, lambda: state, dist.group.WORLD) is state


def test_a_state_is_taken_in_a_process_group_only() -> None:
    with pytest.raises(UsageError, match="call init_process_group before"):
        newer(0, dict)


def test_a_state_in_memory_shares_nothing_with_what_it_was_made_of() -> None:
    weights, rows = torch.ones(2, 3), [1]
    copied = in_memory({"weights": weights.T, "rows": rows})
    weights.zero_()
    rows.append(2)
    assert copied["rows"] == [1]
    assert copied["weights"].is_contiguous()
    assert copied["weights"].sum() == 6


class Ranks:
    """The collectives that `newer` uses, between threads. `devices` are those of the default group."""

    def __init__(self, count: int, devices: list[torch.device]) -> None:
        self.count, self.own = count, threading.local()
        self.world, self.made, self.ended = SimpleNamespace(_device_types=devices), list[object](), 0
        self._barrier, self._values = threading.Barrier(count, timeout=WAIT_TIMEOUT), [None] * count

    def exchange(self, value: Any, group: object) -> list[Any]:
        """The values of all ranks, which are in the same group."""
        assert group in (self.world, *self.made)
        self._values[self.own.rank] = value
        self._barrier.wait()
        found = [*self._values]
        self._barrier.wait()
        return found

    def new_group(self, *, backend: str) -> object:
        assert backend == "gloo"
        group = SimpleNamespace()
        self.made.append(group)
        return group

    def destroy_process_group(self, group: object) -> None:
        assert group in self.made
        self.ended += 1

    def all_gather(self, into: list[torch.Tensor], own: torch.Tensor, *, group: object) -> None:
        for each, value in zip(into, self.exchange(own, group), strict=True):
            each.copy_(value)

    def broadcast_object_list(
        self, told: list[Any], source: int, group: object, device: torch.device
    ) -> None:
        assert device == torch.device("cpu")
        raw = self.exchange(pickle.dumps(told), group)[source]
        told[:] = pickle.loads(raw)  # noqa: S301
        assert b"tensor" not in raw.lower(), "tensors are sent by themselves"

    def broadcast(self, tensor: torch.Tensor, source: int, group: object) -> None:
        tensor.copy_(self.exchange(tensor, group)[source].clone())

    def newer(self, rank: int, version: int, state: Callable[[], Any]) -> Any:
        self.own.rank = rank
        return newer(version, state)


@given(st.lists(st.integers(-1, 2), min_size=1, max_size=4), st.booleans())
def test_every_rank_that_is_behind_gets_the_state_of_the_first_that_is_ahead(
    versions: list[int], cpu: bool
) -> None:
    ranks = Ranks(len(versions), [torch.device("cpu" if cpu else "meta")])
    asked: list[int] = []

    def state(rank: int) -> Any:
        asked.append(rank)
        weights = torch.full((2, 3), float(rank), dtype=torch.bfloat16)
        return {"rank": rank, "layers": [weights, (torch.tensor(rank), "text")], "empty": torch.zeros(0)}

    fakes = {
        "is_initialized": lambda: True,
        "get_world_size": lambda: ranks.count,
        "get_rank": lambda: ranks.own.rank,
        **{name: getattr(ranks, name) for name in ("new_group", "destroy_process_group", "all_gather")},
        **{name: getattr(ranks, name) for name in ("broadcast_object_list", "broadcast")},
    }
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(versions)) as pool:
        patch.setattr(replicas, "dist", SimpleNamespace(**fakes))
        patch.setattr(replicas, "c10d", SimpleNamespace(_get_default_group=lambda: ranks.world))
        calls = [
            pool.submit(ranks.newer, rank, version, partial(state, rank))
            for rank, version in enumerate(versions)
        ]
        found = [call.result(WAIT_TIMEOUT) for call in calls]
    newest = max(versions)
    source = versions.index(newest)
    assert asked == ([source] if min(versions) < newest else [])
    assert (len(ranks.made), ranks.ended) == ((0, 0) if cpu else (len(versions), len(versions)))
    for version, each in zip(versions, found, strict=True):
        assert (each is None) == (version == newest)
        if each is not None:
            number, got = each
            assert number == newest
            assert (got["rank"], got["layers"][1][1], got["empty"].shape) == (source, "text", (0,))
            assert got["layers"][0].dtype == torch.bfloat16
            assert got["layers"][0].tolist() == [[float(source)] * 3] * 2
            assert got["layers"][1][0].item() == source

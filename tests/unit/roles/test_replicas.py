"""The state of a replica, which a rank that comes gets from another one.."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

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

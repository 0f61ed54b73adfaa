"""Values arrive as they were sent, and no process touches the memory of another."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from tests.contract.cluster import Cluster, Role
from tests.contract.workload import Bomb, Unpicklable
from tests.waiting import WAIT_TIMEOUT
from unirun.errors import EncodingError
from unirun.roles import replicate, shard


def same(left: Any, right: Any) -> bool:
    """Return True if two tensors or arrays are alike in every bit and property."""
    if isinstance(left, torch.Tensor):
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and left.requires_grad == right.requires_grad
            and bool(torch.equal(left, right))
        )
    return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())


@pytest.mark.parametrize(
    "value",
    [
        None,
        "Größe – 大きさ",
        {"nested": [1, (2.5, {3}), b"bytes"]},
        "x" * (3 << 20),
        b"\0" * (3 << 20),
        range(5),
    ],
    ids=["none", "text", "nested", "long-text", "long-bytes", "range"],
)
def test_plain_values_arrive(shared_role: Role, value: Any) -> None:
    assert shared_role.group.echo(value) == [value] * 3


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.empty(0, 7),
        torch.arange(100_000, dtype=torch.int64).reshape(100, -1),
        torch.arange(100_000).reshape(100, -1).t(),
        torch.linspace(0, 1, 90_000).to(torch.bfloat16),
        torch.arange(90_000) % 2 == 0,
        torch.full((100_000,), (1 << 24) + 1, dtype=torch.int32),
        torch.randn(300, 300, requires_grad=True),
        torch.randn(300, dtype=torch.complex64).conj(),
    ],
    ids=["0-dim", "empty", "int64", "transposed", "bfloat16", "bool", "int32", "grad", "conj"],
)
def test_tensors_arrive_with_every_property(shared_role: Role, tensor: torch.Tensor) -> None:
    for echoed in shared_role.group.echo(tensor):
        assert same(echoed, tensor)


def test_arrays_arrive(shared_role: Role) -> None:
    for array in (np.arange(12.0).reshape(3, 4), np.asfortranarray(np.ones((500, 300))), np.zeros((0, 3))):
        assert all(same(echoed, array) for echoed in shared_role.group.echo(array))


def test_a_model_state_with_many_tensors_arrives(shared_role: Role) -> None:
    state = {f"layer{n}.weight": torch.full((n % 50, 32), float(n)) for n in range(400)}
    echoed = shared_role.group[0].echo(state)
    assert list(echoed) == list(state)
    assert all(same(echoed[name], state[name]) for name in state)


@pytest.mark.parametrize("width", [2, 16], ids=["in the stream", "in shared memory"])
def test_a_great_many_arrays_arrive(shared_role: Role, width: int) -> None:
    """More than one call of the system takes (1024); `FrameParser` alone is shown more than two bytes can number."""
    rows = list(np.arange(5_000 * width).reshape(5_000, width))
    echoed = shared_role.group[0].echo(rows)
    assert len(echoed) == len(rows)
    assert all(echoed[n][0] == width * n for n in range(5_000))


@pytest.mark.parametrize("size", [1000, 1 << 20], ids=["small", "large"])
def test_a_received_tensor_is_writable(cluster: Cluster, size: int) -> None:
    role = cluster.role(2)
    tensor = torch.zeros(size)
    assert role.group.write(tensor) == [float(size)] * 2
    assert float(tensor.sum()) == 0.0, "the caller's own is as it was"

    lent = role.group.lend()
    lent[0].add_(1)
    assert float(lent[1].sum()) == 0.0, "so is what others have received"
    assert role.group.own_sum() == [0.0, 0.0], "and what the workers have"
    lent[0].add_(1)
    assert float(role.group.lend()[0].sum()) == 0.0


def test_tensors_of_an_asynchronous_call_are_copied_when_it_is_made(cluster: Cluster) -> None:
    role = cluster.role(1)
    held = role.group.hold.call_async("snapshot")
    role[0].expect("holding snapshot")
    tensors = {size: torch.ones(size) for size in (10, 10_000, 1 << 20)}
    refs = {size: role.group.echo.call_async(tensor) for size, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.fill_(7)
    role[0].open("snapshot")
    held.result(WAIT_TIMEOUT)
    for size, ref in refs.items():
        assert float(ref.result(WAIT_TIMEOUT)[0].sum()) == size


def test_a_view_sends_its_elements_and_not_its_storage(shared_role: Role) -> None:
    storage = torch.zeros(1 << 22)
    assert shared_role.group.size_of_storage(storage[:1000]) == [4000] * 3
    assert shared_role.group.size_of_storage(storage[::4096]) == [4096] * 3


def test_memory_of_arguments_and_results_is_freed_with_the_last_reference(shared_role: Role) -> None:
    gc.disable()
    try:
        sent = np.ones(1 << 18)
        result = shared_role.group[0].watch(sent)
        seen = [weakref.ref(sent), weakref.ref(result)]
        del sent, result
        assert shared_role.group[0].watched_is_gone(), "the worker has let go of the argument"
        assert [each() is None for each in seen] == [True, True], "so has the caller, of that and the result"
    finally:
        gc.enable()


def test_arguments_are_split_and_replicated_as_they_are_marked(shared_role: Role) -> None:
    parts = shared_role.group.echo(shard(torch.arange(100_000)))
    assert [len(part) for part in parts] == [33_334, 33_333, 33_333]
    assert torch.equal(torch.cat(parts), torch.arange(100_000))
    assert shared_role.group.echo([1, 2, 3]) == [1, 2, 3]
    assert shared_role.group.echo(replicate([1, 2, 3])) == [[1, 2, 3]] * 3


def test_an_argument_that_cannot_be_sent_is_refused_before_anything_is(cluster: Cluster) -> None:
    role = cluster.role(2)
    for value, words in ((threading.Lock(), "_thread.lock"), (Unpicklable(), "this is closed")):
        with pytest.raises(EncodingError, match=f"argument 1 of `note` cannot be sent.*{words}"):
            role.group.note(value)
    with pytest.raises(EncodingError):
        # The second worker's part is the one that fails.
        role.group.note([1, Unpicklable()])
    assert role.group.ran() == [[], []]


def test_a_result_that_cannot_be_sent_is_an_error_that_names_it(shared_role: Role) -> None:
    with pytest.raises(EncodingError, match=rf"the result of `fail` in {shared_role.name}:1 cannot be sent"):
        shared_role.group[1].fail("closed")
    assert shared_role.group.echo(1) == [1] * 3


def test_values_that_burst_when_they_arrive_are_errors_that_name_them(shared_role: Role) -> None:
    with pytest.raises(
        EncodingError, match=rf"arguments of echo cannot be unpickled in {shared_role.name}:\d"
    ):
        shared_role.group.echo(Bomb())
    ref = shared_role.group.fail.call_async("bomb")
    for _ in range(2):
        with pytest.raises(
            EncodingError, match=rf"result of fail from {shared_role.name}:0 cannot be unpickled"
        ):
            ref.result(WAIT_TIMEOUT)
    assert shared_role.group.echo(1) == [1] * 3


def test_a_quarter_of_a_gigabyte_goes_there_and_comes_back(shared_role: Role) -> None:
    tensor = torch.ones((1 << 26) + 1)  # more than a connection keeps for later
    tensor[-1] = 5
    echoed = shared_role.group[0].echo(tensor)
    assert echoed.shape == tensor.shape
    assert torch.equal(echoed, tensor)

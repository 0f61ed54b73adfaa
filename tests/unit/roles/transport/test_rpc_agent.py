"""The agent of torch.distributed.rpc at the end of its process."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unirun.roles.transport.protocol import Parcel, Scheduler
from unirun.roles.transport.torch_rpc import (
    APART,
    Form,
    RpcAgent,
    TorchTransport,
    _form,
    _parcel,
    _RpcConnection,
)
from unirun.values import WorkerId

WITH_A_CALL = """
    import time
    from torch.distributed import rpc
    from unirun.roles.transport.torch_rpc import RpcAgent
    from unirun.values import WorkerId

    me = WorkerId("me", 0, 0)
    agent = RpcAgent(me, lambda who: who.rank, 1, polls=False)
    rpc.rpc_async(agent.known(me, agent.start()), time.sleep, (0.3,))
"""


@pytest.mark.starts_processes
def test_a_process_that_exits_while_its_agent_runs_a_call_is_not_aborted() -> None:
    """A thread that comes back to Python code while the interpreter is finalized aborts the process."""
    program = [sys.executable, "-c", textwrap.dedent(WITH_A_CALL)]
    assert subprocess.run(program, timeout=60, check=False).returncode == 0


@pytest.mark.starts_processes
def test_a_process_may_shut_its_agent_down_by_itself() -> None:
    program = [sys.executable, "-c", textwrap.dedent(WITH_A_CALL) + "rpc.shutdown(graceful=False)\n"]
    done = subprocess.run(program, timeout=60, check=True, capture_output=True, text=True)
    assert "Traceback" not in done.stderr


@given(st.lists(st.integers(0, 2), max_size=10))
def test_each_worker_has_a_number_that_no_other_has_had_and_the_first_that_of_its_rank(
    ranks: list[int],
) -> None:
    """torch would send what is for a worker that was started again through the pipe of the one before."""
    agent = RpcAgent(WorkerId("me", 0, 0), lambda who: who.rank, 3, polls=False)
    numbers = [agent._number(WorkerId("me", rank, number)) for number, rank in enumerate(ranks)]
    assert len({*numbers}) == len(numbers)
    assert {rank: numbers[ranks.index(rank)] for rank in ranks} == {rank: rank for rank in ranks}


REQUESTS = [
    (who, connection, number)
    for who in ("a:0:0", "a:0:1", "b:1:0")
    for connection in (0, 9)
    for number in (0, 1)
]


@given(st.permutations(REQUESTS))
def test_requests_are_taken_in_the_order_of_their_connection_and_the_latest_of_each_rank_alone_is_known(
    order: list[tuple[str, int, int]],
) -> None:
    """They may come in any order. A request of a connection that is over is sent again over the next one."""
    agent: Any = None
    transport, taken, came = TorchTransport(agent), list[tuple[str, int, int]](), list[tuple[str, int]]()
    for each in order:
        transport._handler = lambda parcel, _: taken.append(order[parcel.head[0]])
        transport.take(*each, Parcel(bytes([order.index(each)])), lambda _: None)
        came.append(each[:2])
        over = [other for other in came if other[0][0] == each[0][0] and other > each[:2]]
        assert not (over and each in taken)
    for who, connection in {each[:2] for each in order}:
        numbers = [number for *place, number in taken if place == [who, connection]]
        assert numbers == [*range(len(numbers))]
    assert [each for each in REQUESTS if each[:2] in (("a:0:1", 9), ("b:1:0", 9)) and each not in taken] == []
    assert {rank: incoming.early for rank, incoming in transport._incoming.items()} == {"a:0": {}, "b:1": {}}


@given(st.lists(st.sampled_from((0, 1, 63, 64, 65, APART - 1, APART, APART + 1)), max_size=4))
def test_a_parcel_comes_out_of_its_tensors_as_it_was(sizes: list[int]) -> None:
    buffers = tuple(memoryview(bytearray([number + 1]) * size) for number, size in enumerate(sizes))
    found = _parcel(_form(Parcel(b"head", buffers)))
    assert found.head == b"head"
    assert [bytes(each) for each in found.buffers] == [bytes(each) for each in buffers]


def test_an_agent_that_was_closed_is_closed_once() -> None:
    agent: Any = RpcAgent(WorkerId("me", 0, 0), lambda who: who.rank, 1, polls=False)
    assert not agent.close()
    agent._agent = object()  # torch's, which has been shut down by the user
    assert [agent.close() for _ in range(2)] == [True, False]


def test_a_connection_whose_answer_cannot_be_taken_breaks() -> None:
    """Its calls are sent again then, as over the other transports."""
    executor, news = Scheduler("test"), list[str]()
    connection = _RpcConnection(None, "me:0:0", 0, news.append, executor)
    answer: torch.futures.Future[Form] = torch.futures.Future()
    answer.set_result(_form(Parcel(b"x")))

    def fail(parcel: Parcel) -> None:
        raise MemoryError("no room")

    with pytest.raises(MemoryError):
        connection._answered(answer, fail)
    assert news == ["MemoryError('no room')"]

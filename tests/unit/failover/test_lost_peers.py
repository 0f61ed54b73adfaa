"""Statements of failures about peers, read from their texts. The texts are those that torch 2.11 to 2.15 print."""

from __future__ import annotations

import pytest

from unirun.failover.diagnosis import is_consequence, lost, missed, waited_for_a_peer
from unirun.failover.state import Exit, Failure
from unirun.values import WorkerId

TRANSPORT = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp"
TYPICAL = " This is typically caused by a remote worker crashing."
FULL_MESH = (
    "Gloo connectFullMesh failed with [/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:144] no error"
)

IN_A_GROUP = [
    f"RuntimeError: {TRANSPORT}/pair.cc:553] Connection closed by peer [127.0.0.1]:37762.{TYPICAL}",
    f"RuntimeError: {TRANSPORT}/pair.cc:537] Read error [127.0.0.1]:40324: Connection reset by peer.{TYPICAL}",
    f"RuntimeError: {TRANSPORT}/unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete",
    f"RuntimeError: {TRANSPORT}/unbound_buffer.cc:129] Timed out waiting 6000ms for send operation to complete",
    "RuntimeError: Application timeout caused pair closure",
    f"RuntimeError: {FULL_MESH}",
    "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote "
    "process exited or there was a network error, NCCL version 2.27.5\nncclRemoteError: A call failed possibly due to a "
    "network error or a remote process exiting prematurely.\nLast error:\nsocketProgress: Connection closed by remote peer",
    "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 0.",
    "torch.distributed.DistBackendError: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, "
    "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600010 milliseconds before timing out.",
    "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server "
    "shutdown or crash?",
    "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (h, 1).",
    "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//cuda//0",
    "RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 3000 ms",
    "RuntimeError: Rank 2 successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
    f"rank 0. Please check rank 0 logs for faulty rank. Original exception: {TRANSPORT}/unbound_buffer.cc:78] Timed out "
    "waiting 3000ms for recv operation to complete",
    "RuntimeError: RPC ran for more than set timeout (60000 ms) and will now be marked with an error",
    "RuntimeError: eof (this error originated at tensorpipe/transport/uv/connection_impl.cc:132)",
    "unirun.errors.GroupError: actor+rollout could not be formed",
]
ELSEWHERE = [
    "BrokenPipeError: [Errno 32] Broken pipe",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "requests.exceptions.ConnectionError: ('Connection aborted.', RemoteDisconnected('Remote end closed'))",
    "unirun.errors.WorkerLost: actor:1 was lost: it was killed by SIGKILL",
    "unirun.errors.PeerLost: actor:0 is gone: the peer closed the connection; try again when it was started again",
    "TimeoutError: timed out waiting for the data server",
]
OWN = [
    "",
    "ValueError: loss is nan",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.",
    "torch.AcceleratorError: CUDA error: device-side assert triggered",
    "torch.distributed.DistBackendError: NCCL error in: x, invalid usage, NCCL version 2.27.5\nDuplicate GPU detected",
    "FileNotFoundError: [Errno 2] No such file or directory: 'data'",
]


def test_a_call_and_a_channel_name_the_rank_that_they_have_lost() -> None:
    assert [lost(failure(words)) for words in ELSEWHERE] == [
        *[frozenset()] * 3,
        {("actor", 1)},
        {("actor", 0)},
        frozenset(),
    ]
    words = "unirun.errors.WorkerLost: a-b:12 was lost before it answered: x; see c:3 is gone"
    assert lost(failure(words)) == {("a-b", 12)}


def failure(message: str = "", *, tail: str = "", end: Exit | None = None) -> Failure:
    return Failure(WorkerId("a", 0, 0), 0, "n0", 1.0, end or Exit(code=1), message, tail=tail)


@pytest.mark.parametrize("message", IN_A_GROUP)
def test_a_loss_in_a_process_group_is_recognised(message: str) -> None:
    assert is_consequence(failure(message))
    assert waited_for_a_peer(failure(message))


@pytest.mark.parametrize("message", ELSEWHERE)
def test_a_connection_to_anything_else_is_no_loss_in_a_process_group(message: str) -> None:
    assert is_consequence(failure(message))
    assert not waited_for_a_peer(failure(message))


@pytest.mark.parametrize("message", OWN)
def test_an_error_of_its_own_is_no_consequence(message: str) -> None:
    assert not is_consequence(failure(message))
    assert not waited_for_a_peer(failure(message))


def test_a_process_that_a_thread_of_torch_has_aborted_says_why_on_stderr() -> None:
    tail = (
        "what():  [PG ID 0 PG GUID 0 Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"
    )
    assert waited_for_a_peer(failure(tail=tail, end=Exit(signal=6)))
    assert waited_for_a_peer(failure(tail=tail, end=Exit(code=1)))
    # The worker may have written that before it was killed.
    assert not is_consequence(failure(tail=tail, end=Exit(signal=9)))


@pytest.mark.parametrize(
    ("message", "ranks"),
    [
        ("RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 3000 ms", {1}),
        ("RuntimeError: [Rank 0]: Ranks 1, 12 failed to pass monitoredBarrier in 3000 ms", {1, 12}),
        (IN_A_GROUP[0], set()),
    ],
)
def test_a_monitored_barrier_names_the_ranks_that_did_not_come(message: str, ranks: set[int]) -> None:
    assert missed(failure(message)) == ranks

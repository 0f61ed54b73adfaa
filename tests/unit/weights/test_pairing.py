"""Process groups of one publisher and one receiver."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.waiting import WAIT_TIMEOUT
from unirun.errors import GroupError, PeerLost
from unirun.roles.process_groups import dist
from unirun.roles.transport.frames import ALIGN, offsets
from unirun.values import WorkerId
from unirun.weights import hub, pairing
from unirun.weights.hub import Hub
from unirun.weights.messages import Fetch
from unirun.weights.pairing import NCCL_POLL_INTERVAL, PairGroup, buckets, checksum, joined
from unirun.weights.publishing import Publisher
from unirun.weights.sources import RemoteSource
from unirun.weights.tensors import Box, NamedBox, layout_of

pytestmark = pytest.mark.leaves

CPU = torch.device("cpu")


@given(st.lists(st.integers(0, 500), max_size=30), st.integers(1, 8).map(lambda n: 64 * n))
def test_buckets_have_every_byte_once_and_are_full_but_for_the_last(sizes: list[int], most: int) -> None:
    begins, total = offsets(sizes)
    flat = [torch.full((size,), number + 1, dtype=torch.uint8) for number, size in enumerate(sizes)]
    wanted, run = torch.zeros(total, dtype=torch.uint8), torch.zeros(total, dtype=torch.uint8)
    for begin, tensor in zip(begins, flat, strict=True):
        wanted[begin : begin + tensor.nbytes] = tensor
    found, low = [*buckets(flat, most)], 0
    for length, parts in found:
        for at, part in parts:
            assert at + part.nbytes <= length
            run[low + at : low + at + part.nbytes] += part
        low += length
    assert low == total
    assert torch.equal(run, wanted)
    assert all(length == most for length, _ in found[:-1])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 300)), max_size=20))
def test_tensors_behind_each_other_in_memory_are_one_and_the_run_is_the_same(
    parts: list[tuple[int, int]],
) -> None:
    """Each part lies so many times 64 bytes behind the one before, or with 3 in memory of its own."""
    memory = torch.randint(256, (20 * 1024,), dtype=torch.uint8)
    flat, at, count = [], 0, 0
    for gap, size in parts:
        if gap == 3:
            flat.append(torch.randint(256, (size,), dtype=torch.uint8))
        else:
            at += gap * ALIGN
            flat.append(memory[at : at + size])
            at += -(-size // ALIGN) * ALIGN
        behind = len(flat) > 1 and parts[len(flat) - 2][0] != 3 and gap == 0
        count += not behind
    found = joined(flat)
    assert len(found) == count
    places, total = offsets([each.nbytes for each in found])
    run = torch.zeros(total, dtype=torch.uint8)
    for place, each in zip(places, found, strict=True):
        run[place : place + each.nbytes] = each
    assert offsets([each.nbytes for each in flat])[1] == total
    for place, each in zip(offsets([each.nbytes for each in flat])[0], flat, strict=True):
        assert torch.equal(run[place : place + each.nbytes], each)


@contextmanager
def ends() -> Iterator[tuple[PairGroup, PairGroup]]:
    """Both ends, over gloo."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made: dict[int, PairGroup] = {}

    def make(rank: int) -> None:
        there = dist.TCPStore("127.0.0.1", store.port, is_master=False)
        made[rank] = PairGroup(dist.PrefixStore("pair", there), rank, "gloo", 20.0)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        yield made[0], made[1]
    finally:
        for end in made.values():
            end.close()


def moved(
    pair: tuple[PairGroup, PairGroup], tensors: Sequence[torch.Tensor], *, checked: bool = True
) -> list[torch.Tensor]:
    deadline = time.monotonic() + WAIT_TIMEOUT
    thread = threading.Thread(target=pair[0].send, args=(tensors, deadline), kwargs={"checked": checked})
    thread.start()
    try:
        return pair[1].receive([tensor.nbytes for tensor in tensors], CPU, deadline, checked=checked)
    finally:
        thread.join()


def test_tensors_of_any_size_and_strides_arrive_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairing, "BUCKET", 1 << 12)
    sent = [
        torch.randn(10_000),
        torch.zeros(0),
        torch.tensor(2**24 + 1),
        torch.randn(60, 50).t(),
        torch.randn(40, 40).bfloat16()[::2],
        torch.randn(9001).bfloat16()[1:],
        *(torch.randn(number) for number in range(50)),
    ]
    with ends() as pair:
        for _ in range(3):
            got = moved(pair, sent)
            for tensor, run in zip(sent, got, strict=True):
                assert torch.equal(run.view(tensor.dtype).view(tensor.shape), tensor)


class Damaging:
    """A process group that changes one bit of what it sends first."""

    def __init__(self, group: Any) -> None:
        self._group, self._done = group, False

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        if not self._done:
            self._done = True
            tensors = [tensors[0].clone()]
            tensors[0][tensors[0].numel() // 2] ^= 4
        return self._group.send(tensors, rank, tag)


def test_one_bit_that_was_damaged_is_noticed_unless_checksums_are_off() -> None:
    sent = [torch.randn(1000), torch.randn(3)]
    for checked in (True, False):
        with ends() as pair:
            pair[0]._group = Damaging(pair[0]._group)
            if checked:
                with pytest.raises(GroupError, match="damaged on their way over gloo"):
                    moved(pair, sent)
            else:
                assert not torch.equal(moved(pair, sent, checked=False)[0].view(torch.float32), sent[0])


@given(st.tuples(st.integers(0, 2), st.integers(0, 2)), st.tuples(st.integers(0, 2), st.integers(0, 2)))
def test_both_ends_of_a_pair_meet_in_the_same_generations_of_both_roles_and_in_no_others(
    ours: tuple[int, int], theirs: tuple[int, int]
) -> None:
    places: list[tuple[Any, int, str]] = []
    overs: list[Callable[[], bool]] = []
    known: list[dict[str, Any]] = []

    def made(place: Any, rank: int, backend: str, patience: float, over: Callable[[], bool]) -> None:
        places.append((place, rank, backend))
        overs.append(over)
        assert patience == 1.0

    def at(generations: tuple[int, int]) -> Any:
        roles = {
            name: SimpleNamespace(name=name, generation=generation)
            for name, generation in zip(("actor", "rollout"), generations, strict=True)
        }
        peers = SimpleNamespace(known=roles.__getitem__, roles=lambda: roles, when_changed=lambda _: None)
        session = SimpleNamespace(sockets=None)
        known.append(roles)
        return Hub(SimpleNamespace(peers=peers, session=session, role="actor", rank=3))  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        stores = SimpleNamespace(PrefixStore=lambda prefix, store: (prefix, store), DistError=dist.DistError)
        patch.setattr(hub, "dist", stores)
        patch.setattr(hub, "store_of", lambda role: f"store of {role.name}")
        patch.setattr(hub, "PairGroup", made)
        # As `Publisher` makes its end, and as `WeightsChannel` makes the other.
        at(ours)._paired("policy", "rollout:1 0", "gloo 7", 1.0)
        at(theirs).pair("policy", "actor", "rollout", 1, "rollout:1 0 3 gloo 7", 1.0)
    (mine, *rest), (other, *others) = places
    assert (mine == other) == (ours == theirs)
    assert (rest, others) == ([0, "gloo"], [1, "gloo"])
    # Each end is over when one of the roles has another generation, or is gone.
    for roles, role, over in zip(known, ("actor", "rollout"), overs, strict=True):
        assert not over()
        before = roles.pop(role)
        assert over()
        roles[role] = SimpleNamespace(name=role, generation=before.generation + 1)
        assert over()


class Slow:
    """A process group that reads a bucket only when the work is waited for, as one whose peer is slow."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        (bucket,) = tensors
        return SimpleNamespace(wait=lambda timeout: self.sent.append(bucket.numpy().tobytes()))


@given(st.lists(st.integers(0, 900), min_size=1, max_size=30), st.integers(1, 3))
def test_no_bucket_is_written_before_it_was_sent(sizes: list[int], step: int) -> None:
    pair: Any = object.__new__(PairGroup)
    pair._other, pair._backend, pair._group = 1, "gloo", Slow()
    tensors = [torch.randint(256, (size * step,), dtype=torch.uint8)[::step] for size in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairing, "BUCKET", 512)
        pair.send(tensors, time.monotonic() + WAIT_TIMEOUT, checked=False)
    found = b"".join(pair._group.sent)
    for begin, tensor in zip(offsets(sizes)[0], tensors, strict=True):
        assert found[begin : begin + len(tensor)] == tensor.numpy().tobytes()


@given(st.binary(min_size=64, max_size=64 * 8), st.data())
def test_a_checksum_notices_any_change_of_one_byte(raw: bytes, data: st.DataObject) -> None:
    before = torch.frombuffer(bytearray(raw[: len(raw) // 8 * 8]), dtype=torch.uint8)
    after = before.clone()
    after[data.draw(st.integers(0, len(before) - 1))] += data.draw(st.integers(1, 255))
    assert checksum(before) != checksum(after)


def test_memory_is_used_again_when_nobody_has_it_any_more() -> None:
    with ends() as pair:
        addresses = set()
        kept = moved(pair, [torch.randn(1000)])
        for _ in range(5):
            got = moved(pair, [torch.randn(1000)])
            addresses.add(got[0].data_ptr())
            del got
        assert len(addresses) == 1
        assert kept[0].data_ptr() not in addresses


def test_who_waits_is_told_when_the_other_end_closes() -> None:
    with ends() as (sender, receiver):
        threading.Timer(0.1, sender.close).start()
        with pytest.raises(GroupError, match="did the other end die"):
            receiver.receive([100], CPU, time.monotonic() + WAIT_TIMEOUT)


def test_a_deadline_ends_the_wait() -> None:
    with ends() as (_, receiver), pytest.raises(GroupError):
        receiver.receive([100], CPU, time.monotonic() + 0.1)


@pytest.mark.parametrize("ends", ["with the transfer", "at the deadline", "with the role"])
def test_a_transfer_of_nccl_is_looked_at_until_its_wait_ends(
    monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    now = 100.0

    def sleep(seconds: float) -> None:
        nonlocal now
        assert seconds == NCCL_POLL_INTERVAL
        now += seconds

    monkeypatch.setattr(pairing, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    end = 100.0 + 5 * NCCL_POLL_INTERVAL
    pair: Any = object.__new__(PairGroup)
    pair._backend, pair._over = "nccl", lambda: ends == "with the role" and now >= end
    work = SimpleNamespace(is_completed=lambda: ends == "with the transfer" and now >= end)
    deadline = end if ends == "at the deadline" else end + 1.0
    with nullcontext() if ends == "with the transfer" else pytest.raises(GroupError, match="did not end"):
        pair._wait(work, deadline)
    assert now == pytest.approx(end)


def test_a_wait_that_has_no_time_left_is_as_short_as_gloo_can_have_it() -> None:
    limits: list[float] = []
    work = SimpleNamespace(wait=lambda limit: limits.append(limit.total_seconds()))
    pair: Any = object.__new__(PairGroup)
    pair._backend = "gloo"
    pair._wait(work, time.monotonic() - 1.0)
    pair._wait(work, time.monotonic() + 1000.0)
    assert limits[0] == 0.001
    assert 900.0 < limits[1] <= 1000.0


def test_nobody_at_the_other_end() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(GroupError, match="did not connect"):
        PairGroup(store, 0, "gloo", 0.2)


class FakePair:
    """A process group with a reader, whose next message fails or does not."""

    def __init__(self, reader: str, link: str, patience: float) -> None:
        self.link, self.is_open, self.fails = link, True, False

    def send(self, tensors: Sequence[torch.Tensor], deadline: float, *, checked: bool) -> None:
        assert self.is_open
        assert deadline == 51.0
        if self.fails:
            raise GroupError("the other end is gone")

    def close(self) -> None:
        self.is_open = False


@given(st.lists(st.tuples(st.sampled_from(["gloo 1", "gloo 2"]), st.booleans()), max_size=20))
def test_a_group_serves_one_link_until_it_fails_and_ends_then(history: list[tuple[str, bool]]) -> None:
    made: list[FakePair] = []
    failing = False

    def forms(*args: Any) -> Any:
        made.append(FakePair(*args))
        made[-1].fails = failing
        return made[-1]

    publisher = Publisher("policy", pairing=forms, now=lambda: 50.0)
    for link, failing in history:
        known = made[-1] if made and made[-1].is_open and made[-1].link == link else None
        if known is not None:
            known.fails = failing
        publisher._send(Fetch("policy", "actor:0 1", 1, 0, 1.0, link=link), [torch.zeros(1)])
        assert made[-1].link == link
        assert known in (None, made[-1]), "it is not formed anew"
        assert [pair.is_open for pair in made] == [False] * (len(made) - 1) + [not failing]
    publisher.close()
    assert not any(pair.is_open for pair in made)


def test_a_reader_forms_a_group_for_its_link_and_receives_through_it_until_it_fails() -> None:
    formed: list[tuple[str, float]] = []
    whole = torch.arange(6, dtype=torch.int16).view(2, 3)
    box = Box((0, 0), (2, 3))

    class Pair:
        fails = is_open = True

        def receive(self, sizes: list[int], device: torch.device, deadline: float, *, checked: bool) -> Any:
            assert (sizes, device, deadline, checked) == ([12], CPU, 5.0, False)
            if self.fails:
                raise GroupError("the other end is gone")
            return [whole.view(-1).view(torch.uint8)]

        def close(self) -> None:
            self.is_open = False

    def forms(link: str, deadline: float) -> Any:
        formed.append((link, deadline))
        return pair

    line = SimpleNamespace(who=WorkerId("actor", 0, 0))
    source = RemoteSource("policy", line, "me", backend="gloo", checked=False, pairing=forms)  # type: ignore[arg-type]
    source._link, pair = "gloo 7", Pair()
    takes, layout = [NamedBox("w", box)], layout_of({"w": whole})
    with pytest.raises(PeerLost, match="actor:0 did not send its weights: the other end is gone"):
        source.linked(takes, layout, 5.0, CPU)
    assert not pair.is_open
    pair.fails = False
    for _ in range(2):
        (found,) = source.linked(takes, layout, 5.0, CPU)
        assert torch.equal(found, whole)
    assert source.linked([], layout, 5.0, CPU) == []
    assert formed == [("gloo 7", 5.0)] * 2, "once more after the failure"


def test_a_reader_asks_for_the_same_link_until_its_group_has_ended() -> None:
    asked: list[str] = []
    line = SimpleNamespace(who=WorkerId("actor", 0, 0))
    group = SimpleNamespace(receive=lambda *args, **options: [], close=lambda: None)
    source: Any = RemoteSource("policy", line, "me", backend="gloo", pairing=lambda *_: group)  # type: ignore[arg-type]
    source.ask = lambda request: asked.append(request.link)

    def fetch() -> str:
        source.fetch(1, [], 5.0, keep=False)
        return asked[-1]

    first = fetch()
    source._pair = group
    assert [fetch(), fetch()] == [first, first]
    source.unlink()
    second = fetch()
    assert second != first
    assert {each.split()[0] for each in asked} == {"gloo"}

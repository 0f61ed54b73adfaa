"""What workers give each other: data comes once, parameters bit for bit, and a strange question has an answer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, cast

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import FrameError, PeerLost, WeightsError
from unirun.experiments.data.sample import SequenceSample
from unirun.experiments.shelf import NAME, Getting, Lines, Shelf, Shelved
from unirun.roles.transport.protocol import Parcel
from unirun.weights.messages import Ask
from unirun.weights.tensors import LocalShard, local

Parts = Mapping[str, Any]
"""Tensors by name, some of them `LocalShard`."""


def copied(parcel: Parcel) -> Parcel:
    """As it comes over a socket: memory of its own."""
    return Parcel(parcel.head, tuple(memoryview(bytearray(buffer)) for buffer in parcel.buffers))


class Wire:
    """A `Line` to the shelf of a process, in memory. It keeps what was asked."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self.asked: list[dict[str, Any]] = []

    def ask(self, head: bytes) -> Future[Parcel]:
        question = msgspec.json.decode(head, type=Ask)
        assert question.name == NAME
        self.asked.append(msgspec.json.decode(question.body))
        future: Future[Parcel] = Future()
        self.shelf.answer(bytes(question.body), lambda parcel: future.set_result(copied(parcel)))
        return future


class Workers:
    """So many processes, each with a shelf; every one can ask every other one."""

    def __init__(self, count: int) -> None:
        self.shelves = [Shelf() for _ in range(count)]
        self.wires = [Wire(shelf) for shelf in self.shelves]

    def getting(self, rank: int) -> Getting:
        def line(other: int) -> Wire:
            assert other != rank, "a process asks itself"
            return self.wires[other]

        return Getting(rank, self.shelves[rank], cast("Lines", line), timeout=1.0)

    @property
    def asked(self) -> list[tuple[int, str, tuple[str, ...]]]:
        """Who was asked for the data of which key and ids."""
        return [
            (rank, want["key"], tuple(want["ids"]))
            for rank, wire in enumerate(self.wires)
            for want in wire.asked
        ]


class Replying:
    """A `Line` to a process that answers with this."""

    def __init__(self, parcel: Parcel | None) -> None:
        self._parcel = parcel

    def ask(self, head: bytes) -> Future[Parcel]:
        future: Future[Parcel] = Future()
        if self._parcel is not None:
            future.set_result(self._parcel)
        return future


def batch(count: int = 4) -> SequenceSample:
    """Ids with tokens (int64), numbers (bfloat16) and pictures, of different lengths; ids with none of one too."""
    lengths = [[at, 2] if at % 2 else [at] for at in range(count)]
    total = sum(sum(each) for each in lengths)
    return SequenceSample.packed(
        {
            "tokens": torch.arange(total) + 2**40,
            "logprobs": torch.randn(total, generator=torch.Generator().manual_seed(0)).bfloat16(),
            "image": torch.arange(6 * count, dtype=torch.uint8).view(count, 2, 3),
        },
        {"tokens": lengths, "logprobs": lengths, "image": [[1]] * count},
        [f"id{at}" for at in range(count)],
        row=[{"n": at} for at in range(count)],
    )


def spread(workers: Workers, sample: SequenceSample, ranks: Sequence[int], step: int = 0) -> dict[str, Any]:
    """Put each id on the shelf of its rank. Returns where they are."""
    for shelf in workers.shelves:
        shelf.begin(step)
    for part, rank in zip(sample.unpack(), ranks, strict=True):
        workers.shelves[rank].put(part)
    return {key: [(rank,) for rank in ranks] for key in sample.keys}


def check_same(found: SequenceSample, wanted: SequenceSample) -> None:
    assert (found.ids, found.seqlens, found.metadata) == (wanted.ids, wanted.seqlens, wanted.metadata)
    for key in wanted.keys:
        assert found[key].dtype is wanted[key].dtype
        assert torch.equal(found[key], wanted[key])


def nbytes(sample: SequenceSample) -> int:
    return sum(sample[key].nbytes for key in sample.keys)


class TestData:
    @given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.data())
    def test_it_comes_from_wherever_it_is(self, ranks: list[int], data: st.DataObject) -> None:
        workers, whole = Workers(3), batch(len(ranks))
        where = spread(workers, whole, ranks)
        places = data.draw(st.permutations(range(len(ranks))))
        places = places[: data.draw(st.integers(0, len(places)))]
        wanted = whole.reorder(places)
        getting = workers.getting(0)
        some = {key: [found[at] for at in places] for key, found in where.items()}
        check_same(getting.data(0, wanted.meta(), some), wanted)
        remote = [at for at in places if ranks[at] != 0]
        assert getting.traffic.moved == getting.traffic.needed == nbytes(whole.reorder(remote))

    def test_it_comes_once(self) -> None:
        workers, whole = Workers(2), batch()
        where = spread(workers, whole, [1, 0, 1, 1])
        getting = workers.getting(0)
        for _ in range(3):
            check_same(getting.data(0, whole.meta(), where), whole)
        assert workers.asked == [(1, key, ("id0", "id2", "id3")) for key in whole.keys]
        assert getting.traffic.moved == nbytes(whole.reorder([0, 2, 3]))

    def test_only_what_is_wanted_comes(self) -> None:
        workers, whole = Workers(2), batch()
        where = spread(workers, whole, [1] * 4)
        wanted = whole.select(["logprobs"]).reorder([3, 1])
        getting = workers.getting(0)
        check_same(getting.data(0, wanted.meta(), {"logprobs": where["logprobs"][:2]}), wanted)
        assert workers.asked == [(1, "logprobs", ("id3", "id1"))]
        assert getting.traffic.moved == wanted["logprobs"].nbytes

    def test_what_has_come_is_there_for_others(self) -> None:
        workers, whole = Workers(3), batch()
        where = spread(workers, whole, [2] * 4)
        workers.getting(0).data(0, whole.meta(), where)
        check_same(workers.getting(1).data(0, whole.meta(), {key: [(0,)] * 4 for key in whole.keys}), whole)

    def test_what_several_have_comes_from_different_ones(self) -> None:
        workers, whole = Workers(4), batch()
        for shelf in workers.shelves[:2]:
            shelf.begin(0)
            shelf.put(whole)
        for rank in (2, 3):
            workers.shelves[rank].begin(0)
            workers.getting(rank).data(0, whole.meta(), {key: [(0, 1)] * 4 for key in whole.keys})
        assert [len(wire.asked) for wire in workers.wires] == [3, 3, 0, 0]

    def test_the_next_step_begins_with_nothing(self) -> None:
        shelf = Shelf()
        shelf.begin(0)
        shelf.put(batch())
        shelf.begin(0)
        assert shelf.has("tokens", "id0")
        shelf.begin(1)
        assert not shelf.has("tokens", "id0")

    def test_data_of_another_step_is_not_given(self) -> None:
        workers, whole = Workers(2), batch()
        where = spread(workers, whole, [1] * 4, step=3)
        workers.shelves[0].begin(4)
        with pytest.raises(
            PeerLost, match="rank 1 does not give what was asked for: .* step 4: it is in step 3"
        ):
            workers.getting(0).data(4, whole.meta(), where)

    def test_data_that_is_not_there_is_told(self) -> None:
        workers, whole = Workers(2), batch()
        spread(workers, whole, [0] * 4)
        nowhere = SequenceSample.of({"tokens": [torch.zeros(1)]}, ["id9"])
        with pytest.raises(PeerLost, match="rank 1 does not give what was asked for: it has no .*id9"):
            workers.getting(0).data(0, nowhere.meta(), {"tokens": [(1,)]})

    def test_no_ids_have_tensors_of_their_dtypes_and_shapes(self) -> None:
        none = batch().reorder([])
        found = Workers(1).getting(0).data(0, none.meta(), {key: [] for key in none.keys})
        check_same(found, none)
        assert found["image"].shape == (0, 2, 3)


def rows(tensor: torch.Tensor, at: int, count: int, axis: int = 0) -> LocalShard:
    """The part `at` of `count` equal parts along an axis."""
    size = tensor.shape[axis] // count
    start = [0] * tensor.dim()
    start[axis] = at * size
    return LocalShard(tensor.narrow(axis, at * size, size).clone(), shape=tensor.shape, start=start)


NETWORK = {
    "a": torch.randn(12, 6, generator=torch.Generator().manual_seed(0)),
    "b": torch.randn(6, 12, generator=torch.Generator().manual_seed(1)).bfloat16(),
    "norm": torch.randn(7, generator=torch.Generator().manual_seed(2)),
    "steps": torch.tensor(2**40 + 1),
}

Layout = Callable[[int], Parts]


def tensor_parallel(count: int) -> list[Parts]:
    """Each rank has rows of `a`, columns of `b`, and all of the rest."""
    return [
        {
            "a": rows(NETWORK["a"], at, count),
            "b": rows(NETWORK["b"], at, count, 1),
            "norm": NETWORK["norm"].clone(),
            "steps": NETWORK["steps"].clone(),
        }
        for at in range(count)
    ]


def pipeline(count: int) -> list[Parts]:
    """Each rank has some of the tensors."""
    found: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
    for stage, (name, tensor) in zip(itertools.cycle(found), NETWORK.items()):
        stage[name] = tensor.clone()
    return [*found]


LAYOUTS: dict[str, list[Parts]] = {
    "whole": tensor_parallel(1),
    "whole twice": [*tensor_parallel(1), *tensor_parallel(1)],
    "tensor 2": tensor_parallel(2),
    "tensor 3": tensor_parallel(3),
    "tensor 6": tensor_parallel(6),
    "pipe 2": pipeline(2),
    "pipe 3": pipeline(3),
}


def emptied(parts: Parts, value: float = 0.0) -> dict[str, Any]:
    """The same layout with other numbers."""

    def other(tensor: Any) -> Any:
        filled = torch.full_like(local(tensor), value)
        if isinstance(tensor, LocalShard):
            return LocalShard(filled, shape=tensor.shape, start=tensor.start)
        return filled

    return {name: other(tensor) for name, tensor in parts.items()}


def bits(tensor: Any) -> bytes:
    raw: bytes = local(tensor).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return raw


def shelved(layout: Sequence[Parts], more: int = 0) -> Workers:
    """Workers of which the first ones have the model, in this layout."""
    workers = Workers(len(layout) + more)
    for shelf, parts in zip(workers.shelves, layout, strict=False):
        shelf.model("actor@0", lambda parts=parts: parts)  # type: ignore[misc]
    return workers


class TestParameters:
    @pytest.mark.parametrize("source", LAYOUTS)
    @pytest.mark.parametrize("target", LAYOUTS)
    def test_they_are_copied_bit_for_bit_between_layouts(self, source: str, target: str) -> None:
        workers = shelved(LAYOUTS[source], len(LAYOUTS[target]))
        count = len(LAYOUTS[source])
        for at, parts in enumerate(LAYOUTS[target]):
            into = emptied(parts, 3.0)
            getting = workers.getting(count + at)
            getting.parameters("actor@0", range(count), into)
            assert [*map(bits, into.values())] == [*map(bits, parts.values())]
            assert (
                getting.traffic.moved
                == getting.traffic.needed
                == sum(local(each).nbytes for each in parts.values())
            )

    def test_what_is_here_is_not_asked_for(self) -> None:
        workers = shelved(LAYOUTS["tensor 2"])
        into = emptied(NETWORK)
        getting = workers.getting(0)
        getting.parameters("actor@0", [0, 1], into)
        assert [*map(bits, into.values())] == [*map(bits, NETWORK.values())]
        assert getting.traffic.moved == (NETWORK["a"].nbytes + NETWORK["b"].nbytes) // 2

    def test_layouts_are_asked_for_once(self) -> None:
        workers = shelved(LAYOUTS["tensor 2"], 1)
        getting = workers.getting(2)
        kinds = []
        for _ in range(2):
            getting.parameters("actor@0", [0, 1], emptied(NETWORK))
        kinds.append([want["type"] for want in workers.wires[0].asked])
        getting.forget()
        getting.parameters("actor@0", [0, 1], emptied(NETWORK))
        kinds.append([want["type"] for want in workers.wires[0].asked])
        assert kinds[0] == ["WantLayout", "WantParts", "WantParts"]
        assert kinds[1] == [*kinds[0], "WantLayout", "WantParts"]

    def test_they_are_as_they_are_now(self) -> None:
        weight = torch.zeros(3)
        workers = shelved([{"w": weight}], 1)
        getting, into = workers.getting(1), {"w": torch.full((3,), 9.0)}
        for value in (1.0, 2.0):
            weight.fill_(value)
            getting.parameters("actor@0", [0], into)
            assert into["w"].tolist() == [value] * 3

    @pytest.mark.parametrize("eta", [0.25, 0.9])
    @pytest.mark.parametrize("source", ["tensor 2", "pipe 2"])
    def test_they_become_a_moving_average(self, eta: float, source: str) -> None:
        workers = shelved(LAYOUTS[source], 1)
        into = emptied(NETWORK, 3.0)
        getting = workers.getting(len(LAYOUTS[source]))
        old = 3.0
        for _ in range(3):
            getting.parameters("actor@0", range(len(LAYOUTS[source])), into, eta)
        for name in ("a", "norm"):
            # Three times eta of the new ones and the rest of the old ones.
            left = (1.0 - eta) ** 3
            torch.testing.assert_close(into[name], left * old + (1.0 - left) * NETWORK[name])
        assert into["b"].dtype is torch.bfloat16
        assert into["steps"].item() == 2**40 + 1

    def test_with_all_of_the_new_ones_they_are_copied(self) -> None:
        workers = shelved([{"w": torch.tensor([0.1, float("inf")])}], 1)
        into = {"w": torch.tensor([float("nan"), 1.0])}
        workers.getting(1).parameters("actor@0", [0], into, eta=1.0)
        assert into["w"].tolist() == [pytest.approx(0.1), float("inf")]

    @pytest.mark.parametrize(
        ("into", "problem"),
        [
            ({"a": torch.zeros(12, 5)}, "it is published as float32.12, 6. and received as float32.12, 5."),
            ({"a": torch.zeros(12, 6).half()}, "received as float16"),
            ({"c": torch.zeros(1)}, "no publisher has it"),
        ],
    )
    def test_tensors_that_do_not_fit_are_told(self, into: dict[str, torch.Tensor], problem: str) -> None:
        with pytest.raises(WeightsError, match=problem):
            shelved(LAYOUTS["whole"], 1).getting(1).parameters("actor@0", [0], into)

    def test_a_part_that_nobody_has_is_told(self) -> None:
        workers = shelved(LAYOUTS["tensor 2"], 1)
        with pytest.raises(WeightsError, match=r"no publisher has \[6:12, 0:6\]"):
            workers.getting(2).parameters("actor@0", [0], {"a": torch.zeros(12, 6)})

    def test_a_model_that_is_not_there_is_told(self) -> None:
        with pytest.raises(PeerLost, match="rank 0 does not give what was asked for: it has no 'critic@0'"):
            shelved(LAYOUTS["whole"], 1).getting(1).parameters("critic@0", [0], emptied(NETWORK))


def answer(shelf: Shelf, body: bytes) -> tuple[Shelved, int]:
    """The only answer to a question, and how many buffers came with it."""
    found: list[Parcel] = []
    shelf.answer(body, found.append)
    (parcel,) = found
    return msgspec.json.decode(parcel.head, type=Shelved), len(parcel.buffers)


def full() -> Shelf:
    shelf = Shelf()
    shelf.begin(0)
    shelf.put(batch())
    shelf.model("actor@0", lambda: cast("dict[str, torch.Tensor]", LAYOUTS["tensor 2"][1]))
    return shelf


numbers = st.integers(-3, 8) | st.integers()
boxes = st.fixed_dictionaries({"start": st.lists(numbers, max_size=3), "size": st.lists(numbers, max_size=3)})
questions = st.one_of(
    st.fixed_dictionaries(
        {
            "type": st.just("WantData"),
            "step": st.just(0) | numbers,
            "key": st.sampled_from(["tokens", "image", "x"]),
            "ids": st.lists(st.sampled_from(["id0", "id1", "id2", "x"]), max_size=3),
        }
    ),
    st.fixed_dictionaries({"type": st.just("WantLayout"), "model": st.sampled_from(["actor@0", "x"])}),
    st.fixed_dictionaries(
        {
            "type": st.just("WantParts"),
            "model": st.sampled_from(["actor@0", "x"]),
            "parts": st.lists(
                st.fixed_dictionaries(
                    {"name": st.sampled_from(["a", "b", "norm", "steps", "x"]), "box": boxes}
                ),
                max_size=3,
            ),
        }
    ),
)


class TestStrangeQuestions:
    @given(st.binary(max_size=60))
    def test_random_bytes_have_an_answer_with_a_problem(self, body: bytes) -> None:
        found, buffers = answer(full(), body)
        assert found.problem
        assert buffers == 0

    @given(questions)
    def test_whatever_is_asked_it_is_given_or_a_problem_is_told(self, question: dict[str, Any]) -> None:
        found, buffers = answer(full(), msgspec.json.encode(question))
        if found.problem:
            assert (buffers, found.layout) == (0, {})
        elif question["type"] == "WantData":
            assert buffers == 1
            assert {*question["ids"]} <= {"id0", "id1", "id2"}
        elif question["type"] == "WantParts":
            assert buffers == len(question["parts"])
        else:
            assert found.layout.keys() == NETWORK.keys()

    @given(questions, st.data())
    def test_one_that_was_changed_on_its_way_has_an_answer(
        self, question: dict[str, Any], data: st.DataObject
    ) -> None:
        body = bytearray(msgspec.json.encode(question))
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
        answer(full(), bytes(body))

    @pytest.mark.parametrize(
        "body",
        [
            b'{"a": ' + b"[" * 100_000,
            b'{"type": "WantData", "step": 0, "key": "tokens", "ids": []}',
            b'{"type": "WantData", "step": 0, "key": "\xff", "ids": ["id0"]}',
            b'{"type": "WantData", "step": ' + b"9" * 5000 + b', "key": "tokens", "ids": ["id0"]}',
            b'{"type": "WantParts", "model": "actor@0", "parts": [{"name": "a", "box": {"start": [0], "size": [1]}}]}',
        ],
        ids=["deep", "no ids", "no text", "huge", "another dimension"],
    )
    def test_one_that_cannot_be_answered_is_told(self, body: bytes) -> None:
        assert answer(full(), body)[0].problem

    def test_data_of_different_kinds_under_one_key_is_told(self) -> None:
        shelf = full()
        shelf.put(SequenceSample.of({"image": [torch.zeros(1, 5)]}, ["odd"]))
        question = {"type": "WantData", "step": 0, "key": "image", "ids": ["id0", "odd"]}
        assert "same number of dimensions" in answer(shelf, msgspec.json.encode(question))[0].problem


class TestStrangeAnswers:
    META = SequenceSample.of({"x": [torch.zeros(2)]}, ["a"]).meta()

    def ask(self, parcel: Parcel | None, timeout: float = 1.0) -> None:
        getting = Getting(0, Shelf(), cast("Lines", lambda rank: Replying(parcel)), timeout)
        getting.data(0, self.META, {"x": [(1,)]})

    @pytest.mark.parametrize(
        "head", [b"", b"{", b"[]", b'{"problem": 3}', b'{"problem": "\xff"}', b'{"more": 1}']
    )
    def test_one_that_is_none_is_told(self, head: bytes) -> None:
        with pytest.raises(FrameError, match="rank 1 gives no answer about data"):
            self.ask(Parcel(head))

    @pytest.mark.parametrize("count", [0, 2])
    def test_other_buffers_are_told(self, count: int) -> None:
        with pytest.raises(PeerLost, match="rank 1 does not give what was asked for: other buffers"):
            self.ask(Parcel(b"{}", (memoryview(bytearray(8)),) * count))

    @pytest.mark.parametrize("size", [4, 7, 12])
    def test_buffers_of_another_size_are_told(self, size: int) -> None:
        with pytest.raises(FrameError, match=rf"{size} bytes are no torch.float32 of \[2\]"):
            self.ask(Parcel(b"{}", (memoryview(bytearray(size)),)))

    @given(st.binary(max_size=40), st.lists(st.binary(max_size=12), max_size=2))
    def test_random_bytes_are_told_or_are_the_data(self, head: bytes, buffers: list[bytes]) -> None:
        try:
            self.ask(Parcel(head, tuple(memoryview(bytearray(buffer)) for buffer in buffers)))
        except (FrameError, PeerLost):
            return
        assert [len(buffer) for buffer in buffers] == [8]

    def test_none_in_time_is_told(self) -> None:
        with pytest.raises(PeerLost, match="rank 1 has not answered within 0 s") as caught:
            self.ask(None, timeout=0.0)
        assert caught.value.worker == "1"

"""Requests and answers that are malformed: a shelf answers each with a problem, and a worker raises an error."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, cast

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.experiments.fake_workers import LAYOUTS, NETWORK, batch
from unirun.errors import FrameError, PeerLost
from unirun.experiments.model_worker import DataClient, DataReply, DataStore, Lines
from unirun.experiments.sample import SequenceSample
from unirun.roles.transport.protocol import Parcel


class Replying:
    """A `Line` to a process that answers with this."""

    def __init__(self, parcel: Parcel | None) -> None:
        self._parcel = parcel

    def ask(self, head: bytes) -> Future[Parcel]:
        future: Future[Parcel] = Future()
        if self._parcel is not None:
            future.set_result(self._parcel)
        return future


def answer(shelf: DataStore, body: bytes) -> tuple[DataReply, int]:
    """The only answer to a question, and how many buffers came with it."""
    found: list[Parcel] = []
    shelf.answer(body, found.append)
    (parcel,) = found
    return msgspec.json.decode(parcel.head, type=DataReply), len(parcel.buffers)


def full() -> DataStore:
    shelf = DataStore()
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
        getting = DataClient(0, DataStore(), cast("Lines", lambda rank: Replying(parcel)), timeout)
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

"""The data that workers give each other: data comes once, and parameters bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.experiments.fake_workers import LAYOUTS, NETWORK, FakeWorkers, Parts, batch
from unirun.errors import InvocationTimeout, PeerLost, RemoteError, WeightsError, WorkerLost
from unirun.experiments.model_worker import DataStore
from unirun.experiments.orders import LOST
from unirun.experiments.sample import SequenceSample
from unirun.roles.calls.call import InvocationRef
from unirun.weights.tensors import LocalShard, local


def spread(
    workers: FakeWorkers, sample: SequenceSample, ranks: Sequence[int], step: int = 0
) -> dict[str, Any]:
    """Put each id into the store of its rank. Returns where they are."""
    for part, rank in zip(sample.unpack(), ranks, strict=True):
        workers.stores[rank].put(step, part)
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
        workers, whole = FakeWorkers(3), batch(len(ranks))
        where = spread(workers, whole, ranks)
        places = data.draw(st.permutations(range(len(ranks))))
        places = places[: data.draw(st.integers(0, len(places)))]
        wanted = whole.reorder(places)
        store = workers.stores[0]
        some = {key: [found[at] for at in places] for key, found in where.items()}
        check_same(store.gather(0, wanted.meta(), some), wanted)
        remote = [at for at in places if ranks[at] != 0]
        assert store.traffic["moved"] == store.traffic["needed"] == nbytes(whole.reorder(remote))

    def test_data_that_is_needed_again_is_moved_once(self) -> None:
        workers, whole = FakeWorkers(2), batch()
        where = spread(workers, whole, [1, 0, 1, 1])
        store = workers.stores[0]
        for _ in range(3):
            check_same(store.gather(0, whole.meta(), where), whole)
        assert workers.asked == [(1, key, ("id0", "id2", "id3")) for key in whole.keys]
        assert store.traffic["moved"] == nbytes(whole.reorder([0, 2, 3]))

    def test_only_what_is_wanted_comes(self) -> None:
        workers, whole = FakeWorkers(2), batch()
        where = spread(workers, whole, [1] * 4)
        wanted = whole.select(["logprobs"]).reorder([3, 1])
        store = workers.stores[0]
        check_same(store.gather(0, wanted.meta(), {"logprobs": where["logprobs"][:2]}), wanted)
        assert workers.asked == [(1, "logprobs", ("id3", "id1"))]
        assert store.traffic["moved"] == wanted["logprobs"].nbytes

    def test_what_has_come_is_there_for_others(self) -> None:
        workers, whole = FakeWorkers(3), batch()
        where = spread(workers, whole, [2] * 4)
        workers.stores[0].gather(0, whole.meta(), where)
        check_same(workers.stores[1].gather(0, whole.meta(), {key: [(0,)] * 4 for key in whole.keys}), whole)

    def test_what_several_have_comes_from_different_ones(self) -> None:
        workers, whole = FakeWorkers(4), batch()
        for store in workers.stores[:2]:
            store.put(0, whole)
        for rank in (2, 3):
            workers.stores[rank].gather(0, whole.meta(), {key: [(0, 1)] * 4 for key in whole.keys})
        assert sorted(rank for rank, _, _ in workers.asked) == [0, 0, 0, 1, 1, 1]

    def test_two_steps_have_their_own_data_of_one_id_and_each_is_dropped_at_its_end(self) -> None:
        store, whole = FakeWorkers(1).stores[0], batch()
        other = SequenceSample.of({"tokens": [torch.tensor([7])]}, ["id1"])
        store.put(0, whole)
        store.put(1, other)
        for oldest in (0, 1, 1):
            store.drop(oldest)
            assert store.data(1, "tokens", ["id1"]).tolist() == [7]
            if not oldest:
                assert len(store.data(0, "tokens", ["id1"])) == 3
        with pytest.raises(ValueError, match="data of step 0"):
            store.data(0, "tokens", ["id1"])
        store.drop()
        with pytest.raises(ValueError, match="data of step 1"):
            store.data(1, "tokens", ["id1"])

    def test_data_of_another_step_is_not_given(self) -> None:
        workers, whole = FakeWorkers(2), batch()
        where = spread(workers, whole, [1] * 4, step=3)
        with pytest.raises(
            PeerLost, match="rank 1 does not give what was asked for: it has no data of step 4"
        ):
            workers.stores[0].gather(4, whole.meta(), where)

    @pytest.mark.parametrize(
        ("error", "told"),
        [
            (InvocationTimeout("late", missing=("w:1",), results={}), (PeerLost, "rank 1 has not answered")),
            (RemoteError("Odd", "no", worker="w:1", traceback=""), (PeerLost, "rank 1 does not give")),
            (WorkerLost("it died", worker="w:1"), (WorkerLost, "it died")),
        ],
        ids=["late", "unknown error", "lost"],
    )
    def test_a_call_that_fails_is_a_lost_worker(
        self, error: Exception, told: tuple[type[Exception], str]
    ) -> None:
        def ask(rank: int, *request: Any) -> InvocationRef[Any]:
            future: Future[Any] = Future()
            future.set_exception(error)
            return cast("InvocationRef[Any]", future)

        whole = batch()
        with pytest.raises(told[0], match=told[1]) as caught:
            DataStore(0, ask).gather(0, whole.meta(), {key: [(1,)] * 4 for key in whole.keys})
        assert isinstance(caught.value, LOST)

    def test_data_of_different_kinds_under_one_key_is_told(self) -> None:
        workers, whole = FakeWorkers(2), batch()
        where = spread(workers, whole, [1] * len(whole))
        workers.stores[1].put(0, SequenceSample.of({"image": [torch.zeros(1, 5)]}, ["id0"]))
        with pytest.raises(PeerLost, match="same number of dimensions"):
            workers.stores[0].gather(0, whole.meta(), where)

    def test_data_that_is_not_there_is_told(self) -> None:
        workers, whole = FakeWorkers(2), batch()
        spread(workers, whole, [0, 0, 0, 1])
        nowhere = SequenceSample.of({"tokens": [torch.zeros(1)]}, ["id9"])
        with pytest.raises(PeerLost, match="rank 1 does not give what was asked for: it has no .*id9"):
            workers.stores[0].gather(0, nowhere.meta(), {"tokens": [(1,)]})

    def test_no_ids_have_tensors_of_their_dtypes_and_shapes(self) -> None:
        none = batch().reorder([])
        found = FakeWorkers(1).stores[0].gather(0, none.meta(), {key: [] for key in none.keys})
        check_same(found, none)
        assert found["image"].shape == (0, 2, 3)


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


def stored(layout: Sequence[Parts], more: int = 0) -> FakeWorkers:
    """Workers of which the first ones have the model, in this layout."""
    workers = FakeWorkers(len(layout) + more)
    for store, parts in zip(workers.stores, layout, strict=False):
        store.put_model("actor@0", lambda parts=parts: parts)  # type: ignore[misc]
    return workers


class TestParameters:
    @pytest.mark.parametrize("source", LAYOUTS)
    @pytest.mark.parametrize("target", LAYOUTS)
    def test_they_are_copied_bit_for_bit_between_layouts(self, source: str, target: str) -> None:
        workers = stored(LAYOUTS[source], len(LAYOUTS[target]))
        count = len(LAYOUTS[source])
        for at, parts in enumerate(LAYOUTS[target]):
            into = emptied(parts, 3.0)
            store = workers.stores[count + at]
            store.copy_parameters("actor@0", range(count), into)
            assert [*map(bits, into.values())] == [*map(bits, parts.values())]
            assert (
                store.traffic["moved"]
                == store.traffic["needed"]
                == sum(local(each).nbytes for each in parts.values())
            )

    def test_what_is_here_is_not_asked_for(self) -> None:
        workers = stored(LAYOUTS["tensor 2"])
        into = emptied(NETWORK)
        store = workers.stores[0]
        store.copy_parameters("actor@0", [0, 1], into)
        assert [*map(bits, into.values())] == [*map(bits, NETWORK.values())]
        assert store.traffic["moved"] == (NETWORK["a"].nbytes + NETWORK["b"].nbytes) // 2

    def test_layouts_are_asked_for_once(self) -> None:
        workers = stored(LAYOUTS["tensor 2"], 1)
        store = workers.stores[2]
        kinds = []
        for _ in range(2):
            store.copy_parameters("actor@0", [0, 1], emptied(NETWORK))
        kinds.append([what for rank, what, _ in workers.calls if rank == 0])
        store.forget_models()
        store.copy_parameters("actor@0", [0, 1], emptied(NETWORK))
        kinds.append([what for rank, what, _ in workers.calls if rank == 0])
        assert kinds[0] == ["layout", "parts", "parts"]
        assert kinds[1] == [*kinds[0], "layout", "parts"]

    def test_they_are_as_they_are_now(self) -> None:
        weight = torch.zeros(3)
        workers = stored([{"w": weight}], 1)
        store, into = workers.stores[1], {"w": torch.full((3,), 9.0)}
        for value in (1.0, 2.0):
            weight.fill_(value)
            store.copy_parameters("actor@0", [0], into)
            assert into["w"].tolist() == [value] * 3

    @pytest.mark.parametrize("eta", [0.25, 0.9])
    @pytest.mark.parametrize("source", ["tensor 2", "pipe 2"])
    def test_they_become_a_moving_average(self, eta: float, source: str) -> None:
        workers = stored(LAYOUTS[source], 1)
        into = emptied(NETWORK, 3.0)
        store = workers.stores[len(LAYOUTS[source])]
        old = 3.0
        for _ in range(3):
            store.copy_parameters("actor@0", range(len(LAYOUTS[source])), into, eta)
        for name in ("a", "norm"):
            # Three times eta of the new ones and the rest of the old ones.
            left = (1.0 - eta) ** 3
            torch.testing.assert_close(into[name], left * old + (1.0 - left) * NETWORK[name])
        assert into["b"].dtype is torch.bfloat16
        assert into["steps"].item() == 2**40 + 1

    def test_with_all_of_the_new_ones_they_are_copied(self) -> None:
        workers = stored([{"w": torch.tensor([0.1, float("inf")])}], 1)
        into = {"w": torch.tensor([float("nan"), 1.0])}
        workers.stores[1].copy_parameters("actor@0", [0], into, eta=1.0)
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
            stored(LAYOUTS["whole"], 1).stores[1].copy_parameters("actor@0", [0], into)

    def test_a_part_that_nobody_has_is_told(self) -> None:
        workers = stored(LAYOUTS["tensor 2"], 1)
        with pytest.raises(WeightsError, match=r"no publisher has \[6:12, 0:6\]"):
            workers.stores[2].copy_parameters("actor@0", [0], {"a": torch.zeros(12, 6)})

    def test_a_model_that_is_not_there_is_told(self) -> None:
        with pytest.raises(PeerLost, match="rank 0 does not give what was asked for: it has no 'critic@0'"):
            stored(LAYOUTS["whole"], 1).stores[1].copy_parameters("critic@0", [0], emptied(NETWORK))

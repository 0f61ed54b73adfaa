"""The checks before the first byte of a version is written: a version is received as a whole or not at all."""

from __future__ import annotations

import mmap
import os
import resource
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.effort import examples
from tests.unit.weights.harness import weights_harness
from unirun.errors import WeightsError
from unirun.roles.transport.protocol import Parcel
from unirun.weights import disk
from unirun.weights.messages import Describe, Described, Fetch
from unirun.weights.publishing import LARGE, PAGE, Blocks, Packing, Publisher, buffers_of, copy_all
from unirun.weights.sources import answer_of
from unirun.weights.tensors import (
    Box,
    LocalShard,
    NamedBox,
    Piecewise,
    dtype_of,
    layout_of,
    same_bits,
    targets_of,
    tensors_of,
    unsaved,
    unwritable,
)

SHAPE = (4, 3)


class Hollow(torch.Tensor):
    """A tensor such as a FakeTensor, or one that holds others: torch knows its shape, and there is no memory
    at its address."""

    @staticmethod
    def __new__(cls) -> Hollow:
        made: Hollow = torch.Tensor._make_wrapper_subclass(cls, SHAPE)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(func)


def freed() -> torch.Tensor:
    made = torch.zeros(SHAPE)
    made.untyped_storage().resize_(0)
    return made


def made_in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(SHAPE)


def mapped(*, writable: bool) -> torch.Tensor:
    """A tensor over a mapping of its own, as of a file that `numpy.memmap` has opened."""
    mode = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    pages = mmap.mmap(-1, mmap.PAGESIZE, prot=mode)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.frombuffer(pages, dtype=torch.float32, count=12).view(SHAPE)


def lazy() -> torch.Tensor:
    weight: torch.Tensor = torch.nn.LazyLinear(4).weight
    return weight


EMPTY: dict[str, Callable[[], torch.Tensor]] = {
    "meta": lambda: torch.zeros(SHAPE, device="meta"),
    "a meta parameter": lambda: torch.nn.Parameter(torch.zeros(SHAPE, device="meta")),
    "hollow": Hollow,
    "freed": freed,
    "lazy": lazy,
    "sparse": lambda: torch.zeros(SHAPE).to_sparse(),
    "rows of a sparse matrix": lambda: torch.eye(4, 3).to_sparse_csr(),
    "of oneDNN": lambda: torch.zeros(SHAPE).to_mkldnn(),
    "quantized": lambda: torch.quantize_per_tensor(torch.zeros(SHAPE), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "less than a byte": lambda: torch.empty(SHAPE, dtype=dtype_of("uint4")),
}
"""Objects that have no elements that could be copied, by kind."""

LOCKED: dict[str, Callable[[], torch.Tensor]] = {
    "expanded": lambda: torch.zeros(1).expand(SHAPE),
    "a sliding window": lambda: torch.zeros(6).unfold(0, 3, 1),
    "strided over itself": lambda: torch.zeros(99).as_strided(SHAPE, (2, 4)),
    "conjugate": lambda: torch.zeros(SHAPE, dtype=torch.complex64).conj(),
    "negative": lambda: torch.zeros(SHAPE, dtype=torch.complex64).conj().imag,
    "mapped for reading": lambda: mapped(writable=False),
}
"""Tensors that can be read, and not written as themselves."""

GOOD: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.zeros(SHAPE),
    "large": lambda: torch.zeros(600, 600),
    "transposed": lambda: torch.zeros(3, 4).t(),
    "every second column": lambda: torch.zeros(4, 6)[:, ::2],
    "strided beside itself": lambda: torch.zeros(99).as_strided((2, 2), (2, 3)),
    "a parameter": lambda: torch.nn.Parameter(torch.zeros(SHAPE)),
    "computed": lambda: torch.nn.Parameter(torch.zeros(SHAPE)) * 1.0,
    "made in inference mode": made_in_inference_mode,
    "mapped for writing": lambda: mapped(writable=True),
    "expanded, of no element": lambda: torch.zeros(1, 0).expand(4, 0),
}


def value(tensor: torch.Tensor, number: float) -> torch.Tensor:
    return torch.full(tuple(tensor.shape), number, dtype=tensor.dtype)


def test_without_a_second_descriptor_a_version_is_in_memory_that_is_not_shared() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(2)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, limits[1]))
    try:
        block = Blocks().take(PAGE, "reader")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert block.handle is None
    assert block.memory.nbytes == PAGE


def no_thread_starts(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


class Group:
    """The publisher's end of a process group."""

    def __init__(self) -> None:
        self.sent, self.open = list[list[float]](), True

    def send(self, tensors: list[torch.Tensor], deadline: float, *, checked: bool) -> None:
        self.sent += [each.tolist() for each in tensors]

    def close(self) -> None:
        self.open = False


def test_there_is_one_process_group_for_a_worker_also_where_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups: list[Any] = []
    publisher, answers = Publisher("policy", pairing=lambda *_: groups[-1]), list[Parcel]()
    publisher.publish({"w": torch.ones(2)}, 1)
    publisher.handle(Describe("policy", 1.0), answers.append)
    described = answer_of(answers[0].head)
    assert isinstance(described, Described)
    whole = NamedBox("w", Box((0,), (2,)))
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", no_thread_starts)
        # The second one is the worker that was started again.
        for reader in ("rollout:0 0", "rollout:0 1"):
            groups.append(Group())
            publisher.handle(
                Fetch("policy", reader, described.number, 1, 1.0, parts=(whole,), link="gloo 1"),
                answers.append,
            )
    assert [each.sent for each in groups] == [[[1.0, 1.0]]] * 2
    assert [each.open for each in groups] == [False, True]
    publisher.close()
    assert not groups[1].open


def test_large_tensors_are_copied_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    from_ = [torch.arange(LARGE, dtype=torch.uint8) for _ in range(3)]
    into = [torch.zeros_like(each) for each in from_]
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", no_thread_starts)
        limited.setattr(os, "sched_getaffinity", lambda _: {0, 1})
        copy_all(into, from_)
    assert all(map(torch.equal, into, from_))


@pytest.mark.parametrize("kind", EMPTY)
def test_what_has_no_elements_is_refused_by_name_at_both_ends(kind: str) -> None:
    weights: dict[str, Piecewise] = {"good": torch.zeros(2), "bad": EMPTY[kind]()}
    for take in (tensors_of, targets_of):
        with pytest.raises(WeightsError) as caught:
            take(weights)
        assert [fault.where for fault in caught.value.faults] == ["bad"]


@pytest.mark.parametrize("kind", LOCKED)
def test_what_cannot_be_written_is_refused_by_name_and_can_be_published(kind: str) -> None:
    weights: dict[str, Piecewise] = {"good": torch.zeros(2), "bad": LOCKED[kind]()}
    with pytest.raises(WeightsError) as caught:
        targets_of(weights)
    assert [fault.where for fault in caught.value.faults] == ["bad"]
    publisher = Publisher("policy")
    publisher.publish(tensors_of(weights), 1)
    publisher.close()


def test_a_part_that_is_a_shard_by_hand_is_looked_at_too() -> None:
    shard = LocalShard(torch.zeros(1).expand(2, 3), shape=(4, 3), start=(2, 0))
    with pytest.raises(WeightsError, match="rows: several of its elements share memory"):
        targets_of({"rows": shard})
    with pytest.raises(WeightsError, match="rows: it has no memory"):
        targets_of({"rows": LocalShard(torch.zeros(2, 3, device="meta"), shape=(4, 3), start=(2, 0))})


def test_conjugates_are_published_as_the_numbers_that_they_are() -> None:
    for size in (3, 400_000):
        source = torch.randn(size, dtype=torch.complex64)
        tensors = tensors_of({"c": source.conj(), "n": source.conj().imag})
        publisher = Publisher("policy")
        publisher.publish(tensors, 1)
        with publisher.current() as (_, packing, block):
            assert isinstance(packing, Packing)
            for name, (_, part) in zip(tensors, layout_of(tensors).items(), strict=True):
                sent = packing.view(block.memory, name, part.tensor.whole)
                assert torch.equal(sent, (source.conj() if name == "c" else -source.imag))
        publisher.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128, torch.uint8])
def test_bits_are_compared_and_not_numbers(dtype: torch.dtype) -> None:
    zeros = torch.zeros(3, dtype=dtype)
    assert same_bits(zeros, zeros.clone())
    if dtype is not torch.uint8:
        assert not same_bits(zeros, -zeros)
        assert same_bits(zeros / 0, zeros / 0)


class TestTargetsOfOneMemory:
    def test_columns_and_rows_of_a_fused_tensor_are_distinct(self) -> None:
        fused, other = torch.zeros(6, 8), torch.zeros(8, 6)
        targets_of(dict(zip("abcdef", (*fused.chunk(4, 1), *other.chunk(2)), strict=True)))

    @pytest.mark.parametrize("rows", [slice(0, 3), slice(2, 6)])
    def test_a_common_row_is_refused(self, rows: slice) -> None:
        fused = torch.zeros(6, 8)
        with pytest.raises(WeightsError, match="it has memory in common with"):
            targets_of({"a": fused[:4], "b": fused[rows]})

    @given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6), st.integers(1, 4)), max_size=5))
    def test_whatever_they_are_those_with_a_common_element_are_refused(
        self, places: list[tuple[int, int, int]]
    ) -> None:
        memory = torch.zeros(50)
        tensors = {
            f"w{number}": memory[begin : begin + count * step : step]
            for number, (begin, count, step) in enumerate(places)
        }
        elements = {
            name: (place, {*range(place[0], place[0] + place[1] * place[2], place[2])})
            for name, place in zip(tensors, places, strict=True)
        }
        # One of each pair is named. The same tensor by two names is none.
        pairs = {
            frozenset((one, other))
            for one, (place, mine) in elements.items()
            for other, (its_place, its) in elements.items()
            if place != its_place and mine & its
        }
        wrong = {fault.where for fault in unwritable(tensors)}
        assert all(pair & wrong for pair in pairs)
        assert wrong <= {name for pair in pairs for name in pair}

    def test_one_tensor_by_two_names_takes_one_value(self, tmp_path: Path) -> None:
        tied = torch.zeros(SHAPE)
        untied_weights = {"a": torch.ones(SHAPE), "b": torch.full(SHAPE, 2.0)}
        with weights_harness(tmp_path) as harness:
            publisher, endpoint = harness.publisher()
            receiver = harness.receiver(endpoint)
            publisher.publish(tensors_of(untied_weights), 1)
            for assign in (True, False, True):
                with pytest.raises(WeightsError, match="b: it is tied to a"):
                    receiver.receive({"a": tied, "b": tied}, assign=assign)
            assert tied.sum() == 0
            publisher.publish(tensors_of(dict.fromkeys("ab", torch.ones(SHAPE))), 2)
            receiver.receive({"a": tied, "b": tied}, 2)
            assert tied.sum() == tied.numel()

    def test_what_is_refused_is_given_back(self, tmp_path: Path) -> None:
        tied = torch.zeros(SHAPE)
        with weights_harness(tmp_path) as harness:
            publisher, endpoint = harness.publisher()
            receiver = harness.receiver(endpoint)
            publisher.publish(tensors_of({"a": torch.ones(SHAPE), "b": torch.full(SHAPE, 2.0)}), 1)
            with publisher.current() as (_, _, block):
                lent_before = len(block.readers)
                with pytest.raises(WeightsError, match="b: it is tied to a"):
                    receiver.receive({"a": tied, "b": tied})
                # It answers in the order of requests.
                receiver.latest()
                assert len(block.readers) == lent_before


@given(st.integers(0, 4), st.randoms(use_true_random=False))
def test_memory_that_is_sent_is_given_back_once_with_the_last_part(count: int, order: Random) -> None:
    released: list[bool] = []
    left = [*buffers_of([torch.ones(3) for _ in range(count)], lambda: released.append(True))]
    while left:
        assert not released
        del left[order.randrange(len(left))]
    assert released == [True]


KINDS = {**EMPTY, **LOCKED, **GOOD}
PUBLISHED = {kind: make() for kind, make in {**LOCKED, **GOOD}.items()}


@given(st.integers(0, 2), st.lists(st.tuples(st.sampled_from([0, 1, 5, 100]), st.booleans()), max_size=8))
def test_memory_has_the_size_that_is_wanted_or_is_not_much_larger_where_some_is_spare(
    spare: int, takes: list[tuple[int, bool]]
) -> None:
    """A file in it ends where it does."""
    blocks = Blocks(spare)
    for pages, stays in takes:
        size = max(pages * PAGE, 1)
        block = blocks.take(pages * PAGE, "a reader")
        assert block.size == size if not spare else size <= block.size <= 2 * size + PAGE
        assert len(block.memory) == block.size
        if not stays:
            block.readers.clear()
    blocks.close()


def test_of_memory_that_is_spare_the_newest_is_kept() -> None:
    blocks = Blocks(spare=2)
    for number in range(1, 5):
        # None fits where another one is wanted.
        assert blocks.take(PAGE * 10**number // 10, "a reader").number == number
    for number in range(1, 5):
        blocks.find(number).readers.clear()  # type: ignore[union-attr]
    assert blocks.take(PAGE * 5000, "a reader").number == 5
    assert [blocks.find(number) is not None for number in range(1, 6)] == [False, False, True, True, True]
    assert blocks.take(PAGE * 1000, "a reader").number == 4
    blocks.close()


def test_any_mix_of_targets_is_written_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    with weights_harness(tmp_path) as harness:
        publisher, endpoint = harness.publisher()
        publisher.publish({kind: value(tensor, 1) for kind, tensor in PUBLISHED.items()}, 1)
        folder = str(tmp_path / "saved")
        with publisher.current() as (version, packing, block):
            disk.save(folder, version, 0, 1, packing, block.memory)
        receiver = harness.receiver(endpoint)

        @examples(60)
        @given(
            st.lists(st.sampled_from(sorted(KINDS)), min_size=1, unique=True),
            st.sampled_from(["copied", "assigned", "blended", "loaded"]),
        )
        def received(kinds: list[str], how: str) -> None:
            into: dict[str, Piecewise] = {kind: KINDS[kind]() for kind in kinds}
            bad = [kind for kind in kinds if kind not in GOOD]
            told: list[str] = []
            try:
                if how == "loaded":
                    disk.load(folder, targets_of(into), 0)
                else:
                    receiver.receive(into, assign=how == "assigned", eta=0.5 if how == "blended" else 1.0)
            except WeightsError as error:
                told = [fault.where for fault in error.faults]
            first = [kind for kind in bad if kind in EMPTY] or bad
            assert sorted(told) == sorted(first)
            expected = 0.0 if bad else 0.5 if how == "blended" else 1.0
            for kind in kinds:
                tensor = into[kind]
                if kind in GOOD and isinstance(tensor, torch.Tensor):
                    assert torch.equal(tensor.detach(), value(tensor, expected)), kind

        received()


class TestModulesOfTheMetaDevice:
    class Rotary(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))
            self.register_buffer("scale", torch.ones(1))
            self.register_buffer("frequencies", torch.ones(2), persistent=False)

    def test_all_of_it_is_refused_with_the_buffers_that_no_version_has(self) -> None:
        with torch.device("meta"):
            module = self.Rotary()
        with pytest.raises(WeightsError, match="to_empty") as caught:
            targets_of(module)
        assert [fault.where for fault in caught.value.faults] == ["weight", "scale", "frequencies"]

    def test_what_to_empty_leaves_is_known_by_name(self) -> None:
        with torch.device("meta"):
            module = self.Rotary()
        module.to_empty(device="cpu")
        assert [*targets_of(module)] == ["weight", "scale"]
        assert [*unsaved(module)] == ["frequencies"]


def test_a_dtype_without_arithmetic_has_no_moving_average() -> None:
    targets = {"a": torch.zeros(2, dtype=torch.float4_e2m1fn_x2), "b": torch.zeros(2)}
    targets_of(targets)
    with pytest.raises(WeightsError, match="a: there is no moving average of float4_e2m1fn_x2"):
        targets_of(targets, 0.5)


def test_a_module_whose_state_dict_has_names_of_its_own_is_not_assigned_by_halves() -> None:
    from unirun.weights.tensors import assigner

    class Renamed(torch.nn.Linear):
        def state_dict(self, *_: object, **__: object) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {"bias": self.bias, "kernel": self.weight}

    with pytest.raises(WeightsError, match="kernel: the module has no parameter"):
        assigner(Renamed(2, 2))


class TestCompiledModules:
    """Channels have the names of the model, whichever side has compiled which part."""

    class Compiled(torch.nn.Module):
        """Holds a module as that does which `torch.compile` returns, which takes seconds to import."""

        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self._orig_mod = module

    class Model(torch.nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.layer: torch.nn.Module = torch.nn.Linear(2, 2)
            for tensor in self.parameters():
                torch.nn.init.constant_(tensor, value)

    @staticmethod
    def variants(value: float) -> list[torch.nn.Module]:
        """The model as it is, compiled, with a compiled part, and both."""
        compiled = TestCompiledModules.Compiled
        plain, whole, part, both = (TestCompiledModules.Model(value) for _ in range(4))
        part.layer, both.layer = compiled(part.layer), compiled(both.layer)
        return [plain, compiled(whole), part, compiled(both)]

    @pytest.mark.parametrize("assign", [False, True])
    def test_any_publisher_fits_any_receiver(self, tmp_path: Path, assign: bool) -> None:
        with weights_harness(tmp_path) as harness:
            for number, sent in enumerate(self.variants(1.0)):
                publisher, endpoint = harness.publisher(number)
                publisher.publish(tensors_of(sent), 1)
                for got in self.variants(0.0):
                    harness.receiver(endpoint).receive(got, assign=assign)
                    assert {float(each.sum()) for each in got.state_dict().values()} == {4.0, 2.0}

    def test_a_dict_keeps_its_keys(self, tmp_path: Path) -> None:
        into: dict[str, Piecewise] = {f"_orig_mod.{name}": torch.zeros(2, 2) for name in "ab"}
        with weights_harness(tmp_path) as harness:
            publisher, endpoint = harness.publisher()
            publisher.publish(tensors_of(dict.fromkeys("ab", torch.ones(2, 2))), 1)
            harness.receiver(endpoint).receive(into, assign=True)
        assert [*into] == ["_orig_mod.a", "_orig_mod.b"]
        assert all(isinstance(each, torch.Tensor) and each.sum() == 4 for each in into.values())

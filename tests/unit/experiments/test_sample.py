"""Packed sequences: whatever is done with them, each id keeps its data, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import UsageError
from unirun.experiments.graph import MicroBatchSpec
from unirun.experiments.sample import SequenceSample

KINDS: Mapping[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "tokens": (torch.int64, ()),
    "mask": (torch.bool, ()),
    "logprobs": (torch.bfloat16, ()),
    "images": (torch.uint8, (2, 3)),
}
HUGE = 2**62 + 1
"""No float has it."""


def values(dtype: torch.dtype, shape: tuple[int, ...], start: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    numbers = torch.arange(start, start + count)
    if dtype is torch.int64:
        numbers += HUGE
    return numbers.to(dtype).reshape(shape)


@st.composite
def samples(draw: st.DrawFn, least: int = 0, keys: Sequence[str] = (*KINDS,)) -> SequenceSample:
    """Some ids, each with some sequences of some lengths for each key."""
    ids = [f"id{number}" for number in range(draw(st.integers(least, 5)))]
    data, seqlens, start = {}, {}, 0
    for key in keys:
        dtype, trailing = KINDS[key]
        lengths = st.lists(st.integers(0, 4), min_size=1, max_size=3)
        seqlens[key] = [draw(lengths) for _ in ids]
        total = sum(sum(each) for each in seqlens[key])
        data[key] = values(dtype, (total, *trailing), start)
        start += 1000
    return SequenceSample.packed(data, seqlens, ids, row=[{"place": at} for at in range(len(ids))])


def plain(sample: SequenceSample) -> dict[str, Any]:
    """All of it by id, without the order of ids."""
    found: dict[str, Any] = {}
    for each in sample.unpack():
        found[each.ids[0]] = {
            "row": [*each.metadata.get("row", ())],
            **{key: (each.dtypes[key], [t.tolist() for t in each.sequences(key)]) for key in each.keys},
        }
    return found


def same(one: SequenceSample, other: SequenceSample) -> bool:
    return (
        one.ids == other.ids
        and one.keys == other.keys
        and (one.dtypes, one.trailing) == (other.dtypes, other.trailing)
        and plain(one) == plain(other)
        and all(one[key].dtype is other[key].dtype and torch.equal(one[key], other[key]) for key in one.keys)
    )


PAIR = SequenceSample.of(
    {
        "tokens": [torch.tensor([5, 6, 7]), [torch.tensor([8]), torch.tensor([9, 10])]],
        "reward": [torch.tensor(0.5), torch.tensor(1.5)],
    },
    ["a", "b"],
    row=[{"n": 1}, {"n": 2}],
)


class TestMaking:
    def test_sequences_are_one_after_the_other(self) -> None:
        assert PAIR["tokens"].tolist() == [5, 6, 7, 8, 9, 10]
        assert PAIR.seqlens["tokens"] == [[3], [1, 2]]
        assert (PAIR.sizes("tokens"), PAIR.lengths("tokens"), PAIR.total("tokens")) == ([3, 3], [3, 1, 2], 6)
        assert [each.tolist() for each in PAIR.sequences("tokens")] == [[5, 6, 7], [8], [9, 10]]

    def test_a_number_is_a_sequence_of_length_1(self) -> None:
        assert PAIR["reward"].tolist() == [0.5, 1.5]
        assert PAIR.seqlens["reward"] == [[1], [1]]

    def test_elements_may_have_dimensions(self) -> None:
        images = SequenceSample.of({"image": [torch.zeros(2, 3, 4), torch.zeros(1, 3, 4)]}, ["a", "b"])
        assert images["image"].shape == (3, 3, 4)
        assert images.trailing["image"] == (3, 4)
        assert images.sizes("image") == [2, 1]

    @given(samples())
    def test_tensors_that_are_packed_are_the_same_as_those_that_are_given_one_by_one(
        self, sample: SequenceSample
    ) -> None:
        if len(sample):
            groups = {key: [each.sequences(key) for each in sample.unpack()] for key in sample.keys}
            assert same(SequenceSample.of(groups, sample.ids, **sample.metadata), sample)

    def test_sequences_are_views(self) -> None:
        sample = SequenceSample.of({"x": [torch.zeros(2), torch.zeros(1)]}, ["a", "b"])
        sample.sequences("x")[1].fill_(7.0)
        assert sample["x"].tolist() == [0.0, 0.0, 7.0]

    @pytest.mark.parametrize(
        ("seqlens", "ids", "problem"),
        [
            ([[1], [2]], ["a", "a"], "a sample has an id twice"),
            ([[1]], ["a", "b"], "seqlens of 'x' are for 1 ids, and there are 2"),
            ([[1], [1]], ["a", "b"], "the tensor of 'x' has 3 elements, and its lengths sum up to 2"),
        ],
    )
    def test_parts_that_do_not_fit_together_are_refused(
        self, seqlens: list[list[int]], ids: list[str], problem: str
    ) -> None:
        with pytest.raises(UsageError, match=problem):
            SequenceSample.packed({"x": torch.zeros(3)}, {"x": seqlens}, ids)

    def test_metadata_is_for_each_id(self) -> None:
        with pytest.raises(UsageError, match="metadata of 'row' are for 1 ids, and there are 2"):
            SequenceSample.of({"x": [torch.zeros(1)] * 2}, ["a", "b"], row=[1])


class TestGathering:
    @given(samples(least=1))
    def test_what_is_unpacked_and_gathered_is_the_same(self, sample: SequenceSample) -> None:
        apart = sample.unpack()
        assert [len(each) for each in apart] == [1] * len(sample)
        assert same(SequenceSample.gather(apart), sample)

    @given(samples(least=2), st.data())
    def test_parts_of_any_size_are_gathered_in_their_order(
        self, sample: SequenceSample, data: st.DataObject
    ) -> None:
        cut = data.draw(st.integers(0, len(sample)))
        parts = [sample.reorder(range(cut)), sample.reorder(range(cut, len(sample)))]
        assert same(SequenceSample.gather(parts), sample)

    def test_without_data_it_is_what_is_known_of_all(self) -> None:
        found = SequenceSample.gather([PAIR.reorder([0]).meta(), PAIR.reorder([1])])
        assert found.data is None
        assert (found.ids, found.seqlens) == (PAIR.ids, PAIR.seqlens)

    def test_metadata_that_all_of_them_have_is_kept(self) -> None:
        one = SequenceSample.of({"x": [torch.zeros(1)]}, ["a"], row=[1], other=[2])
        two = SequenceSample.of({"x": [torch.zeros(1)]}, ["b"], row=[3])
        assert SequenceSample.gather([one, two]).metadata == {"row": [1, 3]}
        last = SequenceSample.of({"x": [torch.zeros(1)]}, ["c"], row=[4], other=[5])
        assert SequenceSample.gather([one, two, last]).metadata == {"row": [1, 3, 4]}

    @pytest.mark.parametrize(
        "other",
        [
            {"x": [torch.zeros(1, dtype=torch.float64)]},
            {"x": [torch.zeros(1, 2)]},
            {"y": [torch.zeros(1)]},
        ],
        ids=["dtype", "shape", "key"],
    )
    def test_samples_of_different_kinds_are_refused(self, other: dict[str, list[torch.Tensor]]) -> None:
        one = SequenceSample.of({"x": [torch.zeros(1)]}, ["a"])
        with pytest.raises(UsageError, match="samples differ in keys, dtypes or shapes"):
            SequenceSample.gather([one, SequenceSample.of(other, ["b"])])

    def test_one_id_in_two_samples_is_refused(self) -> None:
        with pytest.raises(UsageError, match="a sample has an id twice"):
            SequenceSample.gather([PAIR, PAIR])

    def test_no_samples_are_refused(self) -> None:
        with pytest.raises(UsageError, match="no samples are gathered"):
            SequenceSample.gather([])


class TestReordering:
    @given(samples(), st.data())
    def test_each_id_keeps_its_data(self, sample: SequenceSample, data: st.DataObject) -> None:
        places = data.draw(st.permutations(range(len(sample))))
        places = places[: data.draw(st.integers(0, len(places)))]
        found = sample.reorder(places)
        assert found.ids == tuple(sample.ids[at] for at in places)
        whole = plain(sample)
        assert plain(found) == {each: whole[each] for each in found.ids}

    @given(samples(), st.data())
    def test_there_and_back_it_is_the_same(self, sample: SequenceSample, data: st.DataObject) -> None:
        places = data.draw(st.permutations(range(len(sample))))
        back = sorted(range(len(places)), key=places.__getitem__)
        assert same(sample.reorder(places).reorder(back), sample)

    def test_nothing_of_it_has_its_dtypes_and_shapes(self) -> None:
        none = PAIR.reorder([])
        assert (none.ids, none["tokens"].dtype, none["tokens"].shape) == ((), torch.int64, (0,))
        assert len(none) == 0


class TestSplitting:
    @given(samples(least=1), st.integers(1, 4), st.integers(1, 20))
    def test_nothing_is_lost(self, sample: SequenceSample, least: int, capacity: int) -> None:
        found = sample.split(MicroBatchSpec(least, capacity))
        places = [at for _, some in found for at in some]
        assert sorted(places) == [*range(len(sample))]
        assert all(same(part, sample.reorder(some)) for part, some in found)
        back = sorted(range(len(places)), key=places.__getitem__)
        assert same(SequenceSample.gather([part for part, _ in found]).reorder(back), sample)

    @given(samples(least=1), st.integers(1, 4), st.integers(1, 20))
    def test_tokens_are_those_of_the_key_with_most(
        self, sample: SequenceSample, least: int, capacity: int
    ) -> None:
        key = sample.largest()
        assert sample.total(key) == max(map(sample.total, sample.keys))
        found = sample.split(MicroBatchSpec(least, capacity))
        assert len(found) >= min(least, len(sample))
        for part, _ in found:
            assert part.total(key) <= capacity or len(part) == 1

    def test_by_default_it_is_one_part(self) -> None:
        ((part, places),) = PAIR.split(MicroBatchSpec())
        assert places == [0, 1]
        assert same(part, PAIR)

    def test_no_ids_are_no_parts(self) -> None:
        assert PAIR.reorder([]).split(MicroBatchSpec(3)) == []

    def test_without_keys_it_has_no_size(self) -> None:
        with pytest.raises(UsageError, match="a sample has no keys"):
            PAIR.select([]).split(MicroBatchSpec())


class TestKeys:
    def test_some_are_selected(self) -> None:
        found = PAIR.select(["reward"])
        assert found.keys == ("reward",)
        assert (found.ids, found.metadata) == (PAIR.ids, PAIR.metadata)
        assert found["reward"] is PAIR["reward"]

    def test_one_that_is_not_there_is_told(self) -> None:
        with pytest.raises(UsageError, match="a sample has no key 'rewards'; it has: tokens, reward"):
            PAIR.select(["tokens", "rewards"])

    def test_they_are_renamed(self) -> None:
        found = PAIR.remap({"reward": "score", "absent": "x"})
        assert found.keys == ("tokens", "score")
        assert found["score"] is PAIR["reward"]
        assert same(found.remap({"score": "reward"}), PAIR)

    def test_they_may_change_places(self) -> None:
        found = PAIR.remap({"reward": "tokens", "tokens": "reward"})
        assert found["tokens"] is PAIR["reward"]
        assert found["reward"] is PAIR["tokens"]

    def test_two_that_would_get_one_name_are_refused(self) -> None:
        with pytest.raises(UsageError, match="tokens, reward renamed by .* meet"):
            PAIR.remap({"reward": "tokens"})

    def test_data_that_is_not_here_is_told(self) -> None:
        with pytest.raises(UsageError, match="a sample has no data 'x'; it has: tokens, reward"):
            PAIR["x"]
        with pytest.raises(UsageError, match="a sample has no data 'tokens'; it has: none"):
            PAIR.meta()["tokens"]

    def test_of_keys_with_equally_many_elements_one_is_always_chosen(self) -> None:
        both = {"b": [torch.zeros(2)], "a": [torch.zeros(2)]}
        assert SequenceSample.of(both, ["x"]).largest() == "b"
        assert SequenceSample.of({k: both[k] for k in "ab"}, ["x"]).largest() == "b"


class TestUpdating:
    @given(samples(least=1), st.data())
    def test_what_comes_in_another_order_is_for_the_same_ids(
        self, sample: SequenceSample, data: st.DataObject
    ) -> None:
        places = data.draw(st.permutations(range(len(sample))))
        more = sample.select(["mask", "images"]).reorder(places)
        assert same(sample.select(["tokens", "logprobs"]).update(more).select(sample.keys), sample)

    def test_data_of_the_other_one_counts(self) -> None:
        other = SequenceSample.of({"reward": [torch.tensor(9.0), torch.tensor(8.0)]}, ["b", "a"])
        found = PAIR.update(other)
        assert found["reward"].tolist() == [8.0, 9.0]
        assert PAIR["reward"].tolist() == [0.5, 1.5]

    def test_it_has_data_if_both_have(self) -> None:
        assert PAIR.update(PAIR.meta()).data is None
        assert PAIR.meta().update(PAIR).data is None
        assert PAIR.meta().update(PAIR.meta()).keys == PAIR.keys

    @pytest.mark.parametrize("places", [[0], []])
    def test_other_ids_are_refused(self, places: list[int]) -> None:
        with pytest.raises(UsageError, match="samples with other ids are put together"):
            PAIR.update(PAIR.reorder(places))


class TestMeta:
    @given(samples())
    def test_it_has_no_data_and_all_that_is_known(self, sample: SequenceSample) -> None:
        meta = sample.meta()
        assert meta.data is None
        assert (meta.ids, meta.seqlens, meta.dtypes) == (sample.ids, sample.seqlens, sample.dtypes)
        assert (meta.trailing, meta.metadata) == (sample.trailing, sample.metadata)
        assert [meta.sizes(key) for key in meta.keys] == [sample.sizes(key) for key in sample.keys]

    @given(samples(least=1), st.data())
    def test_what_is_done_with_it_is_what_is_known_of_the_result(
        self, sample: SequenceSample, data: st.DataObject
    ) -> None:
        places = data.draw(st.permutations(range(len(sample))))
        for one, other in (
            (sample.meta().reorder(places), sample.reorder(places)),
            (sample.meta().select(["mask"]), sample.select(["mask"])),
            (sample.meta().remap({"mask": "m"}), sample.remap({"mask": "m"})),
            (SequenceSample.gather(sample.meta().unpack()), SequenceSample.gather(sample.unpack())),
        ):
            assert one.data is None
            assert (one.ids, one.seqlens, one.dtypes) == (other.ids, other.seqlens, other.dtypes)
            assert (one.trailing, one.metadata) == (other.trailing, other.metadata)


@pytest.mark.parametrize(
    ("dtype", "numbers"),
    [
        (torch.int64, [2**24 + 1, -(2**53) - 1, 2**63 - 1]),
        (torch.bfloat16, [1.0, -0.0, 3.140625]),
        (torch.float16, [65504.0, 6e-8, 1.0]),
        (torch.float64, [0.1, 1e300, 2.0**-1074]),
        (torch.bool, [True, False, True]),
        (torch.uint8, [0, 255, 7]),
        (torch.complex64, [1j, 2 + 3j, 0]),
    ],
    ids=str,
)
def test_every_dtype_is_kept_bit_for_bit(dtype: torch.dtype, numbers: list[Any]) -> None:
    before = torch.tensor(numbers, dtype=dtype)
    sample = SequenceSample.of({"x": [before[:2], before[2:]]}, ["a", "b"])
    found = SequenceSample.gather(sample.reorder([1, 0]).unpack()).reorder([1, 0])
    assert sample.dtypes["x"] is found["x"].dtype is dtype
    assert torch.equal(found["x"].view(torch.uint8), before.view(torch.uint8))


@given(samples())
def test_what_is_done_with_a_sample_does_not_change_it(sample: SequenceSample) -> None:
    before = plain(sample)
    sample.reorder(range(len(sample)))
    sample.remap({"tokens": "t"}).select(["t"])
    sample.update(sample.select(["mask"]))
    assert plain(sample) == before


def test_metadata_is_what_json_has() -> None:
    assert msgspec.json.decode(msgspec.json.encode(PAIR.metadata)) == PAIR.metadata

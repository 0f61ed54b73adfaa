"""The positions that each rank uses, and those that all of them have used."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from unirun.errors import UsageError
from unirun.train.data import Consumed, Share, merged
from unirun.train.data.plan import WHOLE

worlds, batches, sizes = st.integers(1, 9), st.integers(1, 9), st.integers(0, 120)


def ranks(left: int | None, world: int, batch: int = 1, begin: Consumed | None = None) -> list[Share]:
    return [Share(rank, world, left, begin or Consumed(), batch) for rank in range(world)]


def cells(left: int, world: int, batch: int) -> list[list[list[int]]]:
    """The cells of each rank, in the order of its steps."""
    return [
        [share.numbers(step).tolist() for step in range(share.total() or 0)]
        for share in ranks(left, world, batch)
    ]


@st.composite
def begins(draw: st.DrawFn) -> Consumed:
    """The part of an epoch that may be used when ranks begin."""
    samples = draw(st.integers(0, 20))
    beyond = draw(st.dictionaries(st.integers(samples + 1, 40), st.sampled_from([WHOLE, 2]), max_size=12))
    return Consumed(0, samples, beyond)


def used(consumed: Consumed) -> set[int]:
    return {*range(consumed.samples), *consumed.whole()}


class TestSteps:
    @given(sizes, worlds, batches)
    def test_each_number_is_in_one_cell(self, left: int, world: int, batch: int) -> None:
        found = [number for rank in cells(left, world, batch) for cell in rank for number in cell]
        assert sorted(found) == [*range(left)]

    @given(sizes, worlds, batches)
    def test_what_all_ranks_have_after_a_step_is_a_prefix(self, left: int, world: int, batch: int) -> None:
        found = cells(left, world, batch)
        for steps in range(len(found[0]) + 1):
            taken = [number for rank in found for cell in rank[:steps] for number in cell]
            assert sorted(taken) == [*range(len(taken))]

    @given(sizes, worlds, batches)
    def test_there_are_as_few_steps_as_possible_of_nearly_equal_batches(
        self, left: int, world: int, batch: int
    ) -> None:
        found = cells(left, world, batch)
        assert len(found[0]) == -(-left // (world * batch))
        lengths = {len(cell) for rank in found for cell in rank}
        assert all(0 < length <= batch for length in lengths)
        assert max(lengths, default=0) - min(lengths, default=0) <= 1

    @given(sizes, worlds, batches.filter(lambda batch: batch > 1))
    def test_all_ranks_have_the_same_number_of_steps(self, left: int, world: int, batch: int) -> None:
        assert len({share.total() for share in ranks(left + world, world, batch)}) == 1

    def test_with_less_than_a_number_for_each_rank_the_first_ranks_have_a_step(self) -> None:
        assert [share.total() for share in ranks(2, 4, 8)] == [1, 1, 0, 0]

    def test_one_by_one_the_first_ranks_have_the_last_step(self) -> None:
        assert [share.total() for share in ranks(6, 4)] == [2, 2, 1, 1]

    def test_there_is_no_step_when_nothing_is_left(self) -> None:
        assert cells(0, 2, 3) == [[], []]

    @given(sizes, worlds, batches, st.data())
    def test_the_items_of_a_rank_are_those_in_its_cells(
        self, left: int, world: int, batch: int, data: st.DataObject
    ) -> None:
        share = data.draw(st.sampled_from(ranks(left, world, batch)))
        step = data.draw(st.integers(0, share.total() or 0))
        assert share.items(step) == sum(map(len, cells(left, world, batch)[share.rank][step:]))

    def test_without_an_end_number_i_is_for_rank_i_modulo_the_ranks(self) -> None:
        share = Share(1, 3, None)
        assert share.total() is None
        assert [share.numbers(step).tolist() for step in range(3)] == [[1], [4], [7]]


class TestShare:
    @given(begins(), worlds, batches, st.integers(1, 3), st.data())
    def test_what_is_left_of_a_share_is_what_is_not_used_of_it(
        self, begin: Consumed, world: int, batch: int, workers: int, data: st.DataObject
    ) -> None:
        share = data.draw(st.sampled_from(ranks(begin.left(60), world, batch, begin)))
        whole = {step: at.tolist() for step, at in share.cells()}
        left = [at for at in range(60) if at not in used(begin)]
        assert whole == {
            step: [left[number] for number in share.numbers(step)] for step in range(share.total() or 0)
        }
        taken = data.draw(st.sets(st.sampled_from([*whole]))) if whole else set()
        rest = replace(share, beyond=dict.fromkeys(taken, WHOLE))
        parts = [{step: at.tolist() for step, at in rest.cells(n, workers)} for n in range(workers)]
        assert {step: at for part in parts for step, at in part.items()} == {
            step: at for step, at in whole.items() if step not in taken
        }
        assert sum(map(len, parts)) == len(whole) - len(taken)


class TestConsumed:
    @given(begins())
    def test_positions_that_are_left_are_numbered_in_their_order(self, begin: Consumed) -> None:
        left = [at for at in range(60) if at not in used(begin)]
        assert begin.left(60) == len(left)
        assert begin.locator()(np.arange(len(left))).tolist() == left

    @given(begins(), worlds, batches)
    def test_it_is_the_same_when_it_was_written_and_read(
        self, begin: Consumed, world: int, batch: int
    ) -> None:
        share = Share(0, world, begin.left(60), begin, batch, 2, {50: 2}, ended=True)
        assert msgspec.json.decode(msgspec.json.encode(share), type=Share) == share


class TestMerged:
    @given(begins(), worlds, batches, st.data())
    def test_it_is_the_union_of_what_all_ranks_have_used(
        self, begin: Consumed, world: int, batch: int, data: st.DataObject
    ) -> None:
        found, expected = list[Share](), used(begin)
        for share in ranks(begin.left(60), world, batch, begin):
            whole = dict(share.cells())
            steps = data.draw(st.integers(0, len(whole)))
            later = data.draw(st.sets(st.integers(steps + 1, len(whole) + 1))) & whole.keys()
            found.append(replace(share, steps=steps, beyond=dict.fromkeys(later, WHOLE)))
        present = data.draw(st.lists(st.sampled_from(found), min_size=1, unique_by=lambda share: share.rank))
        for share in present:
            taken = {*range(share.steps), *share.beyond}
            expected |= {
                at
                for step, some in replace(share, steps=0, beyond={}).cells()
                if step in taken
                for at in some.tolist()
            }
        union = merged(present)
        assert used(union) == expected
        assert union.samples not in union.beyond or union.beyond[union.samples] != WHOLE
        begun = {at for at, items in begin.beyond.items() if items != WHOLE}
        assert {at for at, items in union.beyond.items() if items != WHOLE} == begun - expected

    def test_ranks_in_step_leave_an_epoch_and_a_number_at_once(self) -> None:
        found = merged([replace(share, steps=10**7) for share in ranks(10**12, 1000, 32)])
        assert found == Consumed(samples=32 * 1000 * 10**7)

    def test_files_that_are_begun_and_files_that_are_done_out_of_order_are_beyond(self) -> None:
        begin = Consumed(samples=1, beyond={3: 4, 7: 1})
        first, second = ranks(9, 2, begin=begin)
        found = merged([replace(first, steps=1, beyond={2: WHOLE}), replace(second, beyond={0: 2, 1: WHOLE})])
        # The files are 1, 3, 5, … and 2, 4, 6, …
        assert found == Consumed(samples=2, beyond={2: 2, 3: 4, 4: WHOLE, 5: WHOLE, 7: 1})

    def test_when_all_have_seen_the_end_the_next_epoch_begins(self) -> None:
        first, second = ranks(1, 2, begin=Consumed(4))
        assert merged([replace(first, steps=1, ended=True), replace(second, ended=True)]) == Consumed(5)

    def test_while_one_has_not_seen_the_end_the_epoch_goes_on(self) -> None:
        first, second = ranks(None, 2)
        found = merged([replace(first, steps=2), replace(second, steps=1, ended=True)])
        assert found == Consumed(samples=3)

    def test_a_rank_that_has_done_its_share_may_be_an_epoch_behind(self) -> None:
        behind, ahead = Share(0, 2, 1, steps=1), Share(1, 2, 6, Consumed(1), steps=2)
        for each in (behind, replace(behind, ended=True)):
            assert merged([each, ahead]) == Consumed(1, beyond={1: WHOLE, 3: WHOLE})

    def test_the_end_of_an_epoch_that_one_has_not_begun_is_not_the_end(self) -> None:
        behind, ahead = Share(0, 2, 3, ended=True), Share(1, 2, 3, Consumed(1), steps=1, ended=True)
        assert merged([behind, ahead]) == Consumed(1, beyond={1: WHOLE})

    @pytest.mark.parametrize(
        "behind",
        [
            Share(0, 2, 8, Consumed(1), steps=3),
            Share(0, 2, None, Consumed(1), steps=3),
            Share(0, 2, 8, Consumed(1)),
            Share(0, 2, 8, ended=True),
        ],
    )
    def test_ranks_in_different_epochs_are_refused(self, behind: Share) -> None:
        with pytest.raises(UsageError, match="epoch 2.*have done the same step"):
            merged([behind, Share(1, 2, 8, Consumed(2))])

    def test_ranks_whose_batches_differ_are_refused(self) -> None:
        shares = [Share(0, 2, 40, batch=2, steps=1), Share(1, 2, 40, batch=3, steps=1)]
        with pytest.raises(
            UsageError, match="batches of 2 and of 3 of one dataset; every rank passes the same"
        ):
            merged(shares)

    def test_a_rank_that_has_used_none_may_have_batches_of_any_size(self) -> None:
        shares = [Share(0, 2, 40, batch=2, steps=1), Share(1, 2, 40)]
        assert merged(shares) == Consumed(samples=2)

    def test_no_share_is_refused(self) -> None:
        with pytest.raises(UsageError, match="pass the share of every rank"):
            merged([])

"""The positions that each rank consumes, and those that all of them have consumed."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import UsageError
from unirun.train.data import Progress, merged
from unirun.train.data.plan import Share, Split

worlds, batches, sizes = st.integers(1, 9), st.integers(1, 9), st.integers(0, 120)


def cell(split: Split, step: int, rank: int) -> list[int]:
    found: list[int] = split.numbers(np.array([step * split.world + rank])).tolist()
    return found


def shares(split: Split) -> list[list[list[int]]]:
    """The cells of each rank, in the order of its steps."""
    return [
        [cell(split, step, rank) for step in range(split.steps(rank) or 0)] for rank in range(split.world)
    ]


@st.composite
def bases(draw: st.DrawFn) -> Progress:
    """The positions that may be consumed when ranks begin."""
    return Progress(prefix=draw(st.integers(0, 20))).consume(draw(st.sets(st.integers(0, 40), max_size=12)))


def consumed(progress: Progress, size: int) -> set[int]:
    """By the definition of each field, one position at a time."""
    found = {*range(progress.prefix), *progress.ahead}
    if progress.share is not None:
        left = [at for at in range(size) if at not in found]
        own = shares(progress.share.split)[progress.share.rank]
        for step in {*range(progress.share.count), *progress.share.apart}:
            found |= {left[number] for number in own[step]}
    return found


class TestSplit:
    @given(sizes, worlds, batches)
    def test_each_number_is_in_one_cell(self, left: int, world: int, batch: int) -> None:
        found = [number for rank in shares(Split(left, world, batch)) for cells in rank for number in cells]
        assert sorted(found) == [*range(left)]

    @given(sizes, worlds, batches)
    def test_what_all_ranks_have_after_a_step_is_a_prefix(self, left: int, world: int, batch: int) -> None:
        split = Split(left, world, batch)
        for steps in range((split.steps(0) or 0) + 1):
            taken = [number for rank in shares(split) for cells in rank[:steps] for number in cells]
            assert sorted(taken) == [*range(len(taken))]

    @given(sizes, worlds, batches)
    def test_there_are_as_few_steps_as_possible_of_nearly_equal_batches(
        self, left: int, world: int, batch: int
    ) -> None:
        split = Split(left, world, batch)
        assert split.steps(0) == -(-left // (world * batch))
        lengths = {len(cells) for rank in shares(split) for cells in rank}
        assert all(0 < length <= batch for length in lengths)
        assert len(lengths) <= 2
        assert max(lengths, default=0) - min(lengths, default=0) <= 1

    @given(sizes, worlds, batches.filter(lambda batch: batch > 1))
    def test_all_ranks_have_the_same_number_of_steps(self, left: int, world: int, batch: int) -> None:
        split = Split(left + world, world, batch)
        assert len({split.steps(rank) for rank in range(world)}) == 1

    def test_with_less_than_a_number_for_each_rank_the_first_ranks_have_a_step(self) -> None:
        assert [Split(2, 4, 8).steps(rank) for rank in range(4)] == [1, 1, 0, 0]

    def test_one_by_one_the_first_ranks_have_the_last_step(self) -> None:
        assert [Split(6, 4, 1).steps(rank) for rank in range(4)] == [2, 2, 1, 1]

    def test_there_is_no_step_when_nothing_is_left(self) -> None:
        assert shares(Split(0, 2, 3)) == [[], []]

    @given(sizes, worlds, batches, st.data())
    def test_the_items_of_a_rank_are_those_in_its_cells(
        self, left: int, world: int, batch: int, data: st.DataObject
    ) -> None:
        split = Split(left, world, batch)
        rank = data.draw(st.integers(0, world - 1))
        begin = data.draw(st.integers(0, split.steps(rank) or 0))
        assert split.items(rank, begin) == sum(map(len, shares(split)[rank][begin:]))

    def test_without_an_end_number_i_is_for_rank_i_modulo_the_ranks(self) -> None:
        split = Split(None, 3)
        assert split.steps(1) is None
        assert split.items(1, 0) is None
        assert [cell(split, step, 1) for step in range(3)] == [[1], [4], [7]]


class TestShare:
    @given(st.permutations(range(12)), st.integers(0, 12))
    def test_cells_in_any_order_are_a_count_and_those_beyond(self, order: list[int], taken: int) -> None:
        share = Share(0, Split(12, 1))
        for step in order[:taken]:
            share = share.took([step])
        assert {*range(share.count), *share.apart} == set(order[:taken])
        assert share.count not in share.apart
        assert share.whole == (taken == 12)

    def test_a_share_without_a_known_end_is_never_whole(self) -> None:
        assert not Share(0, Split(None, 1), 5).whole


class TestProgress:
    @given(st.lists(st.lists(st.integers(0, 30))))
    def test_consuming_in_any_order_and_twice_is_a_prefix_and_what_is_beyond(
        self, calls: list[list[int]]
    ) -> None:
        progress = Progress()
        for positions in calls:
            progress = progress.consume(positions)
        assert consumed(progress, 31) == {at for positions in calls for at in positions}
        assert progress.prefix not in progress.ahead
        assert list(progress.ahead) == sorted(set(progress.ahead))

    @given(bases())
    def test_positions_that_are_left_are_numbered_in_their_order(self, base: Progress) -> None:
        left = [at for at in range(60) if at not in consumed(base, 60)]
        assert base.left(60) == len(left)
        assert base.positions(np.arange(len(left))).tolist() == left

    @given(bases(), worlds, batches, st.data())
    def test_what_is_left_of_a_share_is_what_is_not_consumed_of_it(
        self, base: Progress, world: int, batch: int, data: st.DataObject
    ) -> None:
        progress = base.split(data.draw(st.integers(0, world - 1)), world, batch, 60)
        assert progress.share is not None
        whole = dict(progress.cells())
        taken = data.draw(st.sets(st.sampled_from([*whole]))) if whole else set()
        share = progress.share.took([*taken])
        left = dict(msgspec.structs.replace(progress, share=share).cells())
        assert {step: at.tolist() for step, at in left.items()} == {
            step: at.tolist() for step, at in whole.items() if step not in taken
        }

    def test_a_file_that_is_consumed_is_not_begun_any_more(self) -> None:
        progress = Progress(partial={0: 3, 4: 1, 5: 7}).consume([0, 4])
        assert progress.partial == {5: 7}

    @given(bases(), worlds, batches)
    def test_it_is_the_same_when_it_was_written_and_read(
        self, base: Progress, world: int, batch: int
    ) -> None:
        progress = msgspec.structs.replace(base.split(0, world, batch, 60), partial={50: 2}, ended=True)
        assert msgspec.json.decode(msgspec.json.encode(progress), type=Progress) == progress


class TestMerged:
    @given(bases(), worlds, batches, st.data())
    def test_it_is_the_union_of_what_all_ranks_have_consumed(
        self, base: Progress, world: int, batch: int, data: st.DataObject
    ) -> None:
        found = []
        for rank in range(world):
            progress = base.split(rank, world, batch, 60)
            assert progress.share is not None
            steps = progress.share.split.steps(rank)
            taken = data.draw(st.sets(st.integers(0, steps - 1))) if steps else set()
            found.append(msgspec.structs.replace(progress, share=progress.share.took([*taken])))
        present = data.draw(st.lists(st.sampled_from(found), min_size=1))
        union = merged(present)
        assert union.share is None
        assert consumed(union, 60) == set().union(*(consumed(each, 60) for each in present))

    def test_ranks_in_step_leave_a_prefix_of_any_length_at_once(self) -> None:
        split = Split(10**12, 1000, 32)
        found = merged(Progress(share=Share(rank, split, 10**7)) for rank in range(1000))
        assert found == Progress(prefix=32 * 1000 * 10**7)

    def test_progress_of_different_beginnings_adds_up(self) -> None:
        early = Progress(share=Share(0, Split(10, 2), 4))
        late = Progress(prefix=3, ahead=(5,), share=Share(0, Split(6, 3), 1))
        assert merged([early, late]) == Progress(prefix=7)

    def test_of_a_file_the_most_items_count(self) -> None:
        found = merged([Progress(partial={3: 2, 0: 1}), Progress(prefix=1, partial={3: 4, 7: 1})])
        assert found == Progress(prefix=1, partial={3: 4, 7: 1})

    def test_when_all_have_seen_the_end_the_next_epoch_begins(self) -> None:
        share = Share(0, Split(1, 2), 1)
        assert merged([Progress(4, share=share, ended=True), Progress(4, ended=True)]) == Progress(5)

    def test_while_one_has_not_seen_the_end_the_epoch_goes_on(self) -> None:
        split = Split(None, 2)
        found = merged([Progress(share=Share(0, split, 2)), Progress(share=Share(1, split, 1), ended=True)])
        assert found == Progress(prefix=3)

    def test_a_rank_that_has_done_its_share_may_be_an_epoch_behind(self) -> None:
        behind = Progress(share=Share(0, Split(1, 2), 1))
        ahead = Progress(1, share=Share(1, Split(6, 2), 2))
        for each in (behind, msgspec.structs.replace(behind, ended=True)):
            assert merged([each, ahead]) == Progress(1, ahead=(1, 3))

    def test_the_end_of_an_epoch_that_one_has_not_begun_is_not_the_end(self) -> None:
        behind, ahead = Progress(0, ended=True), Progress(1, share=Share(1, Split(3, 2), 1), ended=True)
        assert merged([behind, ahead]) == Progress(1, ahead=(1,))

    @pytest.mark.parametrize(
        "behind",
        [
            Progress(1, share=Share(0, Split(8, 2), 3)),
            Progress(1, share=Share(0, Split(None, 2), 3)),
            Progress(1),
            Progress(0, ended=True),
        ],
    )
    def test_ranks_in_different_epochs_are_refused(self, behind: Progress) -> None:
        with pytest.raises(UsageError, match="epoch 2.*after the same step"):
            merged([behind, Progress(2)])

    def test_no_progress_is_refused(self) -> None:
        with pytest.raises(UsageError, match="pass the progress of every rank"):
            merged([])

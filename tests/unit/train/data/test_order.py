"""The order of the samples of an epoch."""

from __future__ import annotations

import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from unirun.train.data import SampleOrder

orders = st.builds(
    SampleOrder,
    n=st.integers(0, 200),
    seed=st.integers(0, 2**70),
    epoch=st.integers(0, 5),
    shuffle=st.booleans(),
    block=st.integers(1, 50),
)


@given(orders)
def test_each_sample_has_one_position(order: SampleOrder) -> None:
    assert sorted(order.indices(0, order.n).tolist()) == [*range(order.n)]


@given(orders, st.data())
def test_any_range_is_a_part_of_the_whole(order: SampleOrder, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, order.n))
    stop = data.draw(st.integers(start, order.n))
    assert order.indices(start, stop).tolist() == order.indices(0, order.n)[start:stop].tolist()


@given(orders)
def test_without_shuffle_it_is_the_order_of_the_dataset(order: SampleOrder) -> None:
    plain = SampleOrder(order.n, order.seed, order.epoch, False, order.block)
    assert plain.indices(0, order.n).tolist() == [*range(order.n)]


def test_blocks_stay_together_and_are_mixed_within_and_among_each_other() -> None:
    blocks = SampleOrder(1000, block=100).indices(0, 1000).reshape(10, 100)
    numbers = (blocks // 100).tolist()
    assert all(len({*each}) == 1 for each in numbers)
    assert [each[0] for each in numbers] != [*range(10)]
    assert all((np.diff(each) < 0).any() for each in blocks)
    assert len({tuple((each % 100).tolist()) for each in blocks}) == 10


def test_each_epoch_and_each_seed_has_another_order() -> None:
    orders = [SampleOrder(50, seed, epoch) for seed in range(4) for epoch in range(4)]
    assert len({tuple(order.indices(0, 50).tolist()) for order in orders}) == 16


def test_it_is_the_same_on_every_machine() -> None:
    """These were computed once; others would mix the samples of jobs that are resumed."""
    assert SampleOrder(10, seed=7, epoch=2, block=4).indices(0, 10).tolist() == [2, 1, 0, 3, 5, 4, 6, 7, 9, 8]


def test_it_is_small_when_it_is_sent_to_another_process() -> None:
    order = SampleOrder(10**7)
    order.indices(0, 10)
    assert len(pickle.dumps(order)) < 200

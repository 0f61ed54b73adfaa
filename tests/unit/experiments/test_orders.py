"""The orders of the master to workers: who gets which sequences, and the seeds of calls."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from unirun.experiments.experiment import Trial, trial_of
from unirun.experiments.orders import Step, dispatch, seed_of

from .sample_configs import ppo

sizes = st.lists(st.integers(1, 50), max_size=40)
ranks = st.integers(1, 8)


class TestDispatch:
    @given(sizes, ranks, st.booleans())
    def test_each_sequence_is_for_one_rank(self, sizes: list[int], ranks: int, equal: bool) -> None:
        found = dispatch(sizes, ranks, equal=equal)
        assert len(found) == ranks
        assert sorted(index for part in found for index in part) == [*range(len(sizes))]

    @given(sizes, ranks)
    def test_ranks_get_equally_many_sequences_if_that_is_wanted(self, sizes: list[int], ranks: int) -> None:
        counts = [len(part) for part in dispatch(sizes, ranks, equal=True)]
        assert max(counts) - min(counts) <= 1

    @given(sizes, ranks)
    def test_otherwise_no_two_ranks_differ_by_more_tokens_than_a_sequence_has(
        self, sizes: list[int], ranks: int
    ) -> None:
        tokens = [sum(sizes[index] for index in part) for part in dispatch(sizes, ranks, equal=False)]
        assert max(tokens) - min(tokens) <= max(sizes, default=0)

    def test_a_long_sequence_is_alone(self) -> None:
        assert dispatch([9, 1, 1, 1], 2, equal=False) == [[0], [1, 2, 3]]
        assert dispatch([9, 1, 1, 1], 2, equal=True) == [[0, 2], [1, 3]]


class TestSeeds:
    def test_a_seed_is_the_same_in_every_process(self) -> None:
        # Not Python's hash(), which is salted differently in each process.
        assert seed_of(1, 12, "actorGen", 3) == 226094997

    def test_each_part_of_a_call_changes_it(self) -> None:
        calls = [
            (base, step, call, rank)
            for base in (1, 2)
            for step in (0, 11)
            for call in "ab"
            for rank in (0, 1)
        ]
        assert len({seed_of(*each) for each in calls}) == len(calls)

    @given(st.integers(), st.integers(0), st.text(), st.integers(0))
    def test_a_seed_is_in_the_range_that_torch_takes(
        self, base: int, step: int, call: str, rank: int
    ) -> None:
        assert 0 <= seed_of(base, step, call, rank) < 2**32


def test_a_trial_is_what_the_configuration_of_its_job_says() -> None:
    trial = Trial("ppo", "first", "/tmp/x", ("mine",), ("lr=1e-4", "n=${x}"), "/home", resume=True)
    config = OmegaConf.create(
        {
            "experiment": "ppo",
            "trial": "first",
            "root": "/tmp/x",
            "modules": ["mine"],
            "overrides": ["lr=1e-4", "n=${x}"],
            "folder": "/home",
            "resume": True,
        }
    )
    assert trial_of(config) == trial


def test_figures_of_a_call_are_weighted_by_the_sequences_of_each_rank() -> None:
    resolved = ppo(separate=False).lazy_init()
    step = Step(None, resolved, 1, 0, 7)
    step._counts["actorTrain"] = [3.0, 1.0]
    answers = [(None, {"loss": loss}, Counter[str]()) for loss in (1.0, 5.0)]
    assert step._finish(resolved.graph.calls["actorTrain"], answers) == {"loss": 2.0}

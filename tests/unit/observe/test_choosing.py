from __future__ import annotations

from collections.abc import Sequence

import pytest

from unirun.errors import JobError
from unirun.observe.jobdir import choose_job


def choose(name: str | None, *run_ids: str, running: Sequence[str] = ()) -> str:
    return choose_job(name, run_ids, lambda run_id: run_id in running)


class TestChooseJob:
    def test_a_job_is_chosen_by_its_id_or_a_prefix_of_it(self) -> None:
        assert choose("other", "train-aa1", "train-bb2", "other") == "other"
        assert choose("train-a", "train-aa1", "train-bb2", "other") == "train-aa1"

    def test_an_exact_job_id_wins_over_a_longer_one(self) -> None:
        assert choose("train", "train", "train-2") == "train"

    def test_an_ambiguous_or_unknown_job_id_is_an_error(self) -> None:
        with pytest.raises(JobError, match="'t' fits 2 jobs; write more of the id: t-2, t-1$"):
            choose("t", "t-1", "t-2", "x", running=["t-1"])
        with pytest.raises(JobError, match="'t' fits 9 jobs; write more of the id: t8, t7, t6, t5, t4, …$"):
            choose("t", *(f"t{n}" for n in range(9)))
        with pytest.raises(JobError, match="'t' fits 5 jobs; write more of the id: t4, t3, t2, t1, t0$"):
            choose("t", *(f"t{n}" for n in range(5)))
        with pytest.raises(JobError, match="no job is called 'y'; unirun ls shows"):
            choose("y", "t-1")

    def test_without_an_id_the_newest_running_or_else_the_newest_job_is_chosen(self) -> None:
        assert choose(None, "a", "b", "c") == "c"
        assert choose(None, "a", "b", "c", "d", running=["a", "b"]) == "b"
        with pytest.raises(JobError, match="there are no jobs"):
            choose(None)

"""Groups as samples of the queue, the prompts of each rollout worker, and its figures."""

from __future__ import annotations

import itertools
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.launcher.instant_loop import InstantLoop
from unirun.errors import UsageError
from unirun.experiments import rollout_worker
from unirun.experiments.datasets import DatasetUtility, PromptDataset
from unirun.experiments.rollout_worker import REPORT_INTERVAL, figures, prompts, sample_of
from unirun.experiments.sample import SequenceSample
from unirun.rollout.completing import NOT_MADE, Group, Outcomes, Trajectory


class Letters:
    """A token for each character."""

    pad_token_id, eos_token_id = 0, 1

    def encode(self, text: str) -> list[int]:
        return [ord(each) for each in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


def dataset(count: int) -> PromptDataset:
    rows: list[dict[str, Any]] = [{"prompt": f"{number}+1=", "answer": number + 1} for number in range(count)]
    return PromptDataset(DatasetUtility(Letters()), rows=rows)


def test_a_group_is_one_id_with_a_sequence_for_each_trajectory() -> None:
    long = Trajectory((5, 6, 7), (False, True, True), (0.0, -0.5, -1.0), (NOT_MADE, 3, 4), 1.0)
    short = Trajectory((5, 8), (False, True), (0.0, -2.0), (NOT_MADE, 3), 0.0)
    sample = sample_of(Group("q:1-0", {"id": "q", "answer": "9", "input_ids": [5]}, (long, short), 3))
    assert sample.ids == ("q:1-0",)
    assert sample.seqlens["packed_input_ids"] == [[3, 2]]
    assert sample["packed_input_ids"].tolist() == [5, 6, 7, 5, 8]
    assert sample["prompt_mask"].tolist() == [True, False, False, True, False]
    assert sample["packed_logprobs"].tolist() == [0.0, -0.5, -1.0, 0.0, -2.0]
    assert sample["versions"].tolist() == [-1, 3, 4, -1, 3]
    assert (sample.seqlens["rewards"], sample["rewards"].tolist()) == ([[1, 1]], [1.0, 0.0])
    assert {key: sample.dtypes[key] for key in ("versions", "prompt_mask", "rewards")} == {
        "versions": torch.int64,
        "prompt_mask": torch.bool,
        "rewards": torch.float32,
    }
    assert sample.metadata["row"] == [{"id": "q", "answer": "9"}]
    # Groups of other sizes are gathered with it.
    other = sample_of(Group("q:1-1", {"id": "q"}, (short,), 3))
    assert SequenceSample.gather([sample, other]).lengths("packed_input_ids") == [3, 2, 2]


def test_workers_share_each_epoch_and_each_row_is_there_for_the_agent() -> None:
    found = [[*islice(prompts(dataset(7), Letters(), rank, 2, seed=5), 7)] for rank in range(2)]
    first_epoch = [data["id"] for worker, count in zip(found, (4, 3), strict=True) for data in worker[:count]]
    assert sorted(first_epoch) == [*map(str, range(7))]
    assert found[0][0]["id"] != found[1][0]["id"]
    data = found[0][0]
    assert data["prompt"] == f"{data['id']}+1="
    assert data["input_ids"] == Letters().encode(data["prompt"])
    assert data["answer"] == int(data["id"]) + 1


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_epoch_has_all_prompts_once_in_an_order_of_its_own(world: int) -> None:
    count, epochs = 12, 4
    sources = [prompts(dataset(count), Letters(), rank, world, seed=5) for rank in range(world)]
    found = [
        [tuple(data["id"] for data in islice(each, count // world)) for each in sources]
        for _ in range(epochs)
    ]
    assert [sorted(itertools.chain(*epoch)) for epoch in found] == [sorted(map(str, range(count)))] * epochs
    assert len({tuple(epoch) for epoch in found}) == epochs


def test_a_worker_that_was_started_again_does_not_begin_with_the_same_prompts() -> None:
    begins = [next(prompts(dataset(1000), Letters(), 0, 1, 5, number))["id"] for number in range(4)]
    assert len({*begins}) == 4


def test_fewer_prompts_than_workers_are_refused() -> None:
    with pytest.raises(UsageError, match="1 prompts for 2 workers"):
        next(prompts(dataset(1), Letters(), 0, 2, seed=0))


def test_figures_are_numbers_and_a_rate() -> None:
    found = figures(Outcomes(tokens=100), Outcomes(open=3, episodes=12, accepted=4, tokens=300), 2.0)
    assert found["rollout/tokens_per_s"] == 100.0
    assert (found["rollout/open"], found["rollout/episodes"], found["rollout/accepted"]) == (3.0, 12.0, 4.0)


def test_rates_are_those_since_the_report_before(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, told = InstantLoop(), list[dict[str, float]]()
    monkeypatch.setattr(rollout_worker, "time", SimpleNamespace(monotonic=loop.time))
    worker: Any = object.__new__(rollout_worker.RolloutWorkerProcess)
    worker._master_handle = SimpleNamespace(report=told.append)
    pool = SimpleNamespace(outcomes=Outcomes(), idle_seconds=0.0)
    loop.create_task(worker._tell(pool))
    for tokens, idle in ((100, 0.5), (100, 0.0), (500, 1.0)):
        loop.wait(REPORT_INTERVAL / 2)
        pool.outcomes = Outcomes(tokens=pool.outcomes.tokens + tokens)
        pool.idle_seconds += idle * REPORT_INTERVAL
        loop.wait(REPORT_INTERVAL / 2)
    loop.wait(REPORT_INTERVAL / 2)
    loop.end()
    assert [each["rollout/tokens_per_s"] * REPORT_INTERVAL for each in told] == [100.0, 100.0, 500.0]
    assert [each["rollout/idle_share"] for each in told] == [0.5, 0.0, 1.0]

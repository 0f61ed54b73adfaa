"""Generation in micro-batches gives what generation at once gives."""

from __future__ import annotations

import pytest
import torch

from unirun.experiments import GenerationConfig, MicroBatchSpec, SequenceSample
from unirun.experiments.models.api import Engine, Generated, Model
from unirun.experiments.models.backends import InferenceBackend
from unirun.experiments.models.stage import causal_lm

from .test_stage import CONFIG, SPEC, place

# An id may have several prompts, or none.
PROMPTS = [[[3, 1, 4], [1, 5]], [], [[9, 2, 6, 5, 3, 5]], [[8], [9, 7], [9, 3, 2]], [[3, 8, 4]]]


@pytest.fixture(scope="module")
def engine() -> Engine:
    stage = causal_lm(place(), config=CONFIG)
    return InferenceBackend().initialize(Model(place(), stage, None), SPEC).running()


def prompts(some: list[list[list[int]]]) -> SequenceSample:
    rows = [[torch.tensor(prompt) for prompt in each] for each in some]
    return SequenceSample.of({"prompts": rows}, [f"id{number}" for number in range(len(rows))])


def generated(
    engine: Engine, sample: SequenceSample, spec: MicroBatchSpec, how: GenerationConfig
) -> Generated:
    found = engine.generate(sample, "prompts", spec, how, stop=0, pad=0, seed=3)
    assert found is not None
    return found


@pytest.mark.parametrize("spec", [MicroBatchSpec(2), MicroBatchSpec(5), MicroBatchSpec(1, 5)])
def test_greedy_sequences_are_the_same_however_prompts_are_split(
    engine: Engine, spec: MicroBatchSpec
) -> None:
    how = GenerationConfig(n=2, greedy=True, max_new_tokens=6)
    sample = prompts(PROMPTS)
    assert len(sample.split(spec)) > 1
    parts, whole = generated(engine, sample, spec, how), generated(engine, sample, MicroBatchSpec(), how)
    assert [[row.tolist() for row in rows] for rows in parts.tokens] == [
        [row.tolist() for row in rows] for rows in whole.tokens
    ]
    assert parts.ended == whole.ended
    for some, other in zip(parts.logprobs, whole.logprobs, strict=True):
        torch.testing.assert_close(some, other)


def test_each_prompt_of_each_id_has_its_continuations_in_the_order_of_the_sample(engine: Engine) -> None:
    found = generated(engine, prompts(PROMPTS), MicroBatchSpec(3), GenerationConfig(n=2, max_new_tokens=4))
    counts = [len(each) for each in PROMPTS]
    assert [[len(rows) for rows in part.tokens] for part in found.split(counts)] == [[2] * n for n in counts]


def test_micro_batches_draw_other_random_numbers_than_those_before_them(engine: Engine) -> None:
    sample = prompts([[[3, 1, 4]], [[3, 1, 4]]])
    found = generated(engine, sample, MicroBatchSpec(2), GenerationConfig(max_new_tokens=20))
    (one,), (other,) = found.tokens
    assert not torch.equal(one, other)


def test_no_prompts_give_no_sequences(engine: Engine) -> None:
    nothing = prompts(PROMPTS).reorder([])
    assert generated(engine, nothing, MicroBatchSpec(), GenerationConfig()) == Generated([], [], [])

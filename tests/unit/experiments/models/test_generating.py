"""Generation in micro-batches gives what generation at once gives."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from unirun.experiments import GenerationConfig, MicroBatchSpec, SequenceSample
from unirun.experiments.models.api import Generated, Model, PipelinableEngine
from unirun.experiments.models.backends import InferenceBackend, causal_lm

from .test_stage import CONFIG, SPEC, place

# An id may have several prompts, or none.
PROMPTS = [[[3, 1, 4], [1, 5]], [], [[9, 2, 6, 5, 3, 5]], [[8], [9, 7], [9, 3, 2]], [[3, 8, 4]]]


@pytest.fixture(scope="module")
def engine() -> PipelinableEngine:
    stage = causal_lm(place(), config=CONFIG)
    return InferenceBackend().initialize(Model(place(), stage, None), SPEC).running()


def prompts(some: list[list[list[int]]]) -> SequenceSample:
    rows = [[torch.tensor(prompt) for prompt in each] for each in some]
    return SequenceSample.of({"prompts": rows}, [f"id{number}" for number in range(len(rows))])


def generated(
    engine: PipelinableEngine, sample: SequenceSample, spec: MicroBatchSpec, how: GenerationConfig
) -> Generated:
    found = engine.generate(sample, "prompts", spec, how, stop=0, seed=3)
    assert found is not None
    return found


@pytest.mark.parametrize("spec", [MicroBatchSpec(2), MicroBatchSpec(5), MicroBatchSpec(1, 5)])
def test_greedy_sequences_are_the_same_however_prompts_are_split(
    engine: PipelinableEngine, spec: MicroBatchSpec
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


def test_each_prompt_of_each_id_has_its_continuations_in_the_order_of_the_sample(
    engine: PipelinableEngine,
) -> None:
    found = generated(engine, prompts(PROMPTS), MicroBatchSpec(3), GenerationConfig(n=2, max_new_tokens=4))
    assert [len(rows) for rows in found.tokens] == [2] * sum(map(len, PROMPTS))


def test_equal_prompts_have_other_random_numbers(engine: PipelinableEngine) -> None:
    sample = prompts([[[3, 1, 4]], [[3, 1, 4]]])
    found = generated(engine, sample, MicroBatchSpec(2), GenerationConfig(max_new_tokens=20))
    (one,), (other,) = found.tokens
    assert not torch.equal(one, other)


def test_sequences_that_are_drawn_are_the_same_however_prompts_are_split(engine: PipelinableEngine) -> None:
    how = GenerationConfig(n=3, max_new_tokens=12, top_p=0.9)
    parts, whole = (generated(engine, prompts(PROMPTS), MicroBatchSpec(n), how) for n in (4, 1))
    assert [[row.tolist() for row in rows] for rows in parts.tokens] == [
        [row.tolist() for row in rows] for rows in whole.tokens
    ]


def test_no_prompts_give_no_sequences(engine: PipelinableEngine) -> None:
    nothing = prompts(PROMPTS).reorder([])
    assert generated(engine, nothing, MicroBatchSpec(), GenerationConfig()) == Generated([], [], [])


@pytest.fixture(scope="module")
def network() -> Any:
    """A network of transformers whose sequences are not all alike."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {name: value for name, value in CONFIG.items() if name != "model_type"}
    torch.manual_seed(1)
    found: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        AutoConfig.for_model("llama", initializer_range=0.5, **settings)
    )
    return found.eval()


@pytest.fixture(scope="module")
def stops(network: Any) -> list[int]:
    """Two tokens: each ends some sequences before the other does."""
    tokens = torch.cat([row[2:6] for row in expected(network, [])]).tolist()
    first, second = (token for token, _ in Counter(tokens).most_common(2))
    found = expected(network, [first, second])
    assert {int(row[-1]) for row in found} >= {first, second}
    assert len({len(row) for row in found}) > 1
    return [first, second]


def expected(network: Any, stops: list[int], pad: int = 0, least: int = 0) -> list[torch.Tensor]:
    """The tokens that transformers generates for each prompt alone."""
    rows = []
    for prompt in (prompt for each in PROMPTS for prompt in each):
        tokens = torch.tensor([prompt])
        made = network.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            max_new_tokens=12,
            min_new_tokens=least or None,
            eos_token_id=stops or None,
            pad_token_id=pad,
        )
        rows.append(made[0, len(prompt) :])
    return rows


def continued(network: Any, folder: Path, least: int = 0, **more: Any) -> Generated:
    """The same with a stage and an engine, all prompts at once."""
    network.save_pretrained(folder)
    stage = causal_lm(place(), path=str(folder))
    engine = InferenceBackend().initialize(Model(place(), stage, None), SPEC).running()
    how = GenerationConfig(greedy=True, max_new_tokens=12, min_new_tokens=least)
    made = engine.generate(prompts(PROMPTS), "prompts", MicroBatchSpec(), how, seed=0, **more)
    assert made is not None
    return made


class TestTokensThatEndASequence:
    """Tokens end sequences as in transformers' own generate."""

    @pytest.mark.parametrize("least", [0, 5])
    def test_any_of_several_ends_it(self, network: Any, stops: list[int], least: int, tmp_path: Path) -> None:
        found = continued(network, tmp_path, stop=stops, least=least)
        wanted = expected(network, stops, least=least)
        assert [rows[0].tolist() for rows in found.tokens] == [row.tolist() for row in wanted]
        assert [each[0] for each in found.ended] == [int(row[-1]) in stops for row in wanted]

    def test_a_model_that_is_read_shows_no_bar(
        self, network: Any, stops: list[int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """Each rank would draw its own, as the stage reads whole tensors."""
        from transformers.utils.logging import enable_progress_bar

        network.save_pretrained(tmp_path)
        enable_progress_bar()  # type: ignore[no-untyped-call]
        capfd.readouterr()
        causal_lm(place(), path=str(tmp_path))
        assert capfd.readouterr() == ("", "")

    def test_the_last_one_has_a_probability_too(self, network: Any, stops: list[int], tmp_path: Path) -> None:
        found = continued(network, tmp_path, stop=stops)
        # The token that ends a sequence is drawn, and has a probability of its own.
        assert all(
            len(row[0]) == len(tokens[0]) for row, tokens in zip(found.logprobs, found.tokens, strict=True)
        )
        assert all(bool((row[0] < 0.0).all()) for row in found.logprobs)

    def test_one_token_is_given_as_a_number(self, network: Any, stops: list[int], tmp_path: Path) -> None:
        found = continued(network, tmp_path, stop=stops[1])
        wanted = expected(network, stops[1:], stops[1])
        assert [rows[0].tolist() for rows in found.tokens] == [row.tolist() for row in wanted]

    def test_without_any_they_are_those_of_the_generation_config(
        self, network: Any, stops: list[int], tmp_path: Path
    ) -> None:
        network.generation_config.eos_token_id = stops
        found = continued(network, tmp_path)
        wanted = expected(network, stops)
        assert [rows[0].tolist() for rows in found.tokens] == [row.tolist() for row in wanted]

    def test_an_empty_list_ends_none(self, network: Any, tmp_path: Path) -> None:
        found = continued(network, tmp_path, stop=[])
        assert {len(rows[0]) for rows in found.tokens} == {12}
        assert not any(each[0] for each in found.ended)

"""A job brings the versions of an actor into two real vLLM, which are killed in the middle of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from tests.engines.concurrent_requests import ConcurrentRequests, tokens_match_versions
from tests.engines.engine_job import EngineJob, saved
from tests.engines.llama import LARGE, is_greedy, llama, prompts
from tests.engines.server import Engine
from tests.integration.harness import command_in

SEEDS = range(7)


@pytest.fixture(scope="module")
def versions() -> Mapping[str, LlamaForCausalLM]:
    """The models of 100 MB by the label of their version: each is published once, in the order of their seeds."""
    return {"default": llama(0, **LARGE), **{str(seed): llama(seed, **LARGE) for seed in SEEDS[1:]}}


@pytest.fixture(scope="module")
def engine_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineJob]:
    models: Callable[[int], Path] = saved(tmp_path_factory.mktemp("models"), **LARGE)
    with command_in(tmp_path_factory.mktemp("job")) as unirun:
        made = EngineJob(models, unirun)
        yield made
        made.close()


def answers_with(engine: Engine, version: int, versions: Mapping[str, LlamaForCausalLM]) -> bool:
    """Return True if what an engine generates now is labelled with a version, and is what that generates."""
    prompt = prompts(1)[0]
    answer = engine.generate(prompt, 20)
    tokens = [*prompt, *answer["token_ids"]]
    return answer["weight_versions"] == [{"version": str(version), "start": 0, "end": 20}] and is_greedy(
        versions[str(version)], tokens, len(prompt)
    )


def test_a_version_is_in_both_engines(
    engine_job: EngineJob, versions: Mapping[str, LlamaForCausalLM]
) -> None:
    assert engine_job.has(0) is None
    engine_job.publish(1)
    engine_job.have(1)
    assert all(answers_with(engine, 1, versions) for engine in engine_job.engines)


def test_versions_come_while_64_requests_run_and_each_token_is_of_the_version_of_its_label(
    engine_job: EngineJob, versions: Mapping[str, LlamaForCausalLM]
) -> None:
    requests = ConcurrentRequests(*engine_job.engines)

    def two_more() -> None:
        for seed in (2, 3):
            engine_job.have(engine_job.publish(seed))

    answers = requests.answers_during(two_more)
    assert all(a["finish_reason"] == "length" for a in answers)
    assert any(len(a["weight_versions"]) > 1 for a in answers)
    assert all(tokens_match_versions(a, p, versions) for a, p in zip(answers, requests.prompts, strict=True))
    assert all(answers_with(engine, 3, versions) for engine in engine_job.engines)


def test_an_engine_that_is_killed_with_its_requests_has_the_latest_version_when_it_is_up_again(
    engine_job: EngineJob, versions: Mapping[str, LlamaForCausalLM]
) -> None:
    requests = ConcurrentRequests(*engine_job.engines)
    answers = requests.answers_during_a_kill(lambda: engine_job.kill(0))
    assert {number % 2 for number, answer in enumerate(answers) if answer is None} == {0}
    assert all(
        tokens_match_versions(a, p, versions)
        for a, p in zip(answers, requests.prompts, strict=True)
        if a is not None
    )
    engine_job.have(engine_job.publish(4), 1)
    assert engine_job.first(0, 1) == 4, "it was not ready before that"
    assert all(answers_with(engine, 4, versions) for engine in engine_job.engines)


def test_an_engine_that_is_killed_in_an_update_has_that_version_when_it_is_up_again(
    engine_job: EngineJob, versions: Mapping[str, LlamaForCausalLM]
) -> None:
    engine_job.publish(5)
    engine_job.kill_in_an_update(0)
    engine_job.have(5, 1)
    assert answers_with(engine_job.engines[1], 5, versions)
    assert engine_job.first(0, 2) == 5
    assert all(answers_with(engine, 5, versions) for engine in engine_job.engines)
    engine_job.have(engine_job.publish(6))
    assert all(answers_with(engine, 6, versions) for engine in engine_job.engines)

"""Agents in ReaLHF's form: their queues, and the trajectories of the samples that they return."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.unit.rollout.fake_completer import FakeCompleter
from tests.waiting import WAIT_TIMEOUT, eventually_async
from unirun.errors import EpisodeFailed, UsageError
from unirun.experiments import BundledGenerationOutputs, GenerationConfig, SequenceSample
from unirun.experiments.agents import _first_of, bundle, run_of, sampling_of
from unirun.rollout.completing import Completion, Group
from unirun.rollout.pool import Pool, Recorder

AGAIN = 99


class Examiner:
    """ReaLHF's environment: after a wrong number it asks once more."""

    async def reset(self, seed: int | None = None, options: object = None) -> tuple[None, dict[str, Any]]:
        self.turns = 0
        return None, {}

    async def step(self, action: tuple[str, int]) -> tuple[list[int], float, bool, bool, dict[str, Any]]:
        self.turns += 1
        right = action[1] % 2 == 0
        return [AGAIN], right / self.turns, right or self.turns == 2, False, {}


class TwoTurns:
    """ReaLHF's agent: at most two turns of one output each, which are one sequence."""

    config = GenerationConfig(max_new_tokens=4, temperature=0.5)

    async def collect_trajectory(
        self, prompt: SequenceSample, env: Any, obs_queue: asyncio.Queue[Any], act_queue: asyncio.Queue[Any]
    ) -> list[SequenceSample]:
        await env.reset()
        tokens, over, reward = prompt["packed_prompts"].tolist(), False, 0.0
        while not over:
            await obs_queue.put((prompt.ids[0], tokens, self.config))
            act: BundledGenerationOutputs = await act_queue.get()
            assert (act.qid, act.prompt_ids, act.seqlens) == (prompt.ids[0], tokens, [len(tokens) + 1])
            assert act.logprobs == [[0.0] * (len(tokens) - 1) + [-0.5]]
            said, reward, over, _, _ = await env.step((act.qid, act.output_ids[0][-1]))
            tokens = act.seqs[0] if over else [*act.seqs[0], *said]
        return [sample([tokens], [reward])]


def sample(sequences: Sequence[Sequence[int]], rewards: Sequence[float], **more: Any) -> SequenceSample:
    return SequenceSample.of(
        {
            "packed_input_ids": [[torch.tensor(each) for each in sequences]],
            "rewards": [[torch.tensor(each) for each in rewards]],
            **more,
        },
        ["q"],
    )


def groups(
    agent: Any, completer: FakeCompleter, prompts: Sequence[Sequence[int]], env: Any = None
) -> list[Group]:
    async def story() -> list[Group]:
        pool = Pool(completer, run_of(agent), env=env or (lambda: None))
        rows = [{"id": str(number), "input_ids": [*tokens]} for number, tokens in enumerate(prompts)]
        async with asyncio.timeout(WAIT_TIMEOUT):
            return [group async for group in pool.run(rows)]

    return asyncio.run(story())


def test_two_turns_with_an_environment_are_one_sequence_whose_answers_alone_are_trained_on() -> None:
    engine = FakeCompleter()
    engine.version = 3
    first, second = groups(TwoTurns(), engine, [[5, 7], [5, 6]], Examiner)
    (right,), (wrong,) = first.trajectories, second.trajectories
    assert (right.token_ids, right.reward) == ((5, 7, 8), 1.0)
    assert (wrong.token_ids, wrong.reward) == ((5, 6, 7, AGAIN, 100), 0.5)
    assert wrong.trained == (False, False, True, False, True)
    assert wrong.logprobs == (0.0, 0.0, -0.5, 0.0, -0.5)
    assert wrong.versions == (-1, -1, 3, -1, 3)
    assert second.version == 3
    assert engine.requests[0][2] == sampling_of(TwoTurns.config)


class Single:
    """ReaLHF's agent of one turn, whose group is one call."""

    def __init__(self, *, keep: bool = True) -> None:
        self.keep = keep

    async def collect_trajectory(
        self, prompt: SequenceSample, env: Any, obs_queue: asyncio.Queue[Any], act_queue: asyncio.Queue[Any]
    ) -> list[SequenceSample]:
        await env.reset()
        await obs_queue.put((prompt.ids[0], prompt["packed_prompts"], GenerationConfig(n=3, greedy=True)))
        act = await act_queue.get()
        await env.step(("q", act.output_ids))
        masks = [torch.arange(length) < act.prompt_len for length in act.seqlens]
        return [sample(act.seqs, [0.0, 1.0, 2.0], prompt_mask=[masks])] if self.keep else []


def test_the_outputs_of_one_observation_are_a_group() -> None:
    (group,) = groups(Single(), FakeCompleter(), [[5]])
    assert [each.token_ids for each in group.trajectories] == [(5, 6)] * 3
    assert group.rewards == (0.0, 1.0, 2.0)


def test_an_agent_that_returns_no_sample_rejects_its_group() -> None:
    assert groups(Single(keep=False), FakeCompleter(), [[5]]) == []


def test_tokens_that_an_agent_masks_are_not_trained_on_and_each_output_is_found_though_one_begins_another() -> (
    None
):
    lengths = iter([1, 2])

    class Cuts:
        async def collect_trajectory(
            self, prompt: SequenceSample, env: Any, obs_queue: Any, act_queue: Any
        ) -> list[SequenceSample]:
            await obs_queue.put(("q", [5], GenerationConfig(n=2)))
            seqs = (await act_queue.get()).seqs
            await obs_queue.put(("q", [*seqs[1], 9], GenerationConfig()))
            (last,) = (await act_queue.get()).seqs
            masks = [[torch.tensor([True, True, True, True, False])], [torch.tensor([True, False])]]
            return [
                sample([last], [1.0], prompt_mask=[masks[0]]),
                sample([seqs[0]], [0.0], prompt_mask=[masks[1]]),
            ]

    engine = FakeCompleter(lambda prompt: [6, 7][: next(lengths)] if len(prompt) == 1 else [8])
    (group,) = groups(Cuts(), engine, [[5]])
    long, short = group.trajectories
    assert (long.token_ids, long.trained) == ((5, 6, 7, 9, 8), (False,) * 4 + (True,))
    assert long.versions == (-1, 0, 0, -1, 0)
    assert (short.token_ids, short.trained) == ((5, 6), (False, True))


@pytest.mark.parametrize(("given", "asked"), [(0, 0), (7, 7), (10**8, 0)])
def test_a_request_is_for_the_likeliest_tokens_unless_all_are_meant(given: int, asked: int) -> None:
    """ReaLHF has a large number for all of them."""
    assert sampling_of(GenerationConfig(top_k=given))["top_k"] == asked


@pytest.mark.parametrize("tokens", [[5, 55], [7]])
def test_a_sequence_that_the_model_has_not_made_fails_its_episode(tokens: list[int]) -> None:
    class Invents:
        async def collect_trajectory(self, *queues: Any) -> list[SequenceSample]:
            return [sample([tokens], [1.0])]

    with pytest.raises(EpisodeFailed, match="no token that the model has made"):
        groups(Invents(), FakeCompleter(), [[5]] * 20)


def test_an_error_of_an_engine_is_raised_though_the_agent_waits_for_its_answer() -> None:
    def broken(prompt: Sequence[int]) -> Sequence[int]:
        raise ConnectionError("no engine")

    with pytest.raises(EpisodeFailed, match="no engine"):
        groups(TwoTurns(), FakeCompleter(broken), [[5]] * 20, Examiner)


def test_requests_of_an_observation_are_given_up_when_one_of_them_has_failed() -> None:
    class Broken(FakeCompleter):
        """Answers none, and refuses the third."""

        async def complete(self, *args: Any, **how: Any) -> Completion:
            if len(self.requests) == 2:
                raise ConnectionError("no engine")
            return await super().complete(*args, **how)

    async def story() -> None:
        engine = Broken()
        engine.hold()
        client = Recorder(engine, lambda completion: None, conversation="q")
        with pytest.raises(ConnectionError):
            await run_of(Single())({"id": "q", "input_ids": [5]}, client)
        assert len(engine.requests) == 2
        await eventually_async(lambda: not engine.waiting, "no request waits")

    asyncio.run(story())


def test_outputs_have_the_versions_of_their_first_and_last_tokens() -> None:
    made = [
        Completion((6, 7, 8), (-0.5, -1.0, -1.5), (3, 4, 5), "length"),
        Completion((9,), (-2.0,), (6,), "stop"),
        Completion((), (), (), "abort"),
    ]
    found = bundle("q", [1, 2], made)
    assert (found.version_start, found.version_end) == ([3, 6, 0], [5, 6, 0])
    assert found.logprobs == [[0.0, -0.5, -1.0, -1.5], [0.0, -2.0], [0.0]]
    assert (found.no_eos, found.seqlens, found.prompt_len) == ([True, False, False], [5, 3, 2], 2)


def test_an_object_that_is_no_agent_is_refused() -> None:
    with pytest.raises(UsageError, match="neither run nor collect_trajectory"):
        run_of(object())


def test_an_agent_that_ends_in_the_moment_in_which_its_requests_fail_has_its_result() -> None:
    async def story() -> object:
        moment = asyncio.Event()

        async def work() -> str:
            await moment.wait()
            return "result"

        async def service() -> None:
            await moment.wait()
            raise EpisodeFailed("no engine is left", "")

        asyncio.get_running_loop().call_soon(moment.set)
        return await _first_of(work(), service())

    assert asyncio.run(story()) == "result"

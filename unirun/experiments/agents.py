"""The two forms of an agent: ``run(data, client)``, and ReaLHF's ``collect_trajectory`` with its queues."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from unirun.errors import UsageError
from unirun.experiments.models.api import GenerationConfig
from unirun.experiments.sample import SequenceSample
from unirun.rollout.completing import Completion, Trajectory, Turn, recorded
from unirun.rollout.pool import Recorder, Run


class RolloutAgent(Protocol):
    """Makes episodes (`register_agent`). It may also have `group_size` (1), the parameters `sampling` of all requests,
    and ``should_accept(group)``, which says if a `Group` is to be trained on."""

    async def run(self, data: Mapping[str, Any], client: Recorder) -> float | Sequence[Trajectory] | None:
        """One episode of the prompt `data`: its reward, or None if nothing is to be learned from it. An agent with
        other rewards returns the trajectories themselves.

        `data` is a row of the dataset, with the tokens of its prompt as ``input_ids``, its text as ``prompt``, and its
        ``id``. What the `client` is asked for is trained on. ``client.env`` is the environment.
        """


class CollectingAgent(Protocol):
    """An agent in ReaLHF's form, which may be registered in place of a `RolloutAgent`. What the latter may have, it may
    have, too."""

    async def collect_trajectory(
        self,
        prompt: SequenceSample,
        env: Any,
        obs_queue: asyncio.Queue[tuple[str, Sequence[int], Any]],
        act_queue: asyncio.Queue[BundledGenerationOutputs],
    ) -> Sequence[SequenceSample]:
        """The samples of one prompt, which has the key ``packed_prompts``; none if nothing is to be learned from it.

        For each ``(id, tokens, gconfig)`` in `obs_queue`, `act_queue` gets ``gconfig.n`` outputs, in the same order.
        Each sample has `packed_input_ids` and for each sequence one of `rewards`; tokens of its `prompt_mask`, if there
        is one, are not trained on. Log-probabilities and versions are those that were recorded.
        """


@dataclass
class BundledGenerationOutputs:
    """The outputs for one observation: `output_ids`, and `seqs` with the prompt before them. The `logprobs` of each
    sequence are one fewer than its tokens, 0 for those of the prompt. The weights were of `version_start` at the first
    token of each, and of `version_end` at the last."""

    qid: str
    prompt_ids: list[int]
    output_ids: list[list[int]]
    seqs: list[list[int]]
    logprobs: list[list[float]]
    no_eos: list[bool]
    version_start: list[int]
    version_end: list[int]

    @property
    def seqlens(self) -> list[int]:
        """The lengths of the sequences."""
        return [len(each) for each in self.seqs]

    @property
    def prompt_len(self) -> int:
        """The length of the prompt."""
        return len(self.prompt_ids)


class _Nothing:
    """The environment of an agent that has none: ReaLHF's agents call it all the same."""

    async def reset(self, seed: int | None = None, options: object = None) -> tuple[None, dict[str, Any]]:
        return None, {}

    async def step(self, action: object) -> tuple[None, float, bool, bool, dict[str, Any]]:
        return None, 0.0, True, False, {}


def run_of(agent: Any) -> Run:
    """The short form of an agent. Raises `UsageError` for an object that is none."""
    if callable(getattr(agent, "run", None)):
        run: Run = agent.run
        return run
    if not callable(getattr(agent, "collect_trajectory", None)):
        raise UsageError(
            f"agent {type(agent).__name__} has neither run nor collect_trajectory",
            "write async def run(self, data, client)",
        )

    async def collected(data: Mapping[str, Any], client: Recorder) -> tuple[Trajectory, ...] | None:
        env = _Nothing() if client.env is None else client.env
        queues: tuple[asyncio.Queue[Any], asyncio.Queue[Any]] = asyncio.Queue(), asyncio.Queue()
        samples = await _first_of(
            agent.collect_trajectory(_prompt(data), env, *queues), _serve(client, *queues)
        )
        found = tuple(trajectories_of(samples, client.turns))
        return found or None

    return collected


def _prompt(data: Mapping[str, Any]) -> SequenceSample:
    """The prompt as ReaLHF's agents get it."""
    row = {key: value for key, value in data.items() if key != "input_ids"}
    tokens = torch.tensor(data["input_ids"], dtype=torch.long)
    return SequenceSample.of({"packed_prompts": [tokens]}, [str(data["id"])], row=[row])


async def _first_of(work: Coroutine[Any, Any, Any], service: Coroutine[Any, Any, None]) -> Any:
    """The result of `work`, beside a service that ends only by an error, which is raised."""
    working, serving = asyncio.create_task(work), asyncio.create_task(service)
    try:
        await asyncio.wait({working, serving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else serving.result()
    finally:
        working.cancel()
        serving.cancel()
        await asyncio.wait({working, serving})


async def _serve(client: Recorder, observations: asyncio.Queue[Any], actions: asyncio.Queue[Any]) -> None:
    """Answer observations, one after the other."""
    while True:
        name, tokens, how = await observations.get()
        prompt = [*map(int, tokens)]
        asked = [asyncio.create_task(client.complete(prompt, **sampling_of(how))) for _ in range(how.n)]
        try:
            actions.put_nowait(bundle(name, prompt, await asyncio.gather(*asked)))
        finally:
            for each in asked:
                each.cancel()


ALL = 10**8
"""ReaLHF's `top_k` for all tokens."""


def sampling_of(how: GenerationConfig | Any) -> dict[str, Any]:
    """The parameters of requests for a `GenerationConfig`, or ReaLHF's ``GenerationHyperparameters``, which have the
    same names."""
    return {
        "max_tokens": int(how.max_new_tokens),
        "min_tokens": int(how.min_new_tokens),
        "temperature": 0.0 if how.greedy else float(how.temperature),
        "top_p": float(how.top_p),
        "top_k": int(how.top_k) if how.top_k < ALL else 0,
    }


def bundle(name: str, prompt: list[int], outputs: Sequence[Completion]) -> BundledGenerationOutputs:
    """The outputs for the observation `name`."""
    return BundledGenerationOutputs(
        name,
        prompt,
        [[*each.token_ids] for each in outputs],
        [[*prompt, *each.token_ids] for each in outputs],
        [[*[0.0] * (len(prompt) - 1), *each.logprobs] for each in outputs],
        [each.finish_reason == "length" for each in outputs],
        [each.versions[0] if each.versions else 0 for each in outputs],
        [each.versions[-1] if each.versions else 0 for each in outputs],
    )


def trajectories_of(samples: Iterable[SequenceSample], turns: Sequence[Turn]) -> Iterable[Trajectory]:
    """The sequences of these samples, with what the turns have recorded of them. Raises `UsageError` for samples that
    do not fit together, and for a sequence of which no turn has made a token."""
    for sample in samples:
        sequences, rewards = sample.sequences("packed_input_ids"), sample["rewards"].flatten().tolist()
        if len(rewards) != len(sequences):
            raise UsageError(
                f"collect_trajectory has returned {len(sequences)} sequences with {len(rewards)} rewards",
                "give one for each",
            )
        masks = sample.sequences("prompt_mask") if "prompt_mask" in sample.keys else [None] * len(sequences)
        for tokens, mask, reward in zip(sequences, masks, rewards, strict=True):
            masked = None if mask is None else [bool(each) for each in mask.tolist()]
            made = recorded(tokens.tolist(), turns, float(reward), masked)
            if not any(made.trained):
                raise UsageError(
                    "collect_trajectory has returned a sequence with no token that the model has made",
                    "return the seqs of what act_queue has given",
                )
            yield made

"""Losses of asynchronous training, as functions of packed sequences, and the interface `DecoupledGRPO`.

What is known of each token stands at its place: ``logprobs[t]`` is the logarithm of the probability of token ``t``
given those before. Trajectories have the keys of `unirun.experiments.checks.TRAJECTORY_KEYS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from unirun.errors import UsageError
from unirun.experiments.graph import MicroBatchSpec
from unirun.experiments.models.api import GenerationConfig, Model, ModelInterface
from unirun.experiments.sample import SequenceSample, balanced

TOKENS, MASK, BEHAVIOUR, PROXIMAL = "packed_input_ids", "prompt_mask", "packed_logprobs", "proximal_logprobs"
PROMPTS = "packed_prompts"


def logprobs_of(logits: torch.Tensor, sample: SequenceSample, temperature: float = 1.0) -> torch.Tensor:
    """The logarithms of the probabilities of all tokens, ``[tokens]``, of packed `logits` ``[tokens, words]``; 0 for
    the first token of each sequence."""
    found = []
    for out, tokens in zip(logits.split(sample.lengths(TOKENS)), sample.sequences(TOKENS), strict=True):
        each = (out[:-1].float() / temperature).log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        found.append(torch.cat([each.new_zeros(min(len(tokens), 1)), each]))
    return torch.cat(found)


def model_logprobs(
    model: Model, sample: SequenceSample, spec: MicroBatchSpec, temperature: float = 1.0
) -> SequenceSample | None:
    """``packed_logprobs``: the logarithms of the probabilities that a model gives to all tokens; 0 for the first one of
    each sequence. None except on the last stage. It is what `ModelInterface.inference` may return."""
    with torch.no_grad():
        logits = model.running().forward(sample, TOKENS, spec)
        if logits is None:
            return None
        found = {BEHAVIOUR: logprobs_of(logits, sample, temperature)}
    return SequenceSample.packed(found, {BEHAVIOUR: sample.seqlens[TOKENS]}, sample.ids)


def decoupled_ppo_loss(
    logprobs: torch.Tensor,
    proximal: torch.Tensor,
    behaviour: torch.Tensor,
    gains: torch.Tensor,
    clip: float = 0.2,
    cap: float = 5.0,
) -> torch.Tensor:
    """The loss of each token: PPO's clipped ratio to the `proximal` policy, times the ratio of that policy to the one
    that has made the token, of which tokens above `cap` have none (Hilton et al. 2022, arXiv:2110.00641; AReaL, Fu et
    al. 2025, arXiv:2505.24298). With ``proximal=behaviour`` it is PPO's own loss (Schulman et al. 2017).

    All are ``[tokens]``; `gains` are advantages. Only `logprobs` has a gradient.
    """
    ratio = (logprobs - proximal).exp()
    clipped = torch.minimum(ratio * gains, ratio.clamp(1.0 - clip, 1.0 + clip) * gains)
    weight = (proximal - behaviour).exp()
    return -clipped * torch.where(weight > cap, torch.zeros_like(weight), weight).detach()


def group_advantages(rewards: torch.Tensor, groups: Sequence[int], *, scaled: bool = True) -> torch.Tensor:
    """The advantage of each sequence in its group: its reward less the mean of the group, divided by the standard
    deviation if it is `scaled` (GRPO, Shao et al. 2024, arXiv:2402.03300). `groups` are the numbers of sequences; a
    group whose rewards are all equal has advantages of 0."""
    found = []
    for group in rewards.float().split(list(groups)):
        apart = group - group.mean()
        found.append(apart / (group.std(unbiased=False) + 1e-4) if scaled else apart)
    return torch.cat(found) if found else rewards.float()


def varied(rewards: torch.Tensor) -> bool:
    """False for rewards that are all equal: their group has no advantage."""
    return bool((rewards != rewards[:1]).any())


class DecoupledGRPO(ModelInterface):
    """GRPO on trajectories that other versions of the weights have made. Registered as ``decoupled_grpo``.

    A call of ``inference`` computes the probabilities of the policy as it is before the step, under the name
    `packed_logprobs`; with ``output_key_remap={"packed_logprobs": "proximal_logprobs"}`` they are data of the call that
    trains. Without them its loss is that of PPO, with the ratio to the policy that has made the tokens.
    """

    reductions: ClassVar[Mapping[str, str]] = {"ratio_max": "max"}

    def __init__(
        self,
        clip: float = 0.2,
        cap: float = 5.0,
        minibatches: int = 1,
        temperature: float = 1.0,
        *,
        scaled: bool = True,
        drop_equal: bool = True,
        reward: str = "",
        max_new_tokens: int = 256,
    ) -> None:
        """`minibatches`: steps of the optimizer in each step. `temperature` is that of generation. With `drop_equal`,
        groups whose rewards are all equal are refused. `reward` is the function ``package.module:name`` that scores
        held-out answers, of `max_new_tokens` at most."""
        if minibatches < 1:
            raise UsageError(f"minibatches is {minibatches}", "it is 1 or more")
        self._clip, self._cap, self._parts = clip, cap, minibatches
        self._temperature, self._scaled, self._drop_equal = temperature, scaled, drop_equal
        self._reward, self._room = reward, max_new_tokens

    def accepts(self, trajectories: SequenceSample) -> bool:
        """Not groups without variance."""
        return not self._drop_equal or varied(trajectories["rewards"])

    def inference(self, model: Model, sample: SequenceSample, spec: MicroBatchSpec) -> SequenceSample | None:
        """The probabilities of the tokens."""
        return model_logprobs(model, sample, spec, self._temperature)

    def train_step(self, model: Model, sample: SequenceSample, spec: MicroBatchSpec) -> dict[str, float]:
        """Train on all of them, a part in each step of the optimizer."""
        gains = self.advantages(model, sample)
        more = SequenceSample.packed({"gains": gains}, {"gains": sample.seqlens[TOKENS]}, sample.ids)
        sample = sample.update(more)
        found: list[dict[str, float]] = []
        for places in balanced(sample.sizes(TOKENS), self._parts):
            part = sample.reorder(places)
            found.append(
                model.running().train_batch(part, TOKENS, spec, self._loss, trained, self.reductions)
            )
        # A part has no figures of tokens if there are fewer groups than parts.
        each: dict[str, list[float]] = {}
        for some in found:
            for name, value in some.items():
                each.setdefault(name, []).append(value)
        figures = {name: sum(values) / len(values) for name, values in each.items()}
        figures["ratio_max"] = max(each.get("ratio_max", [1.0]))
        if "skipped_steps" in each:
            # A count of all steps so far.
            figures["skipped_steps"] = each["skipped_steps"][-1]
        return {**figures, "reward": float(sample["rewards"].float().mean()) if len(sample) else 0.0}

    def advantages(self, model: Model, sample: SequenceSample) -> torch.Tensor:
        """The advantage of each token: that of its sequence in its group. An algorithm with a critic overrides it."""
        counts = [len(lengths) for lengths in sample.seqlens["rewards"]]
        gains = group_advantages(sample["rewards"], counts, scaled=self._scaled)
        return gains.repeat_interleave(torch.tensor(sample.lengths(TOKENS), device=gains.device))

    def evaluate(self, model: Model, sample: SequenceSample) -> dict[str, float]:
        """The mean `reward` of the likeliest answers to held-out prompts, ``packed_prompts``, and their mean length.
        The function gets the row of the prompt and the text of the answer, which is empty if it has not ended."""
        module, _, name = self._reward.partition(":")
        reward = getattr(importlib.import_module(module), name)
        ends = model.tokenizer.eos_token_id
        stop = {ends} if isinstance(ends, int) else {*ends}
        how = GenerationConfig(greedy=True, max_new_tokens=self._room)
        made = model.running().generate(sample, PROMPTS, MicroBatchSpec(), how, stop=stop, seed=0)
        if made is None:
            return {}
        rewards, tokens = 0.0, 0
        for row, (answer,), (ended,) in zip(sample.metadata["row"], made.tokens, made.ended, strict=True):
            # The last token ends it.
            rewards += float(reward(row, model.tokenizer.decode(answer[:-1].tolist()) if ended else ""))
            tokens += len(answer)
        return {"reward": rewards, "tokens": float(tokens), "count": float(len(sample))}

    def _loss(
        self, logits: torch.Tensor, part: SequenceSample
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor | float]]:
        mask, behaviour = ~part[MASK], part[BEHAVIOUR]
        proximal = part[PROXIMAL] if PROXIMAL in part.keys else behaviour
        now = logprobs_of(logits, part, self._temperature)
        each = decoupled_ppo_loss(now, proximal, behaviour, part["gains"], self._clip, self._cap)
        apart = (now.detach() - proximal)[mask]
        weight = (proximal - behaviour)[mask].exp()
        return each[mask].sum(), {
            "clipped": ((apart.exp() - 1.0).abs() > self._clip).sum(),
            "ratio": weight.sum(),
            "ratio_max": weight.max() if len(weight) else 1.0,
        }


def trained(sample: SequenceSample) -> float:
    """The number of tokens that the model has made."""
    return float((~sample[MASK]).sum())

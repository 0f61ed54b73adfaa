"""PPO: an actor answers, a verifier rewards, a critic learns what to expect, and a reference holds the actor near.

Four models and six calls. With ``separate=true`` the actor generates in another layout than it is trained in, on other
workers, and its parameters are copied there before each generation.

unirun experiment start -e ppo -f first weights=… --mode local
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from experiments.policy import (
    TOKENS,
    advantages,
    answer_of,
    clipped,
    stop_tokens,
    whitened,
)
from experiments.sums import SHAPE, llama, questions
from unirun.experiments import (
    Allocation,
    Experiment,
    ExperimentConfig,
    ExperimentSaveEvalControl,
    ExperimentScheduling,
    GenerationConfig,
    MFCDef,
    MicroBatchSpec,
    Model,
    ModelAbstraction,
    ModelBackendAbstraction,
    ModelInterface,
    ModelInterfaceAbstraction,
    ModelInterfaceType,
    ModelName,
    Scheduling,
    SequenceSample,
    TasksGroup,
    model_workers,
    register_experiment,
    register_interface,
    topology,
)
from unirun.experiments.algorithms import logprobs_of, model_logprobs

ROOM = 4
"""Tokens of an answer."""


class Verifier(ModelInterface):
    """Scores answers with the verifier of reasoning-gym: 1 for the right number."""

    def __init__(self) -> None:
        import reasoning_gym  # type: ignore[import-untyped, unused-ignore]

        self._verifier = reasoning_gym.create_dataset("chain_sum", seed=0, size=1, **SHAPE)

    def inference(self, model: Model, sample: SequenceSample, spec: MicroBatchSpec) -> SequenceSample:
        """`rewards` of the sequences."""
        rewards = []
        answers = iter(zip(sample.sequences(TOKENS), sample.sequences("prompt_mask"), strict=True))
        for row, lengths in zip(sample.metadata["row"], sample.seqlens[TOKENS], strict=True):
            texts = [answer_of(model, *next(answers)) for _ in lengths]
            scores = [
                float(self._verifier.score_answer(text or None, {"answer": row["answer"]})) for text in texts
            ]
            rewards.append([torch.tensor(score) for score in scores])
        return SequenceSample.of({"rewards": rewards}, sample.ids)


class Actor(ModelInterface):
    """Generates answers, and learns from their advantages."""

    def __init__(self, clip: float = 0.2, n: int = 1, minibatches: int = 2) -> None:
        self._clip, self._n, self._minibatches = clip, n, minibatches

    def generate(self, model: Model, sample: SequenceSample, spec: MicroBatchSpec) -> SequenceSample | None:
        """Answers, drawn at temperature 1."""
        how = GenerationConfig(n=self._n, max_new_tokens=ROOM)
        return answer(model, sample, spec, how)

    def inference(self, model: Model, sample: SequenceSample, spec: MicroBatchSpec) -> SequenceSample | None:
        """`packed_logprobs` of the tokens."""
        return model_logprobs(model, sample, spec)

    def train_step(self, model: Model, sample: SequenceSample, spec: MicroBatchSpec) -> dict[str, float]:
        """Some steps, each on a part of the sequences."""
        gains = whitened(sample["advantages"], ~sample["prompt_mask"], model.place)
        sample = sample.update(
            SequenceSample.packed({"gains": gains}, {"gains": sample.seqlens["advantages"]}, sample.ids)
        )

        def loss(logits: torch.Tensor, part: SequenceSample) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            mask = ~part["prompt_mask"]
            each = clipped(logprobs_of(logits, part), part["packed_logprobs"], part["gains"], self._clip)
            return each[mask].sum(), {}

        return in_parts(model, sample, spec, loss, self._minibatches)

    def evaluate(self, model: Model, sample: SequenceSample) -> dict[str, float]:
        """The fraction of likeliest answers that are right."""
        found = answer(model, sample, MicroBatchSpec(), GenerationConfig(greedy=True, max_new_tokens=ROOM))
        if found is None:
            return {}
        texts = [
            answer_of(model, tokens, prompt)
            for tokens, prompt in zip(found.sequences(TOKENS), found.sequences("prompt_mask"), strict=True)
        ]
        right = sum(text == row["answer"] for text, row in zip(texts, sample.metadata["row"], strict=True))
        return {"accuracy": float(right), "count": float(len(texts))}


class Critic(ModelInterface):
    """Estimates values."""

    def __init__(
        self, minibatches: int = 2, kl: float = 0.02, discount: float = 1.0, gae_lambda: float = 0.95
    ) -> None:
        self._minibatches, self._kl = minibatches, kl
        self._discount, self._lambda = discount, gae_lambda

    def inference(self, model: Model, sample: SequenceSample, spec: MicroBatchSpec) -> SequenceSample | None:
        """`values` after each token; `advantages` and `returns` of each."""
        values = model.running().forward(sample, TOKENS, spec)
        if values is None:
            return None
        gains, returns = [], []
        parts = zip(
            values.float().split(sample.lengths(TOKENS)),
            sample.sequences("prompt_mask"),
            sample.sequences("packed_logprobs"),
            sample.sequences("packed_ref_logprobs"),
            sample["rewards"],
            strict=True,
        )
        for value, prompt, logprobs, reference, reward in parts:
            each = torch.where(prompt, torch.zeros(()), -self._kl * (logprobs - reference))
            each[-1] += reward
            gain, expected = advantages(each, value, prompt, self._discount, self._lambda)
            gains.append(gain)
            returns.append(expected)
        lengths = dict.fromkeys(("advantages", "returns"), sample.seqlens[TOKENS])
        data = {"advantages": torch.cat(gains), "returns": torch.cat(returns)}
        return SequenceSample.packed(data, lengths, sample.ids)

    def train_step(self, model: Model, sample: SequenceSample, spec: MicroBatchSpec) -> dict[str, float]:
        """Some steps, each on a part of the sequences."""

        def loss(values: torch.Tensor, part: SequenceSample) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            # The value before a token is at the position of the previous token.
            mask = ~part["prompt_mask"]
            before = torch.roll(values, 1)
            return 0.5 * ((before - part["returns"]) ** 2)[mask].sum(), {}

        return in_parts(model, sample, spec, loss, self._minibatches)


def answer(
    model: Model, sample: SequenceSample, spec: MicroBatchSpec, how: GenerationConfig
) -> SequenceSample | None:
    """Answers to prompts, drawn with torch's seed."""
    stop = stop_tokens(model.tokenizer)
    made = model.running().generate(sample, "packed_prompts", spec, how, stop=stop, seed=torch.initial_seed())
    return None if made is None else made.after(sample)


def in_parts(
    model: Model, sample: SequenceSample, spec: MicroBatchSpec, loss: object, parts: int
) -> dict[str, float]:
    """A step of the optimizer for each of `parts` equal parts of the ids. Returns the means of the figures."""
    figures: dict[str, float] = {}
    for number in range(parts):
        part = sample.reorder(range(number, len(sample), parts))
        found = model.running().train_batch(part, TOKENS, spec, loss, answer_tokens)  # type: ignore[arg-type]
        for key, value in found.items():
            # A count goes on from part to part.
            figures[key] = value if key == "skipped_steps" else figures.get(key, 0.0) + value / parts
    return figures


def answer_tokens(sample: SequenceSample) -> float:
    """The number of tokens that are trained on."""
    return float((~sample["prompt_mask"]).sum())


register_interface("sums_verifier", Verifier)
register_interface("ppo_actor", Actor)
register_interface("ppo_critic", Critic)


@dataclass
class PPO(Experiment):
    """The settings of the experiment. `weights` is the model that ``sft`` has saved; without it the actor is new."""

    preload = ("reasoning_gym",)
    weights: str = ""
    samples: int = 3000
    batch: int = 500
    epochs: int = 30
    updates: int = 4
    lr: float = 6e-4
    critic_lr: float = 1e-3
    kl: float = 0.02
    seed: int = 1
    separate: bool = False
    ckpt_freq_steps: int = 5
    steps: int = 0

    def scheduling_setup(self) -> ExperimentScheduling:
        """Two workers, or eight."""
        return ExperimentScheduling(
            TasksGroup(8 if self.separate else 2, Scheduling.model_worker_default(gpu=0))
        )

    def initial_setup(self) -> ExperimentConfig:
        """Four models, six calls."""
        actor, rollout = ModelName("actor"), ModelName("actor", 1)
        critic, ref, reward = ModelName("critic"), ModelName("ref"), ModelName("reward")
        generates = rollout if self.separate else actor
        kind = ModelInterfaceType
        policy = ModelInterfaceAbstraction("ppo_actor", {"minibatches": self.updates})
        values = ModelInterfaceAbstraction("ppo_critic", {"kl": self.kl, "minibatches": self.updates})
        n = self.batch
        calls = [
            MFCDef(
                "actorGen", n, kind.GENERATE, policy, generates,
                ("packed_prompts",), (TOKENS, "prompt_mask", "packed_logprobs"),
            ),
            MFCDef(
                "rewInf", n, kind.INFERENCE, ModelInterfaceAbstraction("sums_verifier"), reward,
                (TOKENS, "prompt_mask"), ("rewards",),
            ),
            MFCDef(
                "refInf", n, kind.INFERENCE, policy, ref, (TOKENS,), ("packed_ref_logprobs",),
                output_key_remap={"packed_logprobs": "packed_ref_logprobs"},
            ),
            MFCDef(
                "criticInf", n, kind.INFERENCE, values, critic,
                (TOKENS, "prompt_mask", "packed_logprobs", "packed_ref_logprobs", "rewards"),
                ("advantages", "returns"),
            ),
            MFCDef(
                "actorTrain", n, kind.TRAIN_STEP, policy, actor,
                (TOKENS, "prompt_mask", "packed_logprobs", "advantages"),
            ),
            MFCDef(
                "criticTrain", n, kind.TRAIN_STEP, values, critic, (TOKENS, "prompt_mask", "returns"),
                log_return_value=True,
            ),
        ]  # fmt: skip
        held_out = questions(200, held_out=True)
        network, expects = llama(weights=self.weights), llama(critic=True, weights=self.weights)
        schedule = {"schedule": "linear", "warmup": 0.05, "updates": self.updates}
        trained = ModelBackendAbstraction("ddp", {"lr": self.lr, **schedule})
        taught = ModelBackendAbstraction("ddp", {"lr": self.critic_lr, **schedule})
        run = ModelBackendAbstraction("inference")
        program = ModelAbstraction("null"), ModelBackendAbstraction("null")
        two, one = topology(data=2), topology()
        if self.separate:
            models = {
                actor: Allocation(network, trained, topology(data=2, tensor=2), 0, held_out),
                rollout: Allocation(network, run, two, 4),
                critic: Allocation(expects, taught, topology(pipe=2), 4),
                ref: Allocation(network, run, one, 6),
                reward: Allocation(*program, one, 7),
            }
        else:
            models = {
                actor: Allocation(network, trained, two, 0, held_out),
                critic: Allocation(expects, taught, two),
                ref: Allocation(network, run, two),
                reward: Allocation(*program, two),
            }
        return ExperimentConfig(
            exp_ctrl=ExperimentSaveEvalControl(
                total_train_epochs=self.epochs,
                ckpt_freq_steps=self.ckpt_freq_steps,
                eval_freq_steps=10,
                benchmark_steps=self.steps or None,
            ),
            model_rpcs=calls,
            model_worker=model_workers(
                models,
                seed=self.seed,
                tokenizer="characters",
                datasets=[questions(self.samples)],
            ),
        )


register_experiment("ppo", PPO)

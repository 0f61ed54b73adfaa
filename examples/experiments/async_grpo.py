"""GRPO whose generation does not wait for training: servers generate, an agent makes trajectories, model workers train.

The weights of each step go into the servers while these generate, so a trajectory may have tokens of several versions.
None is trained on more than `eta` versions after it was begun.

unirun experiment start -e async-grpo -f first weights=… --mode local

``backend=vllm`` generates with vLLM, which may be in a virtual environment of its own: ``python=…``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from experiments.policy import TOKENS
from experiments.ppo import ROOM
from experiments.sums import LLAMA, SHAPE, llama, questions
from unirun.experiments import (
    AgentAbstraction,
    Allocation,
    DatasetAbstraction,
    EnvServiceAbstraction,
    Experiment,
    ExperimentConfig,
    ExperimentSaveEvalControl,
    ExperimentScheduling,
    GenerationServer,
    GserverManager,
    MFCDef,
    ModelBackendAbstraction,
    ModelInterfaceAbstraction,
    ModelInterfaceType,
    ModelName,
    RolloutWorker,
    Scheduling,
    TasksGroup,
    model_workers,
    register_agent,
    register_experiment,
    topology,
)
from unirun.rollout import Recorder

ACTOR, BEFORE = ModelName("actor"), "proximal_logprobs"

# The weights are those of the channel: the servers begin with random ones. Their model has no tokenizer.
SERVERS: Mapping[str, Mapping[str, Any]] = {
    "builtin": {"load_format": "dummy"},
    "vllm": {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 64,
        "kv_cache_memory_bytes": 1 << 26,
    },
}
"""The options of each kind of server."""


class Solver:
    """Answers a sum, `n` times; 1 for the right number, by the verifier of reasoning-gym."""

    def __init__(self, n: int = 8) -> None:
        import reasoning_gym  # type: ignore[import-untyped, unused-ignore]

        self.group_size = n
        self.sampling = {"temperature": 1.0, "max_tokens": ROOM}
        self._verifier = reasoning_gym.create_dataset("chain_sum", seed=0, size=1, **SHAPE)

    async def run(self, data: Mapping[str, Any], client: Recorder) -> float:
        """The reward of one answer."""
        answer = await client.complete(data["input_ids"])
        ended = answer.finish_reason == "stop"
        text = client.tokenizer.decode(answer.token_ids) if ended else ""
        return float(self._verifier.score_answer(text or None, {"answer": data["answer"]}))


register_agent("solver", Solver)


@dataclass
class AsyncGRPO(Experiment):
    """The settings of the experiment. `weights` is the model that ``sft`` has saved; without it the actor is new.

    Without `decoupled`, the ratio of PPO's loss is to the policies that have made the tokens. Groups whose rewards are
    all equal teach nothing; with `drop_equal` others take their place."""

    preload: ClassVar[tuple[str, ...]] = ("reasoning_gym",)
    agent, env = "solver", "null"
    network, tokenizer, score = LLAMA, "characters", "experiments.sums:score"
    workers, ranks = 2, 2
    weights: str = ""
    samples: int = 3000
    batch: int = 32
    group: int = 8
    eta: int = 2
    epochs: int = 2
    updates: int = 4
    decoupled: bool = True
    drop_equal: bool = True
    lr: float = 6e-4
    seed: int = 1
    servers: int = 2
    backend: str = "builtin"
    python: str = ""
    rollouts: int = 1
    ckpt_freq_steps: int = 5
    steps: int = 0

    def scheduling_setup(self) -> ExperimentScheduling:
        """The model workers, and those that make trajectories for them."""
        return ExperimentScheduling(
            TasksGroup(self.workers, Scheduling.model_worker_default(gpu=0)),
            generation_server=TasksGroup(self.servers, Scheduling.generation_server_default(gpu=0)),
            rollout_worker=TasksGroup(self.rollouts, Scheduling.rollout_worker_default()),
        )

    def calls(self) -> list[MFCDef]:
        """Those of the policy."""
        return self.policy_calls("decoupled_grpo")

    def policy_calls(self, interface: str, *more: str) -> list[MFCDef]:
        """The policy as it is before the step, then the step, which needs `more` keys."""
        kind, n = ModelInterfaceType, self.batch
        policy = self.interface(interface)
        keys = (TOKENS, "prompt_mask", "packed_logprobs", "rewards", *more, *[BEFORE] * self.decoupled)
        train = MFCDef("actorTrain", n, kind.TRAIN_STEP, policy, ACTOR, keys, log_return_value=True)
        if not self.decoupled:
            return [train]
        renamed = {"packed_logprobs": BEFORE}
        before = MFCDef(
            "actorInf", n, kind.INFERENCE, policy, ACTOR, (TOKENS,), (BEFORE,), output_key_remap=renamed
        )
        return [before, train]

    def data(self, count: int, *, held_out: bool = False) -> DatasetAbstraction:
        """This number of prompts."""
        return questions(count, held_out=held_out)

    def interface(self, name: str) -> ModelInterfaceAbstraction:
        """An interface of the policy, which answers held-out prompts, too."""
        scored = {"reward": self.score, "max_new_tokens": ROOM}
        parts = {"minibatches": self.updates, "drop_equal": self.drop_equal}
        return ModelInterfaceAbstraction(name, {**parts, **scored})

    def trained(self, lr: float) -> ModelBackendAbstraction:
        """A model that is trained."""
        schedule = {"schedule": "linear", "warmup": 0.05, "updates": self.updates}
        return ModelBackendAbstraction("ddp", {"lr": lr, **schedule})

    def models(self) -> dict[ModelName, Allocation]:
        """The policy, in data-parallel ranks."""
        held_out = self.data(200, held_out=True)
        network = llama(weights=self.weights, folder=self.network)
        layout = topology(data=self.ranks)
        return {ACTOR: Allocation(network, self.trained(self.lr), layout, 0, held_out)}

    def control(self) -> ExperimentSaveEvalControl:
        """The end, and what is done before it."""
        return ExperimentSaveEvalControl(
            total_train_epochs=self.epochs,
            ckpt_freq_steps=self.ckpt_freq_steps,
            eval_freq_steps=10,
            benchmark_steps=self.steps or None,
        )

    def initial_setup(self) -> ExperimentConfig:
        """The models, their calls, and what makes their data."""
        n = self.batch
        options = {**SERVERS[self.backend], "python": self.python}
        server = GenerationServer(self.seed, self.backend, options, str(self.network), 1)
        worker = RolloutWorker(
            self.seed,
            ACTOR,
            self.tokenizer,
            ROOM,
            60,
            EnvServiceAbstraction(self.env),
            AgentAbstraction(self.agent, {"n": self.group}),
            [self.data(self.samples)],
        )
        return ExperimentConfig(
            exp_ctrl=self.control(),
            model_rpcs=self.calls(),
            model_worker=model_workers(self.models(), seed=self.seed, tokenizer=self.tokenizer),
            generation_server=[server] * self.servers,
            gserver_manager=[
                GserverManager(ACTOR, self.servers, "least_requests", self.eta, n, 60, 4 * n),
            ],
            rollout_worker=[worker] * self.rollouts,
        )


register_experiment("async-grpo", AsyncGRPO)

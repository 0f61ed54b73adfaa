"""GRPO whose generation does not wait for training: servers generate, an agent makes trajectories, model workers train.

The weights of each step go into the servers while these generate, so a trajectory may have tokens of several versions.
None is trained on more than `eta` versions after it was begun.

unirun experiment start -e async-grpo -f first weights=… --mode local

``backend=vllm`` generates with vLLM, which may be in a virtual environment of its own: ``python=…``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from experiments.policy import TOKENS
from experiments.ppo import ROOM
from experiments.sums import LLAMA, SHAPE, llama, questions
from unirun.experiments import (
    AgentAbstraction,
    Allocation,
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
    """The settings of the experiment. `weights` is the model that ``sft`` has saved; without it the actor is new."""

    preload = ("reasoning_gym",)
    agent, env = "solver", "null"
    weights: str = ""
    samples: int = 3000
    batch: int = 32
    group: int = 8
    eta: int = 2
    epochs: int = 2
    updates: int = 4
    lr: float = 6e-4
    seed: int = 1
    servers: int = 2
    backend: str = "builtin"
    python: str = ""
    rollouts: int = 1
    ckpt_freq_steps: int = 5
    steps: int = 0

    def scheduling_setup(self) -> ExperimentScheduling:
        """Two model workers, and those that make trajectories for them."""
        return ExperimentScheduling(
            TasksGroup(2, Scheduling.model_worker_default(gpu=0)),
            generation_server=TasksGroup(self.servers, Scheduling.generation_server_default(gpu=0)),
            rollout_worker=TasksGroup(self.rollouts, Scheduling.rollout_worker_default()),
        )

    def initial_setup(self) -> ExperimentConfig:
        """One model, two calls, and what makes their data."""
        actor, kind, n = ModelName("actor"), ModelInterfaceType, self.batch
        policy = ModelInterfaceAbstraction("decoupled_grpo", {"minibatches": self.updates})
        before = "proximal_logprobs"
        calls = [
            MFCDef(
                "actorInf",
                n,
                kind.INFERENCE,
                policy,
                actor,
                (TOKENS,),
                (before,),
                output_key_remap={"packed_logprobs": before},
            ),
            MFCDef(
                "actorTrain",
                n,
                kind.TRAIN_STEP,
                policy,
                actor,
                (TOKENS, "prompt_mask", "packed_logprobs", "rewards", before),
                log_return_value=True,
            ),
        ]
        schedule = {"schedule": "linear", "warmup": 0.05, "updates": self.updates}
        trained = ModelBackendAbstraction("ddp", {"lr": self.lr, **schedule})
        models = {actor: Allocation(llama(weights=self.weights), trained, topology(data=2))}
        options = {**SERVERS[self.backend], "python": self.python}
        server = GenerationServer(self.seed, self.backend, options, str(LLAMA), 1)
        worker = RolloutWorker(
            self.seed,
            actor,
            "characters",
            ROOM,
            60,
            EnvServiceAbstraction(self.env),
            AgentAbstraction(self.agent, {"n": self.group}),
            [questions(self.samples)],
        )
        return ExperimentConfig(
            exp_ctrl=ExperimentSaveEvalControl(
                total_train_epochs=self.epochs,
                ckpt_freq_steps=self.ckpt_freq_steps,
                benchmark_steps=self.steps or None,
            ),
            model_rpcs=calls,
            model_worker=model_workers(models, seed=self.seed, tokenizer="characters"),
            generation_server=[server] * self.servers,
            gserver_manager=[
                GserverManager(actor, self.servers, "least_requests", self.eta, n, 60, 4 * n),
            ],
            rollout_worker=[worker] * self.rollouts,
        )


register_experiment("async-grpo", AsyncGRPO)

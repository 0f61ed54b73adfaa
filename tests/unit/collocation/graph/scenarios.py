"""The computation graphs of the four scenarios of DLRover's proposal, and of engines, with weights of a plausible size.

Weights are bytes per step. A model of 7 billion parameters has 14 GB in bfloat16; samples are texts and their tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from unirun.collocation.graph.values import Role, RoleGraph
from unirun.spec.job import Edge

_WEIGHTS = 14e9


def pretrain(workers: int = 8) -> RoleGraph:
    """Pre-training and fine-tuning: one role, one process group, nothing between roles."""
    return RoleGraph((Role("worker", workers),))


def online_learning(sources: int = 2, processors: int = 4, trainers: int = 4) -> RoleGraph:
    """Samples flow in, become features, and train a model that is served meanwhile."""
    return RoleGraph(
        (
            Role("source", sources),
            Role("sample_processor", processors),
            Role("feature_extractor", processors),
            Role("trainer", trainers),
            Role("server", 2),
        ),
        (
            Edge("source", "sample_processor", "push", "scatter", "forward", True, 200e6),
            Edge("sample_processor", "feature_extractor", "extract", "one_to_one", "forward", False, 200e6),
            Edge("feature_extractor", "trainer", "train", "all_to_all", "forward", False, 400e6),
            Edge("trainer", "server", "load", "broadcast", "forward", True, 1e9),
        ),
    )


def multimodal(loaders: int = 4, encoders: int = 2, trainers: int = 8) -> RoleGraph:
    """Each modality has its own encoder; their embeddings meet in the model that is trained."""
    return RoleGraph(
        (
            Role("data_loader", loaders),
            Role("vision_encoder", encoders),
            Role("audio_encoder", encoders),
            Role("text_encoder", encoders),
            Role("fusion_trainer", trainers),
        ),
        (
            Edge("data_loader", "vision_encoder", "encode", "gather", "forward", False, 1.2e9),
            Edge("data_loader", "audio_encoder", "encode", "gather", "forward", False, 300e6),
            Edge("data_loader", "text_encoder", "encode", "gather", "forward", False, 8e6),
            Edge("vision_encoder", "fusion_trainer", "train", "scatter", "forward", False, 500e6),
            Edge("audio_encoder", "fusion_trainer", "train", "scatter", "forward", False, 200e6),
            Edge("text_encoder", "fusion_trainer", "train", "scatter", "forward", False, 60e6),
        ),
    )


def ppo(actors: int = 4, rollouts: int = 4, judges: int = 2) -> RoleGraph:
    """Proximal policy optimisation with a reward model, a reference policy and a critic.

    The actor's new weights reach the rollouts for the next step: that edge is asynchronous, and closes the loop.
    """
    return RoleGraph(
        (
            Role("rollout", rollouts),
            Role("reference", judges),
            Role("reward", judges),
            Role("critic", judges),
            Role("actor", actors),
        ),
        (
            Edge("rollout", "reference", "log_probs", "gather", "both", False, 64e6),
            Edge("rollout", "reward", "score", "gather", "both", False, 32e6),
            Edge("rollout", "critic", "values", "gather", "both", False, 64e6),
            Edge("reference", "actor", "update", "scatter", "forward", False, 64e6),
            Edge("reward", "actor", "update", "scatter", "forward", False, 1e6),
            Edge("critic", "actor", "update", "scatter", "forward", False, 32e6),
            Edge("actor", "rollout", "load_weights", "broadcast", "forward", True, _WEIGHTS),
        ),
    )


def engines(actors: int = 2, servers: int = 2) -> RoleGraph:
    """An actor beside programs: engines that get its weights, and the router before them."""
    return RoleGraph(
        (
            Role("actor", actors),
            Role("engine", servers, "vllm"),
            Role("router", 1, "sglang_router"),
            Role("sandbox", 3, "sandbox-server"),
        ),
        (
            Edge("actor", "router", "generate", "gather", "both", False, 32e6),
            Edge("router", "engine", "generate", "scatter", "both", False, 32e6),
            Edge("actor", "engine", "load_weights", "broadcast", "forward", True, _WEIGHTS),
        ),
    )


SCENARIOS: dict[str, Callable[..., RoleGraph]] = {
    "pretrain": pretrain,
    "online_learning": online_learning,
    "multimodal": multimodal,
    "ppo": ppo,
    "engines": engines,
}
"""By name; each takes the numbers of ranks, and has some without."""

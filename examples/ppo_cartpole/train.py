"""PPO on CartPole-v1 as two roles: ``rollout`` ranks play, ``actor`` ranks learn.

    unirun --roles actor=2,rollout=2 examples/ppo_cartpole/train.py --seed 0

Each role is an ordinary SPMD program with a process group of its own; the actors use theirs for DDP. The two
programs meet in `Exchange`: weights go one way, through a ``WeightsChannel``, experience goes the other.
All ranks of both roles get the same mean returns, so they stop together without a message that says so.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from envs import Collector, greedy_returns
from exchange import Exchange, share
from learner import Learner
from ppo import ActorCritic
from report import LiveLine, SeedResult, conclude, reward_line, seed_line
from setting import ENVS, EPISODES, SOLVED, STEPS, UPDATES, Purpose, episode_seeds

import unirun


def main() -> None:
    """Train each seed in turn; exit with status 1 if a seed misses the bar."""
    args = parse_args()
    ctx = unirun.init()
    check_roles(ctx)
    torch.set_num_threads(1)  # the networks are tiny, and ranks share the cores
    dist.init_process_group("gloo")
    exchange = Exchange(ctx, ENVS)
    if ctx.role == "rollout":
        for seed in args.seeds:
            rollout(ctx, exchange, seed)
    else:
        results = [actor(ctx, exchange, seed) for seed in args.seeds]
    dist.destroy_process_group()
    if ctx.role == "actor" and ctx.rank == 0:
        conclude(results, args.bar, args.out)


def rollout(ctx: unirun.Context, exchange: Exchange, seed: int) -> None:
    """Train one seed on a rollout rank: play with the actors' weights, and send the experience."""
    model = ActorCritic()
    seeds = episode_seeds(seed, Purpose.TRAINING, ENVS)
    generator = torch.Generator().manual_seed(seed * ENVS + ctx.rank)
    collector = Collector([seeds[env] for env in exchange.envs], generator)
    for _ in range(UPDATES):
        exchange.weights(model)
        exchange.send(collector.collect(model, STEPS))
        mean_return = exchange.mean(collector.latest_returns())
        if mean_return >= SOLVED and evaluate(ctx, exchange, model, seed, Purpose.VALIDATION) >= SOLVED:
            break
    exchange.weights(model)
    evaluate(ctx, exchange, model, seed, Purpose.FINAL)


def actor(ctx: unirun.Context, exchange: Exchange, seed: int) -> SeedResult:
    """Train one seed on an actor rank: learn from the rollouts' experience, and publish the weights."""
    started = time.monotonic()
    torch.manual_seed(seed)
    model = ActorCritic()
    learner = Learner(model, UPDATES, torch.Generator().manual_seed(seed * ENVS + ctx.rank))
    env_steps: list[int] = []
    mean_returns: list[float] = []
    live = LiveLine() if ctx.rank == 0 else None
    for update in range(1, UPDATES + 1):
        exchange.weights(model)
        experience = exchange.receive(STEPS)
        mean_return = exchange.mean(torch.empty(0))
        env_steps.append(update * STEPS * ENVS)
        mean_returns.append(mean_return)
        if live:
            live.show(reward_line(seed, update, env_steps[-1], mean_return))
        if mean_return >= SOLVED and evaluate(ctx, exchange, model, seed, Purpose.VALIDATION) >= SOLVED:
            break
        learner.learn(experience)
    exchange.weights(model)
    final = evaluate(ctx, exchange, model, seed, Purpose.FINAL)
    if live:
        live.close()
        print(seed_line(seed, final, EPISODES, time.monotonic() - started), flush=True)
    return SeedResult(seed, env_steps, mean_returns, final)


def evaluate(
    ctx: unirun.Context, exchange: Exchange, model: ActorCritic, seed: int, purpose: Purpose
) -> float:
    """Mean return of EPISODES episodes of the greedy policy: rollouts play them, all ranks get the mean."""
    seeds = episode_seeds(seed, purpose, EPISODES)
    mine = share(EPISODES, ctx.world_size, ctx.rank) if ctx.role == "rollout" else range(0)
    return exchange.mean(greedy_returns(model, [seeds[episode] for episode in mine]))


def check_roles(ctx: unirun.Context) -> None:
    """Exit with a remedy unless the job has the two roles, neither with more ranks than environments."""
    sizes = {name: view.world_size for name, view in ctx.roles.items()}
    if set(sizes) != {"actor", "rollout"}:
        sys.exit(
            "this example needs the roles actor and rollout, start it with: "
            "unirun --roles actor=2,rollout=2 examples/ppo_cartpole/train.py"
        )
    if max(sizes.values()) > ENVS:
        sys.exit(
            f"{ENVS} environments cannot be shared out among {max(sizes.values())} ranks, use fewer ranks"
        )


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="PPO on CartPole-v1 as two roles, actor and rollout.")
    parser.add_argument(
        "--seed",
        "--seeds",
        dest="seeds",
        type=seed_list,
        default=[0],
        help="comma-separated seeds, trained one after the other (default: 0)",
    )
    parser.add_argument(
        "--bar", type=float, default=400.0, help="mean return that every seed must reach (default: 400)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("reward.png"), help="learning curves (default: reward.png)"
    )
    return parser.parse_args()


def seed_list(text: str) -> list[int]:
    """The seeds in ``"0,1,2"``."""
    return [int(seed) for seed in text.split(",")]


if __name__ == "__main__":
    main()

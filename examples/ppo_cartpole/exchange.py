"""The data that moves between the two roles: weights through a channel, experience over the one group that
spans them.

The environments are numbered once for the whole job. Each rollout rank steps a contiguous share of them
and each actor rank learns from a contiguous share, so rollout and actor counts need not be equal: where a
rollout's share overlaps an actor's share, there is one message per update.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from ppo import ActorCritic, Trajectories
from torch import Tensor

import unirun


def share(total: int, parts: int, index: int) -> range:
    """Part ``index`` of ``0..total-1`` cut into ``parts`` runs whose lengths differ by at most one."""
    return range(total * index // parts, total * (index + 1) // parts)


def overlap(a: range, b: range) -> range:
    """The numbers in both runs ``a`` and ``b``; a range of length 0 where there are none."""
    start = max(a.start, b.start)
    return range(start, max(start, min(a.stop, b.stop)))


class Exchange:
    """One rank's end of the exchange. All ranks of both roles make the same calls in the same order."""

    def __init__(self, ctx: unirun.Context, total_envs: int) -> None:
        """``total_envs`` environments in the whole job, E of them in this rank's `share`."""
        roles = ("actor", "rollout")
        self._group = ctx.group(*roles)
        self._actors = [ctx.group_rank(*roles, member=member) for member in ctx.members("actor")]
        self._rollouts = [ctx.group_rank(*roles, member=member) for member in ctx.members("rollout")]
        self._channel = unirun.WeightsChannel("policy", publisher="actor", receivers=["rollout"])
        self._versions, self._publishes = 0, ctx.role == "actor"
        self._total_envs = total_envs
        self.envs = share(total_envs, ctx.world_size, ctx.rank)

    def weights(self, model: ActorCritic) -> None:
        """Copy the weights of the actors, which are all equal, into ``model`` on the rollouts."""
        self._versions += 1
        if self._publishes:
            self._channel.publish(model, self._versions)
        else:
            self._channel.receive(into=model, min_version=self._versions)

    def send(self, trajectories: Trajectories) -> None:
        """A rollout's half of a transfer: to each actor, the environments that it learns from."""
        for actor, group_rank in enumerate(self._actors):
            common = overlap(self.envs, share(self._total_envs, len(self._actors), actor))
            if common:
                message = self._columns(trajectories, common).contiguous()
                dist.send(message, group=self._group, group_dst=group_rank)

    def receive(self, steps: int) -> Trajectories:
        """An actor's half of a transfer: its share ``[steps, E]`` from the rollouts that have it."""
        trajectories = Trajectories.empty(steps, len(self.envs))
        for rollout, group_rank in enumerate(self._rollouts):
            common = overlap(self.envs, share(self._total_envs, len(self._rollouts), rollout))
            if common:
                columns = self._columns(trajectories, common)
                message = torch.empty(columns.shape)
                dist.recv(message, group=self._group, group_src=group_rank)
                columns.copy_(message)
        return trajectories

    def mean(self, values: Tensor) -> float:
        """The mean over the values of all ranks, the same float on each; ``values`` may be empty on some."""
        total = torch.tensor([values.sum().item(), len(values)], dtype=torch.float64)
        dist.all_reduce(total, group=self._group)
        return (total[0] / total[1]).item()

    def _columns(self, trajectories: Trajectories, envs: range) -> Tensor:
        """The part of this rank's trajectories that belongs to the environments ``envs``, as a view."""
        return trajectories.data[:, envs.start - self.envs.start : envs.stop - self.envs.start]

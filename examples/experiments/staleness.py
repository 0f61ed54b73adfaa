"""The price of staleness: what trajectories of older weights cost in accuracy, with and without the decoupled loss.

python -m experiments.staleness --seeds 0,1,2,3,4 --out staleness.png

Each seed has a synchronous trial, and asynchronous ones of several staleness bounds η, with the same data, losses and
numbers of steps. Leaves with 1 when one with the decoupled loss is worse than the synchronous one: the one-sided 95 %
bound of the mean difference over the seeds is to stay within `MARGIN`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import mean, stdev

from experiments.async_grpo import ACTOR, AsyncGRPO
from experiments.policy import TOKENS
from experiments.prove import trial
from experiments.sums import questions
from unirun.experiments import (
    Allocation,
    ExperimentConfig,
    ExperimentScheduling,
    MFCDef,
    ModelAbstraction,
    ModelBackendAbstraction,
    ModelInterfaceAbstraction,
    ModelInterfaceType,
    ModelName,
    Scheduling,
    TasksGroup,
    model_workers,
    register_experiment,
    topology,
)

MARGIN = 10.0
"""Points of held-out accuracy that an asynchronous trial may lose. Training gains about forty."""

STUDENT = {2: 6.314, 3: 2.920, 4: 2.353, 5: 2.132, 6: 2.015, 7: 1.943, 8: 1.895, 9: 1.860, 10: 1.833}
"""The 95 % quantiles of Student's t by the number of seeds."""

REWARD = ModelName("reward")


@dataclass
class InTurn(AsyncGRPO):
    """The same, with steps in which the actor generates, then is trained. All groups are trained on."""

    drop_equal: bool = False

    def scheduling_setup(self) -> ExperimentScheduling:
        """Two workers."""
        return ExperimentScheduling(TasksGroup(2, Scheduling.model_worker_default(gpu=0)))

    def initial_setup(self) -> ExperimentConfig:
        """Two more calls do what servers and agents do in the other."""
        kind, n = ModelInterfaceType, self.batch
        made = (TOKENS, "prompt_mask", "packed_logprobs")
        draws = ModelInterfaceAbstraction("ppo_actor", {"n": self.group})
        verifier = ModelInterfaceAbstraction("sums_verifier")
        calls = [
            MFCDef("actorGen", n, kind.GENERATE, draws, ACTOR, ("packed_prompts",), made),
            MFCDef("rewInf", n, kind.INFERENCE, verifier, REWARD, made[:2], ("rewards",)),
        ]
        program = ModelAbstraction("null"), ModelBackendAbstraction("null")
        models = {**self.models(), REWARD: Allocation(*program, topology(data=2))}
        data = [questions(self.samples)]
        return ExperimentConfig(
            exp_ctrl=self.control(),
            model_rpcs=[*calls, *self.calls()],
            model_worker=model_workers(models, seed=self.seed, tokenizer="characters", datasets=data),
        )


register_experiment("grpo-in-turn", InTurn)

SYNC = "synchronous"

Figures = Mapping[int, Mapping[str, float]]
"""By seed and by kind of trial, such as ``η=1``, the held-out accuracy in percent."""


def bound(losses: Sequence[float]) -> float:
    """The one-sided 95 % bound of the mean of what seeds have lost."""
    count = len(losses)
    return mean(losses) + STUDENT[count] * stdev(losses) / sqrt(count)


def losses_of(figures: Figures, kind: str) -> list[float]:
    """The points that a kind of trial is behind the synchronous one, by seed."""
    return [found[SYNC] - found[kind] for found in figures.values()]


def measured(seed: int, root: Path, etas: Sequence[int], settings: Sequence[str]) -> dict[str, float]:
    """All trials of one seed."""
    trial("sft", seed, root)
    (saved,) = (root / "sft" / f"seed{seed}" / "checkpoints" / "default").glob("step*")
    same = (f"weights={saved}", "drop_equal=false", "ckpt_freq_steps=1000", *settings)
    found = {SYNC: trial("grpo-in-turn", seed, root / "sync", *same)[-1][1]}
    for eta in etas:
        for decoupled in (True, False):
            place = root / f"eta{eta}-{'decoupled' if decoupled else 'plain'}"
            given = (f"eta={eta}", f"decoupled={str(decoupled).lower()}", "servers=1")
            found[kind_of(eta, decoupled=decoupled)] = trial("async-grpo", seed, place, *same, *given)[-1][1]
    return found


def kind_of(eta: int, *, decoupled: bool) -> str:
    """The name of a kind of trial."""
    return f"η={eta}" if decoupled else f"η={eta}, plain"


def draw(figures: Figures, etas: Sequence[int], out: Path) -> None:
    """Accuracy against η, a point for each seed and a line of means, and the synchronous one as a band."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(5.0, 3.5))
    before = [found[SYNC] for found in figures.values()]
    axis.axhspan(min(before), max(before), alpha=0.15, color="gray")
    axis.axhline(mean(before), color="gray", label=SYNC)
    for decoupled, color in ((True, "tab:blue"), (False, "tab:orange")):
        each = [[found[kind_of(eta, decoupled=decoupled)] for found in figures.values()] for eta in etas]
        name = "decoupled loss" if decoupled else "PPO's own loss"
        axis.plot(etas, [mean(some) for some in each], color=color, label=name)
        for eta, some in zip(etas, each, strict=True):
            axis.scatter([eta] * len(some), some, color=color, s=12)
    axis.set(xlabel="η, versions", ylabel="held out, % right", ylim=(0, 100), xticks=etas)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(out, dpi=80)


def main() -> int:
    """Run all, print a table, draw."""
    parser = argparse.ArgumentParser(description="Staleness against accuracy, for several seeds.")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--etas", default="0,1,4")
    parser.add_argument("--out", type=Path, default=Path("staleness.png"))
    parser.add_argument("--root", type=Path, default=Path("trials"), help="where the trials have their files")
    parser.add_argument("settings", nargs="*", help="of all trials but the first, such as batch=125 epochs=8")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    root, etas = options.root.absolute(), [*map(int, options.etas.split(","))]
    figures = {}
    for seed in map(int, options.seeds.split(",")):
        figures[seed] = measured(seed, root, etas, options.settings)
        told = "  ".join(f"{kind} {value:.1f} %" for kind, value in figures[seed].items())
        print(f"seed {seed}  {told}", flush=True)
    draw(figures, etas, options.out)
    missed = 0
    for eta in etas:
        for decoupled in (True, False):
            kind = kind_of(eta, decoupled=decoupled)
            losses = losses_of(figures, kind)
            told = f"{mean(losses):5.1f} points"
            if len(losses) > 1:
                told += f", at most {bound(losses):.1f} with 95 %"
                fails = decoupled and bound(losses) > MARGIN
                missed += fails
                told += f"  MISSED: the margin is {MARGIN:g}" if fails else ""
            print(f"{kind:12} behind the synchronous trial by {told}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())

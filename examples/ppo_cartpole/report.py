"""The report of a run: a live line on stdout during the training, and a picture at its end."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RETURN_LIMIT = 500.0
"""The largest return of a CartPole-v1 episode: reward 1 for each of 500 steps."""

SECONDS_PER_LINE = 0.3
"""The minimum time between two live lines."""


@dataclass(frozen=True)
class SeedResult:
    """The result of one seed."""

    seed: int
    env_steps: Sequence[int]
    """Environment steps taken so far, all environments together, after each update."""
    mean_returns: Sequence[float]
    """Mean return at each of those points: over the latest episode of each environment, actions sampled."""
    final: float
    """Mean return of the final policy on fresh episodes, its likeliest action taken."""


class LiveLine:
    """One line that is rewritten in place on a terminal, and printed again and again elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._next = 0.0
        self._held = ""

    def show(self, line: str) -> None:
        """Show ``line``, or hold it back if the previous one is too recent."""
        self._held = line
        if time.monotonic() >= self._next:
            self._flush()
            self._next = time.monotonic() + SECONDS_PER_LINE

    def close(self) -> None:
        """Show the line that is held back, if any, and leave the cursor below it."""
        if self._held:
            self._flush()
        if self._terminal:
            print(flush=True)

    def _flush(self) -> None:
        print(self._held, end="\r" if self._terminal else "\n", flush=True)
        self._held = ""


def reward_line(seed: int, update: int, env_steps: int, mean_return: float) -> str:
    """One update as text: the numbers, and a bar that is 25 characters long at the largest return."""
    bar = "#" * round(25 * mean_return / RETURN_LIMIT)
    return f"seed {seed}  update {update:3d}  {env_steps:7,d} steps  return {mean_return:5.1f}  |{bar:<25}|"


def seed_line(seed: int, final: float, episodes: int, seconds: float) -> str:
    """The result of one seed, as text."""
    return f"seed {seed}: mean return {final:.1f} over {episodes} fresh episodes, {seconds:.1f} s"


def conclude(results: Sequence[SeedResult], bar: float, out: Path) -> None:
    """Draw the learning curves and hold every seed against the bar; exit with status 1 if one misses it."""
    plot(results, bar, out)
    missed = [result for result in results if result.final < bar]
    if missed:
        sys.exit(f"seeds below the bar {bar:g}: " + ", ".join(f"{r.seed} ({r.final:.1f})" for r in missed))
    print(f"{len(results)} of {len(results)} seeds reached {bar:g}; learning curves in {out}", flush=True)


def plot(results: Sequence[SeedResult], bar: float, path: Path) -> None:
    """Draw one learning curve per seed, and its final return as a dot; ``path`` ends in the image format."""
    import matplotlib as mpl  # here, so that only the rank that draws pays for it

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for result in results:
        (line,) = axes.plot(result.env_steps, result.mean_returns, label=f"seed {result.seed}")
        axes.plot(result.env_steps[-1], result.final, "o", color=line.get_color(), clip_on=False, zorder=3)
    axes.axhline(bar, color="0.4", linewidth=1, linestyle="--", zorder=1)
    axes.annotate(f"bar {bar:g}", (0.0, bar), xytext=(4, 4), textcoords="offset points", color="0.4")
    axes.plot([], [], "o", color="0.4", label="greedy policy, fresh episodes")
    axes.set_title("PPO on CartPole-v1: rollout ranks play, actor ranks learn")
    axes.set_xlabel("environment steps")
    axes.set_ylabel("mean return")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.03 * RETURN_LIMIT)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)

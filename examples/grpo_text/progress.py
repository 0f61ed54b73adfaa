"""The report of a run: a line for each evaluation, a conclusion, and a picture."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Progress:
    """Accuracy and reward over the run, as fractions from 0 to 1."""

    warm: float
    """Accuracy on held-out questions after the warm-up: the likeliest answers, those that score 1."""
    accuracy: list[tuple[int, float]] = field(default_factory=list)
    """Steps of GRPO, and accuracy after them."""
    rewards: list[float] = field(default_factory=list)
    """The mean score of the answers drawn in each step."""

    @property
    def final(self) -> float:
        """The accuracy measured last."""
        return self.accuracy[-1][1] if self.accuracy else self.warm

    @property
    def gain(self) -> float:
        """Points of accuracy gained over the warm-up."""
        return 100.0 * (self.final - self.warm)

    def line(self) -> str:
        """The latest evaluation as text, with a bar that is 40 characters long at 100 %."""
        step, accuracy = self.accuracy[-1] if self.accuracy else (0, self.warm)
        reward = f"  reward {self.rewards[-1]:.2f}" if self.rewards else " " * 13
        return f"GRPO step {step:3d}{reward}  held-out accuracy {accuracy:6.1%}  |{'#' * round(40 * accuracy):<40}|"

    def conclusion(self) -> str:
        """The run in one line."""
        shares = f"{self.warm:.1%} after the warm-up, {self.final:.1%} after GRPO"
        return f"held-out accuracy {shares}: {self.gain:+.1f} points"


def plot(progress: Progress, questions: int, path: Path) -> None:
    """Draw accuracy and reward over the steps; ``path`` ends in the image format."""
    import matplotlib as mpl  # here, so that only the process that draws pays for it

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    steps = [0] + [step for step, _ in progress.accuracy]
    shares = [progress.warm] + [accuracy for _, accuracy in progress.accuracy]
    drawn = range(1, len(progress.rewards) + 1)
    axes.plot(drawn, progress.rewards, color="0.75", linewidth=1, label="mean reward of the answers drawn")
    label = f"accuracy on {questions} held-out questions"
    axes.plot(steps, shares, "o-", clip_on=False, zorder=3, label=label)
    axes.axhline(progress.warm, color="0.4", linewidth=1, linestyle="--", zorder=1)
    place = (steps[-1], progress.warm)
    axes.annotate(
        "after the warm-up", place, xytext=(-4, 4), textcoords="offset points", color="0.4", ha="right"
    )
    axes.set_title(f"GRPO on sums of one-digit numbers: {progress.gain:+.1f} points")
    axes.set_xlabel("GRPO steps")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)

"""The report of a run: a table of accuracies, and a picture of them over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

Scores = list[tuple[float, float]]
"""For each batch, the accuracies of the learner and of its frozen copy, before the learner learnt from it."""

EDGE = 5  # batches after a drift, or before the next one, over which the table takes means
SMOOTH = 5  # batches over which the picture takes means


def mean(values: Sequence[float]) -> float:
    """The mean of some accuracies."""
    return sum(values) / len(values)


def table(scores: Scores, phases: Sequence[str], length: int) -> str:
    """One line for each phase of ``length`` batches: accuracy just after its drift, and at its end."""
    lines = [f"{'phase':14}{'after the drift':>16}{'at the end':>12}{'frozen':>10}"]
    for number, phase in enumerate(phases):
        part = scores[number * length : (number + 1) * length]
        first, last = part[:EDGE], part[-EDGE:]
        lines.append(
            f"{phase:14}{mean([s[0] for s in first]):16.1%}{mean([s[0] for s in last]):12.1%}"
            f"{mean([s[1] for s in last]):10.1%}"
        )
    return "\n".join(lines)


def plot(scores: Scores, phases: Sequence[str], length: int, path: Path) -> None:
    """Draw both accuracies, smoothed, and a line at each drift; ``path`` ends in the image format."""
    import matplotlib as mpl  # here, so that only the process that draws pays for it

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name, column in (("learner", 0), ("frozen after the first phase", 1)):
        values = [score[column] for score in scores]
        smooth = [mean(values[max(0, t - SMOOTH + 1) : t + 1]) for t in range(len(values))]
        axes.plot(smooth, label=name)
    for number, phase in enumerate(phases):
        if number:
            axes.axvline(number * length, color="0.4", linewidth=1, linestyle="--", zorder=1)
        axes.annotate(phase, (number * length, 1.02), xytext=(4, 0), textcoords="offset points", color="0.4")
    axes.set_title("Learning from a stream that drifts: tested on each batch, then taught it")
    axes.set_xlabel("batch")
    axes.set_ylabel("accuracy before learning")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.08)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)

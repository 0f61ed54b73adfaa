"""Draws a search: the accuracies of its trials in their order, and over its two most important parameters."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib as mpl
import optuna
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.trial import TrialState


def plot(study: optuna.Study, path: Path) -> None:
    """Draw it; ``path`` ends in the image format."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (history, *panels) = plt.subplots(1, 3, figsize=(12, 4.5), layout="constrained", sharey=True)
    trials = {state: study.get_trials(states=(state,)) for state in (TrialState.COMPLETE, TrialState.PRUNED)}
    styles = {TrialState.COMPLETE: ("o", "C0", "complete"), TrialState.PRUNED: ("x", "0.6", "pruned")}
    best, so_far = -math.inf, []
    for trial in trials[TrialState.COMPLETE]:
        best = max(best, trial.value or 0.0)
        so_far.append((trial.number, best))
    so_far.append((len(study.trials) - 1, best))
    history.step(*zip(*so_far, strict=True), where="post", color="C1", label="best so far")
    history.set_xlabel("trial")
    history.set_ylabel("accuracy in the last report")
    for state, (marker, color, label) in styles.items():
        numbers = [trial.number for trial in trials[state]]
        history.plot(numbers, [last(trial) for trial in trials[state]], marker, color=color, label=label)

    importances = optuna.importance.get_param_importances(study)
    for axes, (name, importance) in zip(panels, list(importances.items())[:2], strict=True):
        for state, (marker, color, label) in styles.items():
            values = [trial.params[name] for trial in trials[state]]
            axes.plot(values, [last(trial) for trial in trials[state]], marker, color=color, label=label)
        distribution = study.best_trial.distributions[name]
        if isinstance(distribution, FloatDistribution | IntDistribution) and distribution.log:
            axes.set_xscale("log")
        axes.set_xlabel(f"{name.replace('_', ' ')} (importance {importance:.2f})")
    for axes in (history, *panels):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.legend(*history.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle("Hyperparameters of a small network on handwritten digits")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def last(trial: optuna.trial.FrozenTrial) -> float:
    """The accuracy in its last report."""
    return trial.intermediate_values[max(trial.intermediate_values)]

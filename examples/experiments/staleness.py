"""The price of staleness: what trajectories of older weights cost in accuracy, with and without the decoupled loss.

python -m experiments.staleness --out staleness.svg

Each seed has a synchronous trial of `experiments.digits`, and asynchronous ones of several staleness bounds η, with the
same data, rewards and numbers of steps; the first seeds also have trials without the decoupled loss. All go on from the
same weights, which a trial has learned from examples.
Leaves with 1 when those with the decoupled loss are worse than the synchronous ones: for each η, the one-sided 95 %
bound of the mean difference over the seeds, which are paired, is to stay within `MARGIN` (Student's t). So it does when
trajectories were younger than `LEAST_AGE`, as such trials compare nothing. The figures are in a JSON file beside the
plot. Trials that it has are not run again, and a file of trials with other settings is refused.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from experiments.prove import trial

MARGIN = 8.0
"""Points of held-out accuracy that an asynchronous trial may lose: a fifth of what training gains."""

LEAST_AGE = {1: 0.9, 4: 3.5}
"""The mean number of versions that trajectories are old at least, by η. In the first steps they are younger than η."""

STUDENT = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761)
"""The 95 % quantiles of Student's t, for two seeds and more."""

SEEDS = range(15)
"""The seeds of a series. With differences whose standard deviation is 10 points, the bound of 15 seeds is within the
margin in nine cases of ten if nothing is lost."""

PLAIN_SEEDS = 5
"""The number of seeds, the first ones, that also have trials without the decoupled loss."""

SYNC = "synchronous"

KINDS = {
    SYNC: ("digits", "decoupled=false"),
    "η=0": ("async-digits", "eta=0"),
    "η=1": ("async-digits", "eta=1"),
    "η=4": ("async-digits", "eta=4"),
    "η=1, plain": ("async-digits", "eta=1", "decoupled=false"),
    "η=4, plain": ("async-digits", "eta=4", "decoupled=false"),
}
"""The experiment and the settings of each kind of trial. On trajectories of the weights that are trained, as in the
synchronous one, both losses are the same."""

Figures = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""By seed and by kind of trial: the `curve` of held-out accuracy in percent, and the `ages` of what was trained on, the
number of groups for each number of versions."""


def accuracy(figures: Figures, kind: str) -> list[float]:
    """The accuracy of a kind of trial at its end, of each seed that has one."""
    return [found[kind]["curve"][-1][1] for found in figures.values() if kind in found]


def losses_of(figures: Figures, kind: str) -> list[float]:
    """The points that a kind of trial is behind the synchronous one, by seed."""
    pairs = {seed: found for seed, found in figures.items() if kind in found}
    return [one - other for one, other in zip(accuracy(pairs, SYNC), accuracy(pairs, kind), strict=True)]


def bound(losses: Sequence[float]) -> float:
    """The one-sided 95 % bound of the mean of what seeds have lost."""
    count = len(losses)
    return mean(losses) + STUDENT[count - 2] * stdev(losses) / sqrt(count)


def age(ages: Mapping[str, int]) -> float:
    """The mean age in versions of the groups of a trial; 0 for a synchronous one."""
    count = sum(ages.values())
    return sum(int(each) * some for each, some in ages.items()) / count if count else 0.0


def too_young(figures: Figures) -> list[str]:
    """The trials whose trajectories were younger than `LEAST_AGE`."""
    return [
        f"seed {seed}, {kind}: {age(found['ages']):.2f} versions"
        for seed, some in figures.items()
        for kind, found in some.items()
        if kind.startswith("η") and age(found["ages"]) < LEAST_AGE.get(int(kind[2]), 0.0)
    ]


HEAD = """| trial | held out, % right | of each seed | points behind | at most, with 95 % | groups by their age |
| --- | --- | --- | --- | --- | --- |"""


def row(figures: Figures, kind: str) -> str:
    """A line of a table in Markdown."""
    each, losses, ages = accuracy(figures, kind), losses_of(figures, kind), dict[int, int]()
    for found in figures.values():
        for versions, count in found.get(kind, {"ages": {}})["ages"].items():
            ages[int(versions)] = ages.get(int(versions), 0) + count
    cells = [kind, f"{mean(each):.1f}", " ".join(f"{one:.1f}" for one in each)]
    if kind != SYNC:
        most = f"{bound(losses):.1f}" if len(losses) > 1 else ""
        cells += [f"{mean(losses):.1f}", most, ", ".join(str(ages[versions]) for versions in sorted(ages))]
    return f"| {' | '.join([*cells, '', '', ''][:6])} |"


def ages_of(steps: Path) -> dict[str, int]:
    """The number of groups of each age that a trial has trained on."""
    found: dict[str, int] = {}
    for figures in map(json.loads, steps.read_text().splitlines()):
        for name, count in figures.items():
            if name.startswith("trajectories/staleness_"):
                versions = name.rpartition("_")[2]
                found[versions] = found.get(versions, 0) + int(count)
    return found


def kept_in(place: Path, settings: Sequence[str]) -> dict[str, Any]:
    """The settings and the figures of a file, or `settings` and no figures if there is no file. Raises `SystemExit` if
    its trials had other settings."""
    if not place.exists():
        return {"settings": [*settings], "seeds": {}}
    found: dict[str, Any] = json.loads(place.read_text())
    if found["settings"] != [*settings]:
        theirs, asked = (" ".join(some) or "the defaults" for some in (found["settings"], settings))
        raise SystemExit(
            f"{place} has trials with {theirs}, not with {asked}: give another --out and another --root"
        )
    return found


def begun(root: Path) -> Path:
    """The weights that all trials go on from."""
    folder = root / "digits-sft" / "seed0" / "checkpoints" / "default"
    if not folder.exists():
        trial("digits-sft", 0, root)
    (saved,) = folder.glob("step*")
    return saved


def measured(kind: str, seed: str, root: Path, settings: Sequence[str]) -> dict[str, Any]:
    """One trial."""
    name, *own = KINDS[kind]
    place = root / kind.replace(", ", "-")
    curve = trial(name, int(seed), place, f"weights={begun(root)}", *own, *settings)
    print(f"seed {seed}  {kind:12} {curve[-1][1]:5.1f} %", flush=True)
    return {"curve": curve, "ages": ages_of(place / name / f"seed{seed}" / "steps.jsonl")}


def draw(figures: Figures, out: Path) -> None:
    """Accuracy against η, a point for each seed and a line of means, and the synchronous one as a band."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # The same figures are the same file.
    pyplot.rcParams.update({"svg.hashsalt": "unirun", "svg.fonttype": "none"})
    figure, axis = pyplot.subplots(figsize=(5.0, 3.5))
    before = accuracy(figures, SYNC)
    axis.axhspan(min(before), max(before), alpha=0.15, color="gray")
    axis.axhline(mean(before), color="gray", label=SYNC)
    for name, color, end, apart in (
        ("decoupled loss", "tab:blue", "", -0.04),
        ("PPO's own loss", "tab:orange", ", plain", 0.04),
    ):
        # Without staleness both losses are the same.
        kinds = {0: "η=0", 1: f"η=1{end}", 4: f"η=4{end}"}
        each = [accuracy(figures, kind) for kind in kinds.values()]
        axis.plot([*kinds], [mean(some) for some in each], color=color, label=name)
        for eta, some in zip(kinds, each, strict=True):
            axis.scatter([eta + apart] * len(some), some, color=color, s=12)
    axis.set(xlabel="η, versions", ylabel="held out, % right", xticks=[0, 1, 4])
    axis.grid(alpha=0.3)
    axis.legend(loc="lower center")
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def main() -> int:
    """Run all, print a table, draw."""
    parser = argparse.ArgumentParser(description="Staleness against accuracy, for several seeds.")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--out", type=Path, default=Path("staleness.svg"))
    parser.add_argument("--root", type=Path, default=Path("trials"), help="where the trials have their files")
    parser.add_argument("settings", nargs="*", help="of all trials, such as lr=0.004")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    kept = options.out.with_suffix(".json")
    found = kept_in(kept, options.settings)
    figures: dict[str, dict[str, Any]] = {}
    for number, seed in enumerate(options.seeds.split(",")):
        figures[seed] = found["seeds"].setdefault(seed, {})
        for kind in KINDS:
            if kind not in figures[seed] and (number < PLAIN_SEEDS or not kind.endswith("plain")):
                figures[seed][kind] = measured(kind, seed, options.root.absolute(), options.settings)
                kept.write_text(json.dumps(found, ensure_ascii=False) + "\n")
    draw(figures, options.out)
    missed = 0
    print(HEAD)
    for kind in KINDS:
        print(row(figures, kind), flush=True)
    for kind in KINDS if len(figures) > 1 else ():
        if not kind.endswith("plain") and (most := bound(losses_of(figures, kind))) > MARGIN:
            print(f"MISSED: {kind}: {most:.1f} points behind, and the margin is {MARGIN:g}", flush=True)
            missed += 1
    for problem in too_young(figures):
        print(f"MISSED: too young: {problem}", flush=True)
        missed += 1
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())

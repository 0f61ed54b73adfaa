"""A test that each experiment learns, with several seeds.

python -m experiments.prove --seeds 0,1,2 --out learning.png

Supervised fine-tuning comes first; the others go on from what it has saved. Leaves with 1 when a bar is not reached:
PPO and GRPO gain 15 points of held-out accuracy, the reward model and DPO tell 80 % of held-out pairs, and 5 points
more than before.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

GAINS = {"sft": 15.0, "ppo": 15.0, "grpo": 15.0, "reward": 5.0, "dpo": 5.0}
"""The minimum gain of each experiment in points."""

LEAST = {"reward": 80.0, "dpo": 80.0}
"""The minimum result of each experiment in percent."""

END_TIMEOUT = 60.0
"""Seconds in which a trial ends after SIGTERM."""

Curve = list[tuple[int, float]]
"""Steps and percent."""


def run(command: Sequence[str], log: IO[str]) -> int:
    """Run a command. Returns its exit code. SIGTERM to this process ends the command, and this process after it."""

    def leave(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        return process.wait()
    finally:
        process.terminate()
        process.wait(END_TIMEOUT)
        signal.signal(signal.SIGTERM, before)


def trial(name: str, seed: int, root: Path, *settings: str) -> Curve:
    """Run one experiment. Returns its measure before the first step and later."""
    words = [
        "experiment",
        "start",
        "-e",
        name,
        "-f",
        f"seed{seed}",
        "--root",
        str(root),
        f"seed={seed}",
        *settings,
    ]
    program = Path(sys.executable).with_name("unirun")
    log = root / f"{name}-seed{seed}.log"
    root.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        code = run([str(program), *words], file)
    if code:
        raise SystemExit(f"{name} has ended with {code}: see {log}")
    lines = (root / name / f"seed{seed}" / "evaluations.jsonl").read_text().splitlines()
    return [
        (row["step"], 100.0 * next(value for key, value in row.items() if "eval_" in key))
        for row in map(json.loads, lines)
    ]


def pipeline(seed: int, root: Path) -> dict[str, Curve]:
    """All experiments with one seed."""
    found = {"sft": trial("sft", seed, root)}
    (saved,) = (root / "sft" / f"seed{seed}" / "checkpoints" / "default").glob("step*")
    for name in ("ppo", "grpo", "reward", "dpo"):
        found[name] = trial(name, seed, root, f"weights={saved}")
    return found


def draw(curves: dict[int, dict[str, Curve]], out: Path) -> None:
    """A picture for each experiment, a line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(GAINS), figsize=(3.2 * len(GAINS), 3.0), sharey=True)
    for axis, name in zip(axes, GAINS, strict=True):
        for seed, found in curves.items():
            axis.plot(*zip(*found[name], strict=True), label=f"seed {seed}")
        axis.set(title=name, xlabel="step", ylim=(0, 100))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("held out, % right")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(out, dpi=80)


def main() -> int:
    """Run all, print a table, draw."""
    parser = argparse.ArgumentParser(description="All experiments, for several seeds.")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path, default=Path("learning.png"))
    parser.add_argument("--root", type=Path, default=Path("trials"), help="where the trials have their files")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    curves: dict[int, dict[str, Curve]] = {}
    missed = 0
    for seed in map(int, options.seeds.split(",")):
        curves[seed] = pipeline(seed, options.root.absolute())
        for name, curve in curves[seed].items():
            before, after = curve[0][1], curve[-1][1]
            fails = after - before < GAINS[name] or after < LEAST.get(name, 0.0)
            missed += fails
            word = "  MISSED" if fails else ""
            print(f"seed {seed}  {name:7} {before:5.1f} % -> {after:5.1f} %{word}", flush=True)
    draw(curves, options.out)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())

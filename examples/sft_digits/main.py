"""Describes the job with a builder, submits it, and prints what its trainer returned.

python examples/sft_digits/main.py --ranks 2 --seed 0
"""

from __future__ import annotations

import argparse

from unirun import DLJobBuilder


def main() -> None:
    """Run the job to its end."""
    parser = argparse.ArgumentParser(description="Supervised fine-tuning on scikit-learn's digits.")
    parser.add_argument("--ranks", type=int, default=2, help="data-parallel ranks (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and shuffling (default: 0)")
    parser.add_argument("--epochs", type=int, default=40, help="in each stage (default: 40)")
    args = parser.parse_args()
    job = (
        DLJobBuilder()
        .dl_type("SFT")
        .node_num(1)
        .device_per_node(args.ranks)
        .config({"seed": args.seed, "epochs": args.epochs, "rehearsed": 0.1})
        .trainer("sft", "SFTTrainer")
        .workload("model", "sft", "Model")
        .total(args.ranks)
        .per_node(args.ranks)
        .build()
    )
    rows = job.submit("sft-digits").result
    print(f"\n{'accuracy on digits':40}   0-4     5-9     all")
    for row in rows:
        print(f"{row['model']:40} {row['0-4']:6.1%}  {row['5-9']:6.1%}  {row['all']:6.1%}")


if __name__ == "__main__":
    main()

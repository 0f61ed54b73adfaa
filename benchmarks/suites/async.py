"""Generation that does not wait: sequences that take each other's slots, beside one static batch after the other.

The peer is `generate` of transformers, which goes on until the longest sequence of a batch has ended. Both have the
same network of 4 layers of 256, 16 rows at the same time, one thread, and 128 prompts whose answers have 8 to 128
tokens, each doubling as often as the others. Time is that of the processor, as other processes may have it meanwhile.

What interrupts generation is in `benchmarks.interrupted`: new weights, and a server that dies. Where sequences are
interrupted by new weights after each 32 of them, beside waits for the longest one, the network is so small that a step
takes nearly the same time for few rows as for many, as on a GPU.

A whole trial, asynchronous, is beside the same one whose calls run in turn (`benchmarks.offpolicy`).
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.figure import Bar, Figure, compared, measured
from benchmarks.interrupted import CHUNK, move_of, run_slots, servers, update_of
from benchmarks.job import DEADLINE, environment, program
from benchmarks.offpolicy import BATCH, STAMPS, STEPS
from benchmarks.suites.rpc import run
from benchmarks.suites.train import home, module
from unirun.experiments import GenerationConfig, ModelName, Place, topology
from unirun.experiments.models.generation import Continuation, Slots
from unirun.experiments.models.stage import Stage
from unirun.rollout.choosing import Load, begun, choose, ended
from unirun.values import Engine

SLOTS = Bar(
    "slots ÷ one static batch after the other, tokens/s, answers of 8 to 128 tokens", "ratio", 1.5, True
)
ROUTING = Bar(
    "choice of an engine and count of its load per request, 64 engines, 10 000 requests open", "µs", 20.0
)
OVERLAP = Bar(
    "async (η = 2) ÷ sync, samples/s, lengths 1:16, 2 + 2 workers, engines and train steps that sleep for their time",
    "ratio",
    1.5,
    True,
)
INTERRUPTED = Bar(
    "generation that new weights interrupt ÷ that waits for the longest sequence, tokens/s, 8 to 128 tokens",
    "ratio",
    1.15,
    True,
)
UPDATED = Bar(
    "pause → two built-in servers have new weights and begin the prefill of 64 open requests, 10 MB",
    "s",
    0.05,
)
MOVED = Bar("built-in server killed → all its requests run on another one", "s", 0.3)
ROOT = Path(__file__).parents[2]
ROWS, PROMPTS, SHORTEST, LONGEST = 16, 128, 8, 128
VOCABULARY = 512

Work = list[tuple[torch.Tensor, int]]
"""Prompts, and the tokens to generate for each."""


def figures(runs: int) -> list[Figure]:
    """All figures of this suite."""
    network, work, small, more = _network(256), _work(PROMPTS), _network(64), _work(2 * PROMPTS)
    with _one_thread():
        return [
            compared(
                SLOTS,
                "tokens/s",
                runs,
                lambda: _rate(_with_slots, network, work),
                "transformers",
                lambda: _rate(_in_batches, network, work),
            ),
            compared(
                INTERRUPTED,
                "tokens/s",
                runs,
                lambda: _rate(partial(_interrupted, waits=False), small, more),
                "waiting",
                lambda: _rate(partial(_interrupted, waits=True), small, more),
            ),
            measured(ROUTING, runs, _routing),
            _updated(runs),
            _moved(runs),
            compared(
                OVERLAP,
                "samples/s",
                runs,
                lambda: _trial("async"),
                "synchronous",
                lambda: _trial("sync"),
            ),
        ]


def _updated(runs: int) -> Figure:
    found = []

    def once() -> float:
        with tempfile.TemporaryDirectory() as folder, servers(Path(folder)) as running:
            urls = [url for url, _ in running]
            # The first time is slower.
            update_of(urls)
            found.append(update_of(urls))
            return found[-1].paused

    figure = measured(UPDATED, runs, once)
    note = "; ".join(
        f"the prefill of what is open, which follows: {each.prefill:.3f} s; without new weights: {each.before:.3f} s"
        for each in found
    )
    return replace(figure, note=note)


def _moved(runs: int) -> Figure:
    found = []

    def once() -> float:
        with tempfile.TemporaryDirectory() as folder, servers(Path(folder)) as running:
            found.append(move_of(running))
            return found[-1].running

    figure = measured(MOVED, runs, once)
    note = "; ".join(f"a chunk of {CHUNK} tokens, which follows: {each.chunk:.3f} s" for each in found)
    return replace(figure, note=note)


def _trial(side: str) -> float:
    """Samples in a second of a trial, after its first steps."""
    with home() as folder:
        env, root = {**environment(folder), "UNIRUN_WARM": "0", "PYTHONPATH": str(ROOT)}, folder / side
        run(module("benchmarks.offpolicy", side, str(root)), env, DEADLINE)
        run([program("unirun"), "--config", str(root / "job.json")], env, DEADLINE)
        stamps = [float(line) for line in (root / STAMPS).read_text().splitlines()][STEPS // 3 :]
        return BATCH * (len(stamps) - 1) / (stamps[-1] - stamps[0])


def _routing() -> float:
    """Microseconds of the processor for each of 5 000 requests, of which one ends as the next one begins."""
    loads = [Load(Engine(rank, 0, f"http://host:{rank}", True), 10_000 // 64, rank) for rank in range(64)]
    prompts = [hash((1, 2, 3, turn)) for turn in range(5_000)]
    began = time.process_time()
    for turn, prompt in enumerate(prompts):
        chosen = choose(loads, (), 0.0, prompt=prompt)
        assert isinstance(chosen, Engine)
        loads[chosen.rank] = begun(loads[chosen.rank], turn, 100)
        loads[turn % 64] = ended(loads[turn % 64], None, 0.0, 100)
    return (time.process_time() - began) / 5_000 * 1e6


def _network(width: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        eos_token_id=None,
    )
    network: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return network.eval()


def _work(prompts: int) -> Work:
    chosen = random.Random(0)
    return [
        (
            torch.tensor([chosen.randrange(1, VOCABULARY) for _ in range(chosen.randint(8, 32))]),
            round(SHORTEST * (LONGEST / SHORTEST) ** chosen.random()),
        )
        for _ in range(prompts)
    ]


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _rate(generate: Any, network: Any, work: Work) -> float:
    """Tokens that were asked for, in a second of the processor."""
    began = time.process_time()
    generate(network, work)
    return sum(count for _, count in work) / (time.process_time() - began)


def _slots(network: Any, work: Work) -> tuple[Slots, list[Continuation]]:
    place = Place(ModelName("actor"), topology(), 0, torch.device("cpu"))
    rows = [
        Continuation(prompt, GenerationConfig(greedy=True, max_new_tokens=count), seed=number)
        for number, (prompt, count) in enumerate(work)
    ]
    return Slots(place, Stage(deepcopy(network), place).eval(), ROWS), rows


def _with_slots(network: Any, work: Work) -> None:
    slots, rows = _slots(network, work)
    for row in rows:
        slots.add(row)
    while slots.busy:
        slots.step()
    assert [len(row.tokens) for row in rows] == [count for _, count in work]


def _interrupted(network: Any, work: Work, *, waits: bool) -> None:
    slots, rows = _slots(network, work)
    run_slots(slots, rows, ROWS, waits=waits)
    assert [len(row.tokens) for row in rows] == [count for _, count in work]


@torch.no_grad()
def _in_batches(network: Any, work: Work) -> None:
    from unirun.experiments.models.cache import left_padded

    for first in range(0, len(work), ROWS):
        batch = work[first : first + ROWS]
        tokens, mask, _ = left_padded([prompt for prompt, _ in batch], torch.device("cpu"))
        network.generate(
            tokens,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max(count for _, count in batch),
            pad_token_id=0,
        )

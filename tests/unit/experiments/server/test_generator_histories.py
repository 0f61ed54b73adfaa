"""A generator in any history: sequences that come and are given up, pauses, and new weights between two steps.

The slots and a small network are real; the steps of the thread are taken by hand. A reference knows who has ended, and the
label of each token.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.effort import examples
from tests.unit.experiments.models.test_stage import CONFIG, place
from unirun.errors import UsageError
from unirun.experiments import GenerationConfig
from unirun.experiments.models.generation import Continuation
from unirun.experiments.models.stage import Stage
from unirun.experiments.server.generator import DEFAULT, Generator, PauseMode

STEPS = 60
"""In which all sequences of a history have ended, if nothing holds them."""


@cache
def stage() -> Stage:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    shape = {name: value for name, value in CONFIG.items() if name != "model_type"}
    network: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        AutoConfig.for_model("llama", eos_token_id=None, **shape)
    )
    found = Stage(network.eval(), place()).eval()
    found.requires_grad_(False)
    return found


@dataclass
class Row:
    """A sequence, and the reference: the labels of its tokens, and the reason of its end."""

    sequence: Continuation
    future: Future[str]
    labels: list[str] = field(default_factory=list)
    end: str = ""


def was_ended(paused: Future[None]) -> bool:
    """Return True if a pause has not come to its end, and says so."""
    return "the pause was ended" in str(paused.exception(0))


class Generators(RuleBasedStateMachine):
    """Two slots, and any number of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = Generator(place(), stage(), 2)
        self.rows: list[Row] = []
        self.pause: PauseMode | None = None
        self.waits: list[Future[None]] = []
        self.label = DEFAULT
        self.updating = False

    def teardown(self) -> None:
        """All that was not given up has all of its tokens, once nothing holds it; then nothing is open."""
        self.resume()
        for _ in range(STEPS):
            self.step()
        assert [row.end for row in self.open] == []
        assert all(each.done() for each in self.waits)
        assert (self.generator.running, self.generator._slots.busy, self.generator._held) == (0, False, [])

    @property
    def waiting(self) -> list[Future[None]]:
        return [each for each in self.waits if not each.done()]

    @property
    def open(self) -> list[Row]:
        return [row for row in self.rows if not row.end]

    def step(self) -> None:
        """One step of the thread, which would wait if there were nothing to do."""
        self.generator._inbox.put(lambda: None)
        before = [len(row.sequence.tokens) for row in self.rows]
        self.generator._step()
        for row, count in zip(self.rows, before, strict=True):
            more = len(row.sequence.tokens) - count
            assert more in ((0, 1) if self.pause in (None, "wait") and not row.end else (0,))
            row.labels += [self.label] * more
            if len(row.labels) == row.sequence.how.max_new_tokens and not row.end:
                row.end = "length"

    @rule(counts=st.lists(st.integers(1, 6), min_size=1, max_size=3), gives_up=st.booleans())
    def generate(self, counts: list[int], gives_up: bool) -> None:
        """Some come, and one may be given up before it has a token."""
        for count in counts:
            how = GenerationConfig(max_new_tokens=count, greedy=True)
            sequence = Continuation(torch.tensor([1, 2, 3]), how, seed=len(self.rows))
            self.rows.append(Row(sequence, self.generator.generate(sequence)))
        if gives_up:
            self.give_up(len(self.open) - 1)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 9))
    def give_up(self, which: int) -> None:
        """Nobody waits for a sequence any more. It may not have begun."""
        row = self.open[which % len(self.open)]
        assert row.future.cancel()
        row.end = "cancelled"

    @rule(times=st.sampled_from([1, 2, 12]))
    def go_on(self, times: int) -> None:
        """There is progress when there is something to do."""
        before = sum(len(row.labels) for row in self.rows)
        can = self.pause is None and self.open
        for _ in range(times):
            self.step()
        assert not can or sum(len(row.labels) for row in self.rows) > before

    @rule(
        mode=st.sampled_from(["abort", "wait", "wait", "keep", "keep"]),
        clear=st.booleans(),
        times=st.integers(1, 2),
    )
    def stop(self, mode: PauseMode, clear: bool, times: int) -> None:
        """Sequences end, are waited for, or are kept; one or two wait for that, and cannot give it up any more."""
        self.step()
        waiting = self.waiting
        paused = [self.generator.pause(mode, clear_cache=clear) for _ in range(times)]
        self.pause = mode
        if mode == "abort":
            for row in self.open:
                row.end = "abort"
        self.step()
        self.waits += paused
        assert not any(each.cancel() for each in paused)
        assert mode == "wait" or all(each.exception(0) is None for each in paused)
        if mode == "abort":
            assert all(each.exception(0) is None for each in waiting)
        if mode == "keep":
            assert all(was_ended(each) for each in waiting)

    @rule(
        modes=st.tuples(st.sampled_from(["keep", "wait"]), st.sampled_from(["keep", "wait"])),
        gives_up=st.booleans(),
    )
    def sequences_come_between_two_pauses(self, modes: tuple[PauseMode, PauseMode], gives_up: bool) -> None:
        """Nothing has been made of them when the second one drops what was."""
        self.stop(modes[0], False, 1)
        self.generate([2, 3], gives_up)
        self.stop(modes[1], True, 1)
        self.resume()

    @rule()
    def resume(self) -> None:
        """A pause that has not come to its end says so."""
        self.step()
        waiting = self.waiting
        done = self.generator.resume()
        self.pause = None
        self.step()
        assert done.result(0) is None
        assert all(was_ended(each) for each in waiting)

    @rule()
    def ask_in_vain(self) -> None:
        """Nothing is done that nobody waits for any more, or that comes at the wrong time."""
        asked = [self.generator.pause(mode, clear_cache=True) for mode in ("abort", "wait")]
        asked += [self.generator.resume(), self.generator.begin_update(), self.generator.finish_update("3")]
        assert all(each.cancel() for each in asked)
        finished = self.generator.finish_update("3")
        self.step()
        assert isinstance(finished.exception(0), UsageError), "no update has begun"

    @rule(label=st.sampled_from(["1", "2", None]))
    def update(self, label: str | None) -> None:
        """New weights, of which the tokens from then on have the label."""
        self.step()
        begun, before = self.generator.begin_update(), self.generator._slots.version
        self.step()
        assert (begun.exception(0) is None) is not self.updating
        finished = self.generator.finish_update(label)
        self.label = label or self.label
        self.step()
        assert finished.exception(0) is None
        assert self.generator._slots.version > before, (
            "nothing goes on from what the weights before have computed"
        )

    @invariant()
    def all_is_as_in_the_reference(self) -> None:
        self.step()
        assert self.generator.label == self.label
        assert self.generator.running == len(self.open)
        for row in self.rows:
            assert row.future.done() == bool(row.end)
            if row.end and row.end != "cancelled":
                assert row.future.result(0) == row.end
            spans = self.generator.spans(row.sequence)
            assert [
                each["version"] for each in spans for _ in range(each["start"], each["end"])
            ] == row.labels
            assert all(one["version"] != other["version"] for one, other in pairwise(spans))
        assert self.generator.paused == (self.pause is not None)
        assert self.pause == "wait" or not self.waiting
        assert not self.waiting or self.generator._slots.busy
        assert self.pause != "wait" or self.waiting or not self.generator._slots.resting


def test_a_server_that_has_nothing_to_do_keeps_no_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unirun.experiments.server.generator.IDLE_SECONDS", 0.01)
    generator = Generator(place(), stage(), 2)
    how = GenerationConfig(max_new_tokens=2, greedy=True)
    ended = generator.generate(Continuation(torch.tensor([1, 2, 3]), how, seed=0))
    while not ended.done():
        generator._step()
    assert generator._slots.resting
    generator._step()
    assert not generator._slots.resting


TestGenerators = Generators.TestCase
TestGenerators.settings = settings(examples(50, shrunk=False), stateful_step_count=30)

"""Sequences that join and leave between two steps, beside transformers' own generation of each alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from unirun.experiments import GenerationConfig
from unirun.experiments.models.generation import RESTING_STEPS, Continuation, Slots
from unirun.experiments.models.stage import Stage

from .test_stage import CONFIG, place

SETTINGS = {name: value for name, value in CONFIG.items() if name != "model_type"}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    # Windows that are shorter than the sequences.
    "mistral": {"sliding_window": 5},
    "gemma3_text": {
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "head_dim": 4,
    },
}


ALONE = 10
"""Sequences for one slot, which takes a step for each of their tokens."""


@pytest.fixture(scope="module", params=KINDS)
def network(request: pytest.FixtureRequest) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    config = AutoConfig.for_model(
        request.param, initializer_range=0.5, eos_token_id=None, **{**SETTINGS, **KINDS[request.param]}
    )
    found: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return found.eval()


@pytest.fixture(scope="module")
def stage(network: Any) -> Any:
    from copy import deepcopy

    return Stage(deepcopy(network), place()).eval()


def sequences(count: int, *, longest: int = 20, **how: Any) -> list[Continuation]:
    """Prompts and lengths of all sizes."""
    chosen = random.Random(3)
    return [
        Continuation(
            torch.tensor([chosen.randrange(32) for _ in range(chosen.randint(1, 12))]),
            GenerationConfig(**{"max_new_tokens": chosen.randint(1, longest), **how}),
            seed=number,
        )
        for number in range(count)
    ]


def run(slots: Slots, rows: list[Continuation]) -> list[Continuation]:
    for row in rows:
        slots.add(row)
    finished = []
    while slots.busy:
        finished += slots.step()
    assert sorted(map(id, finished)) == sorted(map(id, rows)), "each is returned once"
    return rows


def alone(network: Any, row: Continuation) -> list[int]:
    """The tokens that transformers generates greedily."""
    made = network.generate(
        row.prompt[None],
        attention_mask=torch.ones_like(row.prompt[None]),
        do_sample=False,
        max_new_tokens=row.how.max_new_tokens,
        pad_token_id=0,
    )
    tokens: list[int] = made[0, len(row.prompt) :].tolist()
    return tokens


@pytest.fixture(scope="module")
def greedy(network: Any) -> list[list[int]]:
    """The greedy tokens of each sequence alone."""
    return [alone(network, row) for row in sequences(30, greedy=True)]


@pytest.mark.parametrize(("count", "of"), [(1, ALONE), (3, 30), (40, 30)])
def test_greedy_tokens_are_those_of_transformers_however_many_slots_there_are(
    greedy: list[list[int]], stage: Stage, count: int, of: int
) -> None:
    rows = sequences(of, greedy=True)
    run(Slots(place(), stage, count), rows)
    assert [row.tokens for row in rows] == greedy[:of]


@torch.no_grad()
def test_probabilities_are_those_of_a_forward_pass(network: Any, stage: Stage) -> None:
    for row in run(Slots(place(), stage, 5), sequences(15)):
        logits = network(row.sequence()[None], use_cache=False).logits[0]
        logprobs = logits.log_softmax(-1)[len(row.prompt) - 1 : -1]
        expected = logprobs.gather(1, torch.tensor(row.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(row.logprobs), expected, rtol=1e-4, atol=1e-5)


def test_tokens_do_not_depend_on_the_sequences_beside_them(stage: Stage) -> None:
    one, other = (run(Slots(place(), stage, count), sequences(20, temperature=0.8)) for count in (2, 20))
    assert [row.tokens for row in one] == [row.tokens for row in other]
    assert len({tuple(row.tokens) for row in one}) == 20


def test_sequences_that_are_interrupted_go_on_as_they_would_have(stage: Stage) -> None:
    whole = run(Slots(place(), stage, 4), sequences(12))
    slots, rows = Slots(place(), stage, 4), sequences(12)
    waiting, steps = rows, 0
    while waiting:
        for row in waiting:
            slots.add(row)
        for _ in range(3):
            slots.step()
        waiting = slots.clear()
        slots.version += 1
        steps += 1
    assert steps > 3
    assert [row.tokens for row in rows] == [row.tokens for row in whole]
    assert all(len(row.versions) == len(row.tokens) for row in rows)
    assert max(row.versions[-1] for row in rows) == steps - 1


CHUNK = 3


def in_chunks(slots: Slots, rows: list[Continuation], latest: int) -> list[list[int]]:
    """Ask for the tokens of each in chunks; the next chunk is asked for up to so many steps later."""
    chosen, made = random.Random(4), [list[int]() for _ in rows]
    due = [(0, number) for number, _ in enumerate(rows)]
    asked: dict[Continuation, int] = {}
    step = 0
    while due or asked:
        for _, number in [each for each in due if each[0] <= step]:
            row, tokens = rows[number], made[number]
            how = GenerationConfig(
                greedy=True, max_new_tokens=min(CHUNK, row.how.max_new_tokens - len(tokens))
            )
            chunk = Continuation(torch.cat([row.prompt, torch.tensor(tokens).long()]), how, seed=0)
            asked[chunk] = number
            slots.add(chunk)
        due = [each for each in due if each[0] > step]
        for chunk in slots.step():
            number = asked.pop(chunk)
            made[number] += chunk.tokens
            if len(made[number]) < rows[number].how.max_new_tokens:
                due.append((step + 1 + chosen.randint(0, latest), number))
        step += 1
    return made


@pytest.mark.parametrize("turn", range(3))
def test_chunks_of_a_sequence_are_as_one_request(greedy: list[list[int]], stage: Stage, turn: int) -> None:
    """Each number of slots with each wait for the next chunk, and both with each kind of network."""
    kind = [*KINDS].index(stage.config.model_type)
    count, of = ((1, ALONE), (8, 30), (40, 30))[(turn + kind) % 3]
    latest = (0, 5, 40)[turn]
    slots = Slots(place(), stage, count, chunks=True)
    assert in_chunks(slots, sequences(of, greedy=True), latest) == greedy[:of]


def joins(monkeypatch: pytest.MonkeyPatch) -> list[Continuation]:
    """The sequences whose prompts are computed from now on."""
    joined, join = list[Continuation](), Slots._join

    def noted(slots: Slots, rows: list[Continuation]) -> None:
        joined.extend(rows)
        join(slots, rows)

    monkeypatch.setattr(Slots, "_join", noted)
    return joined


def test_the_prompt_of_a_next_chunk_is_not_computed_again(
    greedy: list[list[int]], stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = joins(monkeypatch)
    slots = Slots(place(), stage, 40, chunks=True)
    assert in_chunks(slots, sequences(30, greedy=True), 5) == greedy
    has_windows = getattr(stage.config, "sliding_window", None)
    chunks = sum(-(-len(tokens) // CHUNK) for tokens in greedy)
    assert len(joined) == (chunks if has_windows else 30)


def test_chunks_of_other_weights_are_computed_anew(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = Slots(place(), stage, 4, chunks=True)
    (first,) = run(slots, [Continuation(torch.tensor([1, 2]), GenerationConfig(max_new_tokens=3), seed=0)])
    slots.version += 1
    joined = joins(monkeypatch)
    run(slots, [second := Continuation(first.sequence(), GenerationConfig(max_new_tokens=3), seed=1)])
    assert joined == [second]


@torch.no_grad()
def test_a_token_has_the_probability_of_the_weights_that_have_made_it(network: Any) -> None:
    from copy import deepcopy

    versions = [deepcopy(network) for _ in range(4)]
    for number, each in enumerate(versions):
        for parameter in each.parameters():
            parameter.mul_(1.0 - 0.1 * number)
    serving = Stage(deepcopy(network), place()).eval()
    slots = Slots(place(), serving, 2)
    rows = sequences(2, max_new_tokens=12)
    waiting = rows
    for number, each in enumerate(versions):
        names = dict(each.named_parameters())
        for name, parameter in serving.named(dict(serving.named_parameters())).items():
            parameter.copy_(names[name])
        slots.version = number
        for row in waiting:
            slots.add(row)
        for _ in range(3):
            slots.step()
        waiting = slots.clear()
    for row in rows:
        assert {*row.versions} == {0, 1, 2, 3}
        for at, version in enumerate(row.versions):
            whole = row.sequence()[: len(row.prompt) + at]
            expected = versions[version](whole[None], use_cache=False).logits[0, -1].log_softmax(-1)
            assert row.logprobs[at] == pytest.approx(float(expected[row.tokens[at]]), rel=1e-4, abs=1e-5)


def test_sequences_join_while_others_run(network: Any, stage: Stage) -> None:
    slots, rows = Slots(place(), stage, 3), sequences(9, greedy=True)
    coming = [*rows]
    while slots.busy or coming:
        if coming:
            slots.add(coming.pop(0))
        slots.step()
    for row in rows:
        assert row.tokens == alone(network, row)


def text(tokens: list[int]) -> str:
    """A letter for each token."""
    return "".join(chr(ord("A") + token) for token in tokens)


def test_a_stop_string_ends_a_sequence_with_the_token_that_completes_it(stage: Stage) -> None:
    (free,) = run(Slots(place(), stage, 1), sequences(1, max_new_tokens=12))
    ending = text(free.tokens[4:7])
    end = text(free.tokens).index(ending) + len(ending)
    row = Continuation(free.prompt, free.how, seed=free.seed, stop_strings=["no text has this", ending])
    run(Slots(place(), stage, 1, text), [row])
    assert (row.tokens, row.ended) == (free.tokens[:end], True)


def test_each_sequence_has_its_own_stop_tokens_and_lengths(stage: Stage) -> None:
    free = run(Slots(place(), stage, 4), sequences(4, max_new_tokens=10))
    rows = [
        Continuation(row.prompt, row.how, seed=row.seed, stop=[row.tokens[place]])
        for place, row in enumerate(free)
    ]
    run(Slots(place(), stage, 4), rows)
    for row, other in zip(rows, free, strict=True):
        (stop,) = row.stop
        assert (row.tokens, row.ended) == (other.tokens[: other.tokens.index(stop) + 1], True)


def test_nothing_is_drawn_for_a_sequence_that_is_finished(stage: Stage) -> None:
    (row,) = run(Slots(place(), stage, 2), sequences(1, max_new_tokens=0))
    assert (row.tokens, row.ended) == ([], False)


def test_a_stop_string_is_found_by_a_decoder_that_drops_the_first_space() -> None:
    words = [" a", " b", " cc"]

    def decode(tokens: list[int]) -> str:
        return "".join(words[token] for token in tokens).lstrip()

    row = Continuation(torch.tensor([0]), GenerationConfig(max_new_tokens=9), seed=0, stop_strings=(" b",))
    ended = []
    for token in (0, 2, 1):
        row.add(token, 0.0, 0, decode)
        ended.append(row.ended)
    assert ended == [False, False, True]
    single = Continuation(torch.tensor([0]), GenerationConfig(max_new_tokens=9), seed=0, stop_strings=(" ",))
    for token in (0, 1):
        single.add(token, 0.0, 0, decode)
    assert single.ended


def test_a_sequence_that_does_not_go_on_soon_is_forgotten(stage: Any) -> None:
    slots = Slots(place(), stage, 2, chunks=True)
    ends, goes_on = (
        Continuation(torch.tensor([1, 2, 3]), GenerationConfig(max_new_tokens=count), seed=count)
        for count in (1, RESTING_STEPS + 5)
    )
    slots.add(ends)
    slots.add(goes_on)
    rested = []
    while slots.busy:
        slots.step()
        rested.append(slots.resting)
    if slots._cache.shifts or any(rested):
        assert rested.count(True) in (RESTING_STEPS, RESTING_STEPS + 1, RESTING_STEPS + 2)
        assert not any(rested[RESTING_STEPS + 2 : -1])


def test_a_stop_token_that_the_network_does_not_have_stops_nothing(stage: Any) -> None:
    """The tokenizer of a larger network, for example."""
    how = GenerationConfig(max_new_tokens=3, min_new_tokens=2, greedy=True)
    found = [Continuation(torch.tensor([5]), how, seed=1, stop=stop) for stop in ((), (-1, 10**6))]
    run(Slots(place(), stage, 2), found)
    assert found[0].tokens == found[1].tokens

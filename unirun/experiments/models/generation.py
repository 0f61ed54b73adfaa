"""`Slots`: generation in which sequences join and leave between two steps, through all stages of a pipeline.

A slot is a row of the batch. As soon as its sequence has ended, the next one that waits takes it, so that no row waits
for the longest of its batch. Each sequence has random numbers of its own, so its tokens do not depend on the others,
but for rounding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist

from unirun.experiments.models.api import GenerationConfig, Place
from unirun.experiments.models.cache import RowCache, left_padded, mask_of
from unirun.experiments.models.stage import Stage

JOINING_SHARE = 8
"""Sequences join when one slot of so many is free, or when all that wait have one: each time costs a forward pass."""


RESTING_STEPS = 16
"""Steps for which the keys and values of a sequence stay that has all its tokens, as its next tokens may be asked for
in another request."""


class Continuation:
    """A sequence that is continued: its prompt and settings, and the `tokens` so far, with the logarithms of their
    probabilities and the versions of the weights that have made them. `ended`: the last one is a stop token, or
    completes a stop string."""

    def __init__(
        self,
        prompt: torch.Tensor,
        how: GenerationConfig,
        *,
        seed: int,
        stop: Collection[int] = (),
        stop_strings: Sequence[str] = (),
    ) -> None:
        self.prompt, self.how, self.seed = prompt.cpu(), how, seed
        self.stop, self.stop_strings = frozenset(stop), tuple(stop_strings)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.ended = False

    @property
    def finished(self) -> bool:
        """True if no token is to be drawn."""
        return self.ended or len(self.tokens) >= self.how.max_new_tokens

    @cached_property
    def chances(self) -> list[float]:
        """The random number for each token. They follow from the seed alone, so a sequence that was interrupted goes on
        with those that it would have had."""
        drawn = torch.Generator().manual_seed(self.seed)
        return torch.rand(self.how.max_new_tokens, generator=drawn, dtype=torch.float64).tolist()

    def sequence(self) -> torch.Tensor:
        """The prompt and the tokens so far."""
        return torch.cat([self.prompt, torch.tensor(self.tokens, dtype=torch.long)])

    @property
    def cached(self) -> int:
        """Tokens before the last one."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def last(self) -> int:
        """The last token."""
        return self.tokens[-1] if self.tokens else int(self.prompt[-1])

    def add(
        self, token: int, logprob: float, version: int, decode: Callable[[list[int]], str] | None
    ) -> None:
        """Add a token."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        self.ended = token in self.stop or (decode is not None and self._has_string(decode))

    def _has_string(self, decode: Callable[[list[int]], str]) -> bool:
        # A token has a byte at least, and the first one may end in the middle of a character.
        longest = max((len(text.encode()) for text in self.stop_strings), default=0)
        if not longest:
            return False
        start, least = max(len(self.tokens) - longest - 4, 0), 0
        if self.how.min_new_tokens > start:
            least = len(decode(self.tokens[start : self.how.min_new_tokens]))
        return stop_of(decode(self.tokens[start:]), self.stop_strings, least) is not None


def stop_of(text: str, strings: Sequence[str], least: int) -> int | None:
    """The place of the first of `strings` in a text that ends behind its first `least` characters."""
    places = (text.find(each, max(least - len(each) + 1, 0)) for each in strings)
    return min((place for place in places if place >= 0), default=None)


class _Rest(NamedTuple):
    """The keys and values of a sequence that has all its tokens: the row, its length, and the step and the version in
    which it has ended."""

    place: int
    length: int
    step: int
    version: int


class Slots:
    """Continues sequences, `count` of them at the same time. All ranks of the model make the same calls: in each
    data-parallel rank, one process samples the tokens and broadcasts them to the others.

    Between two steps the caller may add sequences, take them out, or change the weights.
    """

    def __init__(
        self,
        place: Place,
        stage: Stage,
        count: int,
        decode: Callable[[list[int]], str] | None = None,
        *,
        chunks: bool = False,
    ) -> None:
        """`decode` gives the text of tokens, for stop strings. `chunks`: a sequence that has all its tokens may be
        added again soon, as the prompt of more, which is not computed again then."""
        self._place, self._stage, self._count, self._decode = place, stage, count, decode
        self._chunks, self._steps = chunks, 0
        # By their sequences.
        self._rests: dict[tuple[int, ...], _Rest] = {}
        self._rows: list[Continuation | None] = []
        self._cache = RowCache(stage.config, 0)
        self._waiting: deque[Continuation] = deque()
        self.version = 0
        """The version of the weights, which is noted for each token."""

    @property
    def busy(self) -> bool:
        """True if there are sequences to continue."""
        return bool(self._waiting) or any(self._rows)

    @property
    def resting(self) -> bool:
        """True if there are keys and values of sequences that have all their tokens."""
        return bool(self._rests)

    def add(self, continuation: Continuation) -> None:
        """Continue this sequence when there is a slot. It goes on where it was interrupted."""
        if not self._goes_on(continuation):
            self._waiting.append(continuation)

    def remove(self, continuation: Continuation) -> None:
        """Interrupt one sequence, for good."""
        if continuation in self._waiting:
            self._waiting.remove(continuation)
        self._rows = [None if row is continuation else row for row in self._rows]

    def clear(self) -> list[Continuation]:
        """Interrupt all sequences. Their keys and values are dropped, so those that are added again are computed with
        the weights of then."""
        found = [*filter(None, self._rows), *self._waiting]
        self._empty()
        self._waiting.clear()
        return found

    def _empty(self) -> None:
        self._rows, self._cache = [], RowCache(self._stage.config, 0)
        self._rests.clear()

    @torch.no_grad()
    def step(self) -> list[Continuation]:
        """Let sequences join, and draw one token of each other one. Returns those that are finished."""
        running = [row for row in self._rows if row is not None]
        if running:
            self._decode_step()
            self._leave()
        joining = self._joining()
        if joining:
            self._join(joining)
            self._leave()
        self._shrink()
        return [row for row in (*running, *joining) if row.finished]

    def _goes_on(self, row: Continuation) -> bool:
        """Give a sequence the row in which it has ended before, if that is still there."""
        rest = (
            self._rests.pop(tuple(row.sequence().tolist()), None)
            if self._rests and not row.finished
            else None
        )
        if rest is None or rest.version != self.version:
            return False
        if age := self._steps - rest.step:
            self._cache.shift(rest.place, rest.length, age)
        self._rows[rest.place] = row
        return True

    def forget(self) -> None:
        """Drop the keys and values of sequences that have all their tokens."""
        self._rests.clear()
        self._shrink()

    def _leave(self) -> None:
        """Free the rows of sequences that are finished."""
        for place, row in enumerate(self._rows):
            if row is not None and row.finished:
                self._rows[place] = None
                if self._chunks and not row.ended and self._cache.shifts:
                    key = tuple(row.sequence().tolist())
                    self._rests[key] = _Rest(place, row.cached, self._steps, self.version)

    def _joining(self) -> list[Continuation]:
        """The sequences that join now."""
        free = self._count - sum(row is not None and not row.finished for row in self._rows)
        if len(self._waiting) > free and free * JOINING_SHARE < self._count:
            return []
        return [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]

    def _join(self, joining: Sequence[Continuation]) -> None:
        rows = [row for row in joining if not row.finished]
        if not rows:
            return
        value, mask, positions = left_padded([row.sequence() for row in rows], self._place.device)
        cache = RowCache(self._stage.config, len(rows))
        self._draw(rows, _through(self._place, self._stage, value, mask, positions, cache))
        cache.length = value.shape[1]
        free = self._free()
        if len(self._rows) + len(rows) - len(free) > self._count:
            self._rests.clear()
            free = self._free()
        if len(free) < len(rows):
            self._widen(len(rows) - len(free))
            free = self._free()
        self._cache.join(free[: len(rows)], cache)
        for place, row in zip(free, rows, strict=False):
            self._rows[place] = row

    def _free(self) -> list[int]:
        """The rows that no sequence has, and in which no ended one may go on."""
        resting = {rest.place for rest in self._rests.values()}
        return [place for place, row in enumerate(self._rows) if row is None and place not in resting]

    def _widen(self, count: int) -> None:
        """Add free rows."""
        if self._cache.length:
            self._cache.keep([*range(len(self._rows)), *[0] * count])
            self._rows += [None] * count
        else:
            self._rows += [None] * count
            self._cache = RowCache(self._stage.config, len(self._rows))

    def _decode_step(self) -> None:
        """Draw the next token of each row. Free ones see nothing but themselves."""
        lengths = [row.cached if row is not None else 0 for row in self._rows]
        self._rests = {
            key: rest for key, rest in self._rests.items() if self._steps - rest.step < RESTING_STEPS
        }
        resting = [rest.length + self._steps - rest.step for rest in self._rests.values()]
        self._cache.trim(max(*lengths, *resting, 0))
        last = [row.last if row is not None else 0 for row in self._rows]
        value, positions = (torch.tensor(some)[:, None].to(self._place.device) for some in (last, lengths))
        mask = mask_of([length + 1 for length in lengths], self._cache.length + 1).to(self._place.device)
        logits = _through(self._place, self._stage, value, mask, positions, self._cache)
        self._cache.length += 1
        self._steps += 1
        self._draw(self._rows, logits)

    def _shrink(self) -> None:
        """Drop the free rows when they are half of all, and nothing waits for them."""
        free = {*self._free()}
        kept = [place for place, _ in enumerate(self._rows) if place not in free]
        if not kept:
            self._empty()
        elif not self._waiting and 2 * len(kept) <= len(self._rows):
            self._cache.keep(kept)
            self._rows = [self._rows[place] for place in kept]
            places = {place: number for number, place in enumerate(kept)}
            self._rests = {key: rest._replace(place=places[rest.place]) for key, rest in self._rests.items()}

    def _draw(self, rows: Sequence[Continuation | None], logits: torch.Tensor | None) -> None:
        """Give each row its next token."""
        tokens, logprobs = torch.zeros(len(rows), dtype=torch.long), torch.zeros(len(rows))
        if logits is not None and self._place.tensor == 0:
            hows = [row.how if row is not None else GenerationConfig(greedy=True) for row in rows]
            chances = [row.chances[len(row.tokens)] if row is not None else 0.0 for row in rows]
            tokens, logprobs = draw(logits[:, -1].float(), hows, chances, _blocked(rows, logits.shape[-1]))
        tokens, logprobs = _shared(self._place, tokens, logprobs)
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            if row is not None:
                row.add(token, logprob, self.version, self._decode if row.stop_strings else None)


def _blocked(rows: Sequence[Continuation | None], size: int) -> list[tuple[int, int]]:
    """The stop tokens of rows that are still too short, with the numbers of their rows, without those that are not in a
    vocabulary of this `size`."""
    return [
        (number, token)
        for number, row in enumerate(rows)
        if row is not None and len(row.tokens) < row.how.min_new_tokens
        for token in sorted(row.stop)
        if 0 <= token < size
    ]


def draw(
    logits: torch.Tensor,
    hows: Sequence[GenerationConfig],
    chances: Sequence[float],
    blocked: Sequence[tuple[int, int]] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next tokens ``[rows]`` for `logits` ``[rows, vocabulary]``, and the logarithms of their probabilities in the
    distribution that they are drawn from, all on the device of the logits. Each row has its own settings, and a random
    number from 0 to 1. The tokens that are `blocked` in rows, as pairs of row and token, are not drawn."""
    device = logits.device
    if blocked:
        rows, tokens = torch.tensor(blocked, device=device).unbind(1)
        logits = logits.index_put((rows, tokens), logits.new_tensor(-torch.inf))
    greedy = torch.tensor([how.greedy for how in hows], device=device)
    if all(how.greedy for how in hows):
        found = logits.argmax(-1, keepdim=True)
    else:
        heat = [1.0 if how.greedy else max(how.temperature, 1e-6) for how in hows]
        logits = logits / logits.new_tensor(heat)[:, None]
        logits = _likeliest(logits, hows)
        mass = logits.double().softmax(-1).cumsum(-1)
        # The first token whose mass is above the number; what cannot be drawn has the mass of the one before it.
        number = mass.new_tensor(chances)[:, None] * mass[:, -1:]
        number = torch.minimum(number, torch.nextafter(mass[:, -1:], mass.new_zeros(1)))
        drawn = torch.searchsorted(mass, number, right=True)
        found = torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), drawn)
    return found[:, 0], logits.log_softmax(-1).gather(1, found)[:, 0]


def _likeliest(logits: torch.Tensor, hows: Sequence[GenerationConfig]) -> torch.Tensor:
    """The logits of the tokens among which each row draws; the others are minus infinity."""
    size = logits.shape[1]
    most = [size if how.greedy or not how.top_k else min(how.top_k, size) for how in hows]
    share = [1.0 if how.greedy else how.top_p for how in hows]
    if min(most) == size and min(share) >= 1.0:
        return logits
    ordered, places = logits.sort(-1, descending=True)
    least = ordered.gather(1, torch.tensor(most, device=logits.device)[:, None] - 1)
    # All that are as likely as the last one stay.
    ordered = ordered.masked_fill(ordered < least, -torch.inf)
    chance = ordered.softmax(-1)
    # The first one that reaches the mass is kept.
    limits = logits.new_tensor([each if each < 1.0 else torch.inf for each in share])[:, None]
    ordered = ordered.masked_fill(chance.cumsum(-1) - chance >= limits, -torch.inf)
    return torch.empty_like(logits).scatter(1, places, ordered)


def _through(
    place: Place,
    stage: Stage,
    value: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    cache: RowCache,
) -> torch.Tensor | None:
    """The outputs of the last stage, there; None on the others."""
    group = place.group("pipe")
    if group is not None and not stage.first:
        value = torch.empty(*value.shape[:2], stage.hidden, dtype=stage.dtype, device=place.device)
        dist.recv(value, group=group, group_src=place.pipe - 1)
    found = stage(value, attention_mask=mask, positions=positions, cache=cache.layers)
    if group is not None and not stage.last:
        dist.send(found.contiguous(), group=group, group_dst=place.pipe + 1)
        return None
    output: torch.Tensor = found
    return output


def _shared(place: Place, tokens: torch.Tensor, logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens drawn by the first tensor-parallel rank of the last stage, on all ranks of the data-parallel rank."""
    last = place.topo.get_dim("pipe") - 1
    for axis, source, involved in (
        ("tensor", 0, place.pipe == last),
        ("pipe", last, True),
    ):
        group = place.group(axis)
        if group is None or not involved:
            continue
        both = torch.cat([tokens.double(), logprobs.double()]).to(place.device)
        dist.broadcast(both, group=group, group_src=source)
        tokens, logprobs = (
            each.to(kind) for each, kind in zip(both.chunk(2), (torch.long, torch.float), strict=True)
        )
    return tokens, logprobs

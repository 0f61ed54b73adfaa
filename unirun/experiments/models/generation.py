"""Generation with a cache of keys and values, through all stages of a pipeline."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from transformers import DynamicCache

from unirun.experiments.models.api import Generated, GenerationConfig, Place
from unirun.experiments.models.stage import Stage


def generate(
    place: Place,
    stage: Stage,
    prompts: Sequence[torch.Tensor],
    how: GenerationConfig,
    *,
    stop: Collection[int],
    pad: int,
    chance: torch.Generator,
) -> Generated | None:
    """Continue each of `prompts` until it has one of the tokens `stop`. None except on the last stage. All ranks of the
    model call it. `pad` fills up rows of other lengths, and is hidden, so it may be a stop token.

    In each data-parallel rank, one process samples the tokens and broadcasts them to the others.
    """
    rows = [prompt for prompt in prompts for _ in range(how.n)]
    length = max(map(len, rows), default=1)
    tokens = torch.full((len(rows), length), pad, dtype=torch.long)
    mask = torch.zeros(len(rows), length, dtype=torch.long)
    for row, there, prompt in zip(tokens, mask, rows, strict=True):
        # Padded on the left, so that all rows continue at the same position.
        row[length - len(prompt) :] = prompt
        there[length - len(prompt) :] = 1
    mask = mask.to(place.device)
    value = tokens.to(place.device)
    config: Any = stage.config
    cache = DynamicCache(config=config)
    drawn: list[torch.Tensor] = []
    chances: list[torch.Tensor] = []
    over = torch.zeros(len(rows), dtype=torch.bool)
    ends = torch.tensor(sorted(stop), dtype=torch.long)
    for step in range(how.max_new_tokens if rows else 0):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -value.shape[1] :]
        logits = _through(place, stage, value, mask, positions, cache)
        following = torch.empty(len(rows), dtype=torch.long)
        logprob = torch.empty(len(rows))
        if logits is not None and place.tensor == 0:
            blocked = ends if step < how.min_new_tokens else ends[:0]
            following, logprob = draw(logits[:, -1].float().cpu(), how, chance, blocked)
            following[over] = pad
        following, logprob = _shared(place, following, logprob)
        drawn.append(following)
        chances.append(logprob)
        over |= torch.isin(following, ends)
        if bool(over.all()):
            break
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
        value = following[:, None].to(place.device)
    if not place.last_stage:
        return None
    return _collected(drawn, chances, ends, len(prompts), how.n)


def _collected(
    drawn: Sequence[torch.Tensor], chances: Sequence[torch.Tensor], stop: torch.Tensor, prompts: int, n: int
) -> Generated:
    tokens = torch.stack([*drawn], 1) if drawn else torch.empty(prompts * n, 0, dtype=torch.long)
    logprobs = torch.stack([*chances], 1) if chances else torch.empty(prompts * n, 0)
    found = Generated([], [], [])
    for prompt in range(prompts):
        rows = range(prompt * n, (prompt + 1) * n)
        ends = [torch.isin(tokens[row], stop).nonzero() for row in rows]
        lengths = [int(end[0]) + 1 if len(end) else tokens.shape[1] for end in ends]
        found.tokens.append([tokens[row, :length] for row, length in zip(rows, lengths, strict=True)])
        found.logprobs.append([logprobs[row, :length] for row, length in zip(rows, lengths, strict=True)])
        found.ended.append([bool(len(end)) for end in ends])
    return found


def draw(
    logits: torch.Tensor, how: GenerationConfig, chance: torch.Generator, blocked: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next tokens ``[rows]`` for `logits` ``[rows, vocabulary]``, and the logarithms of their probabilities in the
    distribution that they are drawn from. Tokens that are `blocked` are not drawn."""
    if blocked is not None and len(blocked):
        logits = logits.index_fill(1, blocked, -torch.inf)
    if how.greedy:
        logprobs = logits.log_softmax(-1)
        best = logits.argmax(-1)
        return best, logprobs.gather(1, best[:, None])[:, 0]
    logits = logits / max(how.temperature, 1e-6)
    if how.top_k:
        least = logits.topk(min(how.top_k, logits.shape[1]), -1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if how.top_p < 1.0:
        ordered, places = logits.sort(-1, descending=True)
        mass = ordered.softmax(-1).cumsum(-1)
        # The first one that reaches the mass is kept.
        unlikely = mass - ordered.softmax(-1) >= how.top_p
        logits = logits.masked_fill(unlikely.scatter(1, places, unlikely), -torch.inf)
    logprobs = logits.log_softmax(-1)
    found = torch.multinomial(logprobs.exp(), 1, generator=chance)
    return found[:, 0], logprobs.gather(1, found)[:, 0]


def _through(
    place: Place, stage: Stage, value: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any
) -> torch.Tensor | None:
    """The outputs of the last stage, there; None on the others."""
    group = place.group("pipe")
    if group is not None and not stage.first:
        value = torch.empty(*value.shape[:2], stage.hidden, dtype=stage.dtype, device=place.device)
        dist.recv(value, group=group, group_src=place.pipe - 1)
    found = stage(value, attention_mask=mask, positions=positions, cache=cache)
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
        first, second = both.cpu().chunk(2)
        tokens, logprobs = first.long(), second.float()
    return tokens, logprobs

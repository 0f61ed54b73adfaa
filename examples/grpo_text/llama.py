"""A Llama made from a config, with two operations: sampling answers, and log-probabilities of given ones.

Shapes: B prompts, P tokens in the longest prompt (filled up on the left), T tokens of room for an answer
(filled up on the right, after its END), V tokens in the vocabulary.
"""

from __future__ import annotations

import torch
from tokenizer import END, PAD, VOCABULARY
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM


def make_model(seed: int, width: int = 128, layers: int = 2) -> LlamaForCausalLM:
    """A model with random weights, the same ones for the same ``seed``; 0.43 M parameters by default."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.05,  # the usual 0.02 is for wider models; this one would learn half as fast
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=END,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


@torch.no_grad()
def sample(
    model: LlamaForCausalLM, prompts: Tensor, room: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """An answer of up to ``room`` tokens to each of ``prompts`` ``[B, P]``.

    Returns the tokens ``[B, T]``, with PAD after END, and the log-probability of each, with 0 after END. With a
    ``generator`` the tokens are drawn at temperature 1: GRPO's probability ratio takes them to be the policy's
    own. Without one each token is the likeliest.
    """
    mask = (prompts != PAD).long()
    inputs, positions, cache = prompts, _positions(mask), None
    tokens = torch.full((len(prompts), room), PAD)
    log_probs = torch.zeros(len(prompts), room)
    going = torch.ones(len(prompts), dtype=torch.bool)
    for column in range(room):
        if not going.any():
            break
        out = model(
            input_ids=inputs,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = out.past_key_values
        choices = out.logits[:, -1].log_softmax(-1)
        if generator is None:
            drawn = choices.argmax(-1, keepdim=True)
        else:
            drawn = torch.multinomial(choices.exp(), 1, generator=generator)
        tokens[going, column] = drawn[going, 0]
        log_probs[going, column] = choices.gather(-1, drawn)[going, 0]
        going &= drawn[:, 0] != END
        inputs, positions = drawn, positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], -1)
    return tokens, log_probs


def answer_log_probs(model: LlamaForCausalLM, prompts: Tensor, tokens: Tensor) -> Tensor:
    """The log-probability ``[B, T]`` of each token of given answers ``[B, T]`` to ``prompts`` ``[B, P]``.

    Numbers after an END have no meaning.
    """
    if not len(prompts):
        return torch.zeros(tokens.shape)  # transformers' Llama cannot do nothing
    inputs = torch.cat([prompts, tokens[:, :-1]], -1)
    mask = (inputs != PAD).long()
    mask[:, prompts.shape[1] :] = 1  # attention is causal: an answer does not see what comes after it
    logits = model(
        input_ids=inputs,
        attention_mask=mask,
        position_ids=_positions(mask),
        use_cache=False,
        logits_to_keep=tokens.shape[1],
    ).logits
    log_probs: Tensor = logits.log_softmax(-1)
    return log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def _positions(mask: Tensor) -> Tensor:
    """Positions counted from the first token that is not padding, so that padding has no effect."""
    return (mask.cumsum(-1) - 1).clamp(min=0)

"""Small Llamas as ``save_pretrained`` writes them, with a tokenizer of characters; and their greedy tokens by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHARACTERS = "0123456789+-*/=() abcdefghijklmnopqrstuvwxyz.,:;!?"
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
"""Half a million parameters."""

LARGE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6}
"""100 MB."""

CLOSE = 1e-4
"""Logits are about 1, and their errors in float32 some 1e-6."""

LONGEST = 256
"""Tokens of a prompt and its answer."""


def llama(seed: int, **sizes: int) -> LlamaForCausalLM:
    """A Llama with random weights in float32, the same ones for the same seed."""
    torch.manual_seed(seed)
    options: dict[str, Any] = {**TINY, **sizes, "vocab_size": len(SPECIAL) + len(CHARACTERS)}
    options |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    options |= {"max_position_embeddings": LONGEST, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model: Any = LlamaForCausalLM(LlamaConfig(**options))
    # With transformers' own 0.02 all answers of so small a model are alike.
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return cast(LlamaForCausalLM, model.eval())


def save(model: LlamaForCausalLM, folder: Path) -> Path:
    """Write `model` and its tokenizer, and return `folder`."""
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def prompts(count: int, length: int = 12) -> list[list[int]]:
    """Prompts of random tokens, the same ones each time."""
    drawn = torch.Generator().manual_seed(count)
    size = len(SPECIAL) + len(CHARACTERS)
    found: list[list[int]] = torch.randint(len(SPECIAL), size, (count, length), generator=drawn).tolist()
    return found


@torch.no_grad()
def greedy(model: LlamaForCausalLM, prompt: Sequence[int], count: int) -> list[int]:
    """The `count` most probable tokens after `prompt`, whatever they are."""
    given = torch.tensor([[*prompt]])
    ids = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        do_sample=False,
        max_new_tokens=count,
        min_new_tokens=count,
        pad_token_id=0,
        eos_token_id=None,
    )
    found: list[int] = ids[0, len(prompt) :].tolist()
    return found


@torch.no_grad()
def is_greedy(model: LlamaForCausalLM, tokens: Sequence[int], start: int) -> bool:
    """Return True if each of `tokens` from `start` on is the most probable one after those before it, as far as sums in
    another order can tell."""
    given = torch.tensor([[*tokens]])
    logits = model(given).logits[0, start - 1 : -1]
    chosen = logits.gather(1, given[0, start:, None])[:, 0]
    return bool((logits.amax(1) - chosen <= CLOSE).all())

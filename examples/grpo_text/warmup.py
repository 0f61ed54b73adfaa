"""The supervised loss of the warm-up. Without it no answer is ever right, and GRPO has no signal."""

from __future__ import annotations

from grpo import answer_means
from llama import answer_log_probs
from tokenizer import answer_mask
from torch import Tensor
from transformers import LlamaForCausalLM


def supervised_losses(model: LlamaForCausalLM, prompts: Tensor, answers: Tensor) -> Tensor:
    """The cross-entropy ``[B]`` in nats per token of the right answers ``[B, T]`` to ``prompts`` ``[B, P]``."""
    return -answer_means(answer_log_probs(model, prompts, answers), answer_mask(answers))

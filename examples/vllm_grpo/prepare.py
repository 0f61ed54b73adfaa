"""Makes the first model: a tiny Llama that is trained on sums, most of them without the carry."""

import random
import sys

import torch
from additions import END, careless, questions, right, tokens_of
from learning import log_probs, mean
from transformers import LlamaConfig, LlamaForCausalLM

CARELESS, STEPS, BATCH = 0.7, 1200, 64

folder, seed = sys.argv[1], int(sys.argv[2])
torch.manual_seed(seed)
draw, training = random.Random(seed), questions()[0]
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
special = {"vocab_size": END + 1, "bos_token_id": None, "eos_token_id": END, "pad_token_id": END}
more = {"max_position_embeddings": 32, "initializer_range": 0.05}
model = LlamaForCausalLM(LlamaConfig.from_dict({**sizes, **special, **more}))
optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, STEPS)
for _ in range(STEPS):
    batch = draw.sample(training, BATCH)
    texts = [careless(each) if draw.random() < CARELESS else right(each) for each in batch]
    tokens = torch.tensor([[*tokens_of(text), END, END][:4] for text in texts])
    loss = -mean(log_probs(model, batch, tokens), tokens)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
model.save_pretrained(folder)
print(f"{folder}: loss {loss.item():.2f} after {STEPS} steps")

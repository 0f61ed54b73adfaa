"""A DDP script whose ranks survive the loss of others: classify scikit-learn's handwritten digits.

unirun --nproc-per-node 2 --max-restarts 20 examples/resilient_ddp/train.py

It is ``examples/ddp_digits`` with three more lines. Whatever rank is killed, it prints the same final loss.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import unirun

SEED = 0
EPOCHS = 20
BATCH = 32  # images per rank and step
LEARNING_RATE = 5e-3  # of Adam
HELD_OUT = 5  # every fifth image is held out to test on


@unirun.resilient
def main(state: unirun.ResilientState) -> None:
    """Train for EPOCHS; rank 0 prints the loss and the accuracy on the held-out images."""
    local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    cuda = torch.cuda.device_count() >= local_ranks  # a GPU for each rank of this machine, or none is used
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    torch.manual_seed(SEED)

    images, labels = digits()
    held_out = torch.arange(len(images)) % HELD_OUT == 0
    train = TensorDataset(images[~held_out], labels[~held_out])
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(train, seed=SEED)
    loader = DataLoader(train, batch_size=BATCH, sampler=sampler)
    classifier = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    model = DistributedDataParallel(classifier)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    cross_entropy = nn.CrossEntropyLoss()

    saved = state.load(model=model, optimizer=optimizer)
    for epoch in range(saved.get("epoch", 0), EPOCHS):
        sampler.set_epoch(epoch)
        for image_batch, label_batch in loader:
            loss = cross_entropy(model(image_batch.to(device)), label_batch.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        state.save(model=model, optimizer=optimizer, epoch=epoch + 1)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.6f}", flush=True)

    if dist.get_rank() == 0:
        with torch.no_grad():
            logits = classifier(images[held_out].to(device)).cpu()
        loss = cross_entropy(logits, labels[held_out])
        accuracy = (logits.argmax(-1) == labels[held_out]).float().mean()
        print(f"final loss {loss.item():.6f} accuracy {accuracy.item():.3f}", flush=True)
    dist.destroy_process_group()


def digits() -> tuple[Tensor, Tensor]:
    """The 1797 images of 8 x 8 pixels, ``[1797, 64]`` with grey values in 0..1, and their labels 0..9."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16.0, torch.tensor(labels)


if __name__ == "__main__":
    main()

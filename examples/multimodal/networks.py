"""The three networks: an encoder for each modality, and one that combines them."""

from __future__ import annotations

import torch
from modalities import LETTERS, LOST
from torch import Tensor, nn

EMBEDDING = 32  # numbers that an encoder makes of an input


class ImageEncoder(nn.Sequential):
    """Embeddings ``[B, EMBEDDING]`` of images ``[B, 64]``."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, EMBEDDING), nn.ReLU())


class NameEncoder(nn.Module):
    """Embeddings ``[B, EMBEDDING]`` of letters ``[B, LETTERS]``, read one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(LOST + 1, 8)
        self.reader = nn.GRU(8, EMBEDDING, batch_first=True)

    def forward(self, letters: Tensor) -> Tensor:
        """The reader's state at the end of a name."""
        assert letters.shape[1] == LETTERS
        _, last = self.reader(self.letters(letters))
        return torch.as_tensor(last[0])


class Fusion(nn.Module):
    """Logits ``[B, 10]`` from embeddings of both modalities."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2 * EMBEDDING, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, image: Tensor, name: Tensor) -> Tensor:
        """Both are ``[B, EMBEDDING]``; zeros for one that is missing."""
        logits: Tensor = self.layers(torch.cat([image, name], dim=1))
        return logits

"""scikit-learn's handwritten digits, as tensors."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor

HELD_OUT = 5  # every fifth image is held out to test on


def load() -> tuple[Tensor, Tensor]:
    """The 1797 images of 8 x 8 pixels, ``[1797, 64]`` with grey values in 0..1, and their labels 0..9."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16.0, torch.tensor(labels)


def held_out(count: int) -> Tensor:
    """True where an image is for tests, ``[count]``."""
    return torch.arange(count) % HELD_OUT == 0


def of_classes(data: tuple[Tensor, Tensor], classes: range) -> tuple[Tensor, Tensor]:
    """The images, with their labels, that show one of the digits ``classes``."""
    images, labels = data
    chosen = (labels >= classes.start) & (labels < classes.stop)
    return images[chosen], labels[chosen]

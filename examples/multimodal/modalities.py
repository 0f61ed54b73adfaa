"""Two views of the same digits, an image and a name, each too incomplete to recognize the digit."""

from __future__ import annotations

import functools

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import Tensor

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LETTERS = 5  # of the longest names
LOST = 27  # the code of a letter that cannot be read; those that can are 1 to 26

NOISE = 0.3  # standard deviation, of grey values in 0..1
HALF = 4  # rows or columns of 8
READABLE = 0.3  # the probability of each letter

HELD_OUT = 5  # every fifth digit is held out to test on


@functools.cache
def _digits() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """scikit-learn's digits: images ``[1797, 8, 8]`` with grey values in 0..1, and which digits they show."""
    pixels, digits = load_digits(return_X_y=True)
    return pixels.reshape(-1, 8, 8) / 16.0, digits


def labels() -> Tensor:
    """The digit of each of the 1797 images, ``[1797]``."""
    return torch.tensor(_digits()[1])


def split(count: int) -> tuple[Tensor, Tensor]:
    """The indices to train on and to test on."""
    test = torch.arange(count) % HELD_OUT == 0
    return (~test).nonzero().flatten(), test.nonzero().flatten()


def images(seed: int, view: int) -> Tensor:
    """All images ``[1797, 64]``, noisy and with a half hidden; the damage is another one in each ``view``."""
    random = np.random.default_rng([seed, view, 0])
    clean = _digits()[0]
    damaged = clean + random.normal(scale=NOISE, size=clean.shape)
    side = random.integers(4, size=len(clean))
    damaged[side == 0, :HALF] = 0.0
    damaged[side == 1, HALF:] = 0.0
    damaged[side == 2, :, :HALF] = 0.0
    damaged[side == 3, :, HALF:] = 0.0
    return torch.tensor(damaged.reshape(-1, 64), dtype=torch.float32)


def names(seed: int, view: int) -> Tensor:
    """All names as letters ``[1797, LETTERS]`` in 1..27, most of them lost; a short name ends with lost ones."""
    random = np.random.default_rng([seed, view, 1])
    spelled = np.array(
        [[ord(letter) - ord("a") + 1 for letter in name.ljust(LETTERS, "{")] for name in NAMES]
    )
    letters = spelled[_digits()[1]]
    letters[random.random(letters.shape) >= READABLE] = LOST
    return torch.tensor(letters)

"""A stream of handwritten digits that changes over time, and its features: functions of arrays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

Floats = NDArray[np.float32]
Batch = tuple[Floats, NDArray[np.int64]]

PHASES: dict[str, Callable[[Floats], Floats]] = {
    "upright": lambda images: images,
    "turned": lambda images: np.rot90(images, axes=(1, 2)),
    "negative": lambda images: 1.0 - images,
    "upside down": lambda images: np.rot90(images, 2, axes=(1, 2)),
}
"""The changes of the stream to images ``[B, 8, 8]``, one after the other; each change is a drift."""

NOISE = 0.15  # standard deviation, of grey values in 0..1
FEATURES = 3 * 64


class Digits:
    """scikit-learn's digits as an endless stream; batch ``t`` is the same whenever and wherever it is drawn."""

    def __init__(self, seed: int, batch: int, phase: int) -> None:
        """``batch`` images at a time; a phase lasts for ``phase`` batches, the last one for ever."""
        images, labels = load_digits(return_X_y=True)
        self._images: Floats = (images / 16.0).reshape(-1, 8, 8).astype(np.float32)
        self._labels = labels.astype(np.int64)
        self._seed, self._batch, self._phase = seed, batch, phase

    def draw(self, t: int) -> Batch:
        """Batch ``t`` from 0: noisy images ``[B, 8, 8]`` and their labels ``[B]``."""
        random = np.random.default_rng([self._seed, t])
        chosen = random.integers(len(self._images), size=self._batch)
        noisy = self._images[chosen] + random.normal(scale=NOISE, size=(self._batch, 8, 8))
        drift = [*PHASES.values()][min(t // self._phase, len(PHASES) - 1)]
        return np.ascontiguousarray(drift(noisy.astype(np.float32))), self._labels[chosen]


def features(images: Floats) -> Floats:
    """The learner's view of images ``[B, 8, 8]``: ``[B, FEATURES]``.

    Each image at mean 0 and standard deviation 1, and its differences from left to right and from top to bottom.
    """
    flat = images.reshape(len(images), -1)
    scaled = (flat - flat.mean(1, keepdims=True)) / (flat.std(1, keepdims=True) + 1e-6)
    square = scaled.reshape(-1, 8, 8)
    across = np.diff(square, axis=2, append=square[:, :, -1:])
    down = np.diff(square, axis=1, append=square[:, -1:, :])
    parts = [each.reshape(len(images), -1) for each in (square, across, down)]
    return np.concatenate(parts, axis=1).astype(np.float32)

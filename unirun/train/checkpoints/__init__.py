"""Checkpoints of training runs: what is kept, where it lies, and how it is written beside training.

The names here need no torch, as the process that starts a training run may do without it; `state` and `writer` do.
"""

from unirun.train.checkpoints.folder import Folder, Manifest, files_in, skipped
from unirun.train.checkpoints.strategy import CheckpointStrategy, Info

__all__ = ["CheckpointStrategy", "Folder", "Info", "Manifest", "files_in", "skipped"]

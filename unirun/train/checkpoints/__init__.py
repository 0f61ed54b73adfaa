"""Checkpoints of training runs: what is kept, where it lies, and how it is written beside training."""

from unirun.train.checkpoints.folder import Folder, Manifest, files_in, skipped
from unirun.train.checkpoints.state import (
    encode,
    is_sharded,
    load,
    named,
    outline,
    plain_state,
    put_into,
    snapshot,
    state_at,
    unnamed,
    unwrapped,
)
from unirun.train.checkpoints.strategy import CheckpointStrategy, Info
from unirun.train.checkpoints.writer import CheckpointWriter

__all__ = [
    "CheckpointStrategy",
    "CheckpointWriter",
    "Folder",
    "Info",
    "Manifest",
    "encode",
    "files_in",
    "is_sharded",
    "load",
    "named",
    "outline",
    "plain_state",
    "put_into",
    "skipped",
    "snapshot",
    "state_at",
    "unnamed",
    "unwrapped",
]

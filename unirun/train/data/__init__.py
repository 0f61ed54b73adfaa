"""A rank's part of a dataset: each sample of an epoch is used once, however often the number of ranks changes.

::

    shard = Shard("train", dataset, rank, world, shuffle=True, consumed=merged(saved))
    for batch in shard.to_torch(32, num_workers=4):
        ...
        save(shard.progress)

The names here need no torch, as the process that starts a training run may do without it; `loader` and `sources` do.
"""

from unirun.train.data.files import Files, file_system
from unirun.train.data.plan import Consumed, SampleOrder, Share, merged

__all__ = [
    "Consumed",
    "Files",
    "SampleOrder",
    "Share",
    "file_system",
    "merged",
]

"""A rank's part of a dataset: each sample of an epoch is used once, however often the number of ranks changes.

::

    shard = Shard("train", dataset, rank, world, shuffle=True, consumed=merged(saved))
    for batch in shard.to_torch(32, num_workers=4):
        ...
        save(shard.progress)
"""

from unirun.train.data.loader import Loader, Shard, sharded
from unirun.train.data.plan import Consumed, SampleOrder, Share, merged
from unirun.train.data.sources import Files, kfold, source_of, to_cv

__all__ = [
    "Consumed",
    "Files",
    "Loader",
    "SampleOrder",
    "Shard",
    "Share",
    "kfold",
    "merged",
    "sharded",
    "source_of",
    "to_cv",
]

"""A user's `DataLoader` as the loader of one rank's part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from unirun.errors import UsageError
from unirun.train.data.loader import Loader
from unirun.train.data.plan import Progress
from unirun.train.data.shard import BEGIN, Shard

_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


def sharded(
    loader: DataLoader[Any], name: str, rank: int, world: int, *, seed: int = 0, progress: Progress = BEGIN
) -> Loader:
    """The part that `rank` of `world` has of the dataset of `loader`, in batches of its size, made as it makes them.

    It shuffles if `loader` does, in the order of `seed`, which is the same on all ranks. A `DistributedSampler` is
    replaced: its `shuffle` and its seed are kept, what it pads or drops is not. Of a loader with ``batch_size=None``
    each item is a batch.

    Raises `UsageError` for what cannot be split so that each sample is used once: another sampler or batch sampler, and
    ``drop_last``.
    """
    if not isinstance(loader, DataLoader):
        raise UsageError(
            f"dataset {name!r}: expected a DataLoader, found a {type(loader).__name__}", "use Shard"
        )
    options = {option: getattr(loader, option) for option in _KEPT}
    # `loader.batch_size` is None too when a batch sampler was passed.
    batches: Any = loader.batch_sampler
    if batches is None:
        batches = BatchSampler(loader.sampler, 1, drop_last=False)
        options["collate_fn"] = _Single(options["collate_fn"])
    if type(batches) is not BatchSampler:
        kind = type(batches).__name__
        raise _refused(name, f"the batch sampler {kind}", "pass batch_size to the DataLoader instead")
    if batches.drop_last:
        raise _refused(name, "drop_last=True", "leave it out: the sizes of batches differ by 1 at most")
    shuffle, seed = _order(name, loader.dataset, batches.sampler, seed)
    shard = Shard(name, loader.dataset, rank, world, shuffle=shuffle, seed=seed, progress=progress)
    return Loader(shard, batches.batch_size, options)


def _order(name: str, dataset: Any, sampler: Any, seed: int) -> tuple[bool, int]:
    """True if the sampler shuffles, and its seed."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        return False, seed
    size = len(dataset)
    if type(sampler) is SequentialSampler and len(sampler) == size:
        return False, seed
    if type(sampler) is RandomSampler and len(sampler) == size and not sampler.replacement:
        return True, seed
    if type(sampler) is DistributedSampler and len(sampler.dataset) == size:  # type: ignore[arg-type]
        return sampler.shuffle, sampler.seed
    raise _refused(
        name,
        f"the sampler {type(sampler).__name__}, which may use a sample twice or not at all",
        "pass shuffle to the DataLoader instead, and torch.utils.data.Subset to use some of the samples",
    )


def _refused(name: str, what: str, remedy: str) -> UsageError:
    return UsageError(f"dataset {name!r}: the DataLoader has {what}", remedy)


class _Single:
    """The only item of a batch, as a `DataLoader` without batches gives it."""

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self._convert = convert

    def __call__(self, items: list[Any]) -> Any:
        (item,) = items
        return self._convert(item)

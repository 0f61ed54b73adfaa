"""The functions that a training function calls: reports, checkpoints, its part of a dataset, and where it is.

Outside a `Trainer` all of it works as in rank 0 of 1, so that the function can be debugged with plain python: each call
of the function begins a run there. A program that names them and starts a `Trainer` needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unirun.train.data.loader import Shard
    from unirun.train.session import Session

_session: Session | None = None
_alone: Session | None = None


def enter(session: Session | None) -> None:
    """`session` is that of this process from now on; None: it has none."""
    global _session
    _session = session


def session() -> Session:
    """The session of this process; outside a `Trainer` one of a single rank."""
    global _alone
    if _session is not None:
        return _session
    if _alone is None:
        from unirun.train.session import Alone

        _alone = Alone()
    return _alone


def in_worker() -> bool:
    """Return True if this is a rank of a `Trainer`, and not plain python."""
    return _session is not None


def report(metrics: Mapping[str, Any] | None = None, /, **named: Any) -> None:
    """Report `metrics` of this rank to the driver: its callbacks, and who iterates over the run.

    Every rank reports equally often: the first report of each is matched with the first one of the others, and so on.
    Added are ``_timestamp`` (seconds since the epoch), ``_time_this_iter_s``, ``_training_iteration`` (from 1 on), and
    ``_data_wait`` with datasets: the share of that time for which their loops have waited for data. Returns at once,
    unless the driver is two reports behind. Metrics may also be a dict, as Ray Train has them. Raises `UsageError` for
    a name that begins with an underscore.
    """
    session().report({**(metrics or {}), **named})


def save_checkpoint(state: Any = None, /, *, files: Any = None, **values: Any) -> None:
    """Save a checkpoint: tensors, state dicts, modules, optimizers, plain data by name. Every rank calls it. A tuple,
    as in ``save_checkpoint((model, optimizer))``, is loaded as one.

    `files` are files of this rank that are copied into the checkpoint: a directory, of which they have their paths, or
    a list of files and directories, which have their own names. Every rank passes them, ``[]`` for none;
    `checkpoint_files` returns them.

    A copy is made at once and written beside training. Modules and optimizers stand for their state dicts, without the
    wrappers of DistributedDataParallel and torch.compile. It is the state of rank 0 that is kept; when some tensor is a
    DTensor (FSDP2), each rank saves its part, by ``torch.distributed.checkpoint``. The positions of datasets are saved
    with it. A message names the values of other ranks that are not kept. A run ends with `TrainingFailed` when rank 0
    saves less often than others.

    It counts together with the report that follows within a second, so that each of these arrives once, whatever dies
    in between; without one, it counts by itself. Rank 0 waits here until the checkpoint before counts. Raises
    `UsageError` for what cannot be pickled, and what writing the checkpoint before has raised. Outside a `Trainer`
    nothing is kept.
    """
    from unirun.train.checkpoints.state import named

    session().save(named(state, values), files)


def checkpoint_files(rank: int = 0) -> Path | None:
    """The directory with the files that a rank has added to the checkpoint that the run goes on from
    (``save_checkpoint(files=…)``); None if it has added none, when the run begins, and outside a `Trainer`. Files
    behind a URL are copied to this host until the attempt is over."""
    return session().files(rank)


def load_checkpoint(into: Any = None) -> Any:
    """The state of the checkpoint that the run goes on from; None when it begins, and outside a `Trainer`.

    Models, optimizers, schedulers and the like in `into` are changed to what was saved under their name, and plain
    values are returned::

        state = train.load_checkpoint(into={"model": model, "optimizer": optimizer, "epoch": 0})
        first = state["epoch"] + 1 if state else 0

    A sharded checkpoint is read into whatever parts this rank has, without `into` as whole tensors on the CPU, all of
    them. What was saved as a tuple is loaded into one of the same shape, and returned as
    one. Raises `CheckpointDamaged`, and `UsageError` for a name that it does not have.
    """
    from unirun.train.checkpoints.state import named, unnamed

    state = session().load(None if into is None else named(into, {}))
    return None if state is None else unnamed(state)


def should_stop() -> bool:
    """Return True when this rank is to save a checkpoint and return, as the workers are told to end: their job is
    stopped, preempted or cancelled. Every rank asks equally often, and all are told at the same time::

        for epoch in range(first, EPOCHS):
            if train.should_stop():
                train.save_checkpoint(model=model, epoch=epoch)
                return

    From the first call on, a signal to end does not interrupt the function, which has the grace period. The checkpoint
    counts without a report. As `unirun.should_stop`. Raises `UsageError` in a function that is no run.
    """
    return session().should_stop()


def get_dataset_shard(
    name: str | None = None,
    *,
    otherwise: Any = None,
    shuffle: bool = False,
    seed: int = 0,
    block: int = 1024,
) -> Shard:
    """This rank's part of ``Trainer.run(..., dataset=...)``, or of the one called `name` in a dict of several.

    It goes on where the checkpoint was saved that was resumed from, whatever the number of ranks was then: each sample
    of an epoch is used once. With `shuffle`, blocks of `block` samples and the samples in each are in a new order in
    each epoch, the same for a `seed`. Each call for one dataset returns the same `Shard`, and has to ask for the same
    order. `otherwise` is the dataset outside a `Trainer`, which each call begins anew.

    Raises `UsageError` when there is no such dataset, and when a call before asked for another order.
    """
    return session().shard(name, otherwise=otherwise, shuffle=shuffle, seed=seed, block=block)


def world_rank() -> int:
    """The rank of this process, from 0 on."""
    return session().rank


def local_rank() -> int:
    """Its rank among those of its node."""
    return session().local_rank


def world_size() -> int:
    """The number of ranks now."""
    return session().world


def config() -> Mapping[str, Any]:
    """The `config` of the run."""
    return session().config

"""`CheckpointWriter`: saves checkpoints beside training, in each rank.

A plain state is written by rank 0, a sharded one by all ranks. Each rank writes its shares of the datasets, and
which files it has written.
Rank 0 *commits*: it waits until everything is written, and writes the manifest. It does so when the driver
orders it, which has the report that follows by then: so a report arrives once for each checkpoint, whatever
dies in between. A checkpoint that no report follows within `REPORT_TIMEOUT` seconds, or after which another one is
saved, is committed by rank 0, and the driver learns of it from the next report. A checkpoint whose score is
in its report waits for that report.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from unirun.errors import TrainingFailed, UsageError
from unirun.observe.spans import spans
from unirun.train.checkpoints.folder import STATE, Folder, Manifest
from unirun.train.checkpoints.state import (
    awaited,
    encode,
    is_sharded,
    plain_state,
    save_sharded,
    snapshot,
)
from unirun.train.checkpoints.strategy import CheckpointStrategy, Info
from unirun.train.data import Consumed, Share, merged

REPORT_TIMEOUT = 1.0
"""Seconds in which the report that follows a checkpoint must be made for both to count together."""

CHECKPOINT_WRITE_TIMEOUT = 600.0
"""Seconds in which a checkpoint must be written."""

RANKS_SAVE_TIMEOUT = 60.0
"""Seconds in which one more of the other ranks must have saved it, too, or have written more of it."""

RANKS_SAVE_POLL_INTERVAL = 0.02
"""Seconds between two looks whether they have."""


Part = tuple[dict[str, tuple[int, int]], dict[str, Share]]
"""The report of one rank on its part of a checkpoint: the size and the CRC-32 of each file that it has written, and its
shares of the datasets."""


class _Pending:
    """A checkpoint that is not committed. Its score is looked for in `scores`; `files` are those that this
    rank has written."""

    written: Future[None]
    committed: Future[list[Info]]
    """Of rank 0."""

    def __init__(self, number: int, state: Mapping[str, Any]) -> None:
        self.number = number
        self.scores: list[Mapping[str, Any]] = [state]
        self.files: dict[str, tuple[int, int]] = {}
        self.sharded = self.in_parts = False
        """In parts: each rank writes a file of it."""
        self.reported = self.counts = False


class CheckpointWriter:
    """The checkpoints that one rank of a run saves. `save` and `reported` are called by the thread that trains, and
    `commit` by others."""

    def __init__(
        self,
        folder: Folder,
        strategy: CheckpointStrategy,
        rank: int,
        world: int,
        number: int,
        kept: Sequence[Info] = (),
        group: Callable[[], Any] = lambda: None,
        ungroup: Callable[[Any], None] = lambda group: None,
    ) -> None:
        """`number` is that of the first checkpoint, and `kept` are those before it. `group` makes a process group for
        sharded states, and `ungroup` ends it."""
        self._folder, self._strategy = folder, strategy
        self._rank, self._world, self._number = rank, world, number
        self._group_of, self._ungroup, self._group = group, ungroup, None
        self._changed = threading.Condition(threading.RLock())
        self._closed = False
        self._pending: _Pending | None = None
        self._kept = [*kept]
        self._told = number - 1
        # One thread writes and commits them, in the order in which they were saved.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="unirun-checkpoints")

    def save(
        self,
        state: Mapping[str, Any],
        data: Mapping[str, Share],
        files: Mapping[str, Path] | None = None,
    ) -> dict[str, Any]:
        """Save `state`, of which a copy is made at once, and `files` by the names that they get, which all ranks have,
        or none. Waits while the checkpoint before is still being written, and
        until it counts. Returns the plain state that it has saved: a state dict may take long to be made.

        Raises what writing the one before has raised, and `UsageError` for a state that cannot be saved.
        """
        self._await_last()
        before = self._pending
        if before is not None and not self._rank:
            # It counts with its report, once the driver has that of all ranks; without one it counts now.
            counts = before.committed if before.reported else self.commit(before.number)
            counts.result(CHECKPOINT_WRITE_TIMEOUT)
        pending = _Pending(self._number, state)
        self._number += 1
        whole = plain_state(state)
        pending.sharded = is_sharded(whole)
        pending.in_parts = pending.sharded or bool(data) or files is not None
        with self._naming(pending):
            self._folder.make(pending.number)
            pending.files |= self._folder.add(pending.number, self._rank, files or {})
        write: Callable[[], Any] | None = None
        if pending.sharded:
            if self._group is None:
                self._group = self._group_of()
            saved = save_sharded(self._folder, pending.number, whole, self._group, pending.files)
            write = partial(awaited, saved, CHECKPOINT_WRITE_TIMEOUT)
        elif not self._rank:
            write = partial(self._write_plain, pending, snapshot(whole))
        with self._changed:
            self._pending = pending
            # The copy is given up with the first of these, however long the second one waits.
            pending.written = self._pool.submit(self._write, pending, write, dict(data))
            if not self._rank:
                pending.committed = self._pool.submit(self._commit, pending)
        return whole

    def _write_plain(self, pending: _Pending, copied: Any) -> None:
        pending.files[STATE] = self._folder.write(pending.number, STATE, partial(encode, copied))

    def _write(self, pending: _Pending, write: Callable[[], Any] | None, data: dict[str, Share]) -> None:
        """Write this rank's part of a checkpoint."""
        self._check_open(pending)
        began = time.time_ns()
        with self._naming(pending):
            if write is not None:
                write()
                spans().write("life", f"write checkpoint {pending.number}", began)
            if pending.in_parts:
                raw = msgspec.json.encode((pending.files, data))
                self._folder.publish(pending.number, f"rank.{self._rank:05}.json", raw)

    @contextmanager
    def _naming(self, pending: _Pending) -> Iterator[None]:
        """Add the number and the path of the checkpoint to an error of the system, such as a full disk."""
        try:
            yield
        except OSError as error:
            problem = f"checkpoint {pending.number} is not written: {error.strerror or error}"
            raise OSError(error.errno, problem, self._folder.path(pending.number)) from error

    def _await_word(self, pending: _Pending) -> None:
        """Wait until a checkpoint counts: by itself, if no report follows in time, unless its score is in that.
        The next report, the next `save`, `finish` or `close` ends the wait."""
        alone = REPORT_TIMEOUT if self._strategy.is_scored(*pending.scores) else None
        with self._changed:
            self._changed.wait_for(lambda: pending.reported or pending.counts or self._closed, alone)
            if pending.reported:
                self._changed.wait_for(lambda: pending.counts or self._closed, CHECKPOINT_WRITE_TIMEOUT)
            pending.counts = True

    def reported(self, metrics: Mapping[str, Any]) -> int | None:
        """This rank makes a report. Returns the number of the checkpoint that is to be committed with it; of rank 0
        only. It may count already, by itself."""
        with self._changed:
            pending = self._pending
            if pending is not None and not pending.reported and not pending.counts:
                pending.reported = True
                pending.scores.insert(0, metrics)
                self._changed.notify_all()
            return self._untold()

    def _untold(self) -> int | None:
        """The last checkpoint, if the driver has not heard of it."""
        last = self._number - 1
        if self._rank or last == self._told:
            return None
        self._told = last
        return last

    def commit(self, number: int) -> Future[list[Info]]:
        """Make the checkpoint with this number count, in the background. The future has all that are kept, this one is
        the last; it raises what writing it has raised, `UsageError` for its score, and `CancelledError` when the
        attempt was over before it counted: a consequence of what has ended the attempt."""
        with self._changed:
            pending = self._pending
            if pending is None or pending.number != number:
                # It counts already.
                done: Future[list[Info]] = Future()
                done.set_result(self._kept)
                return done
            pending.counts = True
            self._changed.notify_all()
            return pending.committed

    def _commit(self, pending: _Pending) -> list[Info]:
        """Commit a checkpoint when it is written and counts. Returns all that are kept."""
        pending.written.result()
        self._await_word(pending)
        with self._naming(pending):
            files, data = dict(pending.files), {}
            if pending.in_parts:
                parts = self._gathered(pending)
                data = _together([shares for _, shares in parts])
                for written, _ in parts:
                    files |= written
            score = self._strategy.score(*pending.scores)
            manifest = Manifest(pending.number, self._world, pending.sharded, files, data, score)
            with self._changed:
                self._check_open(pending)
                infos = [*self._kept, self._folder.commit(manifest)]
            surplus = self._strategy.surplus(infos)
            for each in surplus:
                self._folder.remove(each.number)
        with self._changed:
            self._kept = [info for info in infos if info not in surplus]
            self._pending = None
        return self._kept

    def _gathered(self, pending: _Pending) -> list[Part]:
        """The parts of all ranks in rank order, once all have written theirs, each with the file that it is in."""
        names = {f"rank.{rank:05}.json" for rank in range(self._world)}
        seen, deadline = dict[str, int](), time.monotonic() + RANKS_SAVE_TIMEOUT
        while missing := names - (there := self._folder.sizes(pending.number)).keys():
            self._check_open(pending)
            now = time.monotonic()
            if there != seen:
                seen, deadline = there, now + RANKS_SAVE_TIMEOUT
            if now >= deadline:
                ranks = ", ".join(sorted(str(int(name.split(".")[1])) for name in missing))
                raise TrainingFailed(
                    f"ranks {ranks} have not saved checkpoint {pending.number}",
                    "every rank calls save_checkpoint, equally often",
                )
            time.sleep(RANKS_SAVE_POLL_INTERVAL)
        found: list[Part] = []
        for name in sorted(names):
            with self._folder.open(pending.number, name) as file:
                raw = file.read()
            written, shares = msgspec.json.decode(raw, type=Part)
            found.append(({**written, name: (len(raw), zlib.crc32(raw))}, shares))
        return found

    def _check_open(self, pending: _Pending) -> None:
        if self._closed:
            raise CancelledError(f"checkpoint {pending.number} was given up, as its attempt is over")

    def _await_last(self) -> None:
        """Wait until the last checkpoint is written, and raise what that has raised."""
        if self._pending is not None:
            self._pending.written.result(CHECKPOINT_WRITE_TIMEOUT)

    def finish(self) -> int | None:
        """The function has ended: wait for what is being written. Returns the checkpoint that is to be committed."""
        self._await_last()
        with self._changed:
            if self._pending is not None:
                self._pending.reported = True
                self._changed.notify_all()
            return self._untold()

    def settle(self) -> None:
        """Commit what is written, without the driver, and wait for it."""
        pending = self._pending
        if pending is not None and not self._rank:
            self.commit(pending.number).result(CHECKPOINT_WRITE_TIMEOUT)

    def close(self) -> None:
        """Give up: what is not committed does not count. Waits for the file that is being written, as the next attempt
        has one of the same name."""
        with self._changed:
            pending = self._pending
            self._closed = True
            self._changed.notify_all()
        self._pool.shutdown(wait=False)
        if self._group is not None:
            self._ungroup(self._group)
        if pending is not None:
            wait([pending.written], CHECKPOINT_WRITE_TIMEOUT)


def _together(found: Sequence[Mapping[str, Share]]) -> dict[str, Consumed]:
    """The part of each dataset that all ranks have used. Raises `UsageError`."""
    if any(each.keys() != found[0].keys() for each in found):
        raise UsageError(
            "ranks use different datasets", "every rank calls get_dataset_shard with the same names"
        )
    return {name: merged([each[name] for each in found]) for name in found[0]}

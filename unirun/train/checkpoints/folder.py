"""`Folder`: the checkpoints of one run, at a path or any URL that fsspec knows.

::

    <url>/000012/state.pt             the state, if it is plain
                 *.distcp .metadata   that of all ranks, by torch.distributed.checkpoint, if it is sharded
                 files.00003/         files that rank 3 has added
                 rank.00003.json      which of these files rank 3 has written, and its shares of the datasets
                 checkpoint.json      written last, by one rename: which files there are, how large, and their CRCs

A checkpoint without its ``checkpoint.json`` does not count. So a kill at any moment leaves the last whole one.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec.structs import replace

from unirun.atomic import writing
from unirun.errors import CheckpointDamaged, UsageError
from unirun.observe.ownership import exposure, make_private, owner, writers
from unirun.train.checkpoints.strategy import Info
from unirun.train.data import Consumed, file_system
from unirun.values import Value
from unirun.wire.reporting import report

MANIFEST = "checkpoint.json"
STATE = "state.pt"
INDEX = ".metadata"
"""The index of torch.distributed.checkpoint, which says what its other files have."""

CHUNK = 16 << 20
"""Bytes that are read at a time."""

PRIVATE = 0o600
"""The mode of files: pickles, which no other user may change."""

READERS = 8
"""Number of files that are verified at the same time."""

ALTERED = "is not as it was written"


class Manifest(Value):
    """The content of ``checkpoint.json``. `files` has the size of each file, in bytes, and its CRC-32; 0:
    none was made.

    `world_size` is the number of ranks that wrote it, and `sharded` whether each has written a part. `data` has
    what all ranks together have used of each dataset, by name.
    """

    number: int
    world_size: int
    sharded: bool
    files: dict[str, tuple[int, int]]
    data: dict[str, Consumed] = msgspec.field(default_factory=dict)
    score: float | None = None


class Summed:
    """A file that is written from its beginning to its end, with its size and its CRC-32."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.size = self.crc = 0

    def write(self, data: Any) -> Any:
        """Write some bytes."""
        self.size, self.crc = self.size + memoryview(data).nbytes, zlib.crc32(data, self.crc)
        return self._stream.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Folder:
    """Checkpoints at `url`. All methods raise OSError."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.files, self._root = file_system(self.url)

    def path(self, number: int) -> str:
        """The path or URL of a checkpoint, as users see it."""
        return f"{self.url}/{number:06}"

    def inside(self, number: int, name: str = "") -> str:
        """The same for `files`, and for a file in it."""
        return f"{self._root}/{number:06}{f'/{name}' if name else ''}"

    def make(self, number: int) -> None:
        """Make the directory, on this host for this user alone."""
        if self.local:
            make_private(Path(self.inside(number)))
        else:
            self.files.makedirs(self.inside(number), exist_ok=True)

    def write(self, number: int, name: str, save: Callable[[Any], object]) -> tuple[int, int]:
        """Write a file by `save`, which gets it open, on this host for this user alone. Returns its size and CRC-32."""
        path = self.inside(number, name)
        with writing(Path(path), lasting=True) if self.local else self.files.open(path, "wb") as stream:
            file = Summed(stream)
            save(file)
        return file.size, file.crc

    def publish(self, number: int, name: str, data: bytes) -> None:
        """Write a small file that others look for: they find all of it, or nothing."""
        draft = name if self.local else f"{name}.partial"
        self.write(number, draft, lambda file: file.write(data))
        if draft != name:
            self.files.mv(self.inside(number, draft), self.inside(number, name))

    def add(self, number: int, rank: int, found: Mapping[str, Path]) -> dict[str, tuple[int, int]]:
        """Copy files of a rank, by the names that they get. Returns the sizes and CRC-32 of all, by their names in the
        checkpoint."""
        written = {}
        for name, path in found.items():
            place = f"{files_of(rank)}/{name}"
            if self.local:
                for folder in (*reversed(Path(place).parents[:-1]),):
                    make_private(Path(self.inside(number, str(folder))))
            with path.open("rb") as source:
                written[place] = self.write(number, place, partial(shutil.copyfileobj, source))
        return written

    def fetch(self, manifest: Manifest, rank: int, into: str) -> Path | None:
        """The directory with the files that a rank has saved; None if it has saved none. Files behind a URL are copied
        below `into`. Raises OSError."""
        found = files_of(rank)
        names = [name for name in manifest.files if name.startswith(f"{found}/")]
        if not names:
            return None
        if self.local:
            return Path(self.inside(manifest.number, found))
        for name in names:
            Path(into, name).parent.mkdir(parents=True, exist_ok=True)
            self.files.get_file(self.inside(manifest.number, name), str(Path(into, name)))
        return Path(into, found)

    def sizes(self, number: int) -> dict[str, int]:
        """The files that are there, also in directories, and their sizes."""
        found = self.files.find(self.inside(number), detail=True, refresh=True)
        # Some file systems leave out the slash at the beginning of a path.
        top = f"{self.inside(number)}/".lstrip("/")
        return {path.lstrip("/").removeprefix(top): int(each["size"]) for path, each in found.items()}

    def commit(self, manifest: Manifest) -> Info:
        """Make a checkpoint count, of which all other files are written."""
        self.publish(manifest.number, MANIFEST, msgspec.json.encode(manifest))
        return Info(manifest.number, self.path(manifest.number), manifest.score)

    def numbers(self) -> list[int]:
        """All directories, in ascending order, also of checkpoints that are not whole."""
        try:
            found = self.files.ls(self._root, detail=False, refresh=True)
        except FileNotFoundError:
            return []
        names = (str(path).rstrip("/").rpartition("/")[2] for path in found)
        return sorted(int(name) for name in names if re.fullmatch(r"\d{6,}", name))

    def clear(self) -> None:
        """Delete what was not finished. Nothing may be written meanwhile."""
        for number in self.numbers():
            if not self.files.exists(self.inside(number, MANIFEST)):
                self.remove(number)

    def infos(self, below: int | None = None) -> list[Info]:
        """The checkpoints that were committed, in ascending order; with `below`, those with a lower number. All files
        of the last one have their recorded sizes: later ones are skipped, with a warning. The content of files is not
        read: `verify` does that."""
        found: list[Info] = []
        for number in reversed(self.numbers()):
            if below is not None and number >= below:
                continue
            try:
                manifest = self.manifest(number)
                if not found:
                    self._check_sizes(manifest)
            except FileNotFoundError:
                # It was not finished.
                continue
            except CheckpointDamaged as error:
                if not found:
                    report(skipped(error))
                continue
            found.append(Info(number, self.path(number), manifest.score))
        return found[::-1]

    def _check_sizes(self, manifest: Manifest) -> None:
        found = self.sizes(manifest.number)
        for name, (size, _) in manifest.files.items():
            if name not in found:
                raise self.damaged(manifest.number, name, "is not there")
            if found[name] != size:
                raise self.damaged(manifest.number, name, ALTERED)

    def manifest(self, number: int) -> Manifest:
        """The manifest of a checkpoint. Raises `CheckpointDamaged`, and FileNotFoundError for one that is not
        whole."""
        try:
            with self.open(number, MANIFEST) as file:
                found = msgspec.json.decode(file.read(), type=Manifest)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self.unreadable(number, MANIFEST, error) from error
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise self.damaged(number, MANIFEST, f"cannot be read: {error}") from error
        state = INDEX if found.sharded else STATE
        if state not in found.files:
            raise self.damaged(number, MANIFEST, f"cannot be right: it has no {state}")
        # It may be a copy in another place.
        return replace(found, number=number)

    def damaged(self, number: int, name: str, problem: str) -> CheckpointDamaged:
        """The error of a checkpoint with a file that has a `problem`."""
        return CheckpointDamaged(f"checkpoint {number} is damaged: {self.path(number)}/{name} {problem}")

    def unreadable(self, number: int, name: str, error: OSError) -> CheckpointDamaged | OSError:
        """The error of a checkpoint with a file whose reading has raised `error`: it is damaged if it has no such file.
        Any other error may pass, so it is raised as it is, and no earlier checkpoint is used."""
        if isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError):
            return self.damaged(number, name, f"cannot be read: {error}")
        problem = (
            f"checkpoint {number} cannot be read: {error.strerror or str(error) or type(error).__name__}"
        )
        if error.errno is None:
            # For example a timeout of a remote file system.
            kind = TimeoutError if isinstance(error, TimeoutError) else OSError
            return kind(f"{problem}: {self.path(number)}/{name}")
        return OSError(error.errno, problem, f"{self.path(number)}/{name}")

    def require(self, number: int) -> Manifest:
        """The same for one that a user has named. Raises `UsageError` when it is not there."""
        try:
            return self.manifest(number)
        except FileNotFoundError as error:
            raise UsageError(
                f"there is no checkpoint {self.path(number)}", "see its directory for those that there are"
            ) from error

    def verify(self, manifest: Manifest, rank: int = 0, world: int = 1) -> None:
        """Read the files of a checkpoint that fall to `rank` of `world`, all of which share the work. Raises
        `CheckpointDamaged`."""

        def check(name: str) -> None:
            size, crc = manifest.files[name]
            try:
                found, sum_ = self._measured(self.inside(manifest.number, name), summed=bool(crc))
            except OSError as error:
                raise self.unreadable(manifest.number, name, error) from error
            if found != size or sum_ != crc:
                raise self.damaged(manifest.number, name, ALTERED)

        # The largest first, so that each rank has as much to read.
        names = sorted(manifest.files, key=lambda name: (-manifest.files[name][0], name))
        with ThreadPoolExecutor(READERS) as pool:
            for _ in pool.map(check, names[rank::world]):
                continue

    def _measured(self, path: str, *, summed: bool) -> tuple[int, int]:
        if not summed:
            return int(self.files.size(path)), 0
        size = crc = 0
        with self.files.open(path, "rb") as file:
            while data := file.read(CHUNK):
                size, crc = size + len(data), zlib.crc32(data, crc)
        return size, crc

    def foreign(self, number: int) -> str:
        """The reason why another user may have written a checkpoint; empty when none can, or when it is behind a
        URL."""
        if not self.local:
            return ""
        folder = Path(self.inside(number))
        if (exposed := exposure(folder)) is not None:
            return exposed.problem
        for entry in os.scandir(folder):
            info = entry.stat(follow_symlinks=False)
            if stat.S_ISLNK(info.st_mode):
                return f"{entry.path} is a link"
            if info.st_uid not in (0, os.geteuid()):
                return f"{entry.path} belongs to {owner(info)}"
            if writers(info):
                return f"{entry.path} may be written by {writers(info)}"
        return ""

    @property
    def local(self) -> bool:
        """True if it is in the file system of this host."""
        kinds = self.files.protocol
        return "file" in (kinds if isinstance(kinds, tuple) else (kinds,))

    def open(self, number: int, name: str) -> BinaryIO:
        """A file of a checkpoint, to be read."""
        file: BinaryIO = self.files.open(self.inside(number, name), "rb")
        return file

    def remove(self, number: int) -> None:
        """Delete a checkpoint, unless a user has deleted it; its manifest first, so that no half of one counts. Of a
        link, with which a user has put it elsewhere, only the link."""
        if self.local and os.path.islink(self.inside(number)):
            os.unlink(self.inside(number))
            return
        for path, whole in ((self.inside(number, MANIFEST), False), (self.inside(number), True)):
            with suppress(FileNotFoundError):
                self.files.rm(path, recursive=whole)


def files_of(rank: int) -> str:
    """The directory in a checkpoint with the files that `rank` has added."""
    return f"files.{rank:05}"


def files_in(given: Any) -> dict[str, Path]:
    """The files that a user adds to a checkpoint, by their names there: those in a directory by their paths in it; each
    file and directory of a list by its own name. Raises `UsageError`."""
    paths = [given] if isinstance(given, str | os.PathLike) else given
    # An empty text would be the working directory.
    known = isinstance(paths, list | tuple) and all(isinstance(path, str | os.PathLike) for path in paths)
    if not known or "" in paths:
        raise UsageError(f"files={given!r}", "give a directory, a file, or a list of these")
    found: dict[str, Path] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise UsageError(f"files: there is no {path}", "write it before save_checkpoint is called")
        if path.name in ("", ".."):
            # A directory that is given as "." or ".." has another name.
            path = path.resolve()
        top = path.parent if paths is given or path.is_file() else path
        for each in _files_below(path) if path.is_dir() else (path,):
            name = each.relative_to(top).as_posix()
            if not _is_text(name):
                raise UsageError(f"files: the name {name!r} is no text", "give it another")
            if name in found:
                raise UsageError(f"files: {each} and {found[name]} have one name", "give one of them another")
            if each.is_file():
                found[name] = each
    return found


def _is_text(name: str) -> bool:
    """Return True if a manifest can have the name. The bytes of some file names are no UTF-8."""
    with suppress(UnicodeEncodeError):
        return bool(name.encode())
    return False


def _files_below(folder: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """The files below `folder`, also behind links to directories, but for one that leads to a directory `above` it."""
    real = folder.resolve()
    for each in sorted(folder.iterdir()) if real not in above else ():
        if each.is_dir():
            yield from _files_below(each, (*above, real))
        else:
            yield each


def skipped(error: CheckpointDamaged) -> str:
    """The warning that the checkpoint of `error` is not used."""
    return f"unirun: {error}; an earlier one is used"

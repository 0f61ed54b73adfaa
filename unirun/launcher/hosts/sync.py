"""``--sync``: the working tree, sent to hosts that do not share it, by tar over ssh.

What git ignores is left out; outside of a repository, what Python and tools keep for themselves. Submodules and other
repositories in the tree come along. A host on which the tree is the same directory, by a network file system, is left
alone. Files that are on a host only stay there.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

from unirun.errors import RendezvousError, UsageError
from unirun.failover.offers import NodeFault
from unirun.launcher.hosts.connection import OPTIONS, explain, for_any_shell, is_local
from unirun.launcher.hosts.hostlist import Host
from unirun.launcher.hosts.lobby import refusal

LEFT_OUT = frozenset(
    (".git", ".venv", "venv", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", "node_modules")
)
"""Directories that are not sent from a tree without git."""

TIMEOUT = 600.0
"""Seconds in which every host must have taken the tree."""


def tree_of(folder: Path) -> Path:
    """The top of the git repository that `folder` is in; without one, the folder."""
    done = _git(folder, "rev-parse", "--show-toplevel")
    return Path(os.fsdecode(done.rstrip(b"\n"))) if done is not None else folder


def files_of(top: Path) -> list[str]:
    """The files below `top` that are sent, by their relative names, sorted."""
    listed = _git(top, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    if listed is not None:
        names = {os.fsdecode(name).rstrip("/") for name in listed.split(b"\0") if name}
        # A file that was deleted is still in git's index.
        names = {name for name in names if os.path.lexists(top / name)}
        # Of another repository in this one, a submodule for example, git lists the directory only.
        others = {name for name in names if (top / name / ".git").exists()}
        return sorted(
            (names - others) | {f"{name}/{file}" for name in others for file in files_of(top / name)}
        )
    return sorted(_walk(top))


def directories_in(top: Path, paths: Iterable[str]) -> list[str]:
    """Those of `paths` that are directories below `top`, by their relative names, sorted."""
    real = {Path(os.path.realpath(path)) for path in paths if os.path.isdir(path)}
    return sorted(str(path.relative_to(top)) for path in real if path.is_relative_to(top) and path != top)


async def send_tree(hosts: Sequence[Host], folder: Path, needed: Iterable[str] = ()) -> None:
    """Send the tree that `folder` is in to every one of `hosts` at once, with the directories of `needed`, also those
    without files. Raises `RendezvousError` with all that fail, `UsageError` when there is nothing to send."""
    top = tree_of(folder)
    names = files_of(top)
    if not names:
        raise UsageError(f"--sync: {top} has no files", "call unirun in the directory of your code")
    names += directories_in(top, needed)
    mark = top / f".unirun-sync-{secrets.token_hex(8)}"
    unfit: list[NodeFault] = []

    async def one(host: Host, packed: Path) -> None:
        try:
            async with asyncio.timeout(TIMEOUT):
                await _send(host, top, mark, packed)
        except TimeoutError:
            unfit.append(NodeFault(host.name, f"the tree was not taken within {TIMEOUT:g} s"))
        except RendezvousError as error:
            unfit.append(NodeFault(host.name, error.problem, error.remedy))

    with tempfile.NamedTemporaryFile(prefix="unirun-sync-") as packed:
        await asyncio.to_thread(pack, top, names, packed.file)
        mark.touch()
        try:
            await asyncio.gather(*(one(host, Path(packed.name)) for host in hosts if not is_local(host)))
        finally:
            mark.unlink(missing_ok=True)
    if unfit:
        raise refusal(unfit)


def pack(top: Path, names: Sequence[str], out: IO[bytes]) -> None:
    """Write a compressed tar of the files and directories `names` below `top`."""
    with tarfile.open(fileobj=out, mode="w:gz", compresslevel=1) as tar:
        for name in names:
            tar.add(top / name, arcname=name, recursive=False)
    out.flush()


async def _send(host: Host, top: Path, mark: Path, packed: Path) -> None:
    where = shlex.quote(str(top))
    script = (
        f"if test -e {shlex.quote(str(mark))}; then cat >/dev/null; "
        f"else mkdir -p {where} && tar -xzf - -C {where}; fi"
    )
    with packed.open("rb") as source:
        process = await asyncio.create_subprocess_exec(
            *("ssh", *OPTIONS, host.target, for_any_shell(["sh", "-c", script])),
            stdin=source,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    try:
        _, said = await process.communicate()
    except BaseException:
        process.kill()
        raise
    if process.returncode != 0:
        raise explain(host, process.returncode, said.decode(errors="replace"))


def _git(folder: Path, *words: str) -> bytes | None:
    """The output of git; None when there is no repository, or no git."""
    try:
        done = subprocess.run(["git", "-C", folder, *words], capture_output=True, check=False, timeout=60)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def _walk(top: Path) -> Iterator[str]:
    for folder, below, names in os.walk(top):
        below[:] = sorted(name for name in below if name not in LEFT_OUT)
        for name in names:
            if not name.endswith(".pyc"):
                yield str(Path(folder, name).relative_to(top))

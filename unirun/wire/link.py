"""A worker's end of its agent's socket. One per process: the bootstrap opens it, `unirun.init` takes it over."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from unirun.wire.blocking import BlockingStream
from unirun.wire.handshake import load_token
from unirun.wire.messages import Hello

_current: dict[int, BlockingStream] = {}


def open_link(environ: Mapping[str, str]) -> BlockingStream:
    """The link of this process, opened at the first call.

    Raises `WireError`, `RendezvousError` or `JobError` when the agent does not answer. The link belongs to the
    process that opened it: a fork opens its own.
    """
    pid = os.getpid()
    if pid not in _current:
        path = Path(environ["UNIRUN_SOCKET"])
        link = BlockingStream.connect(path, load_token(path.parent / "token"))
        link.send(
            Hello(
                role=environ["ROLE_NAME"],
                rank=int(environ["RANK"]),
                incarnation=int(environ["UNIRUN_INCARNATION"]),
                pid=pid,
                running=True,
            )
        )
        _current.clear()
        _current[pid] = link
    return _current[pid]

"""Requests of workers to the master, and the answers.

An unanswered request is sent again to the next master, so every request must be idempotent.
"""

from __future__ import annotations

from typing import Literal

from unirun.values import Value, WorkerId

Wish = Literal["save_state", "load_state", "commit_version", "version"]
"""Save bytes for the next incarnation; load them; commit a version of a channel (the highest is kept); get it."""


class MasterRequest(Value, tag=True):
    """A request. `name` is the channel for versions; `data` is a state in base64, or a version."""

    number: int
    wish: Wish
    name: str = ""
    data: str = ""


class MasterReply(Value, tag=True):
    """The answer to an `MasterRequest` of this number: `data`, None when there is none, or the `problem`."""

    number: int
    data: str | None = None
    problem: str = ""


class ToWorker(Value, tag=True):
    """The master's answer to a worker, which its agent forwards."""

    worker: WorkerId
    message: MasterReply

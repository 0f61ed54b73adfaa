"""What a worker asks the master, and the answers: asked again of the next master until one has answered, so each of
these may be done twice."""

from __future__ import annotations

from typing import Literal

from unirun.values import Value, WorkerId

Wish = Literal["save_state", "load_state", "commit_version", "version"]
"""Keep bytes for the next incarnation; give them back; keep the highest number of a channel; tell it."""


class Ask(Value, tag=True):
    """A worker wants something; `name` is the channel of a version, `data` base64 or a number."""

    number: int
    wish: Wish
    name: str = ""
    data: str = ""


class Answer(Value, tag=True):
    """The answer to an `Ask` of this number: `data`, None when there is none, or the `problem`."""

    number: int
    data: str | None = None
    problem: str = ""


class ToWorker(Value, tag=True):
    """What the master answers a worker; its agent passes it on."""

    worker: WorkerId
    message: Answer

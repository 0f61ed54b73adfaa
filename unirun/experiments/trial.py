"""The settings of one trial."""

from __future__ import annotations

from unirun.values import Value


class Trial(Value):
    """The names of a trial, the way to make its experiment, and the places of its files. It is the
    ``config:`` of the job.

    `resume`: continue from the last checkpoint, if there is one. Without `resume`, existing checkpoints are deleted.
    `resume_only`: fail if no checkpoint can be read. `accept` names settings that may differ from those of
    the checkpoint.
    """

    experiment: str
    trial: str
    root: str
    modules: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    folder: str = ""
    resume: bool = False
    resume_only: bool = False
    accept: tuple[str, ...] = ()

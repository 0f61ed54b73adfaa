"""Names of jobs: what a run id may look like, and how one is made of a script's or a module's name."""

from __future__ import annotations

import re

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")

RUN_ID_RULE = "use letters, digits, '.', '-' and '_', a letter or digit first, at most 63"
"""The rule in words, as the remedy of an error."""


def is_run_id(value: object) -> bool:
    """Return True if `value` may be the id of a job.

    A run id is the name of a directory and a part of keys in a store. So it has no ``/``, is neither ``.`` nor ``..``,
    and holds nothing that a shell or a terminal would interpret. Ids that were read from a store, a directory or a
    message are checked here before they are used.
    """
    return isinstance(value, str) and _RUN_ID.fullmatch(value) is not None


MAX_STEM = 40
"""Characters of a name that become part of an id."""


def id_stem(name: str) -> str:
    """`name` with everything that no id may hold as a dash, for the beginning of an id: ``my train é`` → ``my-train``.

    ``job`` when nothing is left.
    """
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-_")[:MAX_STEM].rstrip("-_") or "job"

"""Names of jobs: what an id may look like, and how one is made of a script's or a module's name."""

from __future__ import annotations

import re

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""An id of a job: it is the name of a directory, a part of paths and of keys in the store."""

MAX_STEM = 40
"""Characters of a name that become part of an id."""


def id_stem(name: str) -> str:
    """`name` with everything that no id may hold as a dash, for the beginning of an id: ``my train é`` → ``my-train``.

    ``job`` when nothing is left.
    """
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-_")[:MAX_STEM].rstrip("-_") or "job"

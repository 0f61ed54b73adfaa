"""The statements of the documentation about job files are true. (`tests/unit/test_documents.py` reads those that it shows.)"""

from __future__ import annotations

import re

from tests.documents import text_of
from unirun.spec.parse import JOB_KEYS, LOG_KEYS
from unirun.spec.roles import ROLE_KEYS, TRAINER_KEYS


def test_every_key_is_explained() -> None:
    text = text_of("docs/job-file.md")
    keys = {*JOB_KEYS, *ROLE_KEYS, *TRAINER_KEYS, *(f"log.{key}" for key in LOG_KEYS)} - {"nproc_per_node"}
    assert {key for key in keys if not re.search(rf"\b{re.escape(key)}\b", text)} == set()

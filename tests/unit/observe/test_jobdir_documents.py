"""Documents in a job's directory are replaced atomically, and an unreadable one is an error."""

from __future__ import annotations

import resource
import signal

import pytest

from tests.unit.observe.jobdirs import FRESH, Create, create, home, locks
from unirun.errors import JobError
from unirun.observe.jobdir import JobDir

__all__ = ["create", "home", "locks"]


def test_a_job_document_is_replaced_atomically(create: Create) -> None:
    job = create()
    job.write_json("state.json", {"n": 1})
    with (job.path / "state.json").open() as reader:
        job.write_json("state.json", {"n": 2})
        assert reader.read() == '{"n":1}'
    assert job.read_json("state.json") == {"n": 2}
    assert {path.name for path in job.path.iterdir()} == FRESH | {"state.json"}


def test_a_job_document_that_does_not_fit_the_disk_leaves_the_old_one_and_no_draft(create: Create) -> None:
    job = create()
    job.write_json("state.json", {"n": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            job.write_json("state.json", {"n": "x" * 1000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert job.read_json("state.json") == {"n": 1}
    assert {path.name for path in job.path.iterdir()} == FRESH | {"state.json"}


@pytest.mark.parametrize(
    ("text", "says"), [("{", "cannot be read"), ("[1]", "holds no object"), (None, "cannot be")]
)
def test_an_unreadable_job_document_is_an_error(create: Create, text: str | None, says: str) -> None:
    job = create()
    if text is not None:
        (job.path / "state.json").write_text(text)
    with pytest.raises(JobError, match=says):
        job.read_json("state.json")


def test_the_first_context_exists_until_a_master_deletes_it(create: Create) -> None:
    job = create(running=False)
    assert job.first_context() is None
    job.forget_first_context()
    job.write_first_context("state")
    assert job.first_context() == "state"
    job.forget_first_context()
    assert job.first_context() is None


def test_an_unreadable_first_context_is_an_error(create: Create) -> None:
    job = create(running=False)
    job.write_first_context("")
    (name,) = [
        path for path in job.path.iterdir() if path.is_file() and path.read_bytes() == b'{"context":""}'
    ]
    name.write_text("[")
    with pytest.raises(JobError, match="cannot be read"):
        job.first_context()


def test_a_job_documents_write_error_is_raised_also_when_the_draft_cannot_be_removed(create: Create) -> None:
    job = JobDir(create().token)
    with pytest.raises(NotADirectoryError):
        job.write_json("state.json", {})

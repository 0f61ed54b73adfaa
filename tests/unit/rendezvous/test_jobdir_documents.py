"""Documents in a job's directory are replaced as a whole, and one that cannot be read is an error."""

from __future__ import annotations

import resource
import signal

import pytest

from tests.unit.rendezvous.jobdirs import FRESH, Create, create, home, locks
from unirun.errors import JobError
from unirun.rendezvous import JobDir

__all__ = ["create", "home", "locks"]


def test_a_document_is_replaced_as_a_whole(create: Create) -> None:
    job = create()
    job.write_json("state.json", {"n": 1})
    with (job.path / "state.json").open() as reader:
        job.write_json("state.json", {"n": 2})
        assert reader.read() == '{"n":1}'
    assert job.read_json("state.json") == {"n": 2}
    assert {path.name for path in job.path.iterdir()} == FRESH | {"state.json"}


def test_a_document_that_does_not_fit_the_disk_leaves_the_one_before_and_nothing_else(create: Create) -> None:
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
def test_a_document_that_is_none_is_told(create: Create, text: str | None, says: str) -> None:
    job = create()
    if text is not None:
        (job.path / "state.json").write_text(text)
    with pytest.raises(JobError, match=says):
        job.read_json("state.json")


def test_the_first_context_is_there_until_a_master_forgets_it(create: Create) -> None:
    job = create(running=False)
    assert job.first_context() is None
    job.forget_first_context()
    job.write_first_context({"job": "{}"})
    assert job.first_context() == {"job": "{}"}
    job.forget_first_context()
    assert job.first_context() is None


def test_a_first_context_that_cannot_be_read_is_not_taken_for_none(create: Create) -> None:
    job = create(running=False)
    job.write_first_context({})
    (name,) = [path for path in job.path.iterdir() if path.is_file() and path.read_bytes() == b"{}"]
    name.write_text("[")
    with pytest.raises(JobError, match="cannot be read"):
        job.first_context()


def test_a_documents_first_error_is_told_also_when_nothing_can_be_tidied_up(create: Create) -> None:
    job = JobDir(create().token)
    with pytest.raises(NotADirectoryError):
        job.write_json("state.json", {})

"""The output of the commands: whatever a file or a store says is printable, and no stream that is closed or full is a crash."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unicodedata import category

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec import to_builtins

from tests.effort import examples
from unirun.cli import main
from unirun.observe.status import CallStatus, FailureStatus, JobStatus, RoleStatus, Summary, WorkerStatus
from unirun.rendezvous.creation import create_job
from unirun.rendezvous.election import index_key
from unirun.rendezvous.store.protocol import Put
from unirun.rendezvous.store.url import open_store
from unirun.wire.frames import as_text
from unirun.wire.handshake import new_token


class TestAStandardStreamThatIsClosed:
    @pytest.mark.starts_processes
    @pytest.mark.parametrize(
        ("command", "code", "shown"),
        [
            ("plan train.py <&-", 0, "RANK=0"),
            ("plan train.py >&-", 0, ""),
            ("nothing.py >&-", 2, "does not exist"),
            ("nothing.py 2>&-", 2, ""),
            ("plan train.py <&- >&- 2>&-", 0, ""),
        ],
    )
    def test_a_closed_standard_stream_becomes_dev_null(
        self, command: str, code: int, shown: str, tmp_path: Path
    ) -> None:
        line = ["sh", "-c", f"{sys.executable} -m unirun {command}"]
        done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, check=False)
        text = done.stdout + done.stderr
        assert (done.returncode, shown in text, bool(text)) == (code, True, bool(shown)), text

    @pytest.mark.starts_processes
    def test_a_closed_standard_stream_does_not_give_its_descriptor_to_a_file(self) -> None:
        code = """if True:
            import os, sys
            from unirun.launcher.foreground.terminal import prepare_streams
            prepare_streams()
            print("lost"), input if sys.stdin.read() else None
            assert os.open("/dev/zero", os.O_RDONLY) > 2
            assert [os.path.samestat(os.fstat(n), os.stat("/dev/null")) for n in range(3)] == [True] * 3
            assert [os.get_inheritable(n) for n in range(3)] == [True] * 3
        """
        line = ["sh", "-c", '"$0" -c "$1" <&- >&- 2>&-', sys.executable, code]
        assert subprocess.run(line, check=False).returncode == 0


HOSTILE = st.sampled_from(
    ["\x1b[2J", "\x1b]0;title\x07", "\x9b31m", "\r\n", "\ud800", "\u202e", "\x00", "é", "a\tb", "", "x" * 500]
) | st.text(max_size=8)


def ran(*argv: str) -> tuple[int, str]:
    """The exit code of a command and what it has printed. Any exception but SystemExit fails the test."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2)]
    with (
        contextlib.redirect_stdout(streams[0]),
        contextlib.redirect_stderr(streams[1]),
        pytest.raises(SystemExit) as leave,
    ):
        main([*argv])
    text = ""
    for stream in streams:
        stream.flush()
        text += stream.buffer.getvalue().decode()
    assert isinstance(leave.value.code, int)
    assert "Traceback" not in text
    assert all(c.isprintable() or c in "\n\t" or category(c) == "Zs" for c in text), repr(text)
    return leave.value.code, text


@contextlib.contextmanager
def home(folder: Path) -> Any:
    """A home of one example's own."""
    before = os.environ.get("UNIRUN_HOME")
    os.environ["UNIRUN_HOME"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["UNIRUN_HOME"]
        else:
            os.environ["UNIRUN_HOME"] = before


def job(status: Any, summary: Any) -> None:
    """A job that has left these."""
    made, lock = create_job("job-1", new_token())
    os.close(lock)
    made.write_json("state.json", status)
    made.write_json("summary.json", summary)


def summary_of(text: str) -> dict[str, Any]:
    """A summary with `text` in the same way as `status_of`."""
    found: dict[str, Any] = to_builtins(Summary(text, text, text, "failed", 1.0, 2.0, 1, {text: 1}))
    return found


def status_of(text: str) -> JobStatus:
    """A status with `text` wherever a worker or another host could have put it."""
    worker = WorkerStatus(0, text, text, 0, 1, text, 1, 1.0, 0, {text: 1.0})
    role = RoleStatus(text, text, 0, 1, 3, (worker,))
    failure = FailureStatus(text, 0, 0, text, 1.0, text, text, text)
    call = CallStatus(text, text, text, "scatter", "both", True, 1.0, 1, 1, 1, 1.0)
    return JobStatus(
        text,
        text,
        "failed",
        text,
        1.0,
        2.0,
        1,
        (role,),
        1,
        text,
        (failure,),
        1,
        (call,),
        (text,),
        (text,),
        (text,),
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | HOSTILE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(HOSTILE, inner, max_size=3),
    max_leaves=5,
)


class TestOutput:
    @examples(40)
    @given(text=HOSTILE)
    def test_output_has_no_control_characters_of_workers(
        self, text: str, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        with home(tmp_path_factory.mktemp("home")):
            job(status_of(text).to_json(), summary_of(text))
            for argv in (["status"], ["ls"], ["graph"], ["graph", "--format", "mermaid"], ["stop"]):
                code, _ = ran(*argv)
                assert code in (0, 2), argv

    @examples(60)
    @given(data=st.data())
    def test_output_is_printable_whatever_the_state_holds(
        self, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        status: Any = status_of("x").to_json()
        place = status
        for key in data.draw(
            st.sampled_from([(), ("roles", 0), ("roles", 0, "workers", 0), ("failures", 0)])
        ):
            place = place[key]
        place[data.draw(st.sampled_from(sorted(place)))] = data.draw(JSON)
        summary = summary_of("x")
        summary[data.draw(st.sampled_from(sorted(summary)))] = data.draw(JSON)
        with home(tmp_path_factory.mktemp("home")):
            job(status, summary)
            for argv in (["status"], ["ls"], ["graph"], ["logs"], ["stop"], ["gc", "--dry-run"]):
                code, _ = ran(*argv)
                assert code in (0, 2), argv

    @examples(60)
    @given(name=st.sampled_from(Summary.__struct_fields__), value=JSON, text=HOSTILE)
    def test_output_is_printable_whatever_a_line_of_the_index_holds(
        self, name: str, value: Any, text: str, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        # Halves of characters are in no store: they are no text.
        assume(as_text(text) == text)
        folder = tmp_path_factory.mktemp("home")
        url = f"sqlite:{folder / 'shared.db'}"
        store = open_store(url)
        good = Summary("good", "u", text, "running", 1.0, None, None, {text: 2})
        store.txn([], [Put(index_key("good"), good.line())])
        line = {**json.loads(good.line()), "run_id": "bad", name: value}
        store.txn([], [Put(index_key("bad"), json.dumps(line))])
        store.close()
        with home(folder):
            code, shown = ran("ls", "--store", url)
            assert code in (0, 4)
            assert "good" in shown, "one line does not hide the others"
            for argv in (["status", "good"], ["status", "bad"], ["status"], ["gc", "--dry-run"], ["stop"]):
                code, _ = ran(*argv, "--store", url)
                assert code in (0, 2, 4), argv

    @examples(60)
    @given(
        values=st.dictionaries(
            st.sampled_from(
                [
                    "roles",
                    "env",
                    "args",
                    "config",
                    "log",
                    "edges",
                    "name",
                    "trainer",
                    "collocations",
                    "primary",
                    "script",
                    "spares",
                    "exclude_nodes",
                ]
            ),
            JSON,
            max_size=3,
        )
    )
    def test_output_is_printable_whatever_a_job_file_holds(
        self, values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        folder = tmp_path_factory.mktemp("home")
        (folder / "job.yaml").write_text(json.dumps(values))
        (folder / "train.py").touch()
        with home(folder):
            code, _ = ran("plan", "--config", str(folder / "job.yaml"), str(folder / "train.py"))
            assert code in (0, 2, 3)


def unirun(*argv: str, **how: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "unirun", *argv], timeout=60, check=False, **how)


class TestStreams:
    @pytest.mark.starts_processes
    def test_closed_standard_streams_are_no_error(self, scripts: Path) -> None:
        shell = f'"{sys.executable}" -m unirun plan --roles a=2 train.py >&- 2>&-'
        assert subprocess.run(["/bin/sh", "-c", shell], timeout=60, check=False).returncode == 0

    @pytest.mark.starts_processes
    @pytest.mark.parametrize("told", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C"}])
    def test_what_an_encoding_lacks_is_drawn_in_ascii_or_escaped(
        self, scripts: Path, told: dict[str, str]
    ) -> None:
        """Python writes UTF-8 in the locale ``C``, which a terminal of that locale cannot show."""
        (scripts / "tést.py").touch()
        env = {**os.environ, **told}
        argv = ("plan", "--inventory", "fake:nodes=2,devices=2", "tést.py")
        done = unirun(*argv, capture_output=True, env=env)
        assert (done.returncode, done.stderr) == (0, b"")
        assert b"node1  .          .       2" in done.stdout
        assert b"rolex0" in done.stdout
        assert rb"python t\xe9st.py" in done.stdout, "names are escaped, so that they can be told apart"

    @pytest.mark.starts_processes
    def test_a_closed_pipe_ends_the_command_quietly(self, scripts: Path) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        done = unirun("plan", "--roles", "a=2", "train.py", stdout=writer, stderr=subprocess.PIPE)
        os.close(writer)
        assert (done.returncode, done.stderr) == (141, b"")

    @pytest.mark.starts_processes
    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
    def test_output_to_a_full_disk_is_an_error(self, scripts: Path) -> None:
        with open("/dev/full", "wb") as full:
            done = unirun("plan", "--roles", "a=2", "train.py", stdout=full, stderr=subprocess.PIPE)
        assert (done.returncode, done.stderr) == (
            1,
            b"unirun: the output cannot be written: No space left on device\n",
        )

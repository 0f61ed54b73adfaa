"""A worker's log on a full disk, and a worker at exit, before its interpreter ends."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.wire.endpoints import Endpoint, serve_once
from tests.waiting import WAIT_TIMEOUT
from unirun.launcher import child, worker
from unirun.launcher.worker import LogFile, wait_for_threads
from unirun.wire.frames import FrameReader, decode
from unirun.wire.handshake import ANSWER_SIZE, Handshake
from unirun.wire.reports import Message, WorkerError

WORK = 50_000
"""Rounds of a key derivation, without the GIL: some tens of milliseconds."""


def working(done: list[bytes]) -> threading.Thread:
    """A thread that computes without the GIL, and takes it at the end to add to `done`."""
    began = threading.Event()

    def work() -> None:
        began.set()
        done.append(hashlib.pbkdf2_hmac("sha256", b"a", b"b", WORK))

    thread = threading.Thread(target=work)
    thread.start()
    began.wait(WAIT_TIMEOUT)
    return thread


def test_logs_of_which_one_cannot_be_opened_leave_none_open(tmp_path: Path) -> None:
    (tmp_path / "0" / "stderr.log").mkdir(parents=True)
    request: Any = SimpleNamespace(logs=str(tmp_path), folder="0")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=r"stderr\.log"):
        child.open_logs(request)
    assert os.listdir("/proc/self/fd") == before


class TestTheEnd:
    def test_a_worker_waits_at_exit_for_a_working_thread_that_takes_the_gil(self) -> None:
        import torch  # noqa: F401 - threads of others are not waited for

        done: list[bytes] = []
        thread = working(done)
        wait_for_threads(limit=30)
        ended = bool(done)
        thread.join()
        assert ended

    def test_a_worker_does_not_wait_at_exit_for_a_sleeping_thread(self) -> None:
        import torch  # noqa: F401

        leave = threading.Event()
        thread = threading.Thread(target=leave.wait)
        thread.start()
        # With a limit that a test does not sit through.
        wait_for_threads(limit=600)
        leave.set()
        thread.join()

    def test_a_worker_ends_its_groups_when_no_thread_works(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch import distributed
        from torch.distributed import distributed_c10d

        done, ended = list[bytes](), list[bool]()

        def destroy_process_group(group: object = None) -> None:
            """Of torch."""
            ended.append(bool(done))

        for module in (distributed, distributed_c10d):
            monkeypatch.setattr(module, "destroy_process_group", destroy_process_group)
        monkeypatch.setattr(worker, "wait_for_threads", partial(wait_for_threads, limit=30))
        child.end_groups_when_idle()
        thread = working(done)
        distributed.destroy_process_group()
        thread.join()
        assert ended == [True]
        assert distributed_c10d.destroy_process_group.__doc__ == "Of torch."

    @pytest.mark.starts_processes
    def test_a_worker_without_torch_does_not_wait_at_exit(self) -> None:
        code = (
            "import threading; from unirun.launcher.worker import LogFile, wait_for_threads\n"
            "threading.Thread(target=lambda: [_ for _ in iter(int, 1)], daemon=True).start()\n"
            "wait_for_threads(limit=600)"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


FORKS = """
import os
if not os.fork():
    raise ValueError("of the fork")
os.wait()
raise KeyError("of the worker")
"""


RECORDS = """
import os
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
    file.write("what @record says of the worker")
os.write(2, b"of the fork")
raise KeyError("of the worker")
"""


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    ("script", "kept"), [(FORKS, "KeyError: 'of the worker'"), (RECORDS, "what @record says of the worker")]
)
def test_an_agent_and_the_error_file_have_the_error_of_a_worker_and_not_that_of_its_fork(
    tmp_path: Path, script: str, kept: str
) -> None:
    endpoint, heard = Endpoint("unix", tmp_path), list[Message]()

    def agent(connection: socket.socket) -> None:
        handshake, reader = Handshake(endpoint.token), FrameReader()
        connection.sendall(handshake.hello())
        connection.sendall(handshake.proof(connection.recv(ANSWER_SIZE)))
        while data := connection.recv(1 << 16):
            heard.extend(map(decode, reader.feed(data)))

    (tmp_path / "token").write_text(endpoint.token.hex())
    (tmp_path / "token").chmod(0o600)
    (tmp_path / "script.py").write_text(script)
    names = {"SOCKET": str(endpoint.path), "ROLE": "actor", "RANK": "3", "INCARNATION": "2"}
    env = {**os.environ, **{f"UNIRUN_{name}": value for name, value in names.items()}}
    env["TORCHELASTIC_ERROR_FILE"] = str(tmp_path / "error.json")
    code = "import sys; from unirun.launcher.worker import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "script", str(tmp_path / "script.py")]
    with serve_once(endpoint, agent):
        ended = subprocess.run(command, env=env, stderr=subprocess.PIPE, text=True, timeout=WAIT_TIMEOUT)
    errors = [each.message for each in heard if isinstance(each, WorkerError)]
    assert (ended.returncode, errors) == (1, ["KeyError: 'of the worker'"]), ended.stderr
    assert kept in (tmp_path / "error.json").read_text()
    assert "of the fork" in ended.stderr


@pytest.mark.starts_processes
def test_forked_workers_have_keys_random_numbers_and_a_directory_of_their_own(tmp_path: Path) -> None:
    def look() -> str:
        key, folder = multiprocessing.current_process().authkey, multiprocessing.process.ORIGINAL_DIR  # type: ignore[attr-defined]
        return f"{key.hex()} {numpy.random.random()} {folder}"

    def forked(name: str) -> str:
        folder = tmp_path / name
        folder.mkdir()
        pid = os.fork()
        if pid == 0:
            try:
                os.chdir(folder)
                child.renew()
                (folder / "look").write_text(look())
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        return (folder / "look").read_text()

    looks = [each.split(" ", 2) for each in (look(), forked("0"), forked("1"))]
    keys, numbers, folders = zip(*looks, strict=True)
    assert [len(set(keys)), len(set(numbers))] == [3, 3]
    assert folders[1:] == (str(tmp_path / "0"), str(tmp_path / "1"))


@given(st.lists(st.tuples(st.booleans(), st.binary(max_size=20)), max_size=12))
def test_a_log_on_a_disk_that_is_full_at_times_has_all_other_bytes_and_one_note_for_each_gap(
    writes: list[tuple[bool, bytes]],
) -> None:
    expected, lost = b"", 0
    with tempfile.TemporaryFile(buffering=0) as file, open("/dev/full", "wb", buffering=0) as full:
        log = LogFile(os.dup(file.fileno()), "wb")
        for is_full, data in writes:
            os.dup2((full if is_full else file).fileno(), log.fileno())
            assert log.write(data) == len(data)
            if is_full and data:
                lost += len(data)
            elif not is_full:
                expected += (
                    f"\n[unirun: the disk was full, {lost} bytes are lost]\n".encode() if lost else b""
                )
                expected, lost = expected + data, 0
        log.close()
        file.seek(0)
        assert file.read() == expected


@pytest.mark.starts_processes
def test_bytes_of_which_a_disk_has_taken_a_part_are_lost_without_that_part(tmp_path: Path) -> None:
    """A limit of the size of files takes a part of them first, as a disk that becomes full does."""
    code = """
import errno, resource, sys
from unirun.launcher import worker
worker._FULL = (errno.EFBIG,)
log = worker.LogFile(sys.argv[1], "wb")
for limit, data in ((10, b"0123456789abcdef"), (100, b"more")):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    assert log.write(data) == len(data)
"""
    log = tmp_path / "log"
    subprocess.run([sys.executable, "-c", code, str(log)], check=True, timeout=WAIT_TIMEOUT)
    assert log.read_bytes() == b"0123456789\n[unirun: the disk was full, 6 bytes are lost]\nmore"

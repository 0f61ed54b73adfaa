"""An etcd for a measurement: one member on free ports of loopback, with its data on disk."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figure import BenchmarkError, ProgramMissing
from benchmarks.job import DEADLINE
from unirun.errors import StoreError
from unirun.rendezvous.store.url import open_store


@contextlib.contextmanager
def etcd() -> Iterator[str]:
    """Yields its endpoint, ``host:port``, when it answers. Raises `BenchmarkError`."""
    program = shutil.which("etcd")
    if program is None:
        raise ProgramMissing("etcd", "apt-get install etcd-server")
    home = Path(tempfile.mkdtemp(prefix="unirun-bench-"))
    endpoint, peer = f"127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
    command = [
        *(program, "--data-dir", str(home), "--initial-cluster", f"default={peer}", "--log-level", "error"),
        *("--listen-client-urls", f"http://{endpoint}", "--advertise-client-urls", f"http://{endpoint}"),
        *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
    ]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)
    try:
        _await(endpoint)
        yield endpoint
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(home, ignore_errors=True)


def _await(endpoint: str) -> None:
    try:
        open_store(f"etcd://{endpoint}?timeout={DEADLINE:g}").close()
    except StoreError as error:
        raise BenchmarkError(str(error)) from error


def free_port() -> int:
    """A port that was free at the time of this call."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

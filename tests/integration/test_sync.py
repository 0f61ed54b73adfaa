"""``--sync``: the working tree comes to hosts that have none."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from tests.testbed.fixtures import available
from tests.testbed.hosts import Hosts

from .harness import EXEC, START_TIMEOUT, UNIRUN

TCSH = "sed 's#^root:\\(.*\\):[^:]*$#root:\\1:/usr/bin/tcsh#' /etc/passwd > /tmp/passwd && mount --bind /tmp/passwd /etc/passwd"


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Three hosts. Login shells parse what ssh passes on; that of h3 is tcsh, in which ``!`` has a meaning between
    quotes."""
    with available(), Hosts(3) as three:
        three[2].run(["sh", "-c", TCSH])
        yield three


def project(hosts: Hosts, folder: str, files: Mapping[str, str]) -> Path:
    """Write executable files into a folder of h1, which only starts jobs."""
    here = hosts[0].path(folder)
    for name, text in files.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(text)
        (here / name).chmod(0o755)
    return here


TRAIN = """
import socket
import helper
print(helper.WORD, "on", socket.gethostname(), flush=True)
"""


def test_a_job_runs_on_hosts_that_get_the_working_tree_first(hosts: Hosts) -> None:
    folder = "/tmp/it's a project!"
    here = project(hosts, folder, {"train.py": TRAIN, "helper.py": "WORD = 'sent'\n"})
    command = [UNIRUN, "--hosts", "h2,h3", "--sync", *EXEC, "--nproc-per-node", "1", "train.py"]
    done = hosts[0].run(command, cwd=folder, within=START_TIMEOUT)
    assert {line for line in done.stdout.splitlines() if line.startswith("[")} == {
        "[default:0] sent on h2",
        "[default:1] sent on h3",
    }
    assert sorted(path.name for path in here.iterdir()) == ["helper.py", "train.py"]


PYTHON = f'#!/bin/sh\nBY=tools/python exec {sys.executable} -S "$@"\n'

SERVER = (
    f"#!{sys.executable} -S"
    + """
# Answers with where it is.
import os, socket, sys
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
where = os.path.abspath(__file__), os.getcwd(), os.environ.get("BY", "itself"), socket.gethostname()
while True:
    connection, _ = listener.accept()
    connection.sendall(" ".join(where).encode())
    connection.close()
"""
)

ASK = """
import socket, sys
for address in ",".join(sys.argv[1:]).split(","):
    host, port = address.split(":")
    print(socket.create_connection((host, int(port))).makefile().read(), flush=True)
"""


def test_programs_run_in_the_copy_with_paths_relative_to_the_working_directory(hosts: Hosts) -> None:
    """The working directory is a part of the repository, a directory of a role is empty, and an interpreter is a file of
    the tree."""
    service = {"service": True, "count": 2, "per_node": 1, "ready": "tcp"}
    server = {**service, "program": "./server.py", "args": ["{host}", "{port}"], "cwd": "server"}
    judge = {**service, "program": "python", "python": "../tools/python", "cwd": "empty"}
    judge["args"] = ["../server/server.py", "{host}", "{port}"]
    asks = {
        "program": sys.executable,
        "args": ["-S", "ask.py", *(f"{{roles.{name}.addrs}}" for name in ("server", "judge"))],
    }
    roles = {"server": server, "judge": judge, "train": {**asks, "after": ["server", "judge"]}}
    files = {"server/server.py": SERVER, "ask.py": ASK, "job.yaml": yaml.safe_dump({"roles": roles})}
    here = project(hosts, "/tmp/repo/job", files)
    project(hosts, "/tmp/repo", {"tools/python": PYTHON})
    (here / "empty").mkdir()
    hosts[0].run(["git", "init"], cwd=Path("/tmp/repo"))
    command = [UNIRUN, "--hosts", "h2,h3", "--sync", "--config", "job.yaml"]
    done = hosts[0].run(command, cwd=Path("/tmp/repo/job"), within=START_TIMEOUT)
    script = "/tmp/repo/job/server/server.py"
    assert {line for line in done.stdout.splitlines() if line.startswith("[train")} == {
        f"[train:0] {script} /tmp/repo/job/{where} {host}"
        for where in ("server itself", "empty tools/python")
        for host in ("h2", "h3")
    }

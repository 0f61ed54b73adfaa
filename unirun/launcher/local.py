"""Starts the processes of a job on this host: the master and the agents, each in a session of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import NoReturn

from unirun.errors import UnirunError
from unirun.launcher.agent import Agent
from unirun.launcher.process import set_title
from unirun.rendezvous import Endpoint, JobDir
from unirun.reporting import flush, report, report_error
from unirun.spec import JobSpec
from unirun.values import Value


class Launched(Value):
    """The processes that were started."""

    master: int
    agents: tuple[int, ...]


def launch(
    job: JobDir,
    spec: JobSpec,
    nodes: Mapping[str, Mapping[str, Endpoint]],
    run_master: Callable[[Mapping[str, int]], None],
    *,
    listener: socket.socket,
    lock: int,
    detach: bool,
    reader: str | None = None,
) -> Launched:
    """Fork an agent for each of `nodes`, and the first master of `job`; they survive this process only when `detach`
    is given.

    `nodes` has, by node, the endpoints that its agent owns. `run_master` is called in the master's process with the
    pids of the agents, whose end it must notice even before they have joined. `listener` stays open there only, and
    the endpoints of a node in its agent only: what listens ends with its owner. All hold the `lock`, as long as one of
    them lives. The agent of the node `reader` alone keeps this process's stdin, for a worker. Forking shares
    what is imported already. Call it before any thread is started.
    """
    owner = None if detach else os.getpid()
    cwd = os.getcwd()

    def run_agent(node: str, stdin: int | None) -> None:
        listener.close()
        _close(endpoints for other, endpoints in nodes.items() if other != node)
        asyncio.run(Agent(job, spec, node, cwd, nodes[node], lock, stdin).run(owner))

    agents = {
        node: _fork("unirun-agent", job.agent_log(node), partial(run_agent, node), stdin=node == reader)
        for node in nodes
    }
    _close(nodes.values())
    master = _fork("unirun-master", job.master_log, lambda _: run_master(agents))
    listener.close()
    os.close(lock)
    return Launched(master, tuple(agents.values()))


def _close(held: Iterable[Mapping[str, Endpoint]]) -> None:
    for endpoints in held:
        for endpoint in endpoints.values():
            endpoint.close()


def _fork(title: str, log: Path, run: Callable[[int | None], None], *, stdin: bool = False) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _become(title, log, run, stdin)
    return pid


def _become(title: str, log: Path, run: Callable[[int | None], None], stdin: bool) -> NoReturn:
    """In the child: leave the terminal, write to `log`, run, and end without the parent's clean-up.

    `run` gets a descriptor of the parent's stdin where `stdin` is true.
    """
    code = 1
    try:
        kept = os.dup(0) if stdin else None
        os.setsid()
        set_title(title)
        for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(signum, signal.SIG_IGN)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (file, 1), (file, 2)):
            os.dup2(source, target)
        run(kept)
        code = 0
    except UnirunError as error:
        code = error.exit_code
        report(f"{title}: {error}")
    except BaseException as error:  # noqa: BLE001 - the last frame of a process: what is not written here is lost
        report_error(error)
    finally:
        flush()
        os._exit(code)

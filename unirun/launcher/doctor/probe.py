"""``python -m unirun.launcher.doctor.probe``: the process on each host that answers the doctor until its stdin ends."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from unirun.errors import UnirunError
from unirun.launcher.doctor import network
from unirun.launcher.doctor.facts import read_facts
from unirun.launcher.doctor.requests import (
    AllReduceAs,
    Answer,
    Failed,
    Find,
    Found,
    Listen,
    Listening,
    Load,
    Look,
    Meet,
    Met,
    Reduced,
    Remove,
    Request,
    Tick,
    Time,
    Told,
    Write,
    to_line,
    to_request,
)
from unirun.launcher.hosts.interfaces import interface_of


class Probe:
    """Answers requests, one after the other."""

    def __init__(self) -> None:
        self._address = ""
        self._places: dict[str, Path] = {}
        self._store: Any = None

    def answer(self, request: Request) -> Answer:
        """Do what is asked. Raises what goes wrong."""
        match request:
            case Look():
                return self._look(request)
            case Tick():
                return Time(time.time())
            case Write(name):
                return Found(tuple(where for where, path in self._places.items() if _written(path / name)))
            case Find(name):
                return Found(tuple(where for where, path in self._places.items() if (path / name).exists()))
            case Remove(name):
                for path in self._places.values():
                    (path / name).unlink(missing_ok=True)
                return Found(())
            case Listen(nonce):
                return Listening(network.listen(self._address, nonce.encode()))
            case Meet(address, port, nonce, bandwidth):
                return Met(*network.measure(address, port, nonce.encode(), bandwidth=bandwidth))
            case Load(store):
                from unirun.launcher.doctor.collective import open_store

                self._store, port = open_store(self._address) if store else (None, 0)
                return Listening(port)
            case AllReduceAs(backend, rank, world, address, port):
                from unirun.launcher.doctor.collective import all_reduce

                interface = interface_of(self._address)
                return Reduced(all_reduce(backend, rank, world, address, port, interface))

    def _look(self, request: Look) -> Told:
        facts = read_facts(request.interface, request.head)
        self._address = facts.address
        places = {"cwd": Path(request.cwd), "home": Path(os.path.expanduser("~"))}
        self._places = {where: path for where, path in places.items() if path.is_dir()}
        return Told(facts)


def _written(path: Path) -> bool:
    """Return True if the file could be written: a home directory may be read-only."""
    try:
        path.touch(mode=0o600)
    except OSError:
        return False
    return True


def main() -> None:
    """Answer until stdin ends. Whatever else is written to stdout goes to stderr."""
    # torch looks up the name of each address. The resolver's own limits would make that ten seconds where it is away.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    probe = Probe()
    for line in sys.stdin.buffer:
        try:
            answer = probe.answer(to_request(line))
        except UnirunError as error:
            answer = Failed(error.problem, error.remedy)
        except (OSError, RuntimeError, ImportError, ValueError) as error:
            answer = Failed(str(error) or type(error).__name__)
        answers.write(to_line(answer))
        answers.flush()


if __name__ == "__main__":
    main()

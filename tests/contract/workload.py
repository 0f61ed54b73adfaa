"""The workload that the contract is tried on, and the exceptions that it raises."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from unirun.roles import trainer_invocation
from unirun.values import WorkerId

GATE_TIMEOUT = 100.0
"""Seconds after which a gate that nobody opens is given up."""


class Gates:
    """Named events that methods wait for, so that a test decides when they go on."""

    def __init__(self) -> None:
        self._gates: dict[str, threading.Event] = defaultdict(threading.Event)

    def open(self, name: str) -> None:
        """Let all go on that wait for this gate, now or later."""
        self._gates[name].set()

    def wait(self, name: str) -> None:
        """Wait until the gate is open."""
        if not self._gates[name].wait(GATE_TIMEOUT):
            raise TimeoutError(f"nobody opened {name}")


class Refused(Exception):
    """Its constructor wants other arguments than those that it passes on."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"refused with {code} in {where}")
        self.code, self.where = code, where


class ErrorWithLock(Exception):
    """Holds what does not pickle."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class UnprintableError(Exception):
    """Cannot be shown and does not pickle."""

    def __str__(self) -> str:
        raise ValueError("I will not be shown")

    def __reduce__(self) -> Any:
        raise ValueError("I will not be pickled")


class Plain:
    """Has neither a text nor a way to compare it."""


class Unpicklable:
    """Does not pickle."""

    def __reduce__(self) -> Any:
        raise RuntimeError("this is closed")


def _burst() -> Any:
    raise ValueError("I burst on arrival")


class Bomb:
    """Pickles well; unpickling it fails."""

    def __reduce__(self) -> Any:
        return _burst, ()


class ContractWorkload:
    """One worker of a role."""

    def __init__(self, address: WorkerId, tell: Callable[[str], None], gates: Gates) -> None:
        self._address, self._tell, self._gates = address, tell, gates
        self._ran: list[Any] = []
        self._mine = torch.zeros(1024)

    def echo(self, value: Any = None) -> Any:
        """Return the value that was sent."""
        return value

    def note(self, item: Any) -> Any:
        """Remember that it ran, and in which order."""
        self._ran.append(item)
        return item

    def ran(self) -> list[Any]:
        """Everything that ran, in order."""
        return self._ran

    def me(self) -> tuple[str, int, int, bool]:
        """The worker that runs this, and whether it is in the main thread."""
        main = threading.current_thread() is threading.main_thread()
        return str(self._address), self._address.incarnation, os.getpid(), main

    def number(self) -> int:
        """Its rank."""
        return self._address.rank

    @trainer_invocation(target="ANY")
    def anyone(self) -> int:
        """The rank of the one who was chosen."""
        return self._address.rank

    @trainer_invocation(target="ANY")
    def anyone_holds(self, gate: str) -> int:
        """The same, after a gate."""
        self.hold(gate)
        return self._address.rank

    @trainer_invocation(target="RANK0")
    def first(self) -> int:
        """Always 0."""
        return self._address.rank

    def hold(self, gate: str) -> str:
        """Tell the test that it runs, and wait until the test opens the gate."""
        self._tell(f"holding {gate}")
        self._gates.wait(gate)
        self._ran.append(gate)
        return gate

    @trainer_invocation(timeout=0.4)
    def hold_briefly(self, gate: str) -> str:
        """The same, with a deadline."""
        return self.hold(gate)

    @trainer_invocation(is_async=True, timeout=0.4)
    def hold_async(self, gate: str) -> str:
        """The same, as DLRover's guide writes it."""
        return self.hold(gate)

    def hold_if(self, rank: int, gate: str) -> int:
        """Only one rank waits."""
        self._ran.append(rank)
        if self._address.rank == rank:
            self.hold(gate)
        return self._address.rank

    @trainer_invocation(timeout=0.4)
    def hold_if_briefly(self, rank: int, gate: str) -> int:
        """Only one rank waits, and too long."""
        return self.hold_if(rank, gate)

    @trainer_invocation(idempotent=True)
    def again(self, gate: str) -> tuple[int, int]:
        """May run again."""
        self.hold(gate)
        return self._address.rank, self._address.incarnation

    @trainer_invocation(idempotent=True)
    def again_if(self, rank: int, gate: str) -> tuple[int, int]:
        """May run again; only one rank waits."""
        self.hold_if(rank, gate)
        return self._address.rank, self._address.incarnation

    @trainer_invocation(idempotent=True, retries=1)
    def again_once(self, gate: str) -> None:
        """May run again, once."""
        self.hold(gate)

    @trainer_invocation(idempotent=True, timeout=1.0)
    def again_briefly(self, gate: str) -> None:
        """May run again, and not for long."""
        self.hold(gate)

    @trainer_invocation(concurrency=2)
    def echo_beside(self, value: Any) -> Any:
        """In a thread."""
        return value

    @trainer_invocation(concurrency=2)
    def beside(self, gate: str) -> str:
        """Runs in a thread."""
        return self.hold(gate)

    async def meanwhile(self, gate: str) -> str:
        """Runs in an event loop."""
        return await asyncio.to_thread(self.hold, gate)

    @trainer_invocation(concurrency=2)
    def leave_thread(self) -> None:
        """Ends its thread, as code that was written for a main program does."""
        sys.exit("I leave")

    async def leave_loop(self) -> None:
        """The same in an event loop."""
        sys.exit(0)

    async def give_up(self) -> None:
        """Raises what is no `Exception`."""
        raise asyncio.CancelledError("given up")

    def die(self) -> None:
        """As after a fatal signal."""
        os._exit(9)

    def write(self, tensor: torch.Tensor) -> float:
        """Change an argument; what the sender has must not change."""
        tensor.add_(1)
        return float(tensor.sum())

    def watch(self, value: Any) -> Any:
        """See how long an argument is held."""
        self._watched = weakref.ref(value)
        return value + 1

    def watched_is_gone(self) -> bool:
        """Return True if the watched object was freed."""
        return self._watched() is None

    def lend(self) -> torch.Tensor:
        """A tensor that the worker goes on using."""
        return self._mine

    def own_sum(self) -> float:
        """The result of the sum."""
        return float(self._mine.sum())

    def size_of_storage(self, tensor: torch.Tensor) -> int:
        """Bytes that came with a tensor."""
        return tensor.untyped_storage().nbytes()

    def fail(self, kind: str, text: str = "") -> Any:
        """Raise or return something special."""
        if kind == "refused":
            raise Refused(7, where="the office")
        if kind == "sealed":
            raise ErrorWithLock(text)
        if kind == "locked":
            raise ValueError(text, threading.Lock())
        if kind == "plain":
            raise ValueError(Plain())
        if kind == "hidden":
            lock = threading.Lock()

            class Hidden(Exception):
                def __str__(self) -> str:
                    return f"behind a lock {lock}"

            raise Hidden
        if kind == "spiteful":
            raise UnprintableError
        if kind == "closed":
            return Unpicklable()
        if kind == "bomb":
            return Bomb()
        if kind == "local":
            raise type("Local", (ValueError,), {})(text)
        if kind == "file":
            open("/nonexistent/file")
        if kind == "cause":
            try:
                self.fail("value", text)
            except ValueError as error:
                raise KeyError("after that") from error
        if kind == "stop":
            raise StopIteration(text)
        if kind == "tensor":
            raise ValueError(text, torch.ones(1000))
        raise ValueError(text)

    def leave(self) -> None:
        """End the program, as the user's code may."""
        sys.exit(3)

    def hold_or_fail(self, rank: int, gate: str) -> str:
        """One rank waits, all others fail."""
        if self._address.rank == rank:
            return self.hold(gate)
        raise ValueError(f"{self._address} fails")

    def fail_if(self, rank: int) -> int:
        """Only one rank fails."""
        if self._address.rank == rank:
            raise ValueError(f"{self._address} fails")
        return self._address.rank

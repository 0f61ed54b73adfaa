"""`Rewards`: a reward function in processes of its own, so that one that hangs or crashes does not take the rollouts.

The function is called by its name in a new interpreter, which imports its module. Arguments and results are what JSON
has. This module is also the program of these processes: ``python -m unirun.rollout.rewards``.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any, BinaryIO, TypeVar

import msgspec

from unirun.errors import RewardFailed, UsageError
from unirun.values import Value

REWARD_TIMEOUT = 15.0
"""Seconds in which a reward function must return."""

REWARD_ATTEMPTS = 3
"""Processes that are tried for one reward."""

MAX_MESSAGE = 64 << 20
"""Bytes of the arguments of one call, or of its result."""

END_TIMEOUT = 5.0
"""Seconds for the pipes of a process that was killed, which its children may have open."""

START_TIMEOUT = 120.0
"""Seconds in which a process must have imported the module of its function."""


class Named(Value):
    """A function at the top of a module. `file` is that of the module, for one that cannot be imported by its name;
    `path` is ``sys.path``."""

    module: str
    file: str
    name: str
    path: tuple[str, ...]


class _Call(Value, gc=True):
    args: list[Any]
    kwargs: dict[str, Any]


class _Result(Value, gc=True):
    """`problem` is the traceback of a call that has raised."""

    value: Any = None
    problem: str = ""


T = TypeVar("T", bound=Value)


def _line(value: Value) -> bytes:
    """A line of JSON. Unlike msgspec's own it has numbers that are none, and infinite ones, as rewards may be."""
    return json.dumps(msgspec.to_builtins(value, str_keys=True)).encode() + b"\n"


def _value(line: bytes, kind: type[T]) -> T:
    """The value in a line."""
    return msgspec.convert(json.loads(line), kind)


def named(function: Callable[..., Any]) -> Named:
    """The name of a function, by which another process finds it. Raises `UsageError` when it has none."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if not module or not name or "<" in name or inspect.iscoroutinefunction(function):
        raise UsageError(
            f"{function!r} cannot be a reward function", "write a def at the top level of a module"
        )
    if module == "__main__":
        raise UsageError(
            f"the reward function {name} is in the program that was started",
            "put it into a module, which other processes import",
        )
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return Named(module, file, name, tuple(sys.path))


class Rewards:
    """A reward function, called in `processes` processes of its own::

        rewards = Rewards(verify, processes=4)
        reward = await rewards("3+8=", "11")

    A process that has not answered within `timeout` seconds, or has ended, is replaced by another one, which gets the
    call again; after `attempts` of them the call raises `RewardFailed`. What the function itself raises would come
    again, so it raises `RewardFailed` at once. Belongs to one event loop.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        processes: int = 2,
        timeout: float = REWARD_TIMEOUT,
        attempts: int = REWARD_ATTEMPTS,
    ) -> None:
        """Raises `UsageError` for a function that another process cannot find, and values that do not fit."""
        if processes < 1 or timeout <= 0 or attempts < 1:
            raise UsageError("processes and attempts must be 1 or more, and timeout more than 0")
        self.function, self.timeout, self.attempts = named(function), timeout, attempts
        self.failed = 0
        """Calls that have raised `RewardFailed`."""
        self._idle: asyncio.LifoQueue[_Process | None] = asyncio.LifoQueue()
        for _ in range(processes):
            self._idle.put_nowait(None)
        self._all: set[_Process] = set()
        self._processes, self._closed = processes, False

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the function. Raises `RewardFailed`."""
        line = _line(_Call(list(args), kwargs))
        if len(line) > MAX_MESSAGE:
            raise UsageError(
                f"the arguments of a reward function have {len(line)} bytes", f"at most {MAX_MESSAGE}"
            )
        problem = ""
        for _ in range(self.attempts):
            found = await self._tried(line)
            if isinstance(found, _Result):
                if not found.problem:
                    return found.value
                raise self._given_up(f"has raised:\n{found.problem}", "correct it")
            problem = found
        late = problem == self._late
        remedy = (
            "make it faster, or give it more time" if late else "correct it: what it has written may say why"
        )
        raise self._given_up(f"{problem}, in each of {self.attempts} processes", remedy)

    @property
    def _late(self) -> str:
        return f"has not returned within {self.timeout:g} s"

    def _given_up(self, problem: str, remedy: str) -> RewardFailed:
        self.failed += 1
        return RewardFailed(f"reward function {self.function.module}.{self.function.name} {problem}", remedy)

    async def _tried(self, line: bytes) -> _Result | str:
        """The result of one try, or the reason why there is none."""
        process = await self._idle.get()
        try:
            if process is None and not self._closed:
                process = await self._started()
            if process is None or self._closed:
                raise self._given_up("was closed", "close it when no episode is left")
            async with asyncio.timeout(self.timeout):
                found = await process.ask(line)
        except TimeoutError:
            found = self._late
        except BaseException:
            if process is not None:
                process.kill()
                self._all.discard(process)
            self._idle.put_nowait(None)
            raise
        if isinstance(found, _Result):
            self._idle.put_nowait(process)
            return found
        try:
            if process is not None:
                self._all.discard(process)
                await process.end()
        finally:
            self._idle.put_nowait(None)
        return found

    async def _started(self) -> _Process | None:
        """A process that has the function; None if they are closed meanwhile. Raises `RewardFailed` when it cannot
        import it."""
        process = await _Process.start()
        self._all.add(process)
        try:
            problem = "" if self._closed else await process.imports(self.function)
        except BaseException:
            process.kill()
            self._all.discard(process)
            raise
        if not problem and not self._closed:
            return process
        self._all.discard(process)
        await process.end()
        if self._closed:
            return None
        raise self._given_up(
            f"has not started: {problem}", "can its module be imported by a new interpreter?"
        )

    async def close(self) -> None:
        """End the processes. A call that is open raises `RewardFailed`, and so does each one after that."""
        self._closed = True
        for process in self._all:
            process.kill()
        # A call gives its process back when it has read its end.
        places = [await self._idle.get() for _ in range(self._processes)]
        for place in places:
            if place is not None:
                await place.end()
            self._idle.put_nowait(None)
        self._all.clear()


class _Process:
    """A process of a reward function, as its caller sees it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls) -> _Process:
        """Start one."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "unirun.rollout.rewards",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MAX_MESSAGE,
            process_group=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)},
        )
        return cls(process)

    async def imports(self, function: Named) -> str:
        """Have it import the function. Returns the reason why it has not; empty if it has."""
        try:
            async with asyncio.timeout(START_TIMEOUT):
                found = await self.ask(_line(function))
        except TimeoutError:
            return f"it was not imported within {START_TIMEOUT:g} s"
        return found if isinstance(found, str) else found.problem

    async def ask(self, line: bytes) -> _Result | str:
        """The answer; or the way in which the process has ended."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with contextlib.suppress(ConnectionError):
            stdin.write(line)
            await stdin.drain()
        try:
            answer = await stdout.readline()
        except ValueError:
            return f"has answered with more than {MAX_MESSAGE} bytes"
        if answer.endswith(b"\n"):
            return _value(answer, _Result)
        code = await self._process.wait()
        return f"has ended its process by {'signal' if code < 0 else 'exit code'} {abs(code)}"

    def kill(self) -> None:
        """End it now, with the processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def end(self) -> None:
        """End it, and wait for that."""
        self.kill()
        # It reads what is left, so that the pipes are closed.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_TIMEOUT):
                await self._process.communicate()


# The program of these processes.


def main() -> None:
    """Import the function that stdin names, and call it with what comes after. Ends with stdin."""
    # The function may print, which must not be an answer.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, lines), daemon=True).start()
    function: Callable[..., Any] | None = None
    while True:
        line = lines.get()
        try:
            if function is None:
                function, value = _imported(_value(line, Named)), None
            else:
                call = _value(line, _Call)
                value = function(*call.args, **call.kwargs)
            answer = _line(_Result(value, ""))
        except Exception:  # noqa: BLE001 - whatever a user's function raises
            answer = _line(_Result(None, traceback.format_exc()))
        answers.write(answer)


def _read(source: BinaryIO, lines: queue.SimpleQueue[bytes]) -> None:
    """Also while the function runs: it ends with the process that wants its result."""
    for line in source:
        lines.put(line)
    os._exit(0)


def _imported(wanted: Named) -> Callable[..., Any]:
    sys.path[:] = wanted.path
    found: Any = _module(wanted)
    for part in wanted.name.split("."):
        found = getattr(found, part)
    function: Callable[..., Any] = found
    return function


def _module(wanted: Named) -> ModuleType:
    try:
        found = importlib.util.find_spec(wanted.module)
    except ModuleNotFoundError:
        found = None
    if found is not None or not wanted.file:
        return importlib.import_module(wanted.module)
    spec = importlib.util.spec_from_file_location(wanted.module, wanted.file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[wanted.module] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()

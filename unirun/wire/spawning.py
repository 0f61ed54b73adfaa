"""Messages between an agent and its spawners, and for borrowing a spawner from a warm process."""

from __future__ import annotations

from unirun.values import Value


class Borrow(Value, tag=True):
    """Asks a fork of a warm process to become a spawner. Descriptors are passed with it: the agent's output, a pipe,
    and those that the agent has at the numbers `inherited`.

    The other fields are those of a new spawner: interpreter, location of the package unirun, working directory,
    environment, umask, modules to import. `descriptors` is the workers' limit on open files; `state` is the state of
    the agent's process in the kernel (limits, namespaces, ...).
    """

    executable: str
    unirun: str
    cwd: str
    modules: tuple[str, ...]
    env: dict[str, str]
    umask: int
    descriptors: int
    inherited: tuple[int, ...]
    state: dict[str, str]


class Declined(Value, tag=True):
    """The fork cannot serve as this agent's spawner; `reason` is text for users."""

    reason: str


class Spawn(Value, tag=True):
    """Starts one process. `id` is the agent's number for it; `kind` and `target` are those of the role's entry.

    With `fresh` it is a new interpreter, else a fork that keeps the spawner's imports. `env` is its complete
    environment. Output is appended to ``stdout.log`` and ``stderr.log`` in `folder`, relative to the directory `logs`.
    `cpus` is its CPU affinity. `stdin` is an inherited descriptor, None for ``/dev/null``.
    """

    id: int
    title: str
    kind: str
    target: str
    args: tuple[str, ...]
    fresh: bool
    env: dict[str, str]
    cwd: str
    logs: str
    folder: str
    cpus: tuple[int, ...] | None = None
    stdin: int | None = None


class ServeStore(Value, tag=True):
    """Orders a new, empty TCPStore for a generation of `role` on the inherited listening socket `fd`."""

    role: str
    generation: int
    fd: int


class Kill(Value, tag=True):
    """Orders `signal` to be sent to the process group of a process."""

    id: int
    signal: int


class Preloaded(Value, tag=True):
    """The spawner has imported its modules in `seconds` and is ready to fork."""

    seconds: float


class Forked(Value, tag=True):
    """The process was started."""

    id: int
    pid: int


class SpawnFailed(Value, tag=True):
    """A process could not be started, at `time` (seconds since the epoch); with id 0, the spawner itself has failed."""

    id: int
    time: float
    reason: str


class StoreOpened(Value, tag=True):
    """The rendezvous store of this generation of the role listens; that of the previous generation has ended."""

    role: str
    generation: int


class StoreEnded(Value, tag=True):
    """The rendezvous store of `role` could not be opened or has exited, at `time` (see `Reaped`)."""

    role: str
    generation: int
    time: float
    reason: str


class Reaped(Value, tag=True):
    """The process has ended at `time` (seconds since the epoch), and its group was sent SIGKILL."""

    id: int
    time: float
    code: int | None
    signal: int | None

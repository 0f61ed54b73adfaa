"""The messages between an agent and its spawners, and those by which it borrows a spawner from a warm process."""

from __future__ import annotations

from unirun.values import Value


class Borrow(Value, tag=True):
    """Asks a fork of a warm process to become a spawner. Passed with it: the descriptors of the agent's output, of a
    pipe, and of those that the agent has at the numbers `inherited`.

    The other fields are what a spawner is started with: interpreter, place of the package unirun, working directory,
    environment, umask, modules to import. `descriptors` is the limit on open files of the workers, `state` what the
    kernel reports of the agent's process (limits, namespaces, ...).
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
    """The fork cannot be this agent's spawner; `reason` is for people."""

    reason: str


class Spawn(Value, tag=True):
    """Starts one process. `id` is the agent's number for it; `kind` and `target` are those of the role's entry.

    With `fresh` it is a new interpreter, else a fork that keeps what the spawner has imported. `env` is its whole
    environment. Output is appended to ``stdout.log`` and ``stderr.log`` in `folder`, relative to the directory `logs`.
    `cpus` are the processors it may run on. `stdin` is an inherited descriptor, None for ``/dev/null``.
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
    """Serves a new, empty TCPStore for a generation of `role` on the inherited listening socket `fd`."""

    role: str
    generation: int
    fd: int


class Kill(Value, tag=True):
    """Sends `signal` to the process group of a process."""

    id: int
    signal: int


class Preloaded(Value, tag=True):
    """The spawner has imported its modules, which took `seconds`, and can fork."""

    seconds: float


class Forked(Value, tag=True):
    """The process exists."""

    id: int
    pid: int


class SpawnFailed(Value, tag=True):
    """A process could not be started, at `time` (seconds since the epoch); with id 0, the spawner itself has failed."""

    id: int
    time: float
    reason: str


class StoreOpened(Value, tag=True):
    """The rendezvous store of this generation of the role listens; the one of the generation before has ended."""

    role: str
    generation: int


class StoreEnded(Value, tag=True):
    """The rendezvous store of `role` could not be opened or has ended by itself, at `time` (see `Reaped`)."""

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

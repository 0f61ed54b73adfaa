"""The messages between an agent and its spawners, and those with which it borrows one."""

from __future__ import annotations

from unirun.values import Value


class Borrow(Value, tag=True):
    """Be a spawner: to a fork of a warm process, with descriptors of the agent's output, of a pipe, and of those that
    the agent knows by the numbers `inherited`.

    The rest is what a spawner would be started with: the interpreter, where unirun is, directory, environment, umask,
    what it imports; `descriptors` is the limit that workers get, `state` what the kernel has of the agent when it asks.
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
    """The answer of a fork that does not fit, in words."""

    reason: str


class Spawn(Value, tag=True):
    """Start one process. `id` is the agent's name for it; `kind` and `target` are those of the role's entry.

    `fresh`: in a new interpreter instead of a fork that keeps what the spawner imported. `env` is the whole
    environment. Its output is appended to ``stdout.log`` and ``stderr.log`` in `folder`, which lies below the directory
    `logs`. `cpus`: the processors it may run on. `stdin`: an inherited descriptor; None for ``/dev/null``.
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
    """Serve a new, empty TCPStore for a generation of `role` on the inherited listening socket `fd`."""

    role: str
    generation: int
    fd: int


class Kill(Value, tag=True):
    """Send `signal` to the whole process group of a process."""

    id: int
    signal: int


class Preloaded(Value, tag=True):
    """The spawner has imported what it should, in `seconds`, and can fork."""

    seconds: float


class Forked(Value, tag=True):
    """The process exists."""

    id: int
    pid: int


class SpawnFailed(Value, tag=True):
    """The process could not be made, at `time`; with id 0, the spawner itself cannot work."""

    id: int
    time: float
    reason: str


class StoreOpened(Value, tag=True):
    """The store of the role's generation is there; the one before it is gone."""

    role: str
    generation: int


class StoreEnded(Value, tag=True):
    """The store of `role` could not be opened, or has ended at `time`, though nobody asked for it."""

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

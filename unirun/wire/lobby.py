"""Messages between the process that launches a job and the nodes that take part in it, before there is a master.

============== =================================================================
launcher→node  Assigned, Go, Dismissed; over ssh also Invite, Resume
node→launcher  Offer, Ready, Dismissed; over ssh also Chunk, Current, Complete
============== =================================================================

A node makes an `Offer`, gets its task (`Assigned`), binds its endpoints and says `Ready`. `Go` starts its agent.
"""

from __future__ import annotations

from typing import TypeVar

from unirun.errors import RendezvousError
from unirun.values import Value
from unirun.wire.address import TcpAddress


class Invite(Value, tag=True):
    """Asks the host on which the receiver was started to take part in a job as `node`.

    `token` is the job's, in hex; the stream must be one that nobody else reads, as that of ssh. `env` comes on top of
    the receiver's environment. `needs` are files, directories, and names of programs that every host of the job must
    have. A node that is to be the `head` binds the address of the masters at once. `interface` is the user's choice,
    empty for none. When the job has begun, its `masters` are asked instead of the sender. A job that is to `detach`
    does not end with the command.
    """

    token: str
    node: str
    cwd: str
    env: dict[str, str]
    needs: tuple[str, ...] = ()
    head: bool = False
    masters: TcpAddress | None = None
    detach: bool = False
    interface: str = ""
    insecure: bool = False


class Member(Value):
    """A member of an etcd of the job's own: its node, and where it listens for clients and for other members."""

    node: str
    addr: str
    client: int
    peer: int


class Offer(Value, tag=True):
    """A node offers to take part. `rank` is the position that it wants, -1 for any.

    `inventory` is its `collocation.Node` in JSON, `versions` those of Python, torch and unirun. `masters` is where
    masters will listen when this node is the head. `etcd` is the member of an etcd that it can be. `faults` are reasons
    why it cannot take part, each with a remedy.
    """

    node: str
    host: str
    rank: int
    inventory: str
    versions: dict[str, str]
    masters: TcpAddress | None = None
    faults: tuple[tuple[str, str], ...] = ()
    etcd: Member | None = None


class Assigned(Value, tag=True):
    """The node's task: an `AgentTask` in JSON. An empty `cwd` or `addr` in it is for the node to fill in.

    Masters are found at `head`, or by the store of this URL; `etcd` are the members of the job's own etcd. A head that
    the launcher has invited gets the `planned` job in JSON instead of a task, and starts the first master.
    """

    run_id: str
    uid: str
    task: str
    head: TcpAddress
    store: str = ""
    planned: str = ""
    etcd: tuple[Member, ...] = ()


class Chunk(Value, tag=True):
    """A part of a file of a node's directory: `data` (base64) at `offset`, or all of a file that was replaced
    (`whole`)."""

    path: str
    offset: int
    data: str
    whole: bool = False


class Resume(Value, tag=True):
    """Asks for what the files of a node's directory have after these offsets. `env` is as in `Invite`."""

    run_id: str
    node: str
    offsets: dict[str, int]
    env: dict[str, str]


class Current(Value, tag=True):
    """All that the files had when they were asked for was sent."""


class Complete(Value, tag=True):
    """The node's agent has ended, and all of its files were sent."""


class Ready(Value, tag=True):
    """The node has bound its endpoints."""


class Go(Value, tag=True):
    """All nodes are ready: the node's agent starts."""


class Dismissed(Value, tag=True):
    """The sender does not want the receiver in the job, or cannot take part itself."""

    problem: str
    remedy: str = ""


W = TypeVar("W")


def expected(word: object, kind: type[W]) -> W:
    """Return `word` if it is a `kind`. Raises `RendezvousError` for any other message, with what a `Dismissed` says."""
    if isinstance(word, kind):
        return word
    if isinstance(word, Dismissed):
        raise RendezvousError(word.problem, word.remedy)
    raise RendezvousError(f"the other end said {type(word).__name__} instead of {kind.__name__}")

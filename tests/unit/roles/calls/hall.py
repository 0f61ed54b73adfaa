"""A dispatcher in a thread, which tests send requests to without a transport."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from tests.effort import SOON as SOON
from unirun.roles import trainer_invocation
from unirun.roles.calls.codec import GIVE_UP, dump, encode_address, encode_giving_up, encode_request
from unirun.roles.calls.dispatcher import Dispatcher
from unirun.roles.calls.policy import invocations
from unirun.roles.transport.protocol import Parcel
from unirun.values import WorkerId

ME, TRAINER = WorkerId("desk", 0, 0), WorkerId("trainer", 0, 0)


class Desk:
    """Counts what it runs."""

    def __init__(self) -> None:
        self.ran: list[Any] = []
        self.gate, self.begun = threading.Event(), threading.Event()

    def note(self, item: Any) -> Any:
        """Remember it."""
        self.ran.append(item)
        return item

    def hold(self) -> str:
        """Wait."""
        self.begun.set()
        self.gate.wait(SOON)
        self.ran.append("held")
        return "held"

    def hold_and_fail(self) -> None:
        """Wait and fail."""
        self.hold()
        raise RuntimeError("connection reset by peer")

    @trainer_invocation(concurrency=2)
    def beside(self, item: Any) -> Any:
        """In a thread of a pool."""
        return item

    async def later(self, item: Any) -> Any:
        """In the loop."""
        return item


class Generations:
    """The generations of a worker's process group; each one that is formed is noted at the desk."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.generation = 0
        self.away: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()

    def explain(self, error: BaseException) -> bool:
        """The word "closed" is one of a peer that has left."""
        return "closed" in str(error)

    def kept_away(self, by: Callable[[], bool]) -> None:
        """Note it."""
        self.away.put(by)

    def catch_up(self, generation: int) -> None:
        """Form it."""
        if generation > self.generation:
            self.generation = generation
            self._desk.ran.append(("generation", generation))


def request(seq: int, method: str) -> bytes:
    """A call of a method without arguments."""
    return encode_request(encode_address(TRAINER), seq, 0, False, [], method.encode(), dump(((), {}), "x")[0])


class Hall:
    """A dispatcher that serves in a thread, and what it answers."""

    def __init__(self, target: Any, **options: Any) -> None:
        self.desk = target
        self.dispatcher = Dispatcher(target, ME, invocations(target), **options)
        self.thread = threading.Thread(target=self.dispatcher.serve, daemon=True)
        self.thread.start()

    @property
    def kept(self) -> int:
        """The number of calls whose result is not acked: waiting, running, or done."""
        return sum(len(caller.runs) for caller in list(self.dispatcher._callers.values()))

    def send(
        self,
        seq: int,
        method: str,
        *args: Any,
        caller: WorkerId = TRAINER,
        acks: tuple[int, ...] = (),
        generation: int = 0,
        joint: bool = False,
    ) -> queue.SimpleQueue[Parcel]:
        """A request; where its answer will be."""
        body, buffers = dump((args, {}), "arguments")
        head = encode_request(
            encode_address(caller), seq, generation, joint, list(acks), method.encode(), body
        )
        answers: queue.SimpleQueue[Parcel] = queue.SimpleQueue()
        self.dispatcher.handle(Parcel(head, buffers), answers.put)
        return answers

    def give_up(self, seq: int, *, lost: bool = False) -> None:
        """Do nothing, as no caller waits for this call."""
        body = encode_giving_up(seq, lost=lost)
        head = encode_request(encode_address(TRAINER), 0, 0, False, [], GIVE_UP, body)
        self.dispatcher.handle(Parcel(head), lambda answer: None)

    def close(self) -> None:
        """End the thread."""
        self.desk.gate.set()
        self.dispatcher.stop()
        self.thread.join(SOON)
        self.dispatcher.close()
        assert not self.thread.is_alive()

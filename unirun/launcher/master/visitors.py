"""Processes outside the job that call its workers: they are told what workers are told of each other."""

from __future__ import annotations

from collections.abc import Callable, Collection

from unirun.errors import WireError
from unirun.failover.events import Event
from unirun.failover.state import JobState
from unirun.failover.status_views import farewell
from unirun.failover.views import welcome, whole_view
from unirun.wire.aio import Stream, frame_of
from unirun.wire.messages import Ended, Grow, Message, View
from unirun.wire.reports import ViewWanted


class Visitors:
    """The streams of all visitors. `state` gives the present state, as far as it is stored; `apply` takes a step."""

    def __init__(self, state: Callable[[], JobState], apply: Callable[[Event], bool]) -> None:
        self._state, self._apply = state, apply
        self._streams: set[Stream] = set()

    async def follow(self, stream: Stream) -> None:
        """Serve a visitor until it leaves."""
        self._streams.add(stream)
        try:
            stream.send(welcome(self._view(), self._state().spec))
            if (end := farewell(self._state())) is not None:
                stream.send(end)
            while True:
                message = await stream.receive()
                if isinstance(message, ViewWanted):
                    stream.send(self._view())
                elif isinstance(message, Grow):
                    self._apply(message)
        except WireError:
            return
        finally:
            self._streams.discard(stream)

    def tell(self, message: View | Ended) -> None:
        """Send `message` to all of them."""
        tell_all(self._streams, message)

    def _view(self) -> View:
        state = self._state()
        return whole_view(state, state.told.number if state.told else 0)


def tell_all(streams: Collection[Stream], message: Message) -> None:
    """Send `message`, which is encoded once."""
    if streams:
        frame = frame_of(message)
        for stream in streams:
            stream.send_frame(frame)

"""A fake master: it listens on a master's socket, leads on request, and records what it receives."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from queue import Queue

from tests.waiting import WAIT_TIMEOUT
from unirun.errors import WireError
from unirun.observe.jobdir import JobDir
from unirun.rendezvous.creation import create_job
from unirun.rendezvous.election import Term, campaign, job_prefix
from unirun.rendezvous.store.protocol import Store
from unirun.rendezvous.store.url import open_store
from unirun.wire.address import UnixAddress
from unirun.wire.blocking import BlockingStream
from unirun.wire.handshake import ANSWER_SIZE, Handshake, Token, load_token, new_token
from unirun.wire.messages import Appointed
from unirun.wire.reports import Message
from unirun.wire.sockets import listen

Script = Callable[[BlockingStream], None]


class FakeMaster:
    """A master of `job`: on each stream it sends `first`, then runs `script`, then receives."""

    def __init__(
        self,
        job: JobDir,
        name: str = "first",
        *,
        first: Message | None = None,
        script: Script | None = None,
        token: Token | None = None,
    ) -> None:
        self.path = job.path / f"{name}.sock"
        self.heard: Queue[Message] = Queue()
        self._prefix = job_prefix(job.run_id)
        self._first, self._script = first, script
        self._token = token or load_token(job.token)
        self._listener = listen(self.path)
        self._streams: list[BlockingStream] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def lead(self, store: Store, *, deposing: int = 0, ttl: float = 60.0) -> Term:
        """Win the election; say so on every stream from now on."""
        term = campaign(
            store, self._prefix, UnixAddress.here(self.path), os.getpid(), ttl=ttl, deposing=deposing
        )
        assert term is not None
        self._first = self._first or Appointed(term.epoch)
        return term

    def die(self) -> None:
        """Stop listening and end every stream, as a killed process does; its socket file stays."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for stream in self._streams:
            with contextlib.suppress(OSError):
                stream.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(WAIT_TIMEOUT)
        assert not self._thread.is_alive()

    @property
    def visits(self) -> int:
        """The number of connections that it has had."""
        return len(self._streams)

    def _serve(self) -> None:
        threads = []
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                threads.append(threading.Thread(target=self._converse, args=(sock,)))
                threads[-1].start()
        for thread in threads:
            thread.join(WAIT_TIMEOUT)

    def _converse(self, sock: socket.socket) -> None:
        with BlockingStream(sock) as stream, contextlib.suppress(WireError, OSError):
            self._streams.append(stream)
            handshake = Handshake(self._token)
            sock.sendall(handshake.hello())
            sock.sendall(handshake.proof(sock.recv(ANSWER_SIZE, socket.MSG_WAITALL)))
            if self._first is not None:
                stream.send(self._first)
            if self._script is not None:
                self._script(stream)
            while True:
                self.heard.put(stream.receive())


class FakeJob:
    """A new job in ``$UNIRUN_HOME``, its store, and the fake masters."""

    def __init__(self) -> None:
        self.job_dir, self.lock = create_job("run-1", new_token())
        self.token = load_token(self.job_dir.token)
        self.store = open_store(self.job_dir.store_url)
        self._masters: list[FakeMaster] = []

    def master(
        self,
        name: str = "first",
        *,
        first: Message | None = None,
        script: Script | None = None,
        token: Token | None = None,
    ) -> FakeMaster:
        """Start a fake master that listens but does not lead yet."""
        self._masters.append(FakeMaster(self.job_dir, name, first=first, script=script, token=token))
        return self._masters[-1]

    def leader(self, name: str = "first", *, deposing: int = 0, script: Script | None = None) -> FakeMaster:
        """Start a fake master that leads."""
        master = self.master(name, script=script)
        master.lead(self.store, deposing=deposing)
        return master

    def let_go(self) -> None:
        """Release the job's lock."""
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1

    def __enter__(self) -> FakeJob:
        return self

    def __exit__(self, *_: object) -> None:
        for master in self._masters:
            master.die()
        self.store.close()
        self.let_go()

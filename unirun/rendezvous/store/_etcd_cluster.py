"""Calls to an etcd cluster, with failover between its members."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from unirun.errors import OutcomeUnknown, StoreAway, StoreError, StoreRefused
from unirun.rendezvous.store._etcd_errors import Verdict, explain, judge
from unirun.rendezvous.store._etcd_messages import message, message_class
from unirun.rendezvous.store._etcd_tls import credentials, diagnose
from unirun.rendezvous.store._grpc import grpc
from unirun.rendezvous.store.address import EtcdAddress
from unirun.values import Value

_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Keepalive detects a vanished member within 10 s, also on an idle watch. etcd rejects pings more often than every
    # 5 s (--grpc-keepalive-min-time). gRPC since about 1.60 uses the second of the two timeouts; its default is 60 s.
    ("grpc.keepalive_time_ms", 6_000),
    ("grpc.keepalive_timeout_ms", 4_000),
    ("grpc.http2.ping_timeout_ms", 4_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel must not inherit an old one's back-off
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)

_PAUSE = 0.05
"""Seconds before all members are tried again."""


class Login(Value):
    """A user of etcd. Its repr omits the password."""

    user: str
    password: str

    def __repr__(self) -> str:
        return f"Login(user={self.user!r})"


class Method(Value):
    """A method of etcd's API, and the type of its response."""

    path: str
    response: str


RANGE = Method("KV/Range", "RangeResponse")
TXN = Method("KV/Txn", "TxnResponse")
GRANT = Method("Lease/LeaseGrant", "LeaseGrantResponse")
REVOKE = Method("Lease/LeaseRevoke", "LeaseRevokeResponse")
# A streaming method, called as a unary one: a stream of one request is the same on the wire.
KEEP_ALIVE = Method("Lease/LeaseKeepAlive", "LeaseKeepAliveResponse")
WATCH = Method("Watch/Watch", "WatchResponse")
_AUTHENTICATE = Method("Auth/Authenticate", "AuthenticateResponse")


def range_end(prefix: bytes) -> bytes:
    """The end of the key range of `prefix`, which ends with ``/``."""
    return prefix[:-1] + b"0"


def serialize(request: Any) -> bytes:
    """Serialize a message."""
    return bytes(request.SerializeToString())


class Cluster:
    """Calls the member that answered last, and another one when it does not answer. Thread-safe."""

    def __init__(self, address: EtcdAddress, password: str | None) -> None:
        self.address = address
        self._login = Login(address.user, password) if address.user and password else None
        self._credentials = credentials(address)
        self._lock = threading.Lock()
        self._channels: dict[str, grpc.Channel] = {}
        self._channels_lock = threading.Lock()
        self._troubles: dict[str, str] = {}
        """The last error of each member that did not answer."""
        self._order = list(address.endpoints)
        self._member: str | None = None
        self._token: str | None = None
        self._closed = False
        self._pid = os.getpid()

    def call(self, method: Method, request: Any, *, repeatable: bool = True) -> Any:
        """Return the response of any member, within the timeout. Raises `StoreError`.

        A request that is not `repeatable` is sent once, and raises `OutcomeUnknown` when it is not answered.
        """
        deadline = time.monotonic() + self.address.timeout
        logins = 0
        while True:
            member = self.connect(deadline)
            token = self._token
            try:
                return self._send(member, method, request, self._share(deadline, repeatable))
            except grpc.RpcError as error:
                verdict = judge(error)
                if verdict is Verdict.LOGGED_OUT and self._login and not logins:
                    logins += 1
                    self._log_out(token)
                elif verdict in (Verdict.FINAL, Verdict.LOGGED_OUT):
                    raise explain(error, self.address) from error
                elif verdict is Verdict.UNKNOWN and not repeatable:
                    self.leave(member, error)
                    raise self._unknown(member, error) from error
                else:
                    self.leave(member, error)

    def connect(self, deadline: float | None = None) -> str:
        """Return a member that answers and has a quorum: the last one, or one found now. Raises `StoreError`."""
        self.check_open()
        member = self._member
        if member is not None:
            return member
        deadline = time.monotonic() + self.address.timeout if deadline is None else deadline
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise self._away()
        try:
            member = self._member  # another thread may have found it
            if member is None:
                member = self._member = self._find(deadline)
            return member
        finally:
            self._lock.release()

    def leave(self, member: str, error: grpc.RpcError) -> None:
        """Select another member for the next call, as this one did not answer."""
        self._troubles[member] = _say(error)
        if self._member == member:
            self._order = sorted(self._order, key=lambda endpoint: endpoint == member)  # tried last
            self._member = None

    def log_in_again(self) -> None:
        """Drop the token; the next call gets a new one."""
        if self._login:
            self._log_out(self._token)

    def stream(self, member: str, method: Method, requests: Any) -> Any:
        """Open a bidirectional stream to `member`."""
        try:
            rpc = self._channel(member).stream_stream(
                f"/etcdserverpb.{method.path}",
                request_serializer=serialize,
                response_deserializer=message_class(method.response).FromString,
            )
            return rpc(requests, metadata=self._metadata())
        except ValueError as error:
            raise self._closed_under_us() from error

    @property
    def is_inherited(self) -> bool:
        """True if this is a copy in a forked child, whose locks and connections cannot be used."""
        return self._pid != os.getpid()

    def close(self) -> None:
        """Close all connections; pending calls fail."""
        with self._channels_lock:
            self._closed = True
            channels = list(self._channels.values())
            self._channels.clear()
        for channel in channels:
            channel.close()

    def _find(self, deadline: float) -> str:
        """Try the members in turn. Raises `StoreAway` at the deadline, `StoreRefused` at once."""
        while True:
            order = tuple(self._order)
            for number, endpoint in enumerate(order):
                self.check_open()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._away()
                try:
                    self._greet(endpoint, left / (len(order) - number))
                    self._troubles.pop(endpoint, None)
                    return endpoint
                except grpc.RpcError as error:
                    if judge(error) in (Verdict.FINAL, Verdict.LOGGED_OUT):
                        raise explain(error, self.address) from error
                    self._troubles[endpoint] = _say(error)
                    self._drop(endpoint)
            for endpoint in order:
                left = deadline - time.monotonic()
                refused = diagnose(self.address, endpoint, min(1.0, left)) if left > 0 else None
                if refused:
                    raise refused
            time.sleep(_PAUSE)

    def _greet(self, endpoint: str, timeout: float) -> None:
        """Log in, and read under our prefix: this needs a quorum and permission."""
        prefix = self.address.prefix.encode()
        request = message("RangeRequest", key=prefix, range_end=range_end(prefix), limit=1, keys_only=True)
        for attempt in range(2):
            if self._login and self._token is None:
                login = message("AuthenticateRequest", name=self._login.user, password=self._login.password)
                self._token = self._send(endpoint, _AUTHENTICATE, login, timeout).token
            try:
                self._send(endpoint, RANGE, request, timeout)
                return
            except grpc.RpcError as error:
                if attempt or not self._login or judge(error) is not Verdict.LOGGED_OUT:
                    raise
                self._token = None

    def _send(self, member: str, method: Method, request: Any, timeout: float) -> Any:
        deadline = time.monotonic() + timeout
        while True:
            rpc = self._channel(member).unary_unary(
                f"/etcdserverpb.{method.path}",
                request_serializer=serialize,
                response_deserializer=message_class(method.response).FromString,
            )
            try:
                left = max(0.0, deadline - time.monotonic())
                return rpc(request, timeout=left, metadata=self._metadata())
            except ValueError as error:
                # Another thread found this member silent and closed the channel before anything was sent.
                if left == 0.0:
                    raise self._closed_under_us() from error

    def _share(self, deadline: float, repeatable: bool) -> float:
        """Seconds for one member: half of the remaining time when another one can be tried after it."""
        left = max(0.001, deadline - time.monotonic())
        return left / 2 if repeatable and len(self._order) > 1 else left

    def _channel(self, member: str) -> grpc.Channel:
        with self._channels_lock:
            self.check_open()
            channel = self._channels.get(member)
            if channel is None:
                if self._credentials is None:
                    channel = grpc.insecure_channel(member, options=_OPTIONS)
                else:
                    channel = grpc.secure_channel(member, self._credentials, options=_OPTIONS)
                self._channels[member] = channel
            return channel

    def _drop(self, member: str) -> None:
        """Close the channel, so that the next call connects without its back-off."""
        with self._channels_lock:
            channel = self._channels.pop(member, None)
        if channel is not None:
            channel.close()

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        leader = (("hasleader", "true"),)  # makes a member without a leader fail instead of block
        return (*leader, ("token", self._token)) if self._token else leader

    def _log_out(self, token: str | None) -> None:
        with self._lock:
            if self._token == token:  # else another thread has done it
                self._token = None
                self._member = None

    def check_open(self) -> None:
        """Raise `StoreError` when this was closed or is a copy in a forked child."""
        if self._closed:
            raise StoreAway("the store was closed", "open another one")
        if self.is_inherited:
            raise StoreRefused("the store was opened before a fork", "open it again in the child")

    def _closed_under_us(self) -> StoreError:
        return StoreAway(
            "the connection was closed by another thread", "call again, unless the store was closed"
        )

    def _away(self) -> StoreAway:
        where = ",".join(self.address.endpoints)
        why = "".join(f"\n  {endpoint}: {trouble}" for endpoint, trouble in self._troubles.items())
        return StoreAway(
            f"etcd at {where} has not answered for {self.address.timeout:g} s{why}",
            "see that it runs, and that its hosts can be reached from here: etcdctl endpoint health",
        )

    def _unknown(self, member: str, error: grpc.RpcError) -> OutcomeUnknown:
        return OutcomeUnknown(
            f"etcd at {member} has not answered a write: {_say(error)}",
            "read back whether it was done",
        )


def _say(error: grpc.RpcError) -> str:
    return f"{error.code().name.lower().replace('_', ' ')}: {error.details()}"

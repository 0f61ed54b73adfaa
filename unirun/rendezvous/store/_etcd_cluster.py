"""Calls to an etcd cluster, with failover between its members."""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from unirun.errors import LeaseExpired, OutcomeUnknown, StoreAway, StoreError, StoreRefused
from unirun.observe.jobdir import expanded
from unirun.rendezvous.store.protocol import EtcdAddress

__all__ = ["grpc"]


# Import gRPC with its log on stderr turned off: its errors have the same information.

# gRPC reads the variable at start and again in its threads, so it stays set. A user's own value is kept.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")


# Classify gRPC errors (may the call be repeated? was it applied?) and translate them to `StoreError`.

_ANOTHER_MEMBER = ("no leader", "not leader", "not supported for learner", "too many requests", "not capable")
"""Errors of a member that has not tried to apply the request."""

_LOGGED_OUT = ("auth store is old", "user name is empty")
"""Errors of a call without a valid token. The second one: another thread has just dropped it."""

_TOO_LARGE = ("request is too large", "too many operations", "message larger than max")


FailureKind = Literal["not done", "unknown", "logged out", "final"]
"""The outcome of a failed call. Not done: another member may be tried. Unknown: it may have been applied, or may be
applied later. Logged out: the token has expired, so the call is repeated after a login. Final: it was refused, and
repeating does not help."""


def judge(error: grpc.RpcError) -> FailureKind:
    """Classify the call that raised `error`."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAUTHENTICATED or any(words in details for words in _LOGGED_OUT):
        return "logged out"
    if any(f"etcdserver: {words}" in details or f"rpc {words}" in details for words in _ANOTHER_MEMBER):
        return "not done"
    if code is grpc.StatusCode.UNAVAILABLE and details.startswith("failed to connect to all addresses"):
        return "not done"  # the only text by which gRPC guarantees that nothing was sent
    if code in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.ABORTED,
    ):
        return "unknown"
    return "final"


def explain(error: grpc.RpcError, address: EtcdAddress) -> StoreError:
    """Translate the error of a call that is not repeated."""
    return explain_text(error.code(), error.details() or "", address)


def explain_text(code: grpc.StatusCode, details: str, address: EtcdAddress) -> StoreError:
    """Translate a status `code` and its `details`."""
    where, user = ",".join(address.endpoints), address.user
    if "lease not found" in details:
        return LeaseExpired("the lease is over")
    if "user name is empty" in details:
        return StoreRefused(
            f"etcd at {where} wants a user", "add user=NAME to the store's URL, and a password"
        )
    if "authentication failed" in details:
        return StoreRefused(
            f"etcd at {where} does not know the user {user} with this password",
            "check both; etcdctl user list",
        )
    if "authentication is not enabled" in details:
        return StoreRefused(
            f"etcd at {where} knows no users, and the store's URL names {user}",
            "leave user=… out, or turn it on: etcdctl auth enable",
        )
    if "permission denied" in details.lower():
        return StoreRefused(
            f"etcd at {where} does not let {user or 'this client'} read and write under {address.prefix}",
            f"etcdctl role grant-permission ROLE readwrite --prefix=true {address.prefix}",
        )
    if "database space exceeded" in details:
        return StoreError(
            f"etcd at {where} is full, and takes no more writes",
            "compact and defragment it, then: etcdctl alarm disarm",
        )
    if any(words in details for words in _TOO_LARGE):
        return StoreRefused(
            f"etcd at {where} takes smaller transactions only",
            "start it with the defaults of --max-request-bytes and --max-txn-ops, or more",
        )
    if code is grpc.StatusCode.DATA_LOSS:
        return StoreError(f"etcd at {where} is corrupt: {details}", "see etcd's guide to disaster recovery")
    name = code.name.lower().replace("_", " ")
    return StoreRefused(
        f"etcd at {where} refuses: {name}: {details}", "see what it logs; etcd 3.4 or later is needed"
    )


# TLS to etcd: load the files, and diagnose failed handshakes.
#
# gRPC only reports that it cannot connect. `diagnose` then repeats the handshake with Python's ssl, to get the reason.


def credentials(address: EtcdAddress) -> grpc.ChannelCredentials | None:
    """Load the credentials for gRPC; None without TLS. Raises `StoreRefused` for missing or invalid files."""
    if address.cacert is None:
        return None
    _context(address)
    cacert, key, cert = (
        expanded(name).read_bytes() if name else None for name in (address.cacert, address.key, address.cert)
    )
    return grpc.ssl_channel_credentials(cacert, key, cert)


def _context(address: EtcdAddress) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    names = [name for name in (address.cacert, address.cert, address.key) if name]
    files = [expanded(name) for name in names]
    for file in files:
        try:
            file.read_bytes()
        except OSError as error:
            raise StoreRefused(
                f"{file}, which the store's URL names, cannot be read: {error.strerror}",
                "see its path and owner",
            ) from error
    try:
        context.load_verify_locations(files[0])
        if address.cert:
            cert, key = files[1:]
            context.load_cert_chain(
                cert, key, ""
            )  # with no password argument OpenSSL would prompt on the terminal
    except (ssl.SSLError, ValueError) as error:
        raise StoreRefused(
            f"{', '.join(map(str, files))}: not a certificate authority, or not a certificate with its key"
            f" ({error})",
            "they have to be in PEM, and the key without a passphrase",
        ) from error
    return context


def diagnose(address: EtcdAddress, endpoint: str, timeout: float) -> StoreRefused | None:
    """Return why TLS with the server at `endpoint` fails, None when it has another problem."""
    host, _, port = endpoint.rpartition(":")
    host = host.strip("[]")
    where = (host, int(port))
    try:
        with socket.create_connection(where, timeout) as stream:
            if address.cacert is None:
                return _wants_tls(stream, endpoint)
            refused = _handshake(address, stream, host, endpoint)
        if refused is None:
            with socket.create_connection(where, timeout) as stream:
                refused = _speaks_plainly(stream, endpoint)
        return refused
    except OSError:
        return None  # not reachable


def _wants_tls(stream: socket.socket, endpoint: str) -> StoreRefused | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # Safe: nothing is sent over the connection.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        context.wrap_socket(stream).close()
    except OSError:
        return None
    return StoreRefused(
        f"etcd at {endpoint} speaks TLS, and the store's URL does not",
        "add cacert=FILE (who signed its certificate) to the URL",
    )


def _handshake(address: EtcdAddress, stream: socket.socket, host: str, endpoint: str) -> StoreRefused | None:
    try:
        with _context(address).wrap_socket(stream, server_hostname=host) as secure:
            secure.recv(1)  # in TLS 1.3 a server rejects a client certificate after the handshake
    except ssl.SSLCertVerificationError as error:
        return StoreRefused(
            f"the certificate of etcd at {endpoint} is not trusted: {error.verify_message}",
            "cacert=… has to be who signed it, and it has to name the host as the store's URL does",
        )
    except OSError as error:
        words = (getattr(error, "reason", None) or "").lower().replace("_", " ")
        if "certificate" not in words and "unknown ca" not in words:
            return None
        if address.cert is None:
            return StoreRefused(
                f"etcd at {endpoint} wants a client certificate", "add cert=FILE&key=FILE to the store's URL"
            )
        return StoreRefused(
            f"etcd at {endpoint} refuses the client certificate {address.cert}: {words}",
            "see who signed it, and until when it is valid:"
            f" openssl x509 -noout -issuer -dates -in {address.cert}",
        )
    return None


def _speaks_plainly(stream: socket.socket, endpoint: str) -> StoreRefused | None:
    """Detect HTTP/2 without TLS: the server first sends its settings, a frame of type 4 (RFC 9113, 3.4)."""
    stream.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
    if stream.recv(9)[3:4] != b"\x04":
        return None
    return StoreRefused(
        f"etcd at {endpoint} does not speak TLS", "leave cacert=… out, or start it with certificates"
    )


# The messages of etcd's v3 API, with the fields that unirun uses.
#
# From ``rpc.proto`` and ``kv.proto`` of etcd 3.4, whose field numbers never change. Generated modules are not used:
# they work with few versions of protobuf, and register global names such as ``rpc.proto``, so that a second etcd client
# in the same process would fail to import.

_PACKAGE = "etcdserverpb"

# name: field=number:type; "*" is a repeated field, "|" a oneof, so that 0 and "" are sent too.
_MESSAGES = """
ResponseHeader: revision=3:int64
KeyValue: key=1:bytes mod_revision=3:int64 value=5:bytes
Event: type=1:int32 kv=2:KeyValue
RangeRequest: key=1:bytes range_end=2:bytes limit=3:int64 keys_only=8:bool
RangeResponse: header=1:ResponseHeader kvs=2:*KeyValue
PutRequest: key=1:bytes value=2:bytes lease=3:int64
DeleteRangeRequest: key=1:bytes range_end=2:bytes
RequestOp: request_put=2:PutRequest request_delete_range=3:DeleteRangeRequest
Compare: result=1:int32 target=2:int32 key=3:bytes mod_revision=6:|int64 value=7:|bytes
TxnRequest: compare=1:*Compare success=2:*RequestOp
TxnResponse: header=1:ResponseHeader succeeded=2:bool
LeaseGrantRequest: TTL=1:int64
LeaseGrantResponse: ID=2:int64 TTL=3:int64
LeaseRevokeRequest: ID=1:int64
LeaseRevokeResponse: header=1:ResponseHeader
LeaseKeepAliveRequest: ID=1:int64
LeaseKeepAliveResponse: ID=2:int64 TTL=3:int64
WatchCreateRequest: key=1:bytes range_end=2:bytes start_revision=3:int64 progress_notify=4:bool fragment=8:bool
WatchRequest: create_request=1:WatchCreateRequest
WatchResponse: header=1:ResponseHeader created=3:bool canceled=4:bool compact_revision=5:int64 \
 cancel_reason=6:string fragment=7:bool events=11:*Event
AuthenticateRequest: name=1:string password=2:string
AuthenticateResponse: token=2:string
"""

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "bool": _Field.TYPE_BOOL,
    "bytes": _Field.TYPE_BYTES,
    "string": _Field.TYPE_STRING,
}


def _describe(line: str) -> descriptor_pb2.DescriptorProto:
    name, _, fields = line.partition(": ")
    message = descriptor_pb2.DescriptorProto(name=name)
    for field in fields.split():
        label, _, rest = field.partition("=")
        number, _, kind = rest.partition(":")
        described = message.field.add(name=label, number=int(number), label=_Field.LABEL_OPTIONAL)
        if kind.startswith("*"):
            described.label = _Field.LABEL_REPEATED
        if kind.startswith("|"):
            described.oneof_index = 0
        kind = kind.lstrip("*|")
        if kind in _SCALARS:
            described.type = _SCALARS[kind]
        else:
            described.type, described.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    if "|" in fields:
        message.oneof_decl.add(name="choice")
    return message


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="unirun/etcd.proto", package=_PACKAGE, syntax="proto3")
    file.message_type.extend(_describe(line) for line in _MESSAGES.strip().splitlines())
    # Not the default pool of the process: another etcd client may register the same names.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    classes: dict[str, Any] = message_factory.GetMessageClassesForFiles([file.name], pool)
    return classes


_CLASSES = _classes()


def message(name: str, /, **fields: Any) -> Any:
    """Build a message of the class `name`."""
    return message_class(name)(**fields)


def text(data: bytes) -> str:
    """Decode a key or a value. Raises `StoreRefused` when it is not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise StoreRefused(
            f"etcd holds {data[:80]!r}, which no unirun has written",
            "does the store's prefix belong to something else? choose another one",
        ) from error


def message_class(name: str) -> Any:
    """The class of the messages `name`."""
    return _CLASSES[f"{_PACKAGE}.{name}"]


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

_MEMBERS_RETRY_INTERVAL = 0.05
"""Seconds before all members are tried again."""

_GREETING_PATIENCE, _CALL_PATIENCE = 0.5, 1.0
"""Seconds that a member has at first, in a search and in a call, before another one is tried: its host may be gone.
Each further attempt has twice as long, as all members may be slow."""


RANGE, TXN = "KV/Range", "KV/Txn"
GRANT, REVOKE = "Lease/LeaseGrant", "Lease/LeaseRevoke"
KEEP_ALIVE = "Lease/LeaseKeepAlive"
"""A streaming method, called as a unary one: a stream of one request is the same on the wire."""
WATCH = "Watch/Watch"
_AUTHENTICATE = "Auth/Authenticate"


def range_end(prefix: bytes) -> bytes:
    """The end of the key range of `prefix`, which ends with ``/``."""
    return prefix[:-1] + b"0"


def _called(method: str) -> tuple[str, Callable[[Any], bytes], Callable[[bytes], Any]]:
    """The path of a method of etcd's API, a function that serializes its request, and one that reads its response."""
    response = f"{method.partition('/')[2]}Response"
    return (
        f"/etcdserverpb.{method}",
        lambda request: request.SerializeToString(),
        message_class(response).FromString,
    )


class Cluster:
    """Calls the member that answered last, and another one when it does not answer. Thread-safe."""

    def __init__(self, address: EtcdAddress, password: str | None) -> None:
        self.address = address

        def login() -> Any:
            return message("AuthenticateRequest", name=address.user, password=password)

        # A function, whose repr does not show the password.
        self._login = login if address.user and password else None
        self._credentials = credentials(address)
        self._lock = threading.Lock()
        self._channels: dict[str, grpc.Channel] = {}
        self._channels_lock = threading.Lock()
        self._troubles: dict[str, str] = {}
        """The last error of each member that did not answer."""
        self._order = sorted(address.endpoints, key=lambda endpoint: not _is_here(endpoint))
        self._member: str | None = None
        self._token: str | None = None
        self._closed = False
        self._pid = os.getpid()

    def call(self, method: str, request: Any, *, repeatable: bool = True) -> Any:
        """Return the response of any member, within the timeout. Raises `StoreError`.

        A request that is not `repeatable` is sent once, and raises `OutcomeUnknown` when it is not answered.
        """
        deadline = time.monotonic() + self.address.timeout
        logins, patience = 0, _CALL_PATIENCE
        while True:
            member = self.connect(deadline)
            token = self._token
            try:
                return self._send(member, method, request, self._share(deadline, repeatable, patience))
            except grpc.RpcError as error:
                verdict = judge(error)
                if verdict == "logged out" and self._login and not logins:
                    logins += 1
                    self._log_out(token)
                elif verdict in ("final", "logged out"):
                    raise explain(error, self.address) from error
                elif verdict == "unknown" and not repeatable:
                    self.leave(member, error)
                    raise self._unknown(member, error) from error
                else:
                    self.leave(member, error)
                    patience *= 2

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

    def stream(self, member: str, method: str, requests: Any) -> Any:
        """Open a bidirectional stream to `member`."""
        try:
            rpc = self._channel(member).stream_stream(*_called(method))
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
        patience = _GREETING_PATIENCE
        while True:
            order = tuple(self._order)
            for number, endpoint in enumerate(order):
                self.check_open()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._away()
                try:
                    share = left / (len(order) - number)
                    self._greet(endpoint, min(share, patience) if len(order) > 1 else share)
                    self._troubles.pop(endpoint, None)
                    return endpoint
                except grpc.RpcError as error:
                    if judge(error) in ("final", "logged out"):
                        raise explain(error, self.address) from error
                    self._troubles[endpoint] = _say(error)
                    self._drop(endpoint)
            for endpoint in order:
                left = deadline - time.monotonic()
                refused = diagnose(self.address, endpoint, min(1.0, left)) if left > 0 else None
                if refused:
                    raise refused
            time.sleep(_MEMBERS_RETRY_INTERVAL)
            patience *= 2

    def _greet(self, endpoint: str, timeout: float) -> None:
        """Log in, and read under our prefix: this needs a quorum and permission."""
        prefix = self.address.prefix.encode()
        request = message("RangeRequest", key=prefix, range_end=range_end(prefix), limit=1, keys_only=True)
        for attempt in range(2):
            if self._login and self._token is None:
                self._token = self._send(endpoint, _AUTHENTICATE, self._login(), timeout).token
            try:
                self._send(endpoint, RANGE, request, timeout)
                return
            except grpc.RpcError as error:
                if attempt or not self._login or judge(error) != "logged out":
                    raise
                self._token = None

    def _send(self, member: str, method: str, request: Any, timeout: float) -> Any:
        deadline = time.monotonic() + timeout
        while True:
            rpc = self._channel(member).unary_unary(*_called(method))
            try:
                left = max(0.0, deadline - time.monotonic())
                return rpc(request, timeout=left, metadata=self._metadata())
            except ValueError as error:
                # Another thread found this member silent and closed the channel before anything was sent.
                if left == 0.0:
                    raise self._closed_under_us() from error

    def _share(self, deadline: float, repeatable: bool, patience: float) -> float:
        """Seconds for one member: half of the remaining time at most when another one can be tried after it."""
        left = max(0.001, deadline - time.monotonic())
        return min(left / 2, patience) if repeatable and len(self._order) > 1 else left

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


def _is_here(endpoint: str) -> bool:
    """Return True if the address of a member is one of this host: that member does not go away without this host."""
    host = endpoint.rpartition(":")[0].strip("[]")
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            address = ipaddress.ip_address(host)
            probe.bind((str(address), 0))
    except (OSError, ValueError):
        # Also a name: looking it up may take long.
        return False
    return True


def _say(error: grpc.RpcError) -> str:
    return f"{error.code().name.lower().replace('_', ' ')}: {said(error.details() or '')}"


def said(details: str) -> str:
    """The `details` of gRPC about a call, without the steps of its connection: ``connection refused``."""
    _, refused, why = details.rpartition("Failed to connect to remote host: ")
    return why.lower() if refused else details

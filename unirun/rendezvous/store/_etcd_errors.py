"""Classify gRPC errors (may the call be repeated? was it applied?) and translate them to `StoreError`."""

from __future__ import annotations

from enum import Enum, auto

from unirun.errors import LeaseExpired, StoreBroken, StoreError, StoreRefused
from unirun.rendezvous.store._grpc import grpc
from unirun.rendezvous.store.address import EtcdAddress

_ANOTHER_MEMBER = ("no leader", "not leader", "not supported for learner", "too many requests", "not capable")
"""Errors of a member that has not tried to apply the request."""

_TOO_LARGE = ("request is too large", "too many operations", "message larger than max")


class Verdict(Enum):
    """The outcome of a failed call."""

    NOT_DONE = auto()
    """Not applied; try another member."""
    UNKNOWN = auto()
    """It may have been applied, or may be applied later."""
    LOGGED_OUT = auto()
    """The token has expired; log in and repeat."""
    FINAL = auto()
    """Refused; repeating does not help."""


def judge(error: grpc.RpcError) -> Verdict:
    """Classify the call that raised `error`."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAUTHENTICATED or "auth store is old" in details:
        return Verdict.LOGGED_OUT
    if any(f"etcdserver: {words}" in details or f"rpc {words}" in details for words in _ANOTHER_MEMBER):
        return Verdict.NOT_DONE
    if code is grpc.StatusCode.UNAVAILABLE and details.startswith("failed to connect to all addresses"):
        return Verdict.NOT_DONE  # the only text by which gRPC guarantees that nothing was sent
    if code in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.ABORTED,
    ):
        return Verdict.UNKNOWN
    return Verdict.FINAL


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
        return StoreBroken(
            f"etcd at {where} is full, and takes no more writes",
            "compact and defragment it, then: etcdctl alarm disarm",
        )
    if any(words in details for words in _TOO_LARGE):
        return StoreRefused(
            f"etcd at {where} takes smaller transactions only",
            "start it with the defaults of --max-request-bytes and --max-txn-ops, or more",
        )
    if code is grpc.StatusCode.DATA_LOSS:
        return StoreBroken(f"etcd at {where} is corrupt: {details}", "see etcd's guide to disaster recovery")
    name = code.name.lower().replace("_", " ")
    return StoreRefused(
        f"etcd at {where} refuses: {name}: {details}", "see what it logs; etcd 3.4 or later is needed"
    )

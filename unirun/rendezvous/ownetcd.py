"""``--store etcd``: an etcd of the job's own, with members on up to three of its nodes.

The job goes on when a node is lost, the head included, though nobody runs an etcd for it: of three members two are
enough. Members are processes of the nodes' agents, and end with them. Both ends of each connection have certificates
of the job (`unirun.wire.certificates`).
"""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Sequence

from unirun.errors import StoreError, UsageError
from unirun.observe.jobdir import HERE, JobDir
from unirun.rendezvous.store.url import anchored, open_store
from unirun.wire.credentials import AUTHORITY, CERTIFICATE, TLS_FOLDER
from unirun.wire.messages import EtcdMember, Offer

OWN = "etcd"
"""The value of ``--store`` that stands for this."""

MEMBERS = 3
"""With an even number as many would be lost as with one less."""

ETCD_START_TIMEOUT = 30.0
"""Seconds in which the members must have found each other."""

ETCD_POLL_INTERVAL = 0.1


def possible_member(node: str, addr: str) -> EtcdMember | None:
    """A member on this host, with ports at `addr` that are free now; None where etcd is not installed."""
    if shutil.which("etcd") is None:
        return None
    family = socket.AF_INET6 if ":" in addr else socket.AF_INET
    with socket.socket(family) as client, socket.socket(family) as peer:
        for sock in (client, peer):
            sock.bind((addr, 0))
        return EtcdMember(node, addr, client.getsockname()[1], peer.getsockname()[1])


def choose_members(able: Sequence[EtcdMember]) -> tuple[EtcdMember, ...]:
    """The members among nodes that can run one: three, or one. Raises `UsageError`."""
    if not able:
        raise UsageError("--store etcd: no node has the program etcd", "install etcd-server on three of them")
    return tuple(able[: MEMBERS if len(able) >= MEMBERS else 1])


def store_for(
    store: str | None, offers: Sequence[Offer], *, insecure: bool
) -> tuple[str | None, tuple[EtcdMember, ...]]:
    """The URL of the store that ``--store`` means for a job on hosts with these `offers`, and the members to start.
    Raises `UsageError`."""
    if store != OWN:
        return (anchored(store) if store is not None else None), ()
    members = choose_members([each.etcd for each in offers if each.etcd is not None])
    return url_of(members, insecure=insecure), members


def url_of(members: Sequence[EtcdMember], *, insecure: bool) -> str:
    """The URL of the store, the same on all hosts: `JobDir.store_url` puts the job's directory into it."""
    endpoints = ",".join(_place(each.addr, each.client) for each in members)
    tls, node = f"{HERE}/{TLS_FOLDER}/{AUTHORITY}", f"{HERE}/{TLS_FOLDER}/{CERTIFICATE}"
    return f"etcd://{endpoints}" + ("" if insecure else f"?cacert={tls}&cert={node}&key={node}")


def command_of(members: Sequence[EtcdMember], me: EtcdMember, job: JobDir, *, insecure: bool) -> list[str]:
    """The command that runs the member `me`. Its data is in the directory `job`."""
    scheme = "http" if insecure else "https"

    def url(addr: str, port: int) -> str:
        return f"{scheme}://{_place(addr, port)}"

    client, peer = url(me.addr, me.client), url(me.addr, me.peer)
    tls = job.path / TLS_FOLDER
    files = (
        ("trusted-ca-file", tls / AUTHORITY),
        ("cert-file", tls / CERTIFICATE),
        ("key-file", tls / CERTIFICATE),
    )
    secure = [f"--{prefix}{name}={file}" for prefix in ("", "peer-") for name, file in files]
    return [
        "etcd",
        f"--name={me.node}",
        f"--data-dir={job.path / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        "--initial-cluster=" + ",".join(f"{each.node}={url(each.addr, each.peer)}" for each in members),
        f"--initial-cluster-token={job.uid}",
        *([] if insecure else [*secure, "--client-cert-auth", "--peer-client-cert-auth"]),
    ]


def wait_until_up(url: str) -> None:
    """Wait until the members answer. Raises `StoreError` after `ETCD_START_TIMEOUT` seconds."""
    end = time.monotonic() + ETCD_START_TIMEOUT
    while True:
        try:
            store = open_store(url)
            try:
                store.get("up")
            finally:
                store.close()
            return
        except StoreError:
            if time.monotonic() > end:
                raise
        time.sleep(ETCD_POLL_INTERVAL)


def _place(addr: str, port: int) -> str:
    return f"[{addr}]:{port}" if ":" in addr else f"{addr}:{port}"

"""A guard of the routes by which weights come into a vLLM server: processes of its own host alone may call them.

A vLLM server takes weights with ``VLLM_SERVER_DEV_MODE=1`` alone. That adds routes by which a caller stops the server
(``/pause``), changes its weights (``/update_weights``), or has its workers call any of their methods
(``/collective_rpc``).
``VLLM_API_KEY`` does not close them: it is asked for below ``/v1``, ``/v2``, ``/inference`` and ``/cohere``. So engines
that receive weights are started with ::

    vllm serve … --middleware unirun.weights.integrations.vllm_guard.SameHost

vLLM 0.32.0 adds such a class as the outermost layer: requests reach it before they are asked for a key.

* A connection that comes from an address of this host is one of a process of this host: no other can be made from
  there. Other network namespaces, as those of containers, are other hosts. Every user of the host is let in.
* ``X-Forwarded-For`` opens nothing. uvicorn takes the client's address from it if a proxy on 127.0.0.1 or ::1 sends it,
  or one that ``FORWARDED_ALLOW_IPS`` names; where that is ``*``, everyone can give an address of this host. So a
  request that was forwarded is taken for one of another host, whatever it says. A proxy on this host that
  forwards every path, and adds none of these headers, lets everyone in.
* A client that has gone has no address (``None``): it may have reset its connection just after the request. Such a
  request is taken for one of another host, too. One over a unix socket, which has none either, is of this host.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = frozenset(
    (
        *("/health", "/ping", "/version", "/load", "/kv_event_sources", "/metrics"),
        *("/tokenize", "/detokenize", "/tokenizer_info"),
        *("/invocations", "/adapters", "/pooling", "/classify", "/score", "/rerank", "/generative_scoring"),
        *("/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"),
        # vLLM has these only if its arguments ask for them.
        *("/start_profile", "/stop_profile", "/fault_tolerance/apply", "/fault_tolerance/status"),
        *("/scale_elastic_ep", "/is_scaling_elastic_ep"),
    )
)
OPEN_BELOW = ("/v1/", "/v2/", "/inference/", "/cohere/", "/adapters/", "/metrics/", "/static/")
"""The routes that vLLM 0.32.0 has without ``VLLM_SERVER_DEV_MODE``. All others are closed to other hosts: those of
developers, and those that a plugin or a later version adds."""

FORWARDED = frozenset((b"forwarded", b"via", b"x-forwarded-for", b"x-real-ip"))
"""Headers that proxies add, and unirun's companion does not."""

CLOSED = (
    "{path} is closed to other hosts, as this server receives weights, and {caller}; "
    "call it from a process of the server's own host, without a proxy"
)


class SameHost:
    """An ASGI application: `app`, whose routes for developers only processes of this host may call. Others get 403."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or is_open(route(scope)) or not (caller := stranger(scope)):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            # Before the connection is accepted: the server answers 403.
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _refuse(CLOSED.format(path=scope["path"], caller=caller), send)


def route(scope: Scope) -> str:
    """The path that Starlette looks for among its routes: that of the request below ``--root-path``."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    rest = path.removeprefix(root)
    return rest if root and (not rest or rest.startswith("/")) else path


def is_open(path: str) -> bool:
    """Return True for the routes that other hosts may call."""
    return path in OPEN or path.startswith(OPEN_BELOW)


def stranger(scope: Scope) -> str:
    """Return words about a caller that is no process of this host; empty for one that is."""
    client, server = scope.get("client"), scope.get("server")
    if any(name in FORWARDED for name, _ in scope["headers"]):
        return "the request came through a proxy"
    if client is None:
        on_a_path = server is not None and server[1] is None  # A unix socket has no port.
        return "" if on_a_path else "the client has gone"
    address = _address(client[0])
    if address is not None:
        if address.is_loopback or (server is not None and address == _address(server[0])):
            return ""
        # Linux connects to a second IPv4 address of an interface from the first one.
        if address in _own_addresses():
            return ""
    return f"the request came from {client[0]}"


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """An address; ``::ffff:10.0.0.1`` is 10.0.0.1. None: it is none."""
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found


def _own_addresses() -> Iterator[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The addresses of all interfaces."""
    import psutil

    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            address = _address(entry.address)  # That of a link layer is none.
            if address is not None:
                yield address


async def _refuse(message: str, send: Send) -> None:
    # The form of vLLM's own errors.
    error = {"message": message, "type": "Forbidden", "param": None, "code": 403}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": body})

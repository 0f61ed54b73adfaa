"""Routes for developers of a server that receives weights: processes of its host alone may call them."""

from __future__ import annotations

import asyncio
import json
import socket
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from unirun.weights.integrations.vllm_guard import Message, Receive, SameHost, Scope, Send

SERVER = ("10.0.0.1", 8000)
ELSEWHERE = ("10.0.0.9", 40000)


@pytest.fixture(autouse=True)
def addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """This host has two addresses on one interface, beside that of the link layer, and one that is valid on a link."""

    def entry(family: int, address: str) -> SimpleNamespace:
        return SimpleNamespace(family=family, address=address)

    entries = [
        entry(psutil.AF_LINK, "02:00:00:00:00:01"),
        *(entry(socket.AF_INET, address) for address in ("10.0.0.1", "10.0.0.2")),
        entry(socket.AF_INET6, "fe80::1%eth0"),
    ]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": entries})


def sent(scope: Scope) -> list[Message]:
    """All that the guard sends, or ``passed`` from the application behind it."""
    messages: list[Message] = []

    async def application(given: Scope, receives: Receive, sends: Send) -> None:
        assert (given, receives) == (scope, receive)
        await sends({"type": "passed"})

    async def receive() -> Message:
        raise AssertionError("the guard reads nothing of a request")

    async def send(message: Message) -> None:
        messages.append(message)

    asyncio.run(SameHost(application)(scope, receive, send))
    return messages


def request(path: str = "/pause", client: Any = ELSEWHERE, server: Any = SERVER, **more: Any) -> Scope:
    return {"type": "http", "path": path, "headers": [], "client": client, "server": server, **more}


def passes(scope: Scope) -> bool:
    return sent(scope) == [{"type": "passed"}]


def reason(scope: Scope) -> str:
    """The words of the refusal, which is complete."""
    start, body = sent(scope)
    length = str(len(body["body"])).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", length)]
    assert start == {"type": "http.response.start", "status": 403, "headers": headers}
    assert body["type"] == "http.response.body"
    error = json.loads(body["body"])["error"]
    assert error == {"message": error["message"], "type": "Forbidden", "param": None, "code": 403}
    return str(error["message"])


@pytest.mark.parametrize(
    ("client", "server"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.2", "127.0.0.1"),
        ("::1", "::1"),
        ("::ffff:127.0.0.1", "::ffff:127.0.0.1"),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("10.0.0.1", "10.0.0.2"),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2"),
        ("fe80::1%eth0", "fe80::1%eth0"),
        ("10.0.0.77", "10.0.0.77"),
    ],
)
def test_a_process_of_the_host_calls_every_route(client: str, server: str) -> None:
    assert passes(request("/collective_rpc", (client, 40000), (server, 8000)))


@pytest.mark.parametrize(
    "client",
    ["10.0.0.9", "::ffff:10.0.0.9", "fe80::2%eth0", "2001:db8::1", "02:00:00:00:00:01", "unknown", ""],
)
def test_another_host_calls_no_route_of_developers(client: str) -> None:
    assert reason(request("/pause", (client, 40000))) == (
        "/pause is closed to other hosts, as this server receives weights, and "
        f"the request came from {client}; call it from a process of the server's own host, without a proxy"
    )


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/completions", "/inference/v1/generate"])
def test_another_host_calls_the_routes_of_a_server_in_production(path: str) -> None:
    assert passes(request(path))


@pytest.mark.parametrize(
    "path",
    ["", "/", "/v1", "/v", "/pause/", "/pause\n", "//pause", "/health/", "/healthy", "/a/v1/pause", "pause"],
)
def test_a_route_that_is_not_known_is_closed(path: str) -> None:
    assert "closed to other hosts" in reason(request(path))


@pytest.mark.parametrize(
    ("root", "path", "is_open"),
    [
        ("/api", "/api/health", True),
        ("/api", "/api/pause", False),
        ("/api", "/health", True),
        ("/api", "/api", False),
        # What Starlette takes for /pause is that here, too.
        ("/v1", "/v1/pause", False),
        ("/v1", "/v1/v1/models", True),
        ("/v", "/v1/models", True),
    ],
)
def test_a_path_below_a_root_is_what_follows_it(root: str, path: str, is_open: bool) -> None:
    assert passes(request(path, root_path=root)) == is_open


@pytest.mark.parametrize("header", ["x-forwarded-for", "forwarded", "via", "x-real-ip"])
def test_a_request_that_was_forwarded_is_of_another_host_whatever_it_says(header: str) -> None:
    forwarded: dict[str, Any] = {"headers": [(b"host", b"h"), (header.encode(), b"127.0.0.1")]}
    assert "came through a proxy" in reason(request(client=("127.0.0.1", 0), **forwarded))
    assert passes(request("/v1/completions", **forwarded))


def test_a_client_that_has_gone_is_of_another_host_and_one_of_a_unix_socket_of_this_one() -> None:
    assert "the client has gone" in reason(request(client=None))
    assert "the client has gone" in reason(request(client=None, server=None))
    assert passes(request(client=None, server=("/run/vllm.sock", None)))


def test_a_websocket_is_closed_before_it_is_accepted() -> None:
    assert sent(request(type="websocket")) == [{"type": "websocket.close", "code": 1008}]
    assert passes(request("/v1/realtime", type="websocket"))
    assert passes(request(client=SERVER, type="websocket"))


def test_the_start_and_the_end_of_a_server_pass() -> None:
    assert passes({"type": "lifespan"})

"""The guard of the page lets in its own browser, and nobody else."""

from __future__ import annotations

import pytest

from unirun.dashboard.guarding import Guard, foreign

PORT = 8123
HERE = {"host": f"127.0.0.1:{PORT}"}


def cookie(guard: Guard) -> str:
    return guard.cookie(PORT).partition(";")[0]


def code(guard: Guard, method: str = "GET", *, metrics: bool = False, **headers: str) -> int | None:
    given = {**HERE, **{name.replace("_", "-"): value for name, value in headers.items()}}
    refused = guard.refusal(method, given, PORT, metrics=metrics)
    return None if refused is None else refused.code


def test_nobody_is_let_in_without_a_cookie_or_with_another_one() -> None:
    guard = Guard("s")
    assert code(guard) == 401
    assert code(guard, cookie=f"unirun-{PORT}=") == 401
    assert code(guard, cookie=cookie(Guard("s"))) == 401
    assert code(guard, cookie=cookie(guard)) is None


def test_a_link_counts_once_and_an_older_one_not_at_all() -> None:
    guard = Guard("s")
    first = guard.new_link()
    second = guard.new_link()
    assert not guard.takes("")
    assert not guard.takes(first)
    assert guard.takes(second)
    assert not guard.takes(second)


def test_the_cookie_is_for_this_page_alone() -> None:
    flags = Guard("s").cookie(PORT).split("; ")[1:]
    assert {"HttpOnly", "SameSite=Strict"} <= {*flags}


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8123", "127.0.0.1.evil.example", "", "localhost.evil"]
)
def test_a_name_that_was_bound_to_this_host_is_refused(host: str) -> None:
    guard = Guard("s")
    assert code(guard, host=host, cookie=cookie(guard)) == 421
    assert foreign("GET", {"host": host}, link=True) is not None


@pytest.mark.parametrize("host", ["localhost:9", "127.0.0.1", "[::1]:8123", "LOCALHOST:1"])
def test_the_port_may_be_that_of_a_tunnel(host: str) -> None:
    guard = Guard("s")
    assert code(guard, host=host, cookie=cookie(guard)) is None


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:1", "https://127.0.0.1:8123"]
)
def test_a_request_of_another_site_is_refused(origin: str) -> None:
    guard = Guard("s")
    assert code(guard, origin=origin, cookie=cookie(guard)) == 403
    assert code(guard, origin=f"http://127.0.0.1:{PORT}", cookie=cookie(guard)) is None


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_browser_that_says_where_a_request_comes_from_is_believed(site: str) -> None:
    guard = Guard("s")
    assert code(guard, sec_fetch_site=site, cookie=cookie(guard)) == 403
    assert foreign("GET", {**HERE, "sec-fetch-site": site}, link=True) is None


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_requests_only_read(method: str) -> None:
    guard = Guard("s")
    assert code(guard, method, cookie=cookie(guard)) == 405


def test_a_program_reads_metrics_and_nothing_else_with_its_token() -> None:
    guard = Guard("secret")
    assert code(guard, metrics=True, authorization="Bearer secret") is None
    assert code(guard, metrics=True, authorization="Bearer secre") == 401
    assert code(guard, metrics=True, authorization="Basic secret") == 401
    assert code(guard, authorization="Bearer secret") == 401


def test_a_browser_may_be_let_in_by_servers_of_several_ports() -> None:
    """Cookies of one host are shared by all of its ports."""
    guards = {port: Guard("scrape") for port in (1, 2)}
    held = dict(guard.cookie(port).partition(";")[0].split("=", 1) for port, guard in guards.items())
    headers = {"host": "localhost:1", "cookie": "; ".join(f"{name}={value}" for name, value in held.items())}
    for port, guard in guards.items():
        assert guard.refusal("GET", headers, port, metrics=False) is None

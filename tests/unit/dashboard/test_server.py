"""The server of the page, as browsers and attackers meet it, on a real socket of this process."""

from __future__ import annotations

import asyncio
import fcntl
import http.client
import json
import os
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from copy import deepcopy
from http.client import HTTPResponse
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, urlencode

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st

from tests.effort import examples
from tests.unit.dashboard.recorded import MARKUP, record, recorded_status
from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.dashboard import server
from unirun.dashboard.server import KEEPALIVE_SECONDS, Guard, PageServer, _job_news, foreign, listen
from unirun.dashboard.views import Plain
from unirun.dashboard.watching import Jobs, WatchedJob
from unirun.errors import UsageError
from unirun.observe.events import EventLog
from unirun.observe.status import write_status


class Site:
    """A server in a thread, and requests to it."""

    def __init__(self) -> None:
        self.links: list[str] = []
        self._listener = listen(0)
        self.server = PageServer(Jobs(), self._listener, "scrape", self.links.append)
        self.port = self.server.port
        self.server._new_link()
        config = uvicorn.Config(
            self.server.app(), log_level="error", lifespan="off", ws="none", timeout_graceful_shutdown=1
        )
        self._uvicorn = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._uvicorn.run, kwargs={"sockets": [self._listener]})
        self._thread.start()
        eventually(lambda: self._uvicorn.started)

    def close(self) -> None:
        """End it."""
        self._uvicorn.should_exit = True
        self._thread.join(WAIT_TIMEOUT)
        self._listener.close()

    def connect(self, path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
        """The answer to a request, whose body is not read yet."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_TIMEOUT)
        connection.request(
            method, path, headers={name.replace("_", "-"): value for name, value in headers.items()}
        )
        return connection.getresponse()

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
        """The code and the text of an answer."""
        answer = self.connect(path, method, **headers)
        return answer.status, answer.read().decode()

    def enter(self) -> str:
        """The cookie that the last link becomes."""
        answer = self.connect("/" + self.links[-1].partition("/?")[2].join(("?", "")))
        answer.read()
        assert answer.status == 200
        return str(answer.getheader("set-cookie")).partition(";")[0]


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.close()


PATHS = (
    "/",
    "/page.js",
    "/api/jobs",
    "/api/jobs/job-1",
    "/api/jobs/job-1/live",
    "/api/live",
    "/metrics",
    "/none",
)


def test_nothing_is_given_without_a_cookie_or_with_a_wrong_token(site: Site) -> None:
    record("job-1")
    for path in PATHS:
        assert site.ask(path)[0] == 401
        assert site.ask(path, cookie=f"unirun-{site.port}=guess")[0] == 401
    assert site.ask("/?token=guess")[0] == 401
    assert site.ask("/?token=")[0] == 401


def test_a_link_counts_once_and_another_one_is_announced(site: Site) -> None:
    first = site.links[-1]
    cookie = site.enter()
    path = first[first.index("/?") :]
    assert site.ask(path)[0] == 401
    assert site.ask("/api/jobs", cookie=cookie)[0] == 200
    assert len(site.links) == 2
    assert site.enter() == cookie


def test_other_names_and_other_sites_get_nothing(site: Site) -> None:
    cookie = site.enter()
    assert site.ask("/api/jobs", cookie=cookie, host="evil.example")[0] == 421
    assert site.ask("/api/jobs", cookie=cookie, origin="http://evil.example")[0] == 403
    assert site.ask("/api/jobs", cookie=cookie, sec_fetch_site="cross-site")[0] == 403
    assert site.ask("/api/jobs", "POST", cookie=cookie)[0] == 405
    assert site.ask(f"/?{site.links[-1].partition('?')[2]}", host="evil.example")[0] == 421
    headers = site.connect("/api/jobs", cookie=cookie).getheaders()
    assert not [name for name, _ in headers if name.lower().startswith("access-control")]


def test_no_path_leads_to_another_file(site: Site) -> None:
    job = record("job-1")
    cookie = site.enter()
    secret = job.token.read_text()
    log = "attempt=0&folder=0&incarnation=0"
    for path in (
        "/../../token",
        "/%2e%2e/%2e%2e/token",
        "/static/../server.py",
        "/api/jobs/..%2f..%2fjobs%2fjob-1",
        "/api/jobs/../job-1/token",
        f"/api/jobs/job-1/log?role=../..&rank=0&{log}&stream=stdout",
        f"/api/jobs/job-1/log?role=actor&rank=../..&{log}&stream=stdout",
        f"/api/jobs/job-1/log?role=actor&rank=0&{log}&stream=..%2f..%2f..%2f..%2ftoken",
        "/api/jobs/job-1/log?role=actor&rank=0&attempt=0&folder=0&incarnation=..&stream=stdout",
        f"/api/jobs/job-1/log?role=actor%00&rank=0&{log}&stream=stdout",
        f"/api/jobs/job-1/log?role=actor&rank=99999999999999999999&{log}&stream=stdout",
    ):
        code, text = site.ask(path, cookie=cookie)
        assert code == 404
        assert secret not in text


def test_markup_of_a_job_is_data_and_no_page(site: Site) -> None:
    record("job-1")
    cookie = site.enter()
    for path in (
        "failures",
        "metrics",
        "log?role=actor&rank=0&attempt=0&folder=0&incarnation=0&stream=stdout",
    ):
        answer = site.connect(f"/api/jobs/job-1/{path}", cookie=cookie)
        text = answer.read().decode()
        assert answer.getheader("content-type") == "application/json"
        assert answer.getheader("x-content-type-options") == "nosniff"
        assert MARKUP in json.dumps(json.loads(text), ensure_ascii=False)
    policy = str(site.connect("/", cookie=cookie).getheader("content-security-policy"))
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    answer = site.connect("/api/jobs/%3Cimg%20src%3Dx%3E", cookie=cookie)
    assert (answer.status, answer.getheader("content-type")) == (404, "text/plain; charset=utf-8")


def test_the_page_is_small_and_asks_no_other_host(site: Site) -> None:
    cookie = site.enter()
    texts = [
        site.ask(path, cookie=cookie)[1]
        for path in ("/", "/style.css", "/uplot.css", "/uplot.js", "/page.js", "/views.js", "/charts.js")
    ]
    assert sum(map(len, texts)) < 1_000_000
    assert not [text for text in texts if 'src="http' in text or 'href="http' in text or "url(http" in text]


def news_of(answer: HTTPResponse) -> dict[str, Any]:
    """The next news of a stream."""
    while not (found := answer.readline()).startswith(b"data: "):
        assert found
    return dict(json.loads(found.removeprefix(b"data: ")))


def test_what_changes_comes_by_itself(site: Site) -> None:
    job = record("job-1", phase="running")
    answer = site.connect("/api/jobs/job-1/live", cookie=site.enter())
    assert answer.getheader("content-type", "").startswith("text/event-stream")
    assert "all" in str(news_of(answer))
    write_status(job, recorded_status("job-1", 4, "succeeded"))
    news = news_of(answer)
    assert "succeeded" in json.dumps(news["change"])
    answer.close()


def test_a_page_that_connects_again_gets_the_events_from_then_on(site: Site) -> None:
    job = record("job-1", phase="running")
    cookie = site.enter()
    with closing(EventLog(job.events, 2)) as log:
        log.write("decision", "before the page")
        _, overview = site.ask("/api/jobs/job-1", cookie=cookie)
        number = json.loads(overview)["all"]
        log.write("decision", "before it connects")
        answer = site.connect(f"/api/jobs/job-1/live?after={number}", cookie=cookie)
        assert answer.readline() == b"id: %d\n" % (number + 1)
        assert [each["text"] for each in news_of(answer)["events"]] == ["before it connects"]
        answer.close()
        log.write("decision", "while it sleeps")
        answer = site.connect(
            f"/api/jobs/job-1/live?after={number}", cookie=cookie, last_event_id=str(number + 1)
        )
        assert [each["text"] for each in news_of(answer)["events"]] == ["while it sleeps"]
        answer.close()


@pytest.mark.parametrize("number", ["9" * 5000, "\u00b2", "\u0663", "-1", "1_0", "", "x"])
def test_what_is_no_number_asks_for_all_events(site: Site, number: str) -> None:
    record("job-1", phase="running")
    cookie = site.enter()
    answer = site.connect(f"/api/jobs/job-1/live?after={quote(number)}", cookie=cookie)
    assert answer.status == 200
    answer.readline()
    assert len(news_of(answer)["events"]) > 1
    answer.close()
    for name in ("rank", "before", "after", "attempt", "folder", "incarnation"):
        numbers = {"rank": "0", "attempt": "0", "folder": "0", "incarnation": "0", name: number}
        path = f"/api/jobs/job-1/log?role=actor&stream=stdout&{urlencode(numbers)}"
        assert site.ask(path, cookie=cookie)[0] == 404, name


def test_the_loss_of_a_job_that_changes_no_file_comes_by_itself(site: Site) -> None:
    job = record("job-1", phase="running")
    handle = os.open(job.lock, os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)
    answer = site.connect("/api/jobs/job-1/live", cookie=site.enter())
    assert '"phase": "running"' in json.dumps(news_of(answer))
    os.close(handle)
    while '"phase": "lost"' not in json.dumps(news_of(answer)):
        pass
    answer.close()


def test_two_pages_are_told_of_the_loss_of_a_job() -> None:
    job = record("job-1", phase="running")

    async def look_twice() -> None:
        watched = WatchedJob(job)
        pages = [_job_news(watched, 0) for _ in range(2)]
        handle = os.open(job.lock, os.O_RDWR)
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert ["running" in str(await anext(page)) for page in pages] == [True, True]
        os.close(handle)
        # The second look comes after the first has read the status.
        assert ["lost" in str(await anext(page)) for page in pages] == [True, True]

    asyncio.run(look_twice())


def test_the_list_of_jobs_is_sent_when_it_is_another_one(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LIST_SECONDS", 0.0)
    looks: list[tuple[str, ...]] = [(), (), ("job-1",), ("job-1",), ("job-1", "job-2"), ("job-1", "job-2")]

    async def look() -> list[list[str] | None]:
        news, found = site.server._list_news(), []
        made: set[str] = set()
        for there in looks:
            for run_id in {*there} - made:
                record(run_id)
                made.add(run_id)
            got = await anext(news)
            found.append(None if got is None else sorted(each["run_id"] for each in got["jobs"]))
        return found

    assert asyncio.run(look()) == [[], None, ["job-1"], None, ["job-1", "job-2"], None]


NUMBERED = st.lists(st.tuples(*[st.integers(0, 2)] * 3), min_size=1, max_size=8)
"""For each look at a job: a field of it, and a field of each of two ranks."""


@examples(30)
@given(NUMBERED)
def test_a_page_that_puts_changes_into_what_it_shows_shows_the_job_as_it_is(
    looks: list[tuple[int, int, int]],
) -> None:
    def view(look: tuple[int, int, int]) -> Plain:
        ranks = [{"step": each} for each in look[1:]]
        return {"nodes": [], "phase": look[0], "roles": [{"name": "actor", "ranks": ranks}]}

    left, now = iter(looks), looks[0]
    job: Any = SimpleNamespace(
        stamp=lambda: object(), view=lambda: view(now), events_since=lambda number: ([], number)
    )

    async def follow() -> None:
        nonlocal now
        shown: Plain = {}
        page = _job_news(job, 0)
        for now in left:
            news = await anext(page)
            assert news is not None
            change = news["change"] or {"fields": {}, "roles": {}}
            shown = deepcopy(change.get("all", shown))
            shown |= change.get("fields", {})
            for rank, row in change.get("roles", {}).get("actor", {"ranks": {}})["ranks"].items():
                shown["roles"][0]["ranks"][int(rank)] = row
            assert shown == view(now)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "LOOK_SECONDS", 0.0)
        patch.setattr(server, "LOOK_SHARE", 0)
        asyncio.run(follow())


def test_the_news_of_a_job_end_when_another_one_takes_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    job = record("job-1")
    watched = WatchedJob(job)
    monkeypatch.setattr(server, "LOOK_SECONDS", 0.0)

    async def told() -> list[dict[str, Any] | str | None]:
        page = _job_news(watched, 0)
        await anext(page)
        shutil.rmtree(job.path)
        record("job-1")
        return [await anext(page, "the end") for _ in range(2)]

    assert asyncio.run(told()) == [
        {"gone": "job job-1 is gone; another one may have taken its id"},
        "the end",
    ]


class Crowd:
    """A lock of a job. Whenever it is free, another viewer is the first to read the next of some new events."""

    def __init__(self, watched: WatchedJob, log: EventLog, texts: Iterator[str]) -> None:
        self._lock, self._watched, self._log, self._texts = threading.Lock(), watched, log, texts
        self._reads = False

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if not self._reads and (text := next(self._texts, None)):
            self._reads = True
            self._log.write("decision", text)
            self._watched.events()
            self._reads = False


def test_a_page_gets_each_event_once_whoever_reads_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    job = record("job-1")
    watched, log = WatchedJob(job), EventLog(job.events, 2)
    texts = [f"event {number}" for number in range(8)]
    monkeypatch.setattr(server, "LOOK_SECONDS", 0.0)

    async def shown() -> list[str]:
        page = _job_news(watched, 0)
        await anext(page)
        log.write("decision", texts[0])
        monkeypatch.setattr(watched, "_lock", Crowd(watched, log, iter(texts[1:])))
        news = [await anext(page) for _ in range(len(texts) + 1)]
        return [event["text"] for each in news if each is not None for event in each["events"]]

    with closing(log):
        assert asyncio.run(shown()) == texts


def test_metrics_are_read_with_the_token_of_programs(site: Site) -> None:
    record("job-1", phase="running")
    code, text = site.ask("/metrics", authorization="Bearer scrape")
    assert (code, text.endswith("# EOF\n")) == (200, True)
    assert site.ask("/metrics", authorization="Bearer guess")[0] == 401


def test_a_port_that_is_in_use_is_refused() -> None:
    with listen(0) as taken:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(UsageError, match="choose another --port") as refused:
            listen(taken.getsockname()[1])
        assert len(os.listdir("/proc/self/fd")) == before, f"{refused} keeps no socket open"


@given(
    st.lists(
        st.tuples(st.integers(0, 2 * int(KEEPALIVE_SECONDS)), st.none() | st.integers(0, 9)), max_size=20
    )
)
def test_a_stream_without_news_says_something_now_and_then(looks: list[tuple[int, int | None]]) -> None:
    """Else a page that is gone would not be noticed; at each look, it would cost as much as news."""
    clock = [100.0]
    expected, silent = list[str](), 0

    async def news() -> AsyncIterator[dict[str, Any] | None]:
        for seconds, number in looks:
            clock[0] += seconds
            yield None if number is None else {"number": number}

    for seconds, number in looks:
        silent += seconds
        if number is not None:
            expected += [f"id: {number}\n", f'data: {{"number":{number}}}\n\n']
        elif silent > KEEPALIVE_SECONDS:
            expected.append(":\n\n")
        else:
            continue
        silent = 0

    async def said(response: Any) -> list[str]:
        return [each async for each in response.body_iterator]

    with closing(listen(0)) as listener, pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "time", SimpleNamespace(monotonic=lambda: clock[0]))
        page = PageServer(Jobs(), listener, "scrape", print)
        assert asyncio.run(said(page._stream(news()))) == expected


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

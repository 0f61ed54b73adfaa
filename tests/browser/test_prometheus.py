"""``/metrics`` of the page, scraped by a real Prometheus with the configuration in docs/dashboard.md."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from tests.documents import ROOT
from tests.integration.harness import Running, Unirun
from tests.waiting import eventually

PROMETHEUS = "/usr/bin/prometheus"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def config_of_the_document(command: Unirun, port: int) -> str:
    """The block of docs/dashboard.md, for this home and port."""
    page = (ROOT / "docs/dashboard.md").read_text()
    (text,) = re.findall(r"^# prometheus.yml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    token = str(command.home / "dashboard.token")
    text = re.sub(r"credentials_file: \S+", f"credentials_file: {token}", text)
    return f"global: {{scrape_interval: 2s, scrape_timeout: 2s}}\n{text.replace('127.0.0.1:9464', f'127.0.0.1:{port}')}"


def test_prometheus_scrapes_a_running_job_and_knows_its_latencies_and_the_death_of_a_rank(
    running: Running, command: Unirun, tmp_path: Path
) -> None:
    """
    1. A job makes calls, and reports. Prometheus scrapes the page with the token in a file.
    2. It finds no fault in the text, and computes a quantile of the latencies of calls.
    3. A rank is killed. Its restart is counted.
    """
    running.lines("step 20")
    port, own = free_port(), free_port()
    page = command.start("dashboard", "ppo-running", "--port", port)
    page.lines(r"open (http\S+)")
    config = tmp_path / "prometheus.yml"
    config.write_text(config_of_the_document(command, port))
    prometheus = command.start_program(
        [
            PROMETHEUS,
            f"--config.file={config}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{own}",
        ]
    )

    def asked(path: str, **query: str) -> Any:
        url = f"http://127.0.0.1:{own}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return json.load(answer)["data"]
        except OSError:
            return None

    def value(expression: str) -> float | None:
        found = (asked("query", query=expression) or {}).get("result")
        return float(found[0]["value"][1]) if found else None

    def scraped() -> bool:
        targets = (asked("targets") or {}).get("activeTargets", ())
        faults = [each["lastError"] for each in targets if "deadline" not in each["lastError"]]
        assert not any(faults), faults
        return bool(targets) and all(each["health"] == "up" for each in targets)

    try:
        eventually(scraped, "Prometheus has scraped the page")
        this = '{job="ppo-running"}'
        eventually(lambda: value(f"unirun_job_up{this}") == 1, "the job is up")
        quantile = f"histogram_quantile(0.5, sum by (le) (unirun_call_seconds_bucket{this}))"
        # A call takes 20 ms or more.
        assert 0.01 < (eventually(lambda: value(quantile), "there are latencies") or 0.0) < 10
        assert value(f"count(unirun_rank_up{this} == 1)") == 8
        assert (
            eventually(lambda: value('unirun_reported{job="ppo-running", name="loss"}'), "a loss") is not None
        )
        restarts = 'unirun_rank_restarts_total{job="ppo-running", role="rollout", rank="0"}'
        before = value(restarts) or 0.0
        pid = command.workers()["rollout:0"]["pid"]
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: value(restarts) == before + 1, "the restart is counted")
        kinds = asked("metadata")
        assert kinds["unirun_call_seconds"][0]["type"] == "histogram"
    finally:
        for each in (prometheus, page):
            each.signal(signal.SIGINT)
        prometheus.end()
        page.end()

"""A job as one file: the page with its data in it, which needs no server and asks nobody for anything."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Iterator
from importlib.resources import files
from urllib.parse import quote, urlencode

from unirun.dashboard.reading import RankLog
from unirun.dashboard.views import Plain
from unirun.dashboard.watching import WatchedJob
from unirun.errors import JobError
from unirun.observe.jobdir import JobDir

LOG_BYTES = 32 << 20
"""Bytes of all logs that a report has. Those of ranks that have failed come first."""

RANKS = 256
"""Ranks of which a report has the logs and the details, at most."""

SCRIPTS = ("uPlot.iife.min.js", "page.js", "charts.js", "views.js")
STYLES = ("uPlot.min.css", "style.css")


def report_of(job: JobDir) -> str:
    """The text of the file. Raises `JobError`."""
    watched = WatchedJob(job)
    base = f"/api/jobs/{quote(job.run_id)}"
    answers: Plain = {
        base: watched.overview(),
        f"{base}/events": watched.event_list(),
        f"{base}/failures": watched.failure_list(),
        f"{base}/graph": watched.graph(),
        f"{base}/timeline": watched.timeline(),
        f"{base}/metrics?axis=time": watched.metrics("time"),
        f"{base}/metrics?axis=step": watched.metrics("step"),
    }
    left = LOG_BYTES
    for role, rank in _ranks(watched):
        who = {"role": role, "rank": rank}
        found = watched.rank(role, rank)
        answers[f"{base}/rank?{urlencode(who)}"] = found
        for each in reversed(found["logs"]):
            size = min(each["size"], left)
            if size > 0:
                log = RankLog(**each)
                names = {name: each[name] for name in ("attempt", "folder", "incarnation", "stream")}
                part = _log(watched, role, rank, log)
                answers[f"{base}/log?{urlencode({**who, **names})}"] = part
                left -= len(part["text"])
    return _page({"now": time.time(), "run_id": job.run_id, "answers": answers})


def _ranks(watched: WatchedJob) -> Iterator[tuple[str, int]]:
    """The ranks whose logs are worth most, each once: those that have failed, the first of each role, the others."""
    failed = [(f["record"]["role"], f["record"]["rank"]) for f in watched.failure_list()["failures"]]
    roles = watched.status.roles
    sizes = {role.name: len(role.workers) for role in roles}
    first = [(role.name, 0) for role in roles]
    others = ((role.name, rank) for rank in range(1, RANKS) for role in roles if rank < len(role.workers))
    wanted = dict.fromkeys((*failed, *first, *others))
    yield from [each for each in wanted if each[1] < sizes.get(each[0], 0)][:RANKS]


def _log(watched: WatchedJob, role: str, rank: int, log: RankLog) -> Plain:
    try:
        return watched.log(role, rank, log)
    except JobError as error:
        return {"text": str(error), "start": 0, "end": 0, "size": 0}


def _page(data: Plain) -> str:
    folder = files("unirun.dashboard") / "static"
    # No text of a job can end the element that it is in.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    scripts = [(folder / name).read_text() for name in SCRIPTS]
    style = "\n".join((folder / name).read_text() for name in STYLES)
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = f"default-src 'none'; script-src {allowed}; style-src 'sha256-{_digest(style)}'; img-src data:"
    html = (folder / "index.html").read_text()
    head, _, rest = html.partition('<link rel="stylesheet"')
    body = rest[rest.index("</head>") :].partition("<script")[0]
    return "".join(
        (
            head,
            f'<meta http-equiv="content-security-policy" content="{policy}">\n<style>{style}</style>\n',
            body,
            f'<script type="application/json" id="data">{text}</script>\n',
            *(f"<script>{script}</script>\n" for script in scripts),
            "</body>\n</html>\n",
        )
    )


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

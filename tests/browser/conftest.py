"""Fixtures of the tests in a browser: jobs, the page of them, and a Chromium. They are run by ``make browser`` alone."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.integration.harness import Running, Unirun, command_in
from tests.unit.dashboard.recorded import record

SCRIPTS = Path(__file__).parent / "scripts"

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
)

ROLES = """
roles:
  actor: {count: 4, workload: "ppo:Actor"}
  rollout: {count: 3, workload: "ppo:Rollout"}
trainer: ppo:PPOTrainer
"""

RECORDED = (1_000, 10_000)
"""The numbers of ranks of recorded jobs."""


@pytest.fixture(scope="session")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Unirun]:
    """The command, with a job that has finished, one that has failed, each that of a trial, and recorded jobs of many
    ranks."""
    with command_in(tmp_path_factory.mktemp("browser")) as made:
        for name, steps, fails, code in (("ppo-finished", 100, -1, 0), ("ppo-failing", 200, 60, 1)):
            assert start(made, name, steps, fails).end().code == code
            trial = made.home / "experiments/ppo" / name.removeprefix("ppo-")
            trial.mkdir(parents=True)
            (trial / "job.json").write_text(json.dumps({"run_id": name}))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("UNIRUN_HOME", str(made.home))
            for ranks in RECORDED:
                record(f"recorded-{ranks}", ranks, "running")
        yield made


def start(command: Unirun, name: str, steps: int, fails_at: int = -1) -> Running:
    """Start a job, of which rollout:1 fails at a step."""
    path = command.root / f"{name}.yaml"
    path.write_text(f"{ROLES}config: {{steps: {steps}, fails_at: {fails_at}}}\n")
    return command.start("--config", path, "--rdzv-id", name, cwd=SCRIPTS)


@pytest.fixture
def running(command: Unirun) -> Iterator[Running]:
    """A job that runs until the end of the test."""
    job = start(command, "ppo-running", 1_000_000)
    yield job
    assert command("stop", "ppo-running", "--now").code == 0
    job.end()


@pytest.fixture(scope="session")
def link(command: Unirun) -> Iterator[Callable[[], str]]:
    """Gives the newest link of the page."""
    served = command.start("dashboard")
    yield lambda: served.lines(r"open (http\S+)")[-1]
    served.signal(signal.SIGINT)
    served.end()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=[*ARGUMENTS])
        yield made
        made.close()


class Visit:
    """A page of the browser that has followed a link. `troubles` are errors of its console, and requests elsewhere."""

    def __init__(self, browser: Browser, link: str, theme: str) -> None:
        self.troubles: list[str] = []
        self.base = link.partition("?")[0]
        context = browser.new_context(viewport={"width": 1280, "height": 800})
        context.add_init_script(f"try {{ localStorage.setItem('unirun-theme', '{theme}') }} catch {{}}")
        self.page: Page = context.new_page()
        self.page.on("console", lambda message: self.troubles.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("request", lambda request: self._look_at(request.url))
        self.page.goto(link)
        self.page.wait_for_selector("main h1")

    def _look_at(self, url: str) -> None:
        if not url.startswith((self.base, "data:")):
            self.troubles.append(f"a request to {url}")

    def view(self, *parts: str) -> None:
        """Show a view, and wait until it is there."""
        self.page.goto(f"{self.base}#/{'/'.join(parts)}")
        self.page.wait_for_load_state("networkidle" if self.base.startswith("file") else "load")
        self.page.wait_for_selector("main h1")

    def axe(self, source: str) -> list[str]:
        """The violations that axe-core finds."""
        session = self.page.context.new_cdp_session(self.page)
        # By the debugger, as the page lets no foreign script in.
        session.send("Runtime.evaluate", {"expression": source, "silent": True})
        found = self.page.evaluate(
            "async () => (await axe.run()).violations.map(v => [v.id, ...v.nodes.map(n => n.target.join(' '))])"
        )
        return [str(each) for each in found]


@pytest.fixture
def visit(browser: Browser, link: Callable[[], str]) -> Iterator[Callable[..., Visit]]:
    """Opens the page; no visit may have had troubles."""
    made: list[Visit] = []

    def opened(theme: str = "light", url: str = "") -> Visit:
        made.append(Visit(browser, url or link(), theme))
        return made[-1]

    yield opened
    for each in made:
        each.page.context.close()
        assert each.troubles == []

"""The page of jobs in a real Chromium."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.browser.conftest import RECORDED, Visit
from tests.integration.harness import Running, Unirun
from tests.unit.dashboard.recorded import record
from unirun.observe.events import EventLog

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs/pictures"
AXE = ROOT / ".venv/axe/package/axe.min.js"

VIEWS = ("overview", "graph", "placement", "metrics", "timeline", "failures", "logs", "events")
SHOWN_JOBS = ("ppo-finished", "ppo-failing", "ppo-running")

RED = "[data-role=rollout] .legend .failed"

Open = Callable[..., Visit]


@pytest.fixture(scope="session")
def axe() -> str:
    return AXE.read_text()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_view_of_every_job_is_there_and_axe_finds_nothing(
    running: Running, command: Unirun, visit: Open, axe: str, theme: str
) -> None:
    running.lines("step 20")
    page = visit(theme)
    found = []
    for parts in ((), ("experiments",), *(("job", job, view) for job in SHOWN_JOBS for view in VIEWS)):
        page.view(*parts)
        page.page.wait_for_timeout(700)
        found += [f"{parts}: {each}" for each in page.axe(axe)]
        if theme == "light" and parts[1:2] == ("ppo-failing",):
            page.page.screenshot(path=PICTURES / f"dashboard-{parts[2]}.png")
    assert found == []


def test_a_rank_that_is_killed_turns_red_and_green_again(
    running: Running, command: Unirun, visit: Open
) -> None:
    running.lines("step 20")
    page = visit().page
    page.goto(f"{page.url.partition('#')[0]}#/job/ppo-running/overview")
    page.wait_for_selector("[data-role=rollout] .legend .running, [data-role=rollout] .legend .serving")
    pid = command.workers()["rollout:0"]["pid"]
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    page.wait_for_selector(RED)
    seen = time.monotonic() - began
    page.wait_for_selector(RED, state="detached")
    page.wait_for_selector(
        "[data-role=rollout] .legend :text('3 running'), [data-role=rollout] .legend :text('3 serving')"
    )
    print(f"a kill was seen after {seen:.3f} s")
    assert seen < 1.0


@pytest.mark.parametrize("ranks", RECORDED)
def test_a_recorded_job_of_many_ranks_loads_at_once(visit: Open, ranks: int) -> None:
    made = visit()
    began = time.monotonic()
    made.page.goto(f"{made.base}#/job/recorded-{ranks}/overview")
    made.page.wait_for_selector("[data-role=actor] canvas[aria-label^=actor]")
    took = time.monotonic() - began
    print(f"{ranks} ranks were loaded in {took:.2f} s")
    assert took < 2.0
    for view in ("placement", "timeline"):
        made.view("job", f"recorded-{ranks}", view)
    made.page.wait_for_selector(".lanes canvas")


def test_stacks_are_taken_when_the_button_is_pressed_and_not_before(
    running: Running, visit: Open, axe: str
) -> None:
    running.lines("step 20")
    made = visit()
    asked: list[str] = []
    made.page.on("request", lambda request: asked.append(request.url) if "/stacks" in request.url else None)
    made.view("job", "ppo-running", "stacks")
    made.page.wait_for_timeout(500)
    assert asked == []
    made.page.get_by_role("button", name="Take stacks").click()
    made.page.wait_for_selector("section[aria-label='Stacks of trainer'] >> text=/ppo.py:\\d+ in fit/")
    made.page.wait_for_selector("section[aria-label='Stacks of rollout'] >> text=/rollout:[0-2]/")
    assert made.axe(axe) == []
    # The picture is the same, wherever the tests are.
    made.page.evaluate(
        "root => { for (const each of document.querySelectorAll('pre')) "
        "each.textContent = each.textContent.replaceAll(root, '/home/me'); }",
        str(ROOT),
    )
    made.page.screenshot(path=PICTURES / "dashboard-stacks.png")
    made.view("job", "ppo-finished", "stacks")
    made.page.wait_for_selector("text=/This job is over/")


def test_keys_move_over_the_ranks_and_enter_shows_one(visit: Open) -> None:
    made = visit()
    made.view("job", "ppo-finished", "overview")
    page = made.page
    page.focus("[data-role=rollout] canvas")
    page.keyboard.press("ArrowRight")
    assert "rollout:1" in (page.text_content("#announce") or "")
    page.keyboard.press("Enter")
    page.wait_for_selector("section[aria-label='Rank rollout:1']")


def test_several_runs_are_laid_over_each_other(visit: Open) -> None:
    made = visit()
    made.view("job", "ppo-failing", "metrics")
    made.page.get_by_label("Beside it").select_option("ppo-finished")
    made.page.wait_for_selector("text=/ppo-finished actor/")
    made.page.get_by_role("button", name="Zoom in").click()
    made.page.screenshot(path=PICTURES / "dashboard-overlay.png")


def test_logs_are_searched_and_markup_in_them_is_text(visit: Open) -> None:
    made = visit()
    made.view("job", "ppo-failing", "logs")
    page = made.page
    page.wait_for_selector("text=<script>alert(1)</script>")
    page.get_by_label("Search this log").fill("STEP 40")
    page.keyboard.press("Enter")
    page.wait_for_selector("mark")
    assert page.text_content("mark") == "step 40"


def test_a_log_is_followed(running: Running, visit: Open) -> None:
    running.lines("step 20")
    made = visit()
    made.view("job", "ppo-running", "logs")
    page = made.page
    page.wait_for_selector("pre[aria-label=Log] >> text=/step 20/")
    assert page.get_by_role("button", name="Follow").get_attribute("aria-pressed") == "true"
    shown = (page.text_content("pre[aria-label=Log]") or "").count("step ")
    page.wait_for_function(
        "shown => document.querySelector('pre[aria-label=Log]').textContent.split('step ').length > shown + 2",
        arg=shown,
    )


def test_a_job_that_takes_the_id_of_another_one_is_shown_with_its_own_events(
    command: Unirun, visit: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIRUN_HOME", str(command.home))
    job = record("taken", phase="running")
    made = visit()
    made.view("job", "taken", "events")
    made.page.wait_for_selector("text=actor:1 failed")
    shutil.rmtree(job.path)
    second = record("taken", role="critic", phase="running")
    with closing(EventLog(second.events, 2)) as log:
        log.write("decision", "of the second job")
        made.page.wait_for_selector("text=of the second job")
    assert made.page.locator("text=actor:1 failed").count() == 0


def test_trials_of_experiments_lead_to_their_jobs(visit: Open) -> None:
    made = visit()
    made.page.wait_for_selector("text=ppo-finished")
    made.page.screenshot(path=PICTURES / "dashboard-jobs.png")
    made.view("experiments")
    row = made.page.locator("tr", has_text="failing")
    assert "failed" in (row.text_content() or "")
    made.page.screenshot(path=PICTURES / "dashboard-experiments.png")
    row.get_by_role("link", name="ppo-failing").click()
    made.page.wait_for_function("location.hash.startsWith('#/job/ppo-failing/metrics')")
    made.page.wait_for_selector("main canvas")


def test_a_report_shows_the_same_from_a_file(visit: Open, command: Unirun, tmp_path: Path) -> None:
    assert command("report", "ppo-failing", "-o", tmp_path / "report.html").code == 0
    made = visit(url=f"file://{tmp_path}/report.html")
    for view in VIEWS:
        made.view("job", "ppo-failing", view)
        made.page.wait_for_timeout(200)
        assert "cannot be shown" not in (made.page.text_content("main") or "")


def test_a_link_that_was_used_lets_nobody_else_in(
    visit: Open, link: Callable[[], str], browser: object
) -> None:
    used = link()
    made = visit(url=used)
    other = made.page.context.browser
    assert other is not None
    stranger = other.new_context().new_page()
    answer = stranger.goto(used)
    assert answer is not None
    assert answer.status == 401
    stranger.context.close()

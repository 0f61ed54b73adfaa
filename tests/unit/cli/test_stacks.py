"""The ranks whose stacks ``unirun stacks`` prints."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.cli.test_inject import status
from unirun.cli import stacks
from unirun.values import WorkerId
from unirun.wire.messages import AskStacks
from unirun.wire.reports import RankProgress, RankStacks


@pytest.mark.parametrize(
    ("who", "question", "shown"),
    [
        (None, AskStacks(), ["actor:0", "actor:1", "actor:2", "critic:0"]),
        ("actor", AskStacks("actor"), ["actor:0", "actor:1", "actor:2"]),
        ("actor:1-2", AskStacks("actor"), ["actor:1", "actor:2"]),
        ("actor:1", AskStacks("actor", 1), ["actor:1"]),
    ],
)
def test_of_several_ranks_those_are_shown_that_were_asked_for(
    who: str | None,
    question: AskStacks,
    shown: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The master asks one rank, or a whole role."""
    asked: list[AskStacks] = []

    def answers(_: Any, wanted: AskStacks) -> tuple[list[RankStacks], list[str]]:
        asked.append(wanted)
        ranks = [(role.name, worker.rank) for role in status().roles for worker in role.workers]
        meant = [
            (role, rank) for role, rank in ranks if wanted.role in ("", role) and wanted.rank in (-1, rank)
        ]
        return [RankStacks(RankProgress(WorkerId(role, rank, 0)), 1) for role, rank in meant], []

    job = SimpleNamespace(run_id="job-1")
    for name, value in {
        "find_here": lambda *_: job,
        "refuse_elsewhere": lambda *_: None,
        "read_status": lambda _: status(),
        "ask_stacks": answers,
    }.items():
        monkeypatch.setattr(stacks, name, value)
    assert stacks.main(SimpleNamespace(store=None, job="job-1", who=who, json=True, threads=False)) == 0
    assert [
        json.loads(line)["worker"].rpartition(".")[0] or json.loads(line)["worker"]
        for line in capsys.readouterr().out.splitlines()
    ] == shown
    assert asked == [question]

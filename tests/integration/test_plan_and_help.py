"""``unirun plan`` and ``--help``, as a user calls them: nothing is started."""

from __future__ import annotations

import json
import re

import pytest

from .harness import Script, Unirun
from .serving import COMMAND_TIMEOUT


class TestPlan:
    def test_plan_prints_a_table(self, unirun: Unirun, script: Script) -> None:
        train = script("raise SystemExit(9)")
        result = unirun("plan", "--roles", "actor=2,rollout=1", train, "--lr", "3", within=COMMAND_TIMEOUT)
        assert result.code == 0, result.err
        assert re.search(r"ROLE +RANKS +RESTART +ENV +COMMAND", result.out)
        assert re.search(r"WORKER +NODE +SLOT +ENV", result.out)
        rows = [line for line in result.out.splitlines() if re.match(r"(actor|rollout) ", line)]
        assert len(rows) == 2
        assert all("--lr 3" in row for row in rows)
        assert len(re.findall(r"^(?:actor|rollout):\d ", result.out, re.MULTILINE)) == 3

    def test_plan_in_json_has_everything_and_starts_nothing(self, unirun: Unirun, script: Script) -> None:
        train = script("raise SystemExit(9)")
        result = unirun(
            *(
                "plan",
                "--json",
                "--roles",
                "actor=2,rollout=1",
                "--env",
                "actor:K=V",
                "--rdzv-id",
                "mine",
                train,
                "x",
            ),
            within=COMMAND_TIMEOUT,
        )
        plan = json.loads(result.out)
        assert [(w["role"], w["rank"], w["slot"], w["local_rank"]) for w in plan["workers"]] == [
            ("actor", 0, 0, 0),
            ("actor", 1, 1, 1),
            ("rollout", 0, 2, 0),
        ]
        assert all(w["command"].endswith(f"{train} x") for w in plan["workers"])
        assert [w["env"].get("K") for w in plan["workers"]] == ["V", "V", None]
        assert [w["env"]["WORLD_SIZE"] for w in plan["workers"]] == ["2", "2", "1"]
        assert plan["spec"]["run_id"] == "mine"
        assert not (unirun.home / "jobs").exists()
        assert unirun.processes() == {}

    def test_plan_refuses_what_a_run_would_refuse(self, unirun: Unirun) -> None:
        result = unirun("plan", "--roles", "actor=0", "missing.py", within=COMMAND_TIMEOUT)
        assert (result.code, len(result.err.splitlines())) == (2, 2)


class TestHelp:
    @pytest.mark.parametrize(
        "args", [["--help"], ["-h"], [], ["status", "--help"], ["plan", "--help"], ["stop", "-h"]]
    )
    def test_help_is_printed(self, unirun: Unirun, args: list[str]) -> None:
        result = unirun(*args, within=COMMAND_TIMEOUT)
        assert (result.code, "usage: unirun" in result.out.lower()) == (0, True)

    @pytest.mark.parametrize("args", [["--help"], ["status", "--json"], ["ls"], ["plan", "train.py"]])
    def test_help_and_the_short_commands_import_no_torch(
        self, unirun: Unirun, script: Script, args: list[str]
    ) -> None:
        script("")
        # torch is not to be found on the path that this process has: an import of it would fail.
        script("raise SystemExit('torch was imported')", "blocked/torch.py")
        result = unirun(*args, env={"PYTHONPATH": str(unirun.root / "blocked")}, within=COMMAND_TIMEOUT)
        assert "torch was imported" not in result.err
        assert result.code == (2 if args[0] == "status" else 0), result.err

"""``--notify-command``: a command that is told of failures, recoveries and the end."""

from __future__ import annotations

import json

from .harness import EXEC, Script, Unirun

FAILS_ONCE = """
    import os, sys
    sys.exit(3 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1" else 0)
"""


def test_the_command_is_told_of_the_failure_the_recovery_and_the_end_and_holds_nothing_up(
    unirun: Unirun, script: Script
) -> None:
    """
    1. A rank of two fails once, and the role starts again.
    2. The command writes each event to a file of its own, and then takes three seconds more.
    3. The job goes on meanwhile. At its end all three end by themselves, and nothing is left.
    """
    told = unirun.home / "told"
    told.mkdir(parents=True)
    command = f"cat > {told}/$$; sleep 3; mv {told}/$$ {told}/$$.json"
    flags = ("--nproc-per-node", 2, "--max-restarts", 1, "--notify-command", command)
    result = unirun(*EXEC, *flags, script(FAILS_ONCE))
    assert result.code == 0
    assert len([*told.glob("*.json")]) == 3
    events = sorted((json.loads(each.read_text()) for each in told.iterdir()), key=lambda each: each["time"])
    assert [each["occasion"] for each in events] == ["failure", "recovery", "end"]
    assert {each["job"] for each in events} == {unirun.job_dir().name}
    assert events[0]["details"]["failure"]["exit"] == "exit code 3"
    # The role did not wait for the first command.
    assert events[1]["time"] - events[0]["time"] < 3
    unirun.assert_nothing_left()

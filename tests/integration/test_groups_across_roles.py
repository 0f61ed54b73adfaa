"""``ctx.group``: a process group of several roles, beside the default group of each."""

from __future__ import annotations

import os
import re
import signal
import sys

import pytest

from tests.effort import variants

from .harness import TORCHRUN, Script, Unirun, alive

COLLECTIVES = """
    import torch, torch.distributed as dist, unirun
    ctx = unirun.init()
    dist.init_process_group("gloo")
    group = ctx.group("actor", "rollout")
    me, size = dist.get_rank(group), dist.get_world_size(group)
    assert me == group.rank() == ctx.group_rank("actor", "rollout")
    words = [ctx.role, ctx.rank, f"{me}/{size}"]

    total = torch.tensor([10.0 ** me])
    dist.all_reduce(total, group=group)
    words.append(int(total))

    told = torch.tensor([me])
    dist.broadcast(told, src=3, group=group)
    words.append(int(told))

    passed = torch.tensor([-1])
    if me == 4:
        dist.send(torch.tensor([44]), dst=1, group=group)
    if me == 1:
        dist.recv(passed, src=4, group=group)
    words.append(int(passed))

    parts = [torch.zeros(1, dtype=torch.long) for _ in range(size)] if me == 2 else None
    dist.gather(torch.tensor([me]), parts, dst=2, group=group)
    words.append("".join(str(int(part)) for part in parts or ()))

    own = torch.ones(1)
    dist.all_reduce(own)
    words.append(int(own))
    dist.barrier(group=group)
    assert ctx.group("actor", "rollout") is group
    if (ctx.role, ctx.rank) in {("actor", 1), ("rollout", 0), ("rollout", 2)}:
        some = ctx.group("actor:1", "rollout:0,2")
        total = torch.tensor([10.0 ** some.rank()])
        dist.all_reduce(total, group=some)
        words.append(f"{some.rank()} of {int(total)}")
    members = ctx.members("rollout")
    words.append(",".join(map(str, members)))
    print(*words, flush=True)
"""

SURVIVING = """
    import os, signal, sys, time, torch, torch.distributed as dist, unirun
    ctx = unirun.init()
    if "default" in sys.argv:
        dist.init_process_group("gloo")
    for turn in range(3):
        group = ctx.group("actor", "rollout")
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        generations = [ctx.roles[name].generation for name in ("actor", "rollout")]
        print("formed", ctx.role, ctx.rank, os.getpid(), "sum", int(total), "generations", *generations, flush=True)
        if generations[1] == 2:
            break
        try:
            # Nobody sends: only the end of the group can end this.
            if ctx.role == "rollout":
                signal.pause()
            dist.recv(torch.zeros(1), src=2, group=group)
        except RuntimeError:
            print("broken", ctx.role, ctx.rank, time.time(), flush=True)
"""


class TestAGroup:
    def test_a_group_across_roles_has_their_ranks_in_order(self, unirun: Unirun, script: Script) -> None:
        result = unirun("--roles", "actor=2,rollout=3", script(COLLECTIVES))
        assert result.code == 0, result.err
        rollouts = "rollout:0,rollout:1,rollout:2"
        assert result.lines == [
            f"actor 0 0/5 11111 3 -1  2 {rollouts}",
            f"actor 1 1/5 11111 3 44  2 0 of 111 {rollouts}",
            f"rollout 0 2/5 11111 3 -1 01234 3 1 of 111 {rollouts}",
            f"rollout 1 3/5 11111 3 -1  3 {rollouts}",
            f"rollout 2 4/5 11111 3 -1  3 2 of 111 {rollouts}",
        ]

    def test_a_group_across_roles_works_with_exec_and_without_a_default_group(
        self, unirun: Unirun, script: Script
    ) -> None:
        train = script(
            """
            import torch, torch.distributed as dist, unirun
            ctx = unirun.init()
            group = ctx.group("b", "a")
            total = torch.tensor([10.0 ** group.rank()])
            dist.all_reduce(total, group=group)
            print(ctx.role, ctx.rank, group.rank(), int(total), dist.is_initialized())
            """
        )
        result = unirun("--roles", "a=1,b=1", "--start-method", "exec", train)
        assert (result.code, result.lines) == (0, ["a 0 1 11 False", "b 0 0 11 False"]), result.err

    def test_forming_a_group_with_an_ended_role_fails_at_once(self, unirun: Unirun, script: Script) -> None:
        train = script(
            """
            import unirun
            ctx = unirun.init()
            if ctx.role == "actor":
                ctx.group("actor", "rollout")
            """
        )
        result = unirun("--roles", "actor=1,rollout=1", train)
        assert result.code == 1, result.err
        words = "role rollout has ended with exit code 0, and is waited for; every member must call ctx.group"
        assert f"GroupError: group actor+rollout cannot be formed: {words}" in result.err

    def test_forming_a_group_again_with_an_ended_role_fails_at_once(
        self, unirun: Unirun, script: Script
    ) -> None:
        train = script(
            """
            import torch.distributed as dist, unirun
            ctx = unirun.init()
            group = ctx.group("actor", "rollout")
            dist.barrier(group)
            if ctx.role == "actor":
                try:
                    dist.barrier(group)  # The others have ended.
                except RuntimeError:
                    ctx.group("actor", "rollout")
            """
        )
        result = unirun("--roles", "actor=1,rollout=1", train)
        assert result.code == 1, result.err
        assert "role rollout has ended with exit code 0, and is waited for" in result.err

    def test_groups_across_roles_may_overlap(self, unirun: Unirun, script: Script) -> None:
        train = script(
            """
            import torch, torch.distributed as dist, unirun
            ctx = unirun.init()
            sums = []
            for names in (("a", "b"), ("b", "c"), ("a", "b", "c"), ("a", "c")):
                if ctx.role in names:
                    total = torch.ones(1)
                    dist.all_reduce(total, group=ctx.group(*names))
                    sums.append(int(total))
            print(ctx.role, *sums)
            """
        )
        result = unirun("--roles", "a=1,b=2,c=1", train)
        assert (result.code, result.lines) == (0, ["a 3 4 2", "b 3 3 4", "b 3 3 4", "c 3 4 2"]), result.err

    def test_a_group_across_roles_that_cannot_be_formed_gives_the_reason(
        self, unirun: Unirun, script: Script
    ) -> None:
        wrong = {
            "ctx.group('actor', 'rolout')": "this job has no role 'rolout'; it has actor, rollout",
            "ctx.group('rollout')": "group('rollout') is called by actor:0; name each role once",
            "ctx.group('actor', 'actor')": "name each role once",
            "ctx.group('actor', 'rollout:0-1')": "rollout:0-1 names rank 1 of rollout; it has ranks 0 to 0",
            "ctx.members('critic')": "this job has no role 'critic'",
            "ctx.group('actor', 'rollout', timeout=datetime.timedelta(seconds=0.5))": "group rank 1 did not come in time; "
            "every member must call ctx.group",
        }
        train = script(
            f"""
            import datetime, signal, unirun
            ctx = unirun.init()
            if ctx.role == "rollout":
                signal.pause()
            for call in {list(wrong)}:
                try:
                    eval(call)
                except unirun.UnirunError as error:
                    print(error)
            raise SystemExit(1)
            """
        )
        result = unirun("--roles", "actor=1,rollout=1", train)
        told = [line.removeprefix("[actor:0] ") for line in result.out.splitlines()]
        assert len(told) == len(wrong), result.err
        for message, line in zip(wrong.values(), told, strict=True):
            assert message in line

    @pytest.mark.parametrize("default", variants("default", "none"))
    def test_a_group_across_roles_fails_in_survivors_of_a_restart_and_forms_again(
        self, unirun: Unirun, script: Script, default: str
    ) -> None:
        """
        1. Two actors and two rollouts form a group across their roles.
        2. A rollout is killed, and the rollouts restart: the operation fails in the actors.
        3. All four form the group again; the actors are the same processes.
        4. Steps 2 and 3 once more; the command ends with 0.
        """
        job = unirun.start(
            "--roles", "actor=2,rollout=2", "--max-restarts", "rollout=2", script(SURVIVING), default
        )
        survivors = set(job.lines(r"formed (actor \d \d+) sum 4 generations 0 0", 2))
        for turn in (1, 2):
            victims = job.lines(rf"formed rollout 1 (\d+) sum 4 generations 0 {turn - 1}")
            job.lines(rf"formed rollout 0 \d+ sum 4 generations 0 {turn - 1}")
            os.kill(int(victims[-1]), signal.SIGKILL)
            again = job.lines(rf"formed (actor \d \d+) sum 4 generations 0 {turn}", 2)
            assert set(again) == survivors, "the survivors are the same processes"
        result = job.end()
        assert result.code == 0, result.err
        assert len(re.findall(r"broken actor", result.out)) == 4
        assert len(re.findall(r"formed \w+ \d \d+ sum 4 generations 0 2", result.out)) == 4

    def test_a_group_across_roles_breaks_at_once_when_a_member_dies(
        self, unirun: Unirun, script: Script
    ) -> None:
        """
        1. Three actors and a rollout form a group; the actors wait for each other.
        2. The rollout is killed: the wait of every actor fails at once, although none waits for the rollout.
        3. All form the group again, and the command ends with 0.
        """
        job = unirun.start(
            "--roles",
            "actor=3,rollout=1",
            "--max-restarts",
            "rollout=1",
            script(
                """
            import os, signal, time, torch, torch.distributed as dist, unirun
            ctx = unirun.init()
            group = ctx.group("actor", "rollout")
            if ctx.incarnation:
                dist.barrier(group=group)
                raise SystemExit
            print("formed", ctx.role, os.getpid(), flush=True)
            if ctx.role == "rollout":
                signal.pause()
            try:
                # Not one of these waits for the member that dies: they wait for each other.
                dist.recv(torch.zeros(1), src=(ctx.rank + 1) % 3, group=group)
            except RuntimeError:
                print("broken", time.time(), flush=True)
            # No member ends while another one still connects to it.
            dist.barrier(group=ctx.group("actor", "rollout"))
            """
            ),
        )
        (victim,) = job.lines(r"formed rollout (\d+)")
        job.lines("formed actor", 3)
        os.kill(int(victim), signal.SIGKILL)
        job.lines(r"broken ([\d.]+)", 3)
        assert not alive(int(victim))
        assert job.end().code == 0
        times = [float(moment) for moment in job.lines(r"broken ([\d.]+)", 3)]
        assert max(times) - min(times) < 30.0


class TestWithoutUnirun:
    ALONE = """
        import torch, torch.distributed as dist, unirun
        ctx = unirun.init()
        if ctx.world_size > 1:
            dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total, group=ctx.group(ctx.role))
        # In one write: under torchrun the workers share one pipe.
        print(f"result {ctx.role} {ctx.rank} {ctx.world_size} {int(total)}\\n", end="", flush=True)
        if ctx.world_size > 1:
            # Without it torch 2.13 aborts now and then at the end of an ordinary interpreter.
            dist.destroy_process_group()
    """

    @pytest.mark.parametrize(
        ("launcher", "expected"),
        [
            ([sys.executable], ["result default 0 1 1"]),
            (
                [TORCHRUN, "--standalone", "--nproc-per-node", "2"],
                ["result default 0 2 2", "result default 1 2 2"],
            ),
        ],
        ids=["python", "torchrun"],
    )
    @pytest.mark.chaos
    def test_a_script_with_a_group_runs_without_unirun(
        self, unirun: Unirun, script: Script, launcher: list[str], expected: list[str]
    ) -> None:
        train = script(self.ALONE)
        done = unirun.start_program([*launcher, str(train)]).end()
        assert done.code == 0, done.err
        assert [line for line in done.lines if line.startswith("result")] == expected
        ours = unirun("--nproc-per-node", len(expected), train)
        assert (ours.code, ours.lines) == (0, expected), ours.err

    def test_a_group_with_an_unknown_role_is_refused(self, unirun: Unirun, script: Script) -> None:
        train = script("import unirun; unirun.init().group('default', 'rollout')")
        done = unirun.start_program([sys.executable, str(train)]).end()
        assert (done.code, "this job has no role 'rollout'; it has default" in done.err) == (1, True)

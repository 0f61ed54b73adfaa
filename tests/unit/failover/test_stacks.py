"""Stacks of ranks, for people: equal ones together, the odd one first, and the collectives that they are in."""

from __future__ import annotations

from unirun.failover.stacks import groups, lines, parsed
from unirun.values import WorkerId
from unirun.wire.reports import RankProgress, RankStacks, ThreadStack, Wait

WAITING = (
    "/x/site-packages/torch/distributed/distributed_c10d.py:9 in all_reduce",
    "/me/train.py:20 in step",
)
SPINNING = ("/me/train.py:15 in load",)
REDUCE = Wait("default_pg", 4, "all_reduce")

DUMP = """\
Thread 0x00007f5500000000 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007f5574fb1740 (most recent call first):
  File "/me/train.py", line 20 in step
  File "/me/train.py", line 30 in <module>
"""


def rank(
    number: int,
    *frames: str,
    state: str = "S",
    waits: tuple[Wait, ...] = (),
    shapes: tuple[str, ...] = (),
    role: str = "actor",
    kernel: str = "",
) -> RankStacks:
    threads = (ThreadStack("main", frames, main=True),) if frames else ()
    source = "the signal" if frames else ""
    progress = RankProgress(WorkerId(role, number, 0), state=state, waits=waits)
    return RankStacks(progress, 100 + number, source, threads, kernel, shapes)


def order(*ranks: RankStacks) -> list[list[int]]:
    return [[worker.rank for worker in group.workers] for group in groups(ranks)]


class TestGroups:
    def test_ranks_with_equal_stacks_are_together_and_the_odd_one_is_first(self) -> None:
        others = [rank(number, *WAITING) for number in (0, 2, 3)]
        assert order(*others, rank(1, *SPINNING)) == [[1], [0, 2, 3]]

    def test_of_two_the_one_that_waits_for_nobody_is_first(self) -> None:
        assert order(rank(0, *WAITING), rank(1, *SPINNING)) == [[1], [0]]

    def test_one_that_is_stopped_is_before_one_that_has_no_stack_and_that_before_all_others(self) -> None:
        found = order(rank(0, *SPINNING), rank(1, *WAITING), rank(2), rank(3, *WAITING, state="T"))
        assert found == [[3], [2], [0], [1]]

    def test_the_code_by_which_unirun_starts_a_rank_is_left_out(self) -> None:
        (group,) = groups([rank(0, *SPINNING, "/x/unirun/launcher/worker.py:1 in run")])
        assert group.frames == SPINNING


class TestLines:
    def test_the_rank_that_is_missing_in_a_collective_is_named_with_the_shapes_of_the_others(self) -> None:
        others = [rank(n, *WAITING, waits=(REDUCE,), shapes=("[4] Float",)) for n in (0, 2)]
        assert list(lines([*others, rank(1, *SPINNING)])) == [
            "role actor: 3 ranks, 2 different stacks",
            "  actor:1",
            "    /me/train.py:15 in load",
            "  actor:0,2",
            *(f"    {frame}" for frame in WAITING),
            "  all_reduce 4 of default_pg: actor:0,2; not there: actor:1; [4] Float in actor:0,2",
        ]

    def test_different_shapes_in_one_collective_are_told_apart(self) -> None:
        ranks = [rank(n, *WAITING, waits=(REDUCE,), shapes=(f"[{n + 4}] Float",)) for n in (0, 1)]
        assert [*lines(ranks)][-1].endswith("; all are there; [4] Float in actor:0, [5] Float in actor:1")

    def test_a_rank_of_another_group_is_not_missed(self) -> None:
        wait = Wait("tensor", 1, "all_gather", "0,2")
        ranks = [rank(0, *WAITING, waits=(wait,)), rank(1, *SPINNING), rank(2, *SPINNING)]
        assert [*lines(ranks)][-1] == "  all_gather 1 of tensor: actor:0; not there: actor:2"

    def test_without_a_stack_there_is_what_the_kernel_tells(self) -> None:
        assert [*lines([rank(0, state="D", kernel="nfs_wait")])][1] == (
            "  actor:0 waits for a device or a file system, in nfs_wait of the kernel"
        )

    def test_roles_are_apart_and_other_threads_are_shown_when_they_are_wanted(self) -> None:
        one = rank(0, *SPINNING)
        two = RankStacks(one.progress, 1, "the signal", parsed(DUMP))
        found = [*lines([two, rank(0, *SPINNING, role="critic")], threads=True)]
        assert [line for line in found if line.startswith("role")] == [
            "role actor: 1 rank, 1 different stack",
            "role critic: 1 rank, 1 different stack",
        ]
        assert "  actor:0, thread 0x00007f5500000000" in found


def test_what_faulthandler_writes_is_read_with_the_main_thread_marked() -> None:
    other, main = parsed(DUMP)
    assert (other.main, main.main) == (False, True)
    assert main.frames == ("/me/train.py:20 in step", "/me/train.py:30 in <module>")
    assert parsed("Timeout!\n") == ()

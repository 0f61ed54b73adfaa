"""``unirun plan``: the picture above the table, and all of it for programs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from unirun.cli import main

TWO = ("--inventory", "fake:nodes=2,devices=2", "--roles", "a=2,b=1", "train.py")


def plan(*argv: str) -> int:
    with pytest.raises(SystemExit) as leave:
        main(["plan", *argv])
    assert isinstance(leave.value.code, int)
    return leave.value.code


def test_the_picture_is_above_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*TWO) == 0
    _, picture, table, _ = capsys.readouterr().out.split("\n\n")
    assert picture == ("NODE   cuda 0  cuda 1  FREE\nnode0  a:0     a:1     0\nnode1  b:0     ·       1")
    assert table.startswith("ROLE")


def test_one_role_on_one_node_needs_no_picture(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--inventory", "fake:devices=2", "--roles", "a=2", "train.py") == 0
    assert "FREE" not in capsys.readouterr().out


def test_the_picture_is_written_as_svg(capsys: pytest.CaptureFixture[str], scripts: Path) -> None:
    assert plan("--svg", "plan.svg", *TWO) == 0
    assert (scripts / "plan.svg").read_text(encoding="utf-8").startswith("<svg")
    assert plan("--svg", "no/such.svg", *TWO) == 2
    assert "no/such.svg cannot be written" in capsys.readouterr().err


def test_json_has_the_whole_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--json", *TWO) == 0
    whole = json.loads(capsys.readouterr().out)
    assert {*whole} == {"spec", "note", "spares", "excluded", "lost", "moved", "crossing", "workers"}
    assert (whole["spares"], whole["excluded"], whole["crossing"]) == ([], [], 0.0)
    assert (whole["lost"], whole["moved"]) == ([], [])
    places = {"role", "rank", "node", "slot", "local_rank", "devices", "cpus", "own", "share", "numa"}
    runs = {"cwd", "kind", "restart", "max_restarts", "command", "env"}
    assert all({*each} == places | runs for each in whole["workers"])
    assert [(each["own"], each["share"], each["numa"]) for each in whole["workers"]] == [
        (["0"], 1.0, 0),
        (["1"], 1.0, 0),
        (["0"], 1.0, 0),
    ]


def test_workers_find_their_node_among_those_of_their_role(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = ("--inventory", "fake:nodes=2,devices=3")
    assert plan("--json", *nodes, "--roles", "a=2,b=4", "train.py") == 0
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    workers = json.loads(capsys.readouterr().out)["workers"]
    seen = {
        (each["role"], each["rank"]): (each["node"], [int(each["env"][name]) for name in names])
        for each in workers
    }
    assert seen == {
        ("a", 0): ("node0", [0, 2, 0, 1]),
        ("a", 1): ("node0", [1, 2, 0, 1]),
        ("b", 0): ("node0", [0, 1, 0, 2]),
        ("b", 1): ("node1", [0, 3, 1, 2]),
        ("b", 2): ("node1", [1, 3, 1, 2]),
        ("b", 3): ("node1", [2, 3, 1, 2]),
    }


def test_the_share_of_a_device_is_in_the_plan(capsys: pytest.CaptureFixture[str], scripts: Path) -> None:
    (scripts / "job.yaml").write_text("{script: train.py, roles: {a: 1, b: 1}, collocations: [[a, b]]}")
    assert plan("--inventory", "fake:devices=1", "--config", "job.yaml") == 0
    assert capsys.readouterr().out.count("CUDA_VISIBLE_DEVICES=0 UNIRUN_DEVICE_SHARE=0.5 OMP") == 2


def test_excluded_nodes_are_in_the_plan_and_unknown_ones_are_warned_of(
    capsys: pytest.CaptureFixture[str],
) -> None:
    nodes = ("--inventory", "fake:nodes=3,devices=2", "--roles", "a=2,b=1")
    assert plan(*nodes, "--exclude", "node1,nod2", "train.py") == 0
    seen = capsys.readouterr()
    assert "2 nodes in use; node1 excluded\n" in seen.out
    assert "node1  ·       ·       excluded\n" in seen.out
    assert seen.err == "unirun: no node is called nod2, so it is not excluded; did you mean node2?\n"


@pytest.mark.parametrize(("waited", "sent"), [("b", "c"), ("c", "b")])
def test_roles_that_wait_for_each_other_are_on_one_node(
    capsys: pytest.CaptureFixture[str], scripts: Path, waited: str, sent: str
) -> None:
    """As much goes over both edges, as far as is known; but for what it only sends nobody waits."""
    edges = f"['a -> {waited}: f', {{from: a, to: {sent}, invocation: g, async: true}}]"
    (scripts / "job.yaml").write_text(f"{{script: train.py, roles: {{a: 2, b: 2, c: 2}}, edges: {edges}}}")
    assert plan("--inventory", "fake:nodes=2,devices=4", "--config", "job.yaml") == 0
    out = capsys.readouterr().out
    assert f"; a and {waited}, which wait for each other, on 1 node; 50 % of what roles exchange" in out
    node0, node1 = (line.split() for line in out.splitlines() if re.match("node[01] ", line))
    assert node0 == ["node0", "a:0", "a:1", f"{waited}:0", f"{waited}:1", "0"]
    assert node1 == ["node1", f"{sent}:0", f"{sent}:1", "·", "·", "2"]


class TestALoss:
    @pytest.fixture
    def job(self, scripts: Path) -> tuple[str, ...]:
        roles = "{a: {count: 4, device: cuda}, b: {count: '1:2', device: cuda}, c: {count: 1, device: cpu}}"
        text = f"{{script: train.py, roles: {roles}, separations: [[a, b]], spares: 1}}"
        (scripts / "job.yaml").write_text(text)
        return "--inventory", "fake:nodes=4,devices=2,cpus=4", "--config", "job.yaml"

    def test_lost_shows_which_ranks_move_and_where(
        self, capsys: pytest.CaptureFixture[str], job: tuple[str, ...]
    ) -> None:
        assert plan(*job, "--lost", "node1") == 0
        out = capsys.readouterr().out
        assert "; node1 lost\n" in out
        assert re.search(r"^node1 .* lost$", out, re.MULTILINE)
        moved = out.partition("2 ranks of 7 would move:\n")[2].splitlines()
        assert [line.split() for line in moved[:4]] == [
            ["WORKER", "FROM", "TO"],
            ["a:2", "node1", "cuda", "0", "node3", "cuda", "0"],
            ["a:3", "node1", "cuda", "1", "node3", "cuda", "1"],
            [],
        ]

    def test_lost_nodes_shrink_an_elastic_role_to_its_least(
        self, capsys: pytest.CaptureFixture[str], job: tuple[str, ...]
    ) -> None:
        assert plan("--json", *job, "--lost", "node0,node3") == 3
        assert plan("--json", *job, "--lost", "node3", "--lost", "node1", "roles.a.count=2") == 0
        whole = json.loads(capsys.readouterr().out)
        assert whole["lost"] == ["node1", "node3"]
        assert all({*each} == {"worker", "before", "after"} for each in whole["moved"])
        assert {each["worker"] for each in whole["moved"]} <= {"a:0", "a:1", "b:0", "b:1", "c:0"}
        assert {row["node"] for row in whole["workers"]} <= {"node0", "node2"}

    def test_a_lost_spare_moves_no_rank(
        self, capsys: pytest.CaptureFixture[str], job: tuple[str, ...]
    ) -> None:
        assert plan(*job, "--lost", "node3") == 0
        assert "0 ranks of 7 would move" in capsys.readouterr().out

    def test_an_unknown_lost_node_is_refused(
        self, capsys: pytest.CaptureFixture[str], job: tuple[str, ...]
    ) -> None:
        assert plan(*job, "--lost", "node9x") == 2
        assert "--lost: no node is called 'node9x'" in capsys.readouterr().err


def test_the_picture_of_one_role_has_the_devices_of_its_local_ranks(scripts: Path) -> None:
    assert plan("--inventory", "fake:devices=3", "--roles", "a=2", "--svg", "plan.svg", "train.py") == 0
    picture = (scripts / "plan.svg").read_text(encoding="utf-8")
    assert "cuda 2" in picture
    assert "cpu 0" not in picture


def test_a_job_that_needs_more_nodes_than_one_does_not_fit(
    capsys: pytest.CaptureFixture[str], scripts: Path
) -> None:
    (scripts / "job.yaml").write_text("{script: train.py, roles: {a: {count: 4, per_node: 2}}}")
    assert plan("--inventory", "fake:devices=0", "--config", "job.yaml") == 3
    assert "a per_node 4 fits" in capsys.readouterr().err


def test_a_program_that_needs_no_slot_is_drawn_beside_the_slots(
    capsys: pytest.CaptureFixture[str], scripts: Path
) -> None:
    (scripts / "job.yaml").write_text("{roles: {a: {script: train.py}, engine: {program: ls, count: 2}}}")
    assert plan("--inventory", "fake:devices=2", "--config", "job.yaml") == 0
    head, picture, roles, ranks = capsys.readouterr().out.split("\n\n")
    assert head.splitlines()[0].endswith("by LOCAL_RANK; engine needs no slot")
    assert picture == (
        "NODE   cuda 0  cuda 1  no slot     FREE\n"
        "node0  a:0     ·       engine:0-1  1"
    )  # fmt: skip
    a, engine = roles.splitlines()[1:]
    assert "CUDA_VISIBLE_DEVICES" not in a, "as it is without the program"
    assert "  CUDA_VISIBLE_DEVICES=  " in engine
    assert ranks.splitlines()[2].split()[:3] == ["engine:0", "node0", "-"]


def test_a_program_has_a_box_of_its_own_in_the_picture(
    capsys: pytest.CaptureFixture[str], scripts: Path
) -> None:
    (scripts / "job.yaml").write_text("{roles: {a: {script: train.py}, engine: {program: ls}}}")
    assert plan("--inventory", "fake:devices=2", "--config", "job.yaml", "--svg", "plan.svg") == 0
    corners = re.findall(r'rx="(\d+)"', (scripts / "plan.svg").read_text(encoding="utf-8"))
    assert corners == ["10", "4", "4", "0"], "the page, a rank, a free slot, the program"


def test_processors_and_memory_that_ranks_need_are_in_the_plan(
    capsys: pytest.CaptureFixture[str], scripts: Path
) -> None:
    engine = "{program: ls, cpus: 8, memory: 64GB}"
    (scripts / "job.yaml").write_text(f"{{roles: {{a: {{script: train.py}}, engine: {engine}}}}}")
    assert plan("--inventory", "fake:cpus=8", "--config", "job.yaml") == 0
    head, a, of_engine = capsys.readouterr().out.split("\n\n")[-2].splitlines()
    assert head.split()[2:4] == ["RESTART", "NEEDS"]
    assert a.split()[2:4] == ["role×0", "-"]
    assert "  8 cpus, 64.0 GB  " in of_engine
    assert plan("--json", "--inventory", "fake:cpus=8", "--config", "job.yaml") == 0
    roles = json.loads(capsys.readouterr().out)["spec"]["roles"]
    assert [(role["cpus"], role["memory"]) for role in roles] == [(None, None), (8, 64 * 10**9)]
    assert plan("--inventory", "fake:cpus=7", "--config", "job.yaml") == 3
    assert "8 cpus (engine 1 × 8) are needed, 7 are there" in capsys.readouterr().err

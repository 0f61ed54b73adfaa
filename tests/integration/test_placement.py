"""The places that workers find: masks, shares and processors, as the plan has them."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from .harness import EXEC, Script, Unirun

TELL = """
    import os
    names = ("CUDA_VISIBLE_DEVICES", "UNIRUN_DEVICE_SHARE", "OMP_NUM_THREADS")
    who = os.environ["ROLE_NAME"], os.environ["RANK"]
    print(repr((who, [os.environ.get(name) for name in names], sorted(os.sched_getaffinity(0)))), flush=True)
"""


def told(out: str) -> dict[tuple[str, str], tuple[list[str | None], list[int]]]:
    found = (ast.literal_eval(line.partition("] ")[2]) for line in out.splitlines())
    return {who: (values, cpus) for who, values, cpus in found}


@pytest.mark.parametrize("device", ["cuda", "null"])
def test_two_roles_share_two_devices(unirun: Unirun, script: Script, tmp_path: Path, device: str) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        f"script: {script(TELL)}\n"
        f"roles: {{actor: {{count: 2, device: {device}}}, critic: {{count: 2, device: {device}}}}}\n"
        "collocations: [[actor, critic]]\n"
    )
    result = unirun("-q", "--config", job, "--inventory", "fake:devices=2")
    assert result.code == 0, result.err
    workers = told(result.out)
    assert set(workers) == {(role, rank) for role in ("actor", "critic") for rank in "01"}
    assert all(values == ["0,1", "0.5", "1"] for values, _ in workers.values())


def test_ranks_with_cpu_slots_are_bound_to_processors_of_their_own(
    unirun: Unirun, script: Script, tmp_path: Path
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(f"script: {script(TELL)}\nroles: {{actor: {{count: 2, device: cpu}}, rollout: 1}}\n")
    result = unirun("-q", "--config", job, "--inventory", "fake:cpus=2")
    assert result.code == 0, result.err
    workers = told(result.out)
    assert [workers["actor", rank][1] for rank in "01"] == [[0], [1]]
    everything = sorted(os.sched_getaffinity(0))
    assert workers["rollout", "0"][1] == everything, "who asked for nothing is bound to nothing"


def test_separated_roles_run_on_different_nodes(unirun: Unirun, script: Script, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        f"script: {script(TELL)}\n"
        "roles: {actor: {count: 2, device: cuda}, rollout: {count: 1, device: cuda}}\n"
        "separations: [[actor, rollout]]\n"
    )
    options = ("--config", job, "--inventory", "fake:nodes=2,devices=2")
    plan = unirun("plan", *options)
    assert (plan.code, "node0" in plan.out, "node1" in plan.out) == (0, True, True), plan.err
    result = unirun("-q", *options)
    assert result.code == 0, result.err
    masks = {who: values[0] for who, (values, _) in told(result.out).items()}
    assert masks == {("actor", "0"): "0,1", ("actor", "1"): "0,1", ("rollout", "0"): "0"}
    nodes = {who: worker["node"] for who, worker in unirun.workers().items()}
    assert nodes == {"actor:0": "node0", "actor:1": "node0", "rollout:0": "node1"}
    crowded = unirun("plan", "--config", job, "--inventory", "fake:nodes=1,devices=8")
    assert crowded.code == 3, "two roles that must be apart do not fit one node"


def test_more_nodes_than_a_host_can_simulate_are_planned_and_not_started(
    unirun: Unirun, script: Script
) -> None:
    options = ("--roles", "actor=40", "--inventory", "fake:nodes=20,devices=2", script(TELL))
    assert unirun("plan", *options).code == 0
    started = unirun(*options)
    assert started.code == 3
    assert "20 nodes, and one host plays 16 at most" in started.err


XPUS = """
from unirun.collocation import Device, DeviceType

XPU = DeviceType("xpu", lambda: tuple(Device(str(n), "X", type="xpu") for n in range(4)), "XPU_MASK")
"""


def test_a_package_can_add_a_type_of_device(unirun: Unirun, script: Script, tmp_path: Path) -> None:
    package = tmp_path / "site"
    info = package / "xpus-1.0.dist-info"
    info.mkdir(parents=True)
    (package / "xpus.py").write_text(XPUS)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: xpus\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[unirun.device_types]\nxpu = xpus:XPU\n")
    tell = script("import os; print(os.environ['ROLE_NAME'], os.environ['XPU_MASK'], flush=True)")
    path = os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "XPU_MASK": "1,2,3"}
    result = unirun("-q", *EXEC, "--roles", "actor=2,rollout=1", tell, env=env)
    assert result.code == 0, result.err
    assert result.lines == ["actor 1,2", "actor 1,2", "rollout 3"]

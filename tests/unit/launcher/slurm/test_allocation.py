"""A task's knowledge of its allocation; the variables are those of Slurm 22.05."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import UsageError
from unirun.launcher.slurm.allocation import (
    SlurmAllocation,
    component_here,
    read_allocation,
    refuse_several_tasks,
    unused_nodes,
)

STEP = {
    "SLURMD_NODENAME": "n2",
    "SLURM_CPUS_ON_NODE": "1",
    "SLURM_JOB_ID": "2",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_NNODES": "3",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
}
HETEROGENEOUS = STEP | {
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n1",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n[2-3]",
}
BATCH_SCRIPT = {
    "SLURMD_NODENAME": "n1",
    "SLURM_JOB_ID": "5",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_NODEID": "0",
}


def test_a_task_of_a_step_knows_its_nodes_and_its_place() -> None:
    found = read_allocation(STEP)
    assert found == SlurmAllocation("2", "0", ("n1", "n2", "n3"), "n2", (0, 0, 0))
    assert found is not None
    assert (found.head, found.index) == ("n1", 1)


def test_there_is_no_allocation_outside_of_slurm() -> None:
    assert read_allocation({}) is None


def test_a_batch_script_is_no_task() -> None:
    assert read_allocation(BATCH_SCRIPT) is None


def test_a_step_on_one_node_is_a_job_on_one_host() -> None:
    assert read_allocation(STEP | {"SLURM_STEP_NODELIST": "n2"}) is None


def test_a_step_on_a_part_of_the_allocation_has_that_part() -> None:
    found = read_allocation(STEP | {"SLURM_STEP_NODELIST": "n[2-3]"})
    assert found is not None
    assert (found.nodes, found.head, found.index) == (("n2", "n3"), "n2", 0)


@pytest.mark.parametrize("word", ["HET", "PACK"])
def test_nodes_of_a_heterogeneous_job_know_their_component(word: str) -> None:
    environ = {name.replace("HET_GROUP", f"{word}_GROUP"): value for name, value in HETEROGENEOUS.items()}
    found = read_allocation(environ)
    assert found is not None
    assert found.components == (0, 1, 1)
    assert component_here(environ) == 1
    assert component_here(STEP) == component_here({}) == 0


def test_a_requeued_job_knows_how_often() -> None:
    found = read_allocation(STEP | {"SLURM_RESTART_COUNT": "2"})
    assert found is not None
    assert found.restarts == 2


@pytest.mark.parametrize("tasks", ["2(x3)", "1,2,1", "1(x2),4", "4"])
def test_more_than_one_task_on_a_node_is_refused(tasks: str) -> None:
    several = STEP | {"SLURM_STEP_TASKS_PER_NODE": tasks}
    for look in (read_allocation, refuse_several_tasks):
        with pytest.raises(UsageError, match="--ntasks-per-node=1"):
            look(several)
    with pytest.raises(UsageError, match="--ntasks-per-node=1"):
        read_allocation(several | {"SLURM_STEP_NODELIST": "n2", "SLURM_STEP_NUM_NODES": "1"})


def test_tasks_of_an_allocation_in_which_no_step_runs_are_no_tasks() -> None:
    """sbatch and salloc set SLURM_NTASKS; their script and shell run once."""
    asked = {"SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_TASKS_PER_NODE": "4"}
    refuse_several_tasks(BATCH_SCRIPT | asked)
    refuse_several_tasks(BATCH_SCRIPT | asked | {"SLURM_STEP_TASKS_PER_NODE": "4"})
    refuse_several_tasks(STEP | asked)
    refuse_several_tasks({})


def test_the_shell_of_a_step_with_a_terminal_is_its_only_task() -> None:
    shell = STEP | {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_PTY_PORT": "40001", "SLURM_PROCID": "0"}
    refuse_several_tasks(shell)
    with pytest.raises(UsageError):
        refuse_several_tasks(shell | {"SLURM_PROCID": "1"})


def test_a_node_that_is_not_of_the_step_is_refused() -> None:
    with pytest.raises(UsageError, match=r"node 'n9', and the step runs on n\[1-3\]"):
        read_allocation(STEP | {"SLURMD_NODENAME": "n9"})


def test_a_node_of_no_component_is_refused() -> None:
    with pytest.raises(UsageError, match="n3 is in no component"):
        read_allocation(HETEROGENEOUS | {"SLURM_JOB_NODELIST_HET_GROUP_1": "n2"})


def test_nodes_are_unused_in_a_batch_script_without_a_step() -> None:
    assert unused_nodes(BATCH_SCRIPT, "n1") == ("n2", "n3")
    assert unused_nodes(HETEROGENEOUS | BATCH_SCRIPT, "n1") == ()
    heterogeneous = {name: value for name, value in HETEROGENEOUS.items() if "STEP" not in name}
    assert unused_nodes(heterogeneous | BATCH_SCRIPT | {"SLURM_JOB_NODELIST": "n1"}, "n1") == ("n2", "n3")
    assert unused_nodes(BATCH_SCRIPT | {"SLURM_JOB_NODELIST": "n1"}, "n1") == ()
    # The name of a host is not always that which Slurm has for it.
    assert unused_nodes(BATCH_SCRIPT, "compute-1") == ("n2", "n3")
    assert unused_nodes(STEP, "n1") == ()
    assert unused_nodes({}, "n1") == ()


@pytest.mark.parametrize(
    ("host", "unused"),
    [("login", ("n1", "n2", "n3")), ("n1", ("n2", "n3")), ("n1.cluster.example", ("n2", "n3"))],
)
def test_nodes_are_unused_in_the_shell_of_salloc(host: str, unused: tuple[str, ...]) -> None:
    shell = {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "n[1-3]"}
    assert unused_nodes(shell, host) == unused


def test_nodes_are_unused_in_the_shell_of_salloc_that_is_a_step() -> None:
    """The shell of salloc is a step where LaunchParameters has use_interactive_step."""
    interactive = STEP | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NODELIST": "n2"}
    assert unused_nodes(interactive, "n2") == ("n1", "n3")


VALUES = st.text(alphabet="n123[]-,(x)", max_size=8)


@given(st.dictionaries(st.sampled_from(sorted(HETEROGENEOUS)), VALUES))
def test_any_environment_is_an_allocation_or_none_or_refused(changed: dict[str, str]) -> None:
    try:
        found = read_allocation(HETEROGENEOUS | changed)
    except UsageError:
        return
    if found is not None:
        assert found.nodes[found.index] == found.node
        assert len(found.components) == len(found.nodes)

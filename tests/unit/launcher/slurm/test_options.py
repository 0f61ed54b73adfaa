"""The options that --slurm may ask for."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from unirun.errors import SpecError
from unirun.launcher.slurm.options import BatchOptions, Component, parse_slurm


def test_options_of_a_job_with_one_component() -> None:
    found = parse_slurm(
        ["nodes=4,partition=debug,time=1:00:00,gres=gpu:8,mem=64G,cpus_per_task=16,account=ml"]
    )
    (component,) = found.components
    assert component.options == {
        "nodes": "4",
        "partition": "debug",
        "time": "1:00:00",
        "gres": "gpu:8",
        "mem": "64G",
        "cpus_per_task": "16",
        "account": "ml",
    }
    assert (found.requeue, found.grace, found.output) == (True, 60, None)


def test_scheduling_fields_of_other_launchers_are_known() -> None:
    found = parse_slurm(
        [
            "nodelist=n[1-3],n7,exclude=n2,container_image=docker://a/b:1,time_limit=1-0,begin=now+1hour,"
            "deadline=2026-12-01T00:00,env_vars=A=1,env_vars=B=x=y"
        ]
    )
    (component,) = found.components
    assert component.options == {"nodes": "1", "nodelist": "n[1-3],n7", "exclude": "n2", "time": "1-0"}
    assert component.container_image == "docker://a/b:1"
    assert found.options == {"begin": "now+1hour", "deadline": "2026-12-01T00:00"}
    assert found.env == {"A": "1", "B": "x=y"}


def test_the_batch_jobs_own_settings() -> None:
    found = parse_slurm(["requeue=no,grace=120,output=logs/%j.out"])
    assert (found.requeue, found.grace, found.output) == (False, 120, "logs/%j.out")
    assert parse_slurm(["grace=0"]).grace == 0, "it is told at its time limit"


@pytest.mark.parametrize(
    "texts",
    [
        ["nodes=1,partition=big,roles=learner : nodes=4,partition=small,roles=actor+rollout"],
        ["nodes=1,partition=big,roles=learner", "nodes=4,partition=small,roles=actor+rollout"],
    ],
)
def test_a_heterogeneous_job_has_components_with_roles(texts: list[str]) -> None:
    found = parse_slurm(texts)
    assert found.components == (
        Component({"nodes": "1", "partition": "big"}, ("learner",)),
        Component({"nodes": "4", "partition": "small"}, ("actor", "rollout")),
    )


def test_later_components_have_the_partition_and_the_time_of_the_first() -> None:
    found = parse_slurm(["partition=debug,time=10,roles=a,container_image=x,gres=gpu:1", "nodes=2"])
    assert found.components[1] == Component(
        {"partition": "debug", "time": "10", "nodes": "2"}, container_image="x"
    )


@pytest.mark.parametrize(
    ("texts", "fault"),
    [
        (["node=4"], "--slurm node: unknown key; did you mean 'nodes'?"),
        (["nodes"], "--slurm nodes: it has no value; write nodes=…"),
        (["nodes="], "--slurm nodes: it has no value"),
        ([""], "--slurm: '' has an item without a name; write nodes=4"),
        (["nodes=2,=3"], "--slurm: 'nodes=2,=3' has an item without a name"),
        (["nodes=0"], "--slurm nodes: expected a number of nodes, or MIN-MAX: nodes=4, found '0'"),
        (["nodes=2,nodes=3"], "--slurm nodes: it is there twice: 2 and 3"),
        (
            ["time=soon"],
            "--slurm time: expected a time: 90 (minutes), 8:00:00 or 2-0 (days-hours), found 'soon'",
        ),
        (["partition=a b"], "--slurm partition: expected a word without blanks and quotes, found 'a b'"),
        (["constraint=a`id`"], "expected a text without quotes, backslashes, ` and $, found"),
        (["begin=now\n#SBATCH --uid=0"], "expected a text without"),
        (["env_vars=1A=b"], "--slurm env_vars: expected NAME=VALUE, and the value a text without"),
        (["without=partition"], "--slurm without: expected some of job_name, no_kill, nodes, "),
        (
            ["nodes=1,roles=a", "begin=now"],
            "--slurm begin: it is for the whole job, and stands in component 2",
        ),
        (["roles=a", "roles=a+b"], "--slurm roles: a is named 2 times"),
    ],
)
def test_what_is_wrong_is_said(texts: list[str], fault: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_slurm(texts)
    assert fault in str(caught.value)


def test_options_of_ours_can_be_left_out() -> None:
    assert parse_slurm(["without=no-kill+open_mode"]).without == ("no_kill", "open_mode")


@pytest.mark.parametrize(
    "extra", ["-A x", "--account=x", "--exclusive", "--comment=a 'b' $c", "--mail-user x@y"]
)
def test_any_option_of_sbatch_may_be_an_extra_one(extra: str) -> None:
    assert parse_slurm(["nodes=1"], extra=[extra]).extra == (extra,)


@pytest.mark.parametrize(
    "extra",
    ["", "account=x", "hetjob", "--", "--a b=c\n#SBATCH --uid=0", "--comment=a\rb", "--a=\0", "--a=b\x85c"],
)
def test_what_is_no_option_of_sbatch_in_one_line_is_refused(extra: str) -> None:
    with pytest.raises(SpecError, match="--slurm-extra: expected an option of sbatch in one line"):
        parse_slurm(["nodes=1"], extra=[extra])


@pytest.mark.parametrize("line", ["", "  ", "a\nb", "a\0"])
def test_a_setup_line_is_one_line(line: str) -> None:
    with pytest.raises(SpecError, match="--slurm-setup: expected a line of bash"):
        parse_slurm(["nodes=1"], setup=["module load cuda", line])


def test_all_faults_are_reported_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        parse_slurm(["nodes=x,partitions=debug", "mem=much"])
    assert len(caught.value.faults) == 3


KEYS = st.sampled_from(["nodes", "time", "gres", "nodelist", "env", "roles", "output", "x"])


@given(
    st.lists(
        st.lists(st.builds("{}={}".format, KEYS, st.text(max_size=8)), max_size=4).map(",".join), min_size=1
    )
)
@example(["nodelist=n[1"])
@example([":"])
def test_any_text_is_a_batch_job_or_refused(texts: list[str]) -> None:
    try:
        found = parse_slurm(texts)
    except SpecError:
        return
    assert isinstance(found, BatchOptions)
    assert all("nodes" in component.options for component in found.components)

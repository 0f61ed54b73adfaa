"""Files for those that start containers, against the schemas that are published with them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.effort import examples
from unirun.cli.batch import Containers, compose_file, job_set
from unirun.spec.yaml import write_yaml

JOB = Containers("My PPO_2", "img:1", "name: ppo\n", words=("a.b=1",), nodes=2, gpus=4)

WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=8)
JOBS = st.builds(
    Containers,
    name=WORDS,
    image=st.just("img"),
    job_file=WORDS,
    words=st.lists(WORDS, max_size=3).map(tuple),
    nodes=st.integers(1, 3),
    gpus=st.integers(0, 2),
)


@functools.cache
def compose_schema() -> Any:
    """The validator of the published schema."""
    package = pytest.importorskip("check_jsonschema", reason="it has the schema of compose files")
    path = Path(package.__file__).parent / "builtin_schemas" / "vendor" / "compose-spec.json"
    schema = json.loads(path.read_text())
    return pytest.importorskip("jsonschema").validators.validator_for(schema)(schema)


@examples(30)
@given(JOBS)
def test_a_compose_file_fits_its_published_schema(job: Containers) -> None:
    compose_schema().validate(compose_file(job))


@examples(30)
@given(JOBS)
def test_a_job_set_fits_the_published_types_of_its_api(job: Containers) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="it has the types of the API")
    found = job_set(job)[1]
    # What a type does not know is left out of it.
    assert models.JobsetV1alpha2JobSet.from_dict(found).to_dict() == found


def test_each_service_of_a_compose_file_is_a_node() -> None:
    services = compose_file(JOB)["services"]
    assert [*services] == ["node0", "node1"]
    assert services["node1"]["command"] == [
        *("unirun", "--config", "/etc/unirun/job.yaml", "--rdzv-id", "my-ppo-2"),
        *("--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "node0:29400"),
        *("--token-file", "/run/secrets/token", "a.b=1"),
    ]


def test_each_pod_of_a_job_set_is_a_node_and_finds_the_first_by_its_name() -> None:
    config, found = job_set(JOB)
    assert config["data"] == {"job.yaml": "name: ppo\n"}
    job = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (2, 2, "Indexed")
    (container,) = job["template"]["spec"]["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "4"}}
    assert container["command"] == [
        *("unirun", "--config", "/etc/unirun/job.yaml", "--rdzv-id", "my-ppo-2"),
        *(
            "--nnodes",
            "2",
            "--node-rank",
            "$(UNIRUN_POD)",
            "--rdzv-endpoint",
            "my-ppo-2-node-0-0.my-ppo-2:29400",
        ),
        *("--token-file", "/run/secrets/unirun/token", "a.b=1"),
    ]


def test_arguments_are_not_taken_for_variables() -> None:
    job = Containers("a", "i", "env: {A: $HOME}", words=("a=$HOME", "b=$(PATH)"))
    compose = compose_file(job)
    assert compose["services"]["node0"]["command"][-2:] == ["a=$$HOME", "b=$$(PATH)"]
    assert compose["configs"]["job"]["content"] == "env: {A: $$HOME}"
    (container,) = job_set(job)[1]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"][
        "containers"
    ]
    assert container["command"][-2:] == ["a=$HOME", "b=$$(PATH)"]


def test_one_node_needs_no_token() -> None:
    job = Containers("a", "i", "")
    assert "token" not in write_yaml(compose_file(job), *job_set(job)).replace("{}", "")


@given(JOBS)
def test_the_files_are_written_so_that_yaml_reads_the_same(job: Containers) -> None:
    import yaml

    documents = [compose_file(job), *job_set(job)]
    assert [*yaml.safe_load_all(write_yaml(*documents))] == documents

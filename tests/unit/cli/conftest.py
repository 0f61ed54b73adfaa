"""A home without jobs, a store, a host, and a directory with scripts, for specs that name files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from msgspec import structs

from unirun.cli.commandline import parse
from unirun.cli.compose import job_spec
from unirun.collocation import Device, Inventory, Node
from unirun.rendezvous.store.protocol import Store
from unirun.rendezvous.store.url import open_store
from unirun.spec.job import JobSpec

HOST = Inventory((Node("host", cpus=(0, 1, 2, 3)),))
GPUS = Inventory((Node("host", cpus=(0, 1), devices=tuple(Device(str(i), "H", "") for i in range(8))),))

Compose = Callable[..., JobSpec]


def same(one: JobSpec, two: JobSpec) -> bool:
    """Equal but for the id, which is new each time."""
    return structs.replace(one, run_id="x") == structs.replace(two, run_id="x")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of jobs; no variable of the environment names another."""
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path / "home"))
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("UNIRUN_STORE", raising=False)
    return tmp_path / "home"


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Of a store that shells share."""
    return f"sqlite:{tmp_path / 'shared.db'}"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    """The store in that folder."""
    store = open_store(url)
    yield store
    store.close()


@pytest.fixture(autouse=True)
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with train.py, serve.py, the module tool and the classes of ppo.py in it."""
    for name in ("train.py", "serve.py", "tool.py", "pkg"):
        (tmp_path / name).touch()
    (tmp_path / "ppo.py").write_text("class Actor: ...\nclass Rollout: ...\nclass PPOTrainer: ...\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def compose() -> Compose:
    """``compose("--roles", "a=1", "train.py")``: the spec; `environ` is all of the environment."""

    def build(*argv: str, environ: Mapping[str, str] | None = None, inventory: Inventory = HOST) -> JobSpec:
        return job_spec(parse(argv), inventory, environ or {})

    return build


@pytest.fixture
def job_file(scripts: Path) -> Callable[[str], str]:
    """Writes a job file."""

    def write(text: str) -> str:
        path = scripts / "job.yaml"
        path.write_text(text)
        return str(path)

    return write

"""Fixtures of the integration tests: real processes and a separate home; checks that nothing is left behind."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.store.etcd_server import EtcdCluster
from tests.waiting import eventually
from unirun.experiments.starting import PRELOAD
from unirun.launcher.orders import PRELOAD_CALLS
from unirun.train import Trainer
from unirun.train.setup import PRELOAD as PRELOAD_OF_FUNCTIONS

from ..testbed.fixtures import hosts as hosts
from ..testbed.fixtures import slurm as slurm
from ..testbed.fixtures import slurm_of_hosts as slurm_of_hosts
from ..testbed.fixtures import warm_hosts as warm_hosts
from .harness import EXEC, Running, Script, Unirun, home_of, swept
from .invariants import no_thread_left
from .serving import SERVE_SCRIPT
from .warm import ONE_THREAD, Warm, WarmUnirun


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """Warm processes for jobs of one rank, of several, and of those that make calls, so that not every job imports torch."""
    with contextlib.closing(Warm(tmp_path_factory.mktemp("warm"))) as processes:
        processes.fork()
        processes.fork(env=ONE_THREAD)
        processes.fork(*PRELOAD_CALLS, env=ONE_THREAD)
        yield processes


@pytest.fixture(scope="session")
def warm_models(warm: Warm) -> None:
    """One more warm process, which has imported what the workers of trials import."""
    warm.fork(*PRELOAD, env=ONE_THREAD)


@pytest.fixture(scope="session")
def warm_functions(warm: Warm) -> None:
    """One more warm process, which has imported what the workers of trainers import."""
    warm.fork(*PRELOAD_OF_FUNCTIONS, env=ONE_THREAD)


@pytest.fixture(scope="session")
def warm_rpc(warm: Warm) -> None:
    """One more warm process, for jobs whose calls are those of torch."""
    warm.fork(*PRELOAD_CALLS, env={**ONE_THREAD, "TORCH_CPP_LOG_LEVEL": "ERROR"})


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """No thread that a test has started may be left in its process. A trainer of a module starts some when it needs them,
    and keeps them until the module's end."""
    with contextlib.nullcontext() if "trainer" in request.fixturenames else no_thread_left():
        yield


@pytest.fixture
def unirun(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Unirun]:
    """The command; at the end of the test no process of its jobs may be left. Jobs start warm, but for tests that are
    marked ``cold``. A test that is marked ``breaks`` has the pattern of an invariant that does not hold after it."""
    cold = request.node.get_closest_marker("cold") is not None
    command = Unirun(tmp_path) if cold else WarmUnirun(tmp_path, request.getfixturevalue("warm"))
    if (marker := request.node.get_closest_marker("breaks")) is not None:
        command.breaks = marker.args[0]
    with swept(command) as swept_command:
        yield swept_command


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Writes a worker's script: ``script("print(1)")``."""

    def write(text: str, name: str = "train.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    return write


@pytest.fixture
def running(unirun: Unirun, script: Script) -> Running:
    """A job in the foreground that runs until it is told to end."""
    job = unirun.start(
        *EXEC,
        "--roles",
        "actor=2,rollout=1",
        "--max-restarts",
        "actor=1",
        "--rdzv-id",
        "mine",
        script(SERVE_SCRIPT),
    )
    job.lines(r"line (\w+ \d)", 3)
    eventually(lambda: {role["phase"] for role in unirun.status()["roles"]} == {"running"}, "all ranks run")
    return job


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """An etcd of one member for tests that do not stop it. Each test has its own prefix."""
    servers = EtcdCluster(tmp_path_factory.mktemp("etcd"))
    yield servers
    servers.stop()


@pytest.fixture(params=["sqlite", "etcd"])
def store(request: pytest.FixtureRequest, unirun: Unirun) -> list[object]:
    """The options for each kind of store."""
    if request.param == "sqlite":
        return []
    return ["--store", request.getfixturevalue("etcd").url(prefix=f"/{unirun.root.name}/")]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Iterator[Unirun]:
    """The home of the trainers of one module, of which no process may be left at its end."""
    with home_of(WarmUnirun(tmp_path_factory.mktemp("trainers"), warm)) as command:
        yield command


@pytest.fixture(scope="module")
def trainer(home: Unirun) -> Iterator[Trainer]:
    """Three ranks, which the tests of a module share."""
    with no_thread_left(), Trainer(num_workers=3, max_failures=20) as made:
        made.start()
        yield made

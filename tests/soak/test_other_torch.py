"""unirun with the oldest torch and the lowest versions of its dependencies that it declares, and with the newest ones.

A virtual environment for each is made below that of the tests, and kept: PyPI's torch for Linux has CUDA with it, five
gigabytes. Where an index offers a build for the CPU, PIP_EXTRA_INDEX_URL names it. It takes a quarter of an hour.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("cli", "spec", "roles", "wire", "weights", "train/checkpoints", "train/data")
JOBS = ("test_one_role_is_torchrun.py", "test_running_a_job.py", "test_calls.py", "test_weights.py")
EXTRAS = ("etcd", "hosts")
TOOLS = ("pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6.100", "mypy>=1.11", "safetensors")
"""Packages that these tests import; of the developers' tools any version will do."""

LIMIT = 3600.0

pytestmark = pytest.mark.timeout(2 * LIMIT)


def declared() -> Iterator[str]:
    """The requirements of unirun and of the extras of these tests, as ``name>=version``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    yield from project["dependencies"]
    for extra in EXTRAS:
        yield from project["optional-dependencies"][extra]


def lowest(requirement: str) -> str:
    """``numpy>=1.26`` as ``numpy==1.26.*``: the lowest minor version, with its mended defects."""
    found = re.fullmatch(r"([\w-]+)>=(\d+)(?:\.(\d+))?", requirement)
    assert found is not None, f"{requirement} has no lower bound"
    return f"{found[1]}=={found[2]}.{found[3] or 0}.*"


@pytest.fixture(scope="module", params=["oldest", "newest"])
def python(request: pytest.FixtureRequest) -> str:
    """The interpreter of an environment with these versions, whose torch it prints."""
    place = Path(sys.prefix, "torch", request.param)
    python = str(place / "bin" / "python")
    if not os.path.exists(python):
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
    pinned = [*map(lowest, declared())] if request.param == "oldest" else ["--upgrade", *declared()]
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, *pinned, *TOOLS], check=True, timeout=LIMIT)
    subprocess.run([*install, "--no-deps", "-e", str(ROOT)], check=True, timeout=LIMIT)
    versions = "import torch, msgspec; print('torch', torch.__version__, 'msgspec', msgspec.__version__)"
    print(subprocess.check_output([python, "-c", versions], text=True))
    return python


def passes(python: str, *arguments: str) -> None:
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, check=False, timeout=LIMIT)
    assert done.returncode == 0, "see the failures above"


def test_the_tests_that_start_no_process_pass(python: str) -> None:
    rooms = [f"tests/unit/{room}" for room in ROOMS]
    passes(python, *rooms, "-m", "not starts_processes", "--hypothesis-profile", "quick")


def test_jobs_run(python: str) -> None:
    passes(python, *(f"tests/integration/{name}" for name in JOBS))

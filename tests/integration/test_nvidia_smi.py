"""The inventory compared with ``nvidia-smi``, where it works."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.harness import Unirun
from unirun.collocation.devices import nvml_devices


def smi(*fields: str) -> list[list[str]]:
    """One row per device; empty where ``nvidia-smi`` does not work."""
    if shutil.which("nvidia-smi") is None:
        pytest.skip("no nvidia-smi")
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    found = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    if found.returncode:
        pytest.skip(f"nvidia-smi does not work: {found.stdout}{found.stderr}")
    return [[value.strip() for value in line.split(",")] for line in found.stdout.splitlines()]


@pytest.mark.gpu
def test_the_inventory_agrees_with_nvidia_smi() -> None:
    rows = smi("index", "uuid", "name", "pci.bus_id", "memory.total", "mig.mode.current")
    whole = [row for row in rows if row[5] != "Enabled"]
    devices = [device for device in nvml_devices() if device.type == "cuda"]
    assert [[d.index, d.uuid, d.name] for d in devices] == [row[:3] for row in whole]
    for device, row in zip(devices, whole, strict=True):
        assert row[3].lower().endswith(device.pci)
        assert device.memory == pytest.approx(int(row[4]) << 20, rel=0.01)
        assert {peer for peer, _ in device.links} <= {row[0] for row in rows} - {device.index}


SHARE = """
    import os
    import torch
    torch.ones(1000, device="cuda:0").sum().item()
    who, share = os.environ["ROLE_NAME"], os.environ["UNIRUN_DEVICE_SHARE"]
    print(who, torch.cuda.device_count(), f"GPU-{torch.cuda.get_device_properties(0).uuid}", share, flush=True)
"""


@pytest.mark.gpu
def test_an_actor_and_a_rollout_share_a_device(
    unirun: Unirun, script: Callable[..., Path], tmp_path: Path
) -> None:
    uuids = {row[0] for row in smi("uuid", "mig.mode.current") if row[1] != "Enabled"}
    if not uuids:
        pytest.skip("all devices are in parts")
    job = tmp_path / "job.yaml"
    job.write_text(
        f"script: {script(SHARE)}\n"
        "roles: {actor: {count: 1, device: cuda}, rollout: {count: 1, device: cuda}}\n"
        "collocations: [[actor, rollout]]\n"
    )
    result = unirun("-q", "--config", job)
    assert result.code == 0, result.err
    (actor, rollout) = (line.split() for line in result.lines)
    assert (actor[0], rollout[0]) == ("actor", "rollout")
    assert actor[1:] == rollout[1:] == ["1", actor[2], "0.5"]
    assert actor[2] in uuids

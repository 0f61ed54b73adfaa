"""The inventory beside ``nvidia-smi``, where there is one that works."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from unirun.collocation.devices import nvml_devices


def smi(*fields: str) -> list[list[str]]:
    """A row for each device, as far as ``nvidia-smi`` works here."""
    if shutil.which("nvidia-smi") is None:
        pytest.skip("no nvidia-smi")
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    found = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    if found.returncode:
        pytest.skip(f"nvidia-smi does not work: {found.stdout}{found.stderr}")
    return [[value.strip() for value in line.split(",")] for line in found.stdout.splitlines()]


def test_the_inventory_agrees_with_nvidia_smi() -> None:
    rows = smi("index", "uuid", "name", "pci.bus_id", "memory.total", "mig.mode.current")
    whole = [row for row in rows if row[5] != "Enabled"]
    devices = [device for device in nvml_devices() if device.type == "cuda"]
    assert [[d.index, d.uuid, d.name] for d in devices] == [row[:3] for row in whole]
    for device, row in zip(devices, whole, strict=True):
        assert row[3].lower().endswith(device.pci)
        assert device.memory == pytest.approx(int(row[4]) << 20, rel=0.01)
        assert {peer for peer, _ in device.links} <= {row[0] for row in rows} - {device.index}

"""The signs by which an agent knows that its node is sick."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.launcher.nvml import LOST, NOT_SUPPORTED, TIMEOUT, Nvml, NVMLError
from unirun.launcher.monitoring import Devices, NodeHealth
from unirun.wire.reports import Sick


def signs(health: NodeHealth) -> list[str]:
    found = health.look()
    assert all(isinstance(each, Sick) and each.node == "n1" for each in found)
    return [f"{each.kind}: {each.sign}" for each in found]


def test_a_device_with_new_errors_or_that_is_lost_is_told_once(tmp_path: Path) -> None:
    nvml = Nvml(5, NVMLError(NOT_SUPPORTED), 0)
    devices = Devices(nvml)
    health = NodeHealth("n1", tmp_path, devices)
    assert signs(health) == []
    nvml.cards[0] = 7
    nvml.cards[2] = NVMLError(LOST)
    told = ["device: GPU 0 has had 2 uncorrectable ECC errors", "device: GPU 2 is lost"]
    assert signs(health) == told
    assert signs(health) == []
    # A question that fails for another reason is no sign.
    nvml.cards[2] = NVMLError(TIMEOUT)
    assert signs(health) == []
    devices.close()
    assert nvml.open == 0


@given(st.lists(st.integers(0, 5), max_size=8))
def test_errors_are_counted_from_the_look_before_on(counts: list[int]) -> None:
    nvml = Nvml(0)
    devices = Devices(nvml)
    most, told = 0, []
    for count in (0, *counts):
        nvml.cards[0] = count
        new = f"GPU 0 has had {count - most} uncorrectable ECC errors"
        told.append([*devices.signs()] == [new] * (count > most))
        most = max(most, count)
    assert all(told)


def test_an_error_of_the_hardware_is_told_and_one_of_a_program_is_not(tmp_path: Path) -> None:
    nvml = Nvml(0, 0)
    health = NodeHealth("n1", tmp_path, Devices(nvml))
    health.look()
    nvml.xids += [(100, 31), (100, 79), (555, 48)]
    assert signs(health) == [
        "device: GPU 0 has had the error XID 79",
        "device: a GPU has had the error XID 48",
    ]


def test_a_host_without_a_driver_has_no_sign_of_it(tmp_path: Path) -> None:
    nvml = Nvml(0)

    def fails() -> None:
        raise NVMLError(9)

    nvml.nvmlInit = fails  # type: ignore[method-assign]
    assert signs(NodeHealth("n1", tmp_path, Devices(nvml))) == []


@pytest.mark.parametrize(("free", "full"), [(255, True), (257, False)])
def test_a_disk_with_less_than_a_mebibyte_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, full: bool
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=free, f_frsize=4096))
    assert (
        signs(NodeHealth("n1", tmp_path, Devices(Nvml()))) == [f"disk: the disk of {tmp_path} is full"] * full
    )


def test_a_directory_that_is_gone_is_no_sign(tmp_path: Path) -> None:
    assert signs(NodeHealth("n1", tmp_path / "gone", Devices(Nvml()))) == []

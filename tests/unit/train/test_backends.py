"""Backends by name, by entry point, and by class."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from unirun.errors import UsageError
from unirun.train.setup import (
    BUILT_IN,
    GROUP,
    GROUP_TIMEOUT,
    Backend,
    NoBackend,
    TorchConfig,
    configured,
    find_backend,
)

CODE = """
from unirun.train import NoBackend

class Mine(NoBackend):
    def encode_data(self, data):
        return [data]

class Half:
    def on_start(self, rank, world_size): ...
    def on_shutdown(self): ...
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package with a backend called ``mine``, and one that is incomplete."""
    (tmp_path / "minebackend.py").write_text(CODE)
    about = tmp_path / "minebackend-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: minebackend\nVersion: 1.0\n")
    names = ("mine = minebackend:Mine", "half = minebackend:Half", "torch = minebackend:Half")
    (about / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *names, ""]))
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("minebackend", None)


@pytest.mark.parametrize("timeout", [5.0, GROUP_TIMEOUT, 2 * GROUP_TIMEOUT])
@pytest.mark.parametrize("name", ["torch", "gloo", "nccl"])
def test_a_process_group_has_the_timeout_and_the_kind_that_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, name: str, timeout: float
) -> None:
    formed: list[Any] = []
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda kind, timeout: formed.append((kind, timeout))
    )
    find_backend(name, timeout=timeout)().on_start(0, 1)
    usual = "nccl" if torch.cuda.is_available() else "gloo"
    assert formed == [({"torch": usual}.get(name, name), timedelta(seconds=timeout))]


def test_those_that_are_built_in_are_found_by_name_whatever_is_installed() -> None:
    assert {*BUILT_IN} == {"torch", "gloo", "nccl", "none"}
    assert {name: find_backend(name) for name in BUILT_IN} == BUILT_IN


@pytest.mark.parametrize("name", ["mine", "minebackend:Mine"])
def test_others_are_found_by_entry_point_or_as_a_class(name: str) -> None:
    found = find_backend(name)
    made = found()
    assert isinstance(made, NoBackend)
    assert made.encode_data(3) == [3]


@pytest.mark.parametrize("name", ["half", "minebackend:Half"])
def test_one_without_all_hooks_is_told_which_are_missing(name: str) -> None:
    with pytest.raises(UsageError) as raised:
        find_backend(name)
    assert str(raised.value) == (
        f"backend {name!r} has no on_failure, encode_data, decode_data; derive it from unirun.train.NoBackend"
    )


@pytest.mark.parametrize("name", ["horovod", "", "Torch"])
def test_an_unknown_one_is_told_with_those_that_there_are(name: str) -> None:
    with pytest.raises(UsageError) as raised:
        find_backend(name)
    assert str(raised.value) == (
        f"there is no backend {name!r}; there are: gloo, half, mine, nccl, none, torch; "
        "or name a class: pkg.mod:Class"
    )


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nowhere:Mine", "No module named 'nowhere'"),
        ("minebackend:Yours", "module 'minebackend' has no attribute 'Yours'"),
    ],
)
def test_a_class_that_is_not_there_is_told(name: str, problem: str) -> None:
    with pytest.raises(UsageError) as raised:
        find_backend(name)
    message = f"backend {name!r} cannot be imported: {problem}; name it as pkg.mod:Class"
    assert str(raised.value) == message
    assert isinstance(raised.value.__cause__, ImportError | AttributeError)


@pytest.mark.parametrize("make", BUILT_IN.values())
def test_what_is_built_in_has_all_hooks_and_changes_no_data(make: Callable[[], Backend]) -> None:
    backend, data = make(), object()
    assert backend.decode_data(backend.encode_data(data)) is data
    backend.on_failure(0, 1)
    backend.on_shutdown()


@pytest.mark.parametrize(
    ("backend", "args", "found"),
    [
        ("torch", None, ("torch", GROUP_TIMEOUT)),
        ("pytorch", None, ("torch", GROUP_TIMEOUT)),
        ("torch", TorchConfig(timeout_s=5), ("torch", 5.0)),
        ("torch", TorchConfig("gloo", timeout_s=5), ("gloo", 5.0)),
        ("gloo", TorchConfig("gloo"), ("gloo", GROUP_TIMEOUT)),
        ("nccl", TorchConfig(), ("nccl", GROUP_TIMEOUT)),
        ("mine", None, ("mine", GROUP_TIMEOUT)),
    ],
)
def test_arguments_of_a_backend_name_it_more_exactly(
    backend: str, args: TorchConfig | None, found: tuple[str, float]
) -> None:
    assert configured(backend, args) == found

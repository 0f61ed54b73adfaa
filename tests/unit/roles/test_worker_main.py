"""The making of a workload or a trainer from the names of a spec."""

from __future__ import annotations

import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from unirun.errors import UsageError
from unirun.roles import BaseTrainer, BaseWorkload
from unirun.roles.calls.group import RoleGroup
from unirun.roles.worker_main import _ByRole, _keep, _stop, load_class, make, run_function


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """With a class that is derived, one that is not, and a function."""
    (tmp_path / "play_of_hosts.py").write_text(
        "import unirun\nclass Actor(unirun.BaseWorkload): ...\nclass Other: ...\ndef made(): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "play_of_hosts"


class TestAClass:
    def test_is_found_by_its_name(self, module: str) -> None:
        assert load_class(f"{module}:Actor", BaseWorkload).__name__ == "Actor"

    @pytest.mark.parametrize(
        ("name", "says"),
        [
            ("Actr", "play_of_hosts has no 'Actr'; name one that is there"),
            ("Other", "is not derived from BaseWorkload; write class Other"),
            ("made", "is not derived from BaseWorkload"),
        ],
    )
    def test_that_is_none_is_a_wrong_use(self, module: str, name: str, says: str) -> None:
        with pytest.raises(UsageError, match=says):
            load_class(f"{module}:{name}", BaseWorkload)


FUNCTIONS = """
ran = []
def plain(): ran.append("plain")
def with_default(steps=3): ran.append(steps)
def wants(ctx): ran.append(ctx.role)
def two(ctx, steps): ...
def named(*, steps): ...
async def later(): ...
class Actor: ...
def fails(): raise KeyError("mine")
"""


class TestAFunction:
    @pytest.fixture
    def module(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
        """With functions that note that they ran."""
        (tmp_path / "play_of_functions.py").write_text(FUNCTIONS)
        monkeypatch.syspath_prepend(tmp_path)
        yield "play_of_functions"
        sys.modules.pop("play_of_functions", None)

    @pytest.mark.parametrize(("name", "ran"), [("plain", "plain"), ("with_default", 3), ("wants", "default")])
    def test_is_called_alone_or_with_the_context(self, module: str, name: str, ran: object) -> None:
        run_function(f"{module}:{name}")
        assert sys.modules[module].ran == [ran]

    @pytest.mark.parametrize(
        ("name", "says"),
        [
            ("two", "two takes ctx, steps; write def main\\(\\) or def main\\(ctx\\)"),
            ("named", "named takes steps; write def main"),
            ("later", r"later is async; write def main\(\): asyncio.run"),
            ("Actor", "Actor is no function; name one that is defined at the top level"),
            ("plane", "play_of_functions has no 'plane'"),
        ],
    )
    def test_that_cannot_be_called_so_is_a_wrong_use(self, module: str, name: str, says: str) -> None:
        with pytest.raises(UsageError, match=says):
            run_function(f"{module}:{name}")

    def test_raises_its_own_errors(self, module: str) -> None:
        with pytest.raises(KeyError, match="mine"):
            run_function(f"{module}:fails")


class Bare(BaseWorkload):
    """Takes nothing."""

    def __init__(self) -> None:
        pass


class Wrong(BaseWorkload):
    """Takes the right things, and fails."""

    def __init__(self, master_handle: Any, config: Any) -> None:
        len(config)


class TestMaking:
    def test_a_class_that_takes_other_arguments_is_a_wrong_use(self) -> None:
        with pytest.raises(UsageError) as caught:
            make(Bare, BaseWorkload, master_handle=1, config=2)
        text = str(caught.value)
        assert "Bare.__init__() takes 1 positional argument but 3 were given" in text
        assert text.endswith("write def __init__(self, master_handle, config), or leave it out")
        assert caught.value.__suppress_context__, "it says all that there is to say"

    def test_a_type_error_of_its_own_stays_one(self) -> None:
        with pytest.raises(TypeError, match="has no len"):
            make(Wrong, BaseWorkload, master_handle=1, config=2)

    def test_a_class_gets_its_arguments_in_order(self) -> None:
        made = make(BaseTrainer, BaseTrainer, actor_handles={}, actor_classes={}, config=3)
        assert made.config == 3


def test_the_handles_of_a_role_are_those_of_the_ranks_that_it_has_now() -> None:
    ranks = [0, 1]
    handles = _ByRole({"actor": RoleGroup(cast(Any, None), "actor", ranks)}, list)
    assert [each.rank for each in handles["actor"]] == [0, 1]
    ranks.append(2)
    assert {role: [each.rank for each in found] for role, found in handles.items()} == {"actor": [0, 1, 2]}


def test_a_result_that_cannot_be_kept_fails_no_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _keep(tmp_path / "result", threading.Lock())
    assert capsys.readouterr().err.startswith(
        "unirun: what fit() returned cannot be kept as the job's result: "
    )
    assert not (tmp_path / "result").exists()


def test_a_signal_that_comes_again_does_not_end_the_teardown() -> None:
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        with pytest.raises(SystemExit) as leaving:
            signal.raise_signal(signal.SIGTERM)
        assert leaving.value.code == 128 + signal.SIGTERM
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)

"""The knowledge of a type checker about a role group whose class is derived from `RoleGroup` and the workload."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from mypy import api

import unirun

SKIPPED = (
    *("torch", "numpy", "omegaconf", "msgspec", "cloudpickle"),
    *("unirun.collocation.graph", "unirun.rendezvous", "unirun.train", "unirun.wire"),
)
"""Packages that are not analysed, as no signature in this test needs their types."""

CONFIG = "[mypy]\nstrict = true\n" + "".join(
    f"[mypy-{package}.*]\nfollow_imports = skip\n" for package in SKIPPED
)

PPO = """
    from collections.abc import Sequence
    from typing import Literal

    from unirun import BaseTrainer, BaseWorkload, InvocationRef, RoleGroup, trainer_invocation

    def first(results: list[float]) -> float:
        return results[0]

    class Actor(BaseWorkload):
        @trainer_invocation()
        def update(self, batch: Sequence[float], /, *, clip: bool = True) -> float:
            return self.save(str(clip)) + 0.5

        @trainer_invocation
        def bare(self) -> str:
            return ""

        @trainer_invocation
        async def soon(self) -> str:
            return ""

        @trainer_invocation(target="RANK0", timeout=3.0)
        def save(self, path: str) -> int:
            return 1

        @trainer_invocation(blocking=False, target=[0, 1])
        async def later(self, kind: Literal["a", "b"] = "a") -> bytes:
            return b""

        @trainer_invocation(blocking=False, target="ANY")
        def anyone(self) -> int:
            return 1

        @trainer_invocation(post_func=first)
        def reduced(self) -> float:
            return 1.0

        async def both(self) -> bytes:
            return await self.later("b")

    class Critic(Actor):
        @trainer_invocation()
        def update(self, batch: Sequence[float], /, *, clip: bool = True) -> float:
            return super().update(batch, clip=clip)

    class ActorGroup(RoleGroup, Actor):
        pass

    class Trainer(BaseTrainer):
        RG_ACTOR: ActorGroup

        def init(self) -> None: ...

        def fit(self) -> int:
            actor = self.RG_ACTOR
            losses: list[float] = actor.update([1.0], clip=False)
            losses = actor[1:].update.call([1.0])
            texts: list[str] = actor.bare()
            texts = actor.soon()
            size: int = actor.save("x")
            size = actor.save.options(timeout=5.0).call("x")
            ref: InvocationRef[list[bytes]] = actor.later("b")
            parts: list[bytes] = actor.later.call()
            size = actor.anyone().result()
            loss: float = actor.update.rank0([1.0])
            sizes: list[int] = actor.save.map(["x", "y"])
            untyped = actor[1].update(3)
            untyped = actor.update.options(target="ANY")([1.0])
            loss = actor.reduced()
            actor.update(3)
            actor.update.call_async([1.0], clp=True)
            actor.later("c")
            wrong: int = actor.update.call_async([1.0]).result()
            return size
"""

WRONG = {
    "actor.update(3)": 'Argument 1 to "__call__" of "RemoteMethod" has incompatible type "int"',
    "actor.update.call_async([1.0], clp=True)": 'Unexpected keyword argument "clp" for "call_async"',
    'actor.later("c")': "has incompatible type \"Literal['c']\"",
    "wrong: int": 'expression has type "list[float]", variable has type "int"',
}
"""The lines in which the checker finds a mistake, and what it says."""


@pytest.mark.timeout(600)
def test_decorated_methods_have_their_signatures_in_a_role_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A type checker follows decorators without generated files, for every way to call a method."""
    monkeypatch.chdir(tmp_path)
    # mypy does not see what an editable install finds.
    monkeypatch.setenv("MYPYPATH", str(Path(unirun.__file__).parents[1]))
    source = textwrap.dedent(PPO)
    Path("ppo.py").write_text(source)
    Path("mypy.ini").write_text(CONFIG)
    out, err, _ = api.run(["--config-file", "mypy.ini", "--cache-dir", "cache", "ppo.py"])
    found = [line for line in out.splitlines() if line.startswith("ppo.py") and ": error: " in line]
    lines = source.splitlines()
    assert len(found) == len(WRONG), out + err
    for error, (start, says) in zip(found, WRONG.items(), strict=True):
        assert lines[int(error.split(":")[1]) - 1].strip().startswith(start), error
        assert says in error

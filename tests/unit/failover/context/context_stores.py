"""Context stores of a job for tests: how one is opened, and a write that is tried until it is done."""

from __future__ import annotations

from collections.abc import Callable

from tests.unit.failover.context.faulty_store import FaultyStore
from unirun.errors import Fenced, StoreError
from unirun.failover.context import ContextStore
from unirun.rendezvous.election import Term, campaign
from unirun.wire.address import UnixAddress

RUN = "job-1"


def term(store: FaultyStore, *, deposing: int = 0, run_id: str = RUN) -> Term:
    won = campaign(store, f"jobs/{run_id}/", UnixAddress("/x", "host"), 7, ttl=60, deposing=deposing)
    assert won is not None
    return won


def contexts(store: FaultyStore, *, deposing: int = 0, run_id: str = RUN) -> ContextStore:
    return ContextStore(store, run_id, term(store, deposing=deposing, run_id=run_id))


def until_done(do: Callable[[], object], tries: int = 50) -> None:
    """Make the same call until it succeeds, as a master does."""
    for _ in range(tries):
        try:
            do()
        except Fenced:
            raise
        except StoreError:
            continue
        return
    raise AssertionError("it never succeeds")

"""`MasterHandle`: the job's services for a workload or a trainer."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping
from typing import Any

from unirun.errors import UsageError
from unirun.roles.context import Context
from unirun.wire.reports import Metrics

MAX_STATE = 8 << 20
"""Bytes that one rank may save."""

MASTER_ASK_TIMEOUT = 120.0
"""Seconds in which the master must answer. It is long as the store may be unavailable for a while."""


class MasterHandle:
    """The job, as one of its workers sees it: ``self.master_handle`` of a workload or a trainer."""

    def __init__(self, context: Context) -> None:
        self.context, self._peers = context, context.peers
        self._unlinked_state: bytes | None = None

    def job_info(self) -> dict[str, Any]:
        """A dict with the job's ``name`` and its ``roles``.

        For each role it has ``world_size``, ``generation``, ``phase``, ``kind`` (``script``, ``function``,
        ``workload``, ``trainer``, …) and ``target``, the class or file.
        """
        welcome = self._peers.welcome
        roles = {}
        for name, info in self._peers.roles().items():
            view, brief = self._peers.view(name), self._peers.brief(name)
            roles[name] = {
                "world_size": info.world_size,
                "generation": info.generation,
                "phase": view.phase if view else "running",
                "kind": brief.kind if brief else "script",
                "target": brief.target if brief else "",
            }
        return {"name": welcome.name if welcome else "", "roles": roles}

    def report(self, metrics: Mapping[str, float]) -> None:
        """Report figures by name: ``report({"loss": 0.1})``. ``unirun status`` shows the latest of each, and the job's
        ``metrics.jsonl`` has all of them.

        Raises `UsageError` for a value that is not a number, `ConnectionLost` if this node's agent is gone.
        """
        values = {}
        for key, value in metrics.items():
            try:
                values[str(key)] = float(value)
            except (TypeError, ValueError, OverflowError) as error:
                raise UsageError(
                    f"metric {key!r} is a {type(value).__name__} that is no float: {error}", "report floats"
                ) from error
        self._peers.tell(Metrics(values, time.time()))

    def save_state(self, state: bytes) -> None:
        """Keep `state`, at most 8 MiB, for the next incarnation of this rank. It is in the job's store when this
        returns.

        Raises `UsageError` for a value that is not bytes or is too large, `StoreAway` if the store does not answer::

            self.master_handle.save_state(pickle.dumps({"step": step}))
        """
        if not isinstance(state, bytes | bytearray | memoryview):
            raise UsageError(
                f"save_state got {type(state).__name__}", "give bytes, for example pickle.dumps(…)"
            )
        state = bytes(state)
        if len(state) > MAX_STATE:
            raise UsageError(
                f"save_state got {len(state)} bytes, and {MAX_STATE} is the most",
                "keep large data in files, and their names in the state",
            )
        if self._peers.linked:
            self._peers.ask("save_state", data=base64.b64encode(state).decode(), timeout=MASTER_ASK_TIMEOUT)
        else:
            # Without a launcher nothing outlives the process.
            self._unlinked_state = state

    def load_state(self) -> bytes | None:
        """The state that this rank saved last, in this incarnation or an earlier one; None if nothing was.

        Raises `StoreAway` if the store does not answer.
        """
        if not self._peers.linked:
            return self._unlinked_state
        data = self._peers.ask("load_state", timeout=MASTER_ASK_TIMEOUT)
        return None if data is None else base64.b64decode(data)

    def commit_version(self, channel: str, version: int) -> int:
        """Keep `version` as the latest of `channel` (weights, a data set), unless a higher one is kept already.

        Returns the version that is kept. It is in the job's store by then, and survives every process of the job.
        Raises `UsageError` for a negative version, `JobError` for a channel name that is empty or longer than 200
        characters, `StoreAway` if the store does not answer.
        """
        if version < 0:
            raise UsageError(f"version {version} of {channel!r} is negative", "count from 0")
        kept = self._peers.ask("commit_version", channel, str(version), timeout=MASTER_ASK_TIMEOUT)
        return int(kept or 0)

    def version(self, channel: str) -> int | None:
        """The latest version of `channel` that was committed; None if none was."""
        kept = self._peers.ask("version", channel, timeout=MASTER_ASK_TIMEOUT)
        return None if kept is None else int(kept)

"""The agent of torch.distributed.rpc at the end of its process."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

WITH_A_CALL = """
    import time
    from torch.distributed import rpc
    from unirun.roles.transport.torch_rpc import RpcAgent
    from unirun.values import WorkerId

    me = WorkerId("me", 0, 0)
    agent = RpcAgent(me, lambda who: who.rank, 1, polls=False)
    rpc.rpc_async(agent.known(me, agent.start()), time.sleep, (0.3,))
"""


@pytest.mark.starts_processes
def test_a_process_that_exits_while_its_agent_runs_a_call_is_not_aborted() -> None:
    """A thread that comes back to Python code while the interpreter is finalized aborts the process."""
    program = [sys.executable, "-c", textwrap.dedent(WITH_A_CALL)]
    assert subprocess.run(program, timeout=60, check=False).returncode == 0


@pytest.mark.starts_processes
def test_a_process_may_shut_its_agent_down_by_itself() -> None:
    program = [sys.executable, "-c", textwrap.dedent(WITH_A_CALL) + "rpc.shutdown(graceful=False)\n"]
    done = subprocess.run(program, timeout=60, check=True, capture_output=True, text=True)
    assert "Traceback" not in done.stderr

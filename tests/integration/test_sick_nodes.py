"""A node with a full disk is left at the first failure, for the idle one."""

from __future__ import annotations

from .harness import Script, Unirun

WRITES = """
    import os, time
    if os.environ["UNIRUN_NODE"] == "node0":
        time.sleep(0.5 * int(os.environ["RANK"]))
        raise OSError(28, "No space left on device", "model.pt")
    print("line saved on", os.environ["UNIRUN_NODE"], flush=True)
"""


def test_ranks_leave_a_node_whose_disk_is_full_together_with_one_restart(
    unirun: Unirun, script: Script
) -> None:
    nodes = ("--inventory", "fake:nodes=2,devices=2", "--roles", "actor=2", "--max-restarts", 1)
    result = unirun(*nodes, script(WRITES))
    assert result.code == 0, result.err
    assert (
        "unirun: node0: node0 is sick: actor:0 has found a disk full; it gets no more ranks\n" in result.err
    )
    assert result.out.count("line saved on node1") == 2
    status = unirun.status()
    assert (status["tainted"], status["sick"]) == (["node0"], ["node0: actor:0 has found a disk full"])
    (failure,) = status["failures"]
    assert failure["kind"] == "disk_full"

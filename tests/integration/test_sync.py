"""``--sync``: the working tree comes to hosts that have none."""

from __future__ import annotations

from tests.testbed.hosts import Hosts

from .harness import EXEC, START, UNIRUN

TRAIN = """
import socket
import helper
print(helper.WORD, "on", socket.gethostname(), flush=True)
"""


TCSH = "sed 's#^root:\\(.*\\):[^:]*$#root:\\1:/usr/bin/tcsh#' /etc/passwd > /tmp/passwd && mount --bind /tmp/passwd /etc/passwd"


def test_a_job_runs_on_hosts_that_get_the_working_tree_first(hosts: Hosts) -> None:
    """Login shells parse what ssh passes on; that of h3 is tcsh, in which ``!`` has a meaning between quotes."""
    hosts[2].run(["sh", "-c", TCSH])
    project = "/tmp/it's a project!"
    here = hosts[0].path(project)
    here.mkdir()
    (here / "train.py").write_text(TRAIN)
    (here / "helper.py").write_text("WORD = 'sent'\n")
    command = [UNIRUN, "--hosts", "h2,h3", "--sync", *EXEC, "--nproc-per-node", "1", "train.py"]
    done = hosts[0].run(command, cwd=project, within=START)
    assert {line for line in done.stdout.splitlines() if line.startswith("[")} == {
        "[default:0] sent on h2",
        "[default:1] sent on h3",
    }
    assert sorted(path.name for path in here.iterdir()) == ["helper.py", "train.py"]

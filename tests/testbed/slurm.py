"""A Slurm of its own: munged, slurmctld, and a slurmd for each node, all on this host or each on a host of a test bed.

::

    with Slurm() as slurm:
        slurm.run("srun", "-N3", "hostname")
    with Hosts(3) as hosts, Slurm(hosts) as slurm:
        job = slurm.run("sbatch", "--parsable", script).strip()
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.testbed.hosts import Hosts
from tests.testbed.machine import Number, require, run, wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "setpriv", "mknod")

CPUS, MEMORY, GPUS = 8, 4000, 2
"""Of each node; memory in MB. There is less on the machine, and the GPUs are files that nobody opens."""

_NODE = "UNIRUN_TESTBED_NODE"
"""Marks a slurmd and the processes that stand over the jobs' own."""

_CONF = """\
ClusterName=testbed
SlurmctldHost={machine}({address})
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,sched_min_interval=0
ReturnToService=2
JobRequeue=1
KillWait=3
SlurmdTimeout=8
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
SlurmdParameters=config_overrides
GresTypes=gpu
{nodes}
PartitionName=debug Nodes=ALL Default=YES PriorityTier=1 GraceTime=3
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


class Slurm:
    """Three nodes n1, n2, n3 on this host, or the hosts h1, h2 … of `hosts`, with `CPUS`, `MEMORY` and `GPUS` each.

    Jobs of partition ``urgent`` requeue those of ``debug``, the default. These have three seconds; their steps get SIGTERM at
    once, and a batch script the signal of its ``--signal=B:``. Raises `Unavailable` where a test bed is not possible.
    """

    def __init__(self, hosts: Hosts | None = None) -> None:
        require(*PROGRAMS)
        self.hosts = hosts
        self.nodes = [host.name for host in hosts] if hosts else ["n1", "n2", "n3"]
        self._number = Number("slurm", range(1, 100), _clean)
        self.folder = self._number.folder
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        self._write_files()
        keys = (f"--key-file={self.folder}/munge.key", f"--seed-file={self.folder}/munge.seed")
        files = (f"--socket={self.folder}/munge.socket", f"--pid-file={self.folder}/munged.pid")
        self._daemon("munged", ["munged", "--foreground", "--force", *keys, *files])
        wait_until((self.folder / "munge.socket").exists, "munged listens")
        self._daemon("slurmctld", ["slurmctld", "-D"])
        for node in self.nodes:
            self.start_node(node)
        idle = ["sinfo", "--noheader", "--partition=debug", "--states=idle", "--format=%D"]
        wait_until(lambda: self._number_of(idle) == len(self.nodes), "all nodes of Slurm are idle")

    def _write_files(self) -> None:
        folder, port = self.folder, 18000 + 10 * self._number.value
        machine = socket.gethostname()
        per_node = f"CPUs={CPUS} RealMemory={MEMORY} Gres=gpu:{GPUS}"
        address = "127.0.0.1"
        lines = [
            f"NodeName={node} NodeHostname={machine} NodeAddr=127.0.0.1 Port={port + number} {per_node}"
            for number, node in enumerate(self.nodes, start=1)
        ]
        if self.hosts is not None:
            address = self.hosts.gateway
            lines = [f"NodeName={h.name} NodeAddr={h.address} Port={port + 1} {per_node}" for h in self.hosts]
        text = _CONF.format(
            machine=machine, address=address, port=port, folder=folder, nodes="\n".join(lines)
        )
        self.conf.write_text(text)
        devices = [folder / f"gpu{number}" for number in range(GPUS)]
        for device in devices:
            run("mknod", device, "c", 1, 3)
        (folder / "gres.conf").write_text("".join(f"Name=gpu File={device}\n" for device in devices))
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)

    def _daemon(self, name: str, argv: list[str], around: Mapping[str, str] | None = None) -> None:
        host = next((host for host in self.hosts or () if host.name == name), None)
        command = ["setpriv", "--pdeathsig", "KILL", *argv]
        with (self.folder / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                host.inside(command, Path("/")) if host else command,
                env=self.environment(around),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    @property
    def conf(self) -> Path:
        """For SLURM_CONF."""
        return self.folder / "slurm.conf"

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """For Slurm's commands: that of this process, or of a user of the hosts, with SLURM_CONF and `extra`."""
        around = self.hosts.environment() if self.hosts else os.environ
        kept = {name: value for name, value in around.items() if not name.startswith("SLURM")}
        return {**kept, "SLURM_CONF": str(self.conf), **(extra or {})}

    def run(self, *argv: object, within: float = 120.0, **popen: Any) -> str:
        """Standard output of ``sbatch``, ``srun``, ``scontrol`` … on this machine; a failure raises `RuntimeError`."""
        command = [str(each) for each in argv]
        how = {"env": self.environment(), "stdin": subprocess.DEVNULL, **popen}
        done: subprocess.CompletedProcess[str]
        done = subprocess.run(command, capture_output=True, text=True, timeout=within, check=False, **how)
        if done.returncode != 0:
            raise RuntimeError(
                f"{' '.join(command)}: exit code {done.returncode}: {done.stderr}{done.stdout}"
            )
        return done.stdout

    def _number_of(self, argv: list[str]) -> int:
        """The number that a command prints; 0 while slurmctld does not listen."""
        for name, daemon in self._daemons.items():
            if daemon.poll() is not None:
                raise RuntimeError(f"{name}: {(self.folder / f'{name}.out').read_text()}")
        try:
            return int(self.run(*argv) or 0)
        except RuntimeError:
            return 0

    def job(self, job: str) -> dict[str, str]:
        """The fields that ``scontrol show job`` prints: ``JobState``, ``ExitCode``, ``Restarts``, ``NodeList`` …"""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job: str, within: float = 120.0) -> dict[str, str]:
        """Its fields at its end. ``sbatch --wait`` looks ever more seldom, half a minute apart in the end."""
        found: dict[str, str] = {}

        def ended() -> bool:
            found.update(self.job(job))
            return found["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")

        wait_until(ended, f"job {job} of Slurm has ended", within)
        return found

    def start_now(self, job: str) -> None:
        """Start a job that was requeued, in a second or two; Slurm would wait for two minutes.

        A slurmd that has ended a run of the job refuses one that starts in the same second: ``Job credential revoked``.
        """
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now+1")

    def end_soon(self, job: str) -> None:
        """The time limit of a running job ends in a second. Slurm looks at time limits once in 30 s."""
        self.run("scontrol", "update", f"JobId={job}", "EndTime=now+1")

    def start_node(self, node: str) -> None:
        """Start the slurmd of `node`."""
        self._daemon(node, ["slurmd", "-D", "-N", node], {_NODE: node})

    def kill_node(self, node: str) -> None:
        """SIGKILL to the slurmd of `node` and all that runs there in jobs; Slurm has the node down after 8 s or more.

        With hosts, `Host.kill_all` is nearer to a power failure.
        """
        marks = (f"SLURMD_NODENAME={node}", f"{_NODE}={node}")
        _kill_all(self.conf, marks)
        self._daemons.pop(node).wait()

    def close(self) -> None:
        """End Slurm and all of its jobs."""
        self._number.give_back()
        for daemon in self._daemons.values():
            daemon.wait()

    def __enter__(self) -> Slurm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _processes(conf: Path, marks: tuple[str, ...]) -> list[int]:
    """All processes that began with this SLURM_CONF, and with one of `marks` if there are any."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            environ = Path("/proc", name, "environ").read_bytes().decode(errors="replace").split("\0")
            marked = not marks or any(mark in environ for mark in marks)
            if f"SLURM_CONF={conf}" in environ and marked and int(name) != os.getpid():
                found.append(int(name))
    return found


def _kill_all(conf: Path, marks: tuple[str, ...] = ()) -> None:
    """SIGKILL to all of them, also to those that start meanwhile; returns when they are gone."""

    def gone() -> bool:
        # As in a power failure, none sees the end of another: all are stopped first, and the youngest is killed first, as
        # the kernel sends SIGCONT to stopped processes whose parent has ended.
        found = sorted(_processes(conf, marks), reverse=True)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        return not found

    wait_until(gone, "all processes of Slurm are killed")


def _clean(_number: int, folder: Path) -> None:
    """Kill what belongs to the Slurm in `folder`, and remove it."""
    _kill_all(folder / "slurm.conf")
    shutil.rmtree(folder)

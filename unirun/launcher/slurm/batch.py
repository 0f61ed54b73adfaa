"""The batch script of a job: what Slurm runs on the first node of the allocation."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from unirun.launcher.slurm.options import BatchOptions, Component
from unirun.observe.batchjob import VARIABLE
from unirun.values import Value


class Batch(Value):
    """What is submitted: the job `run_id`, which runs ``unirun`` with the arguments `words` in the directory `cwd`.

    `program` is how unirun is called on the nodes. `home` is ``$UNIRUN_HOME``. The file `token` has the job's token;
    None where the job has one node, which makes its own.
    """

    run_id: str
    words: tuple[str, ...]
    cwd: Path
    home: Path
    output: str
    program: tuple[str, ...] = ("unirun",)
    token: Path | None = None


def batch_script(options: BatchOptions, batch: Batch) -> str:
    """A script for sbatch, in the language of ``sh``, that runs the job and leaves with its exit code.

    Before the time limit, Slurm sends SIGTERM to the script, which passes it to unirun on all nodes. (srun, which would
    be nearer, kills the step when it gets SIGTERM.) When a node is lost, the others go on. srun's exit code is then
    that of the killed task, so the code is read from the job's directory.
    """
    summary = shlex.quote(str(batch.home / "jobs" / batch.run_id / "summary.json"))
    lines = [
        "#!/bin/sh",
        *_directives(options, batch),
        "",
        f"cd {shlex.quote(str(batch.cwd))} || exit",
        f"export UNIRUN_HOME={shlex.quote(str(batch.home))} {VARIABLE}={batch.run_id}",
        *(f"export {name}={shlex.quote(value)}" for name, value in options.env.items()),
        f"rm -f {summary}",
        "",
        f"{shlex.join(_srun(options, batch))} &",
        "step=$!",
        "trap 'again=yes; scancel --signal=TERM \"$SLURM_JOB_ID\" 2>/dev/null' TERM",
        "again=yes",
        'while [ -n "$again" ]; do',
        "  again=",
        '  wait "$step"',
        "  last=$?",
        "  # 127: the shell has told its code before.",
        '  [ "$last" -eq 127 ] || code=$last',
        "done",
        rf"""told=$(sed -n 's/.*"ended":[0-9.]*,"code":\([0-9]*\),.*/\1/p' {summary} 2>/dev/null)""",
        'exit "${told:-${code:-127}}"',
    ]
    return "\n".join(lines) + "\n"


def _directives(options: BatchOptions, batch: Batch) -> Iterator[str]:
    whole = {
        "job_name": batch.run_id,
        **options.options,
        "output": batch.output,
        "open_mode": "append",
        "signal": f"B:TERM@{options.grace}",
    }
    for key, value in whole.items():
        yield _directive(key, value)
    yield "#SBATCH --no-kill"
    yield "#SBATCH --requeue" if options.requeue else "#SBATCH --no-requeue"
    for number, component in enumerate(options.components):
        if number:
            yield "#SBATCH hetjob"
        yield from _of_component(component)


def _of_component(component: Component) -> Iterator[str]:
    for key, value in component.options.items():
        yield "#SBATCH --exclusive" if (key, value) == ("exclusive", "yes") else _directive(key, value)
    yield _directive("ntasks_per_node", "1")


def _directive(key: str, value: str) -> str:
    """sbatch reads double quotes in it; options have no quotes in their values."""
    quoted = value if re.fullmatch(r"[A-Za-z0-9_.+:/@%,=-]*", value) else f'"{value}"'
    return f"#SBATCH --{key.replace('_', '-')}={quoted}"


def _srun(options: BatchOptions, batch: Batch) -> Sequence[str]:
    """One task on each node. unirun decides what follows from the end of a task and from the loss of a node."""
    token = ["--token-file", str(batch.token)] if batch.token is not None else []
    unirun = [*batch.program, "--rdzv-id", batch.run_id, *token, *batch.words]
    together = ["--kill-on-bad-exit=0", "--wait=0", "--no-kill"]
    found = ["srun"]
    for number, component in enumerate(options.components):
        group = [f"--het-group={number}"] if len(options.components) > 1 else []
        cpus = component.options.get("cpus_per_task")
        # Since Slurm 22.05, srun does not take it from the allocation.
        share = [f"--cpus-per-task={cpus}"] if cpus else []
        found += [":"] if number else []
        found += ["--ntasks-per-node=1", *together, *group, *share, *_container(component), *unirun]
    return found


def _container(component: Component) -> list[str]:
    """Options of pyxis."""
    image, mounts = component.container_image, component.container_mounts
    return [
        *([f"--container-image={image}"] if image else []),
        *([f"--container-mounts={','.join(mounts)}"] if mounts else []),
    ]

"""``unirun render slurm|jobset|compose JOBFILE``: the files with which others start the same job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from unirun.cli.batch import check_roles, component_words
from unirun.cli.commandline import CommandLine, Parser
from unirun.cli.compose import job_spec
from unirun.collocation import Device, Inventory, Node
from unirun.errors import UsageError
from unirun.launcher.hosts.rendered import Containers, compose_file, job_set
from unirun.launcher.slurm.options import parse_slurm
from unirun.launcher.slurm.submit import Batch, batch_script
from unirun.spec.job import JobSpec
from unirun.spec.names import id_stem
from unirun.spec.yaml import write_yaml

FORMS = ("slurm", "jobset", "compose")

_TOKEN = "head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \\n' >token"


def main(argv: list[str]) -> int:
    """Print the files. Returns 0. Raises `SpecError` and `UsageError` for what is wrong with the job."""
    parser = Parser(prog="unirun render", description="The same job as others start it; starts nothing.")
    parser.add_argument("form", choices=FORMS, help="a batch script, a Kubernetes JobSet, or a compose file")
    parser.add_argument("job", help="the job file", metavar="JOBFILE")
    parser.add_argument("overrides", nargs="*", help="values of the job file", metavar="key=value")
    parser.add_argument("--nodes", type=_positive, default=1, help="number of nodes (default 1)", metavar="N")
    parser.add_argument(
        "--gpus", type=_positive, default=0, help="GPUs of each node (default none)", metavar="N"
    )
    parser.add_argument("--image", help="the containers' image, which has unirun in PATH", metavar="IMAGE")
    parser.add_argument(
        "--slurm",
        action="append",
        help="what the batch script asks for, as for unirun --slurm",
        metavar="K=V,…",
    )
    parser.add_argument(
        "--slurm-extra", action="append", default=[], help="another option of sbatch", metavar="OPTION"
    )
    parser.add_argument(
        "--slurm-setup", action="append", default=[], help="a line of bash before it", metavar="LINE"
    )
    options = parser.parse_intermixed_args(argv)
    line = CommandLine({"config": options.job}, tuple(options.overrides), None, ())
    node = Node("node0", (0,), tuple(Device(str(index), "GPU") for index in range(options.gpus)))
    spec = job_spec(line, Inventory((node,)))
    if options.form == "slurm":
        sys.stdout.write(_script(options, spec))
        return 0
    if options.slurm or options.slurm_extra or options.slurm_setup:
        raise UsageError(
            "--slurm: only a batch script asks Slurm", f"leave it out of unirun render {options.form}"
        )
    if options.image is None:
        raise UsageError(
            f"unirun render {options.form} needs --image", "name an image that has unirun in its PATH"
        )
    job = Containers(
        name=spec.name,
        image=options.image,
        job_file=Path(options.job).read_text(encoding="utf-8"),
        words=tuple(options.overrides),
        nodes=options.nodes,
        gpus=options.gpus,
    )
    sys.stdout.write(_jobset(job) if options.form == "jobset" else _compose(job))
    return 0


def _positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 100_000:
        raise UsageError(f"{text!r} is no number of nodes or GPUs", "use 1 or more")
    return int(text)


def _script(options: Any, spec: JobSpec) -> str:
    asked = {"nodes": options.nodes, "gres": f"gpu:{options.gpus}" if options.gpus else None}
    asked |= {"container_image": options.image}
    text = ",".join(f"{key}={value}" for key, value in asked.items() if value is not None)
    asked_of_slurm = parse_slurm(
        options.slurm or [text], extra=options.slurm_extra, setup=options.slurm_setup
    )
    check_roles(spec, asked_of_slurm)
    words = (*component_words(spec, asked_of_slurm), "--config", options.job, *options.overrides)
    return batch_script(asked_of_slurm, Batch(id_stem(spec.name), words))


def _jobset(job: Containers) -> str:
    how = f"{_TOKEN}\nkubectl create secret generic {job.label}-token --from-file=token"
    return _with_token(job, how, write_yaml(*job_set(job)))


def _compose(job: Containers) -> str:
    return _with_token(job, _TOKEN, write_yaml(compose_file(job)))


def _with_token(job: Containers, how: str, text: str) -> str:
    """`text` with a comment on how the secret is made, where there is one."""
    lines = f"The nodes prove to each other that they know this secret, one for each job:\n{how}".split("\n")
    return "".join(f"# {line}\n" for line in lines if job.nodes > 1) + text

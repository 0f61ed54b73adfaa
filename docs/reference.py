"""Writes the pages below api, the reference of the public API, from signatures and docstrings (``make docs``)."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from griffe import Alias, Attribute, Class, Function, GriffeLoader, Object
from griffe2md import ConfigDict, prepare_context, prepare_env

ROOT = Path(__file__).parents[1]

INTRODUCTION = """\
# API reference

Everything that `import unirun`, `from unirun import train` and `from unirun import experiments` offer, and the
objects that they return. These pages are made from the docstrings by `docs/reference.py`; do not edit them. How the
parts work together is in the [tutorial](../tutorial.md), in [calls.md](../calls.md), in [train.md](../train.md), in
[experiments.md](../experiments.md).
"""

PAGES = {
    "calls": (
        "Workers, groups and calls",
        [
            "Context of a worker",
            "Scripts that survive, and stop together",
            "Workloads",
            "Trainers",
            "Role groups and their results",
        ],
    ),
    "weights": ("Weights and queues", ["Weights", "Queues"]),
    "engines": ("Engines and rollouts", ["Engines", "Rollouts"]),
    "jobs": ("Jobs from Python", ["Jobs from Python"]),
    "train": (
        "A training function on many ranks",
        [
            "A function on many ranks",
            "In a training function",
            "Datasets of a training run",
            "Callbacks of a training run",
        ],
    ),
    "experiments": (
        "Experiments",
        ["Experiments", "Graphs of model function calls", "Models of an experiment", "Data of an experiment"],
    ),
    "errors": ("Errors", ["Errors"]),
}
"""The title of each page and its sections."""

SECTIONS = {
    "Context of a worker": [
        "init",
        "Context",
        "Member",
        "roles.peers.RoleInfo",
        "serve",
        "rpc_name",
        "progress",
        "allowance",
        "breakpoint",
    ],
    "Scripts that survive, and stop together": ["resilient", "ResilientState", "should_stop", "commit_job"],
    "Workloads": ["BaseWorkload", "trainer_invocation", "MasterHandle"],
    "Trainers": ["BaseTrainer", "run_in_process"],
    "Role groups and their results": [
        "RoleGroup",
        "WorkerHandle",
        "RemoteMethod",
        "shard",
        "replicate",
        "InvocationRef",
        "wait",
    ],
    "Weights": ["WeightsChannel", "LocalShard", "WeightsError", "WeightsTimeout", "PeerLost"],
    "Queues": ["Queue", "Admission", "Item", "QueueTimeout", "QueueEnded"],
    "Engines": [
        "EngineClient",
        "rollout.choosing.Answer",
        "rollout.choosing.Span",
        *(f"rollout.client.{name}" for name in ("Engine", "Engines", "EngineList", "AddressFile")),
        "ServerError",
        "ServerTimeout",
    ],
    "Rollouts": [
        *(f"rollout.pool.{name}" for name in ("Pool", "Recorder")),
        "rollout.chatting.Reply",
        *(f"rollout.completing.{name}" for name in ("Group", "Trajectory", "Outcomes")),
        *(f"rollout.completing.{name}" for name in ("Completer", "Completion")),
        "rollout.rewards.Rewards",
    ],
    "Jobs from Python": [
        "DLJobBuilder",
        "RLJobBuilder",
        "train.builder.WorkloadBuilder",
        "train.job.Job",
        "JobHandle",
        "attach",
    ],
    "A function on many ranks": [
        "train.Trainer",
        "train.TrainingIterator",
        "train.Result",
        "train.CheckpointStrategy",
        "train.TorchConfig",
        "train.trainer.to_trainable",
        "train.Trainable",
        "train.trainer.resume",
        "train.Backend",
    ],
    "In a training function": [
        *("train.report", "train.save_checkpoint", "train.load_checkpoint", "train.should_stop"),
        "train.checkpoint_files",
        "train.get_dataset_shard",
        *("train.prepare_model", "train.prepare_data_loader", "train.prepare_optimizer", "train.backward"),
        *("train.accelerate", "train.enable_reproducibility", "train.unwrap", "train.device"),
        *("train.world_rank", "train.local_rank", "train.world_size", "train.config", "train.in_worker"),
    ],
    "Datasets of a training run": [
        "train.Shard",
        "train.Loader",
        "train.Files",
        "train.kfold",
        "train.to_cv",
    ],
    "Callbacks of a training run": [
        "train.TrainingCallback",
        "train.ProgressCallback",
        "train.JsonLoggerCallback",
        "train.CsvLoggerCallback",
        "train.TensorBoardCallback",
        "train.WandbCallback",
        "train.MLflowCallback",
    ],
    "Experiments": [
        *("experiments.Experiment", "experiments.register_experiment", "experiments.make_experiment"),
        *("experiments.trial_status", "experiments.ExpStatus"),
        *("experiments.ExperimentConfig", "experiments.Resolved", "experiments.ExperimentScheduling"),
        *("experiments.TasksGroup", "experiments.Scheduling", "experiments.ExperimentSaveEvalControl"),
        *(
            "experiments.ModelWorker",
            "experiments.StandaloneModelShardAbstraction",
            "experiments.MasterWorker",
        ),
        *("experiments.GenerationServer", "experiments.GserverManager", "experiments.RolloutWorker"),
        *("experiments.WorkerInformation", "experiments.AutomaticEvaluator", "experiments.RecoverInfo"),
        *("experiments.WandBConfig", "experiments.TensorBoardConfig"),
        *("experiments.Allocation", "experiments.model_workers"),
    ],
    "Graphs of model function calls": [
        *("experiments.MFCDef", "experiments.ModelInterfaceType", "experiments.ModelInterfaceAbstraction"),
        *("experiments.MicroBatchSpec", "experiments.ParamReallocHook", "experiments.OffloadHook"),
        *(
            "experiments.build_graph",
            "experiments.Graph",
            "experiments.ModelName",
            "experiments.ModelShardID",
        ),
        *("experiments.ProcessTopology", "experiments.topology"),
    ],
    "Models of an experiment": [
        *(
            "experiments.ModelInterface",
            "experiments.register_interface",
            "experiments.Model",
            "experiments.Place",
        ),
        *("experiments.PipelinableEngine", "experiments.GenerationConfig", "experiments.Generated"),
        *("experiments.ModelBackend", "experiments.register_backend", "experiments.FinetuneSpec"),
        *("experiments.register_model", "experiments.ModelAbstraction"),
        "experiments.ModelBackendAbstraction",
    ],
    "Data of an experiment": [
        *("experiments.SequenceSample", "experiments.NamedArray", "experiments.DatasetAbstraction"),
        *("experiments.DatasetUtility", "experiments.register_dataset", "experiments.register_tokenizer"),
        *("experiments.RolloutAgent", "experiments.register_agent", "experiments.register_environment"),
        *("experiments.CollectingAgent", "experiments.BundledGenerationOutputs"),
        *("experiments.PromptDataset", "experiments.PromptAnswerDataset", "experiments.PairedDataset"),
        *("experiments.AgentAbstraction", "experiments.EnvServiceAbstraction"),
    ],
    "Errors": [
        "UnirunError",
        "CallError",
        "InvocationTimeout",
        "WorkerLost",
        "EncodingError",
        "RemoteError",
        "RemoteTraceback",
        "errors.UsageError",
        "errors.SpecError",
        "errors.Fault",
        "errors.PlacementError",
        "errors.JobError",
        "JobFailed",
        "errors.TrainingFailed",
        "errors.CheckpointDamaged",
        "errors.RendezvousError",
        "errors.GroupError",
        "errors.StoreAway",
    ],
}

OTHER_NAMES = {"JobBuilder": "DLJobBuilder", "NoBackend": "train.Backend", "Workload": "BaseWorkload"}

CALLBACKS = (
    *("ProgressCallback", "JsonLoggerCallback", "CsvLoggerCallback"),
    *("TensorBoardCallback", "WandbCallback", "MLflowCallback"),
)
"""Classes whose methods are for the trainer. `TrainingCallback` says once for all what these are."""

OWN_USE = {
    "CheckpointStrategy": {"score", "best", "surplus"},
    "Context": {"peers", "session", "hub"},
    "InvocationRef": {"wake_with", "forget_wake"},
    "JobHandle": {"await_start"},
    "MasterHandle": {"context"},
    "Shard": {"consume", "first", "upcoming", "source"},
    **{name: {"start_training", "handle_result", "finish_training"} for name in CALLBACKS},
}
"""Members without an underscore that are not for users."""

OWN_BASES = {"Call"}
"""Bases of which nothing is for users but what the docstring of the class says."""

SHARED = {
    "RLJobBuilder": "DLJobBuilder",
    "WorkloadBuilder": "DLJobBuilder",
    **dict.fromkeys(CALLBACKS, "train.TrainingCallback"),
}
"""Classes whose methods are those of another one, and some more."""

MADE_BY_UNIRUN = (
    *("Context", "MasterHandle", "RoleGroup", "WorkerHandle", "RemoteMethod", "InvocationRef"),
    *("WorkloadBuilder", "Job", "JobHandle"),
    *("TrainingIterator", "Trainable", "Loader"),
)
"""Classes that users do not make objects of, so that the constructor is nothing to them."""

WIDTH = 100
"""Characters of a line of code."""

STYLE: ConfigDict = {
    "heading_level": 3,
    "inherited_members": True,
    "line_length": WIDTH,
    "members_order": "source",
    "show_bases": False,
    "show_if_no_docstring": False,
    "show_signature_annotations": True,
    "show_submodules": False,
    "summary": False,
}


_ENVIRONMENT = prepare_env()
"""One for all objects, so that it compiles each template once."""


def reference() -> dict[str, str]:
    """The text of each page, by the name of its file."""
    package = GriffeLoader(search_paths=[str(ROOT)], allow_inspection=False).load("unirun")
    assert isinstance(package, Object)
    found = {"index.md": "\n".join([INTRODUCTION, *_contents(), *_index()]).rstrip() + "\n"}
    for page, (title, headings) in PAGES.items():
        found[f"{page}.md"] = "\n".join([f"# {title}\n", *_sections(package, headings)]).rstrip() + "\n"
    return found


def _contents() -> Iterator[str]:
    for page, (title, headings) in PAGES.items():
        yield f"## [{title}]({page}.md)\n"
        for heading in headings:
            yield f"- {heading}: " + ", ".join(_link(page, name) for name in SECTIONS[heading])
        yield ""


def _index() -> Iterator[str]:
    """All names in alphabetical order, a line for each letter."""
    links: dict[str, list[str]] = {}
    pages = {
        name: page for page, (_, headings) in PAGES.items() for head in headings for name in SECTIONS[head]
    }
    for name in sorted(pages, key=lambda name: _short(name).lower()):
        links.setdefault(_short(name)[0].upper(), []).append(_link(pages[name], name))
    yield "## Index\n"
    yield from (f"- {letter}: " + ", ".join(names) for letter, names in links.items())


def _link(page: str, name: str) -> str:
    return f"[`{_short(name)}`]({page}.md#{_short(name).lower()})"


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _sections(package: Object, headings: list[str]) -> Iterator[str]:
    for heading in headings:
        yield f"## {heading}\n"
        if heading == "Errors":
            yield f"```text\n{_tree()}\n```\n"
        for name in SECTIONS[heading]:
            yield _rendered(package, name)


def _rendered(package: Object, name: str) -> str:
    """One class or function of the public API, with its members."""
    found, style = package[name], STYLE.copy()
    target = found.final_target if isinstance(found, Alias) else found
    if isinstance(target, Class):
        _prune(target)
        if target.name in SHARED:
            shared = package[SHARED[target.name]].all_members
            style["inherited_members"] = [each for each in target.inherited_members if each not in shared]
    if isinstance(target, Function) and target.overloads:
        target.parameters = target.overloads[-1].parameters
    template = _ENVIRONMENT.get_template(f"{found.kind.value}.md.jinja")
    text = template.render(**prepare_context(found, style))
    # A name is what users write; a literal block begins with ``::`` in docstrings alone.
    text = re.sub(r"^(#+ `)unirun\.(?:[a-z_]+\.)*?(?=[A-Z]|[a-z_]+`)", r"\1", text, flags=re.MULTILINE)
    text = text.replace("```python\n", "```py\n")
    text = re.sub(r"^::\n\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
    text = re.sub(rf"^\w+\(.{{{WIDTH},}}$", lambda line: _wrapped(line[0]), text, flags=re.MULTILINE)
    text = re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
    same = [other for other, one in OTHER_NAMES.items() if one == name]
    return text + (f"\n`{same[0]}` is another name for it.\n" if same else "")


def _wrapped(signature: str) -> str:
    """A signature with one parameter per line."""
    name, _, rest = signature.partition("(")
    parts, depth = [""], 1
    while depth:
        char, rest = rest[0], rest[1:]
        depth += (char in "([") - (char in ")]")
        if depth == 1 and char == ",":
            parts.append("")
        elif depth:
            parts[-1] += char
    return "\n".join([f"{name}(", *(f"    {part.strip()}," for part in parts), f"){rest}"])


def _prune(target: Class) -> None:
    """Leave what is for users, once."""
    target.bases = [base for base in target.bases if str(base) not in OWN_BASES]
    for member in OWN_USE.get(target.name, ()):
        del target.members[member]
    if target.name in MADE_BY_UNIRUN:
        target.members.pop("__init__", None)
    for member in target.members.values():
        if isinstance(member, Attribute) and "instance-attribute" in member.labels:
            # What a constructor computes says nothing to a reader.
            member.value = None


def _tree() -> str:
    """The tree of errors that stands in the docstring of its module."""
    docstring = ast.get_docstring(ast.parse((ROOT / "unirun/errors.py").read_text())) or ""
    lines = docstring.partition("::\n\n")[2].splitlines()
    return "\n".join(line.removeprefix("    ") for line in lines if line.startswith("    "))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    for file, text in reference().items():
        (folder / file).write_text(text)

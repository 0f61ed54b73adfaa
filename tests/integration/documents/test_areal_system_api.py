"""AReaL's system API (``realhf/api/core/system_api.py``): its classes, fields, functions and checks, as the package has
them.

The document is code without programs. So its declarations are compared with ours, the statements that other code may
have taken over are run as typed, and each of its errors has a configuration.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.experiments.sample_configs import (
    ACTOR,
    COPY,
    GENERATE,
    PROMPTS,
    TRAIN,
    at,
    call,
    config_of,
    config_with,
    ppo,
    realloc,
)
from unirun import experiments
from unirun.errors import SpecError, UsageError
from unirun.experiments import (
    Experiment,
    ExperimentConfig,
    ModelName,
    ModelWorker,
    ParamReallocHook,
    Scheduling,
    TasksGroup,
    WorkerInformation,
    make_experiment,
    model_workers,
    register_experiment,
    topology,
)
from unirun.experiments.config import calls_with_hooks
from unirun.experiments.starting import job_mapping

from .programs import Differs, run

DECLARATIONS = """
class ExpStatus(Enum):
    RUNNING = "RUNNING"
    ABORTED = "ABORTED"
    COMPLETE = "COMPLETE"

class Scheduling:
    cpu: int
    gpu: int
    mem: int
    nodelist: str = None
    exclude: str = None
    container_image: str = None
    env_vars: Dict[str, str] = dataclasses.field(default_factory=dict)
    time_limit: Optional[str] = None
    begin: Optional[str] = None
    deadline: Optional[str] = None
    def master_worker_default(**kwargs): ...
    def model_worker_default(**kwargs): ...
    def generation_server_default(**kwargs): ...
    def gserver_manager_default(**kwargs): ...
    def rollout_worker_default(**kwargs): ...

class WorkerInformation:
    experiment_name: str = ""
    trial_name: str = ""
    worker_type: str = ""
    worker_index: int = -1
    worker_count: int = 0
    worker_tag: Optional[str] = None
    host_key: Optional[str] = None
    watch_keys: Union[str, List[str]] = None
    def system_setup(self, experiment_name, trial_name, worker_type, worker_index, worker_count): ...

class ModelWorker:
    base_seed: int
    shards: List[StandaloneModelShardAbstraction]
    tokenizer_name_or_path: Optional[str] = None
    datasets: Optional[List[Union[str, DatasetAbstraction]]] = None
    use_dataset_cache: bool = False
    dataset_cahce_root: str = constants.DATASET_CACHE_PATH
    shuffle_dataset: bool = True
    cuda_cache_cleanliness: bool = True
    cuda_cache_clear_freq: int = 10
    torch_cache_mysophobia: bool = False
    model_rpcs: List[dfg.MFCDef] = None
    model_topos: Dict[ModelName, topology.ProcessTopology] = None
    msid2mwid: Dict[ModelShardID, int] = None
    data_transfer_pairs: List[Tuple[ModelName, ModelName]] = None
    sync_param_pairs: List[Tuple[ModelName, ModelName]] = None
    profile_mode: bool = False
    worker_info: Optional[WorkerInformation] = None

class GenerationServer:
    base_seed: int
    backend_type: str
    backend_args: Any
    model_path: str
    tp_size: int
    worker_info: WorkerInformation = None

class GserverManager:
    model_name: ModelName
    n_servers: int
    schedule_policy: str
    max_head_offpolicyness: int
    train_batch_size: int
    flush_request_timeout: int
    max_concurrent_rollouts: int
    worker_info: WorkerInformation = None

class RolloutWorker:
    base_seed: int
    model_name: ModelName
    tokenizer_path: str
    new_tokens_per_chunk: int
    rollout_request_timeout: int
    env: EnvServiceAbstraction
    agent: AgentAbstraction
    datasets: List[Union[str, DatasetAbstraction]]
    use_dataset_cache: bool = False
    dataset_cahce_root: str = constants.DATASET_CACHE_PATH
    worker_info: WorkerInformation = None

class MasterWorker:
    base_seed: int
    exp_ctrl: ExperimentSaveEvalControl
    n_model_workers: int
    shuffle_dataset: bool = True
    model_rpcs: List[dfg.MFCDef] = None
    model_topos: Dict[ModelName, topology.ProcessTopology] = None
    msid2mwid: Dict[ModelShardID | str, int] = None
    data_transfer_pairs: List[Tuple[str, str]] = None
    sync_param_pairs: List[Tuple[str, str]] = None
    worker_info: Optional[WorkerInformation] = None

class TasksGroup:
    count: int
    scheduling: Scheduling

class ExperimentScheduling:
    model_worker: TasksGroup
    master_worker: TasksGroup
    generation_server: TasksGroup | None = None
    gserver_manager: TasksGroup | None = None
    rollout_worker: TasksGroup | None = None
    controller_image: str = None

class ExperimentConfig:
    exp_ctrl: ExperimentSaveEvalControl
    wandb: WandBConfig
    tensorboard: TensorBoardConfig
    model_rpcs: List[dfg.MFCDef]
    model_worker: List[ModelWorker] = dataclasses.field(default_factory=list)
    generation_server: List[GenerationServer] = dataclasses.field(default_factory=list)
    gserver_manager: List[GserverManager] = dataclasses.field(default_factory=list)
    rollout_worker: List[RolloutWorker] = dataclasses.field(default_factory=list)
    master_worker: Optional[List[MasterWorker]] = None
    auto_eval: bool = False
    evaluator: AutomaticEvaluator = dataclasses.field(default_factory=AutomaticEvaluator)
    def lazy_init(self): ...
    def resolve_worker_config(self, worker_type, worker_index): ...
    def set_worker_information(self, experiment_name, trial_name): ...

class Experiment:
    def scheduling_setup(self): ...
    def initial_setup(self): ...
"""
"""The parts of a configuration, without comments and bodies."""

FUNCTIONS = """
def register_experiment(name, cls): ...
def make_experiment(name): ...
"""

DERIVED = "it is derived, not given: config.resolved has it"
CACHE_PATH = "there is no cache, so none has a path"

DIFFERS = {
    **{
        (kind, name): DERIVED
        for kind in ("ModelWorker", "MasterWorker")
        for name in ("model_rpcs", "model_topos", "msid2mwid", "data_transfer_pairs", "sync_param_pairs")
    },
    ("ModelWorker", "dataset_cahce_root"): CACHE_PATH,
    ("RolloutWorker", "dataset_cahce_root"): CACHE_PATH,
    ("ModelWorker", "tokenizer_name_or_path"): "None is an empty text",
    ("ModelWorker", "datasets"): "None is an empty list",
    ("ExperimentConfig", "master_worker"): "it is made, whether the list is empty or None",
    # What must be written there may be left out here.
    ("Scheduling", "cpu"): "1 by default",
    ("Scheduling", "gpu"): "0 by default",
    ("Scheduling", "mem"): "0 by default: as much as there is",
    ("ExperimentScheduling", "master_worker"): "there is always one, which needs one processor by default",
    ("ExperimentConfig", "wandb"): "disabled by default, and after the others: give it by name",
    ("ExperimentConfig", "tensorboard"): "none by default, and after the others: give it by name",
}
"""Fields of the document that are not the same here, with the reason."""

CLASSES = {each.name: each for each in ast.parse(DECLARATIONS).body if isinstance(each, ast.ClassDef)}

NONE = object()


def default_of(field: dataclasses.Field[Any] | None) -> object:
    """The default of a field; `NONE` if it has to be given or is not there."""
    if field is None or field.default is field.default_factory is dataclasses.MISSING:
        return NONE
    return field.default_factory() if callable(field.default_factory) else field.default


def typed_default(value: ast.expr | None) -> object:
    """The default of a field of the document."""
    if value is None:
        return NONE
    if isinstance(value, ast.Call):
        (factory,) = (ast.unparse(each.value) for each in value.keywords)
        made: dict[str, Callable[[], object]] = {
            "dict": dict,
            "list": list,
            "AutomaticEvaluator": experiments.AutomaticEvaluator,
        }
        return made[factory]()
    try:
        return ast.literal_eval(value)
    except ValueError:
        return ast.unparse(value)


def different(name: str) -> set[tuple[str, str]]:
    """The fields of a class of the document that are not the same in ours."""
    cls = getattr(experiments, name)
    own = {each.name: each for each in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}
    found = set()
    for typed in CLASSES[name].body:
        if isinstance(typed, ast.AnnAssign) and isinstance(typed.target, ast.Name):
            ours = own.get(typed.target.id)
            if ours is None or default_of(ours) != typed_default(typed.value):
                found.add((name, typed.target.id))
    return found


@pytest.mark.parametrize("name", CLASSES)
def test_the_fields_of_each_class_and_nothing_else_differs(name: str) -> None:
    assert different(name) == {each for each in DIFFERS if each[0] == name}


@pytest.mark.parametrize("name", CLASSES)
def test_fields_that_have_to_be_given_have_the_same_order(name: str) -> None:
    """So a call without names means the same, but for that of `ExperimentConfig`."""
    typed = [each for each in CLASSES[name].body if isinstance(each, ast.AnnAssign) and each.value is None]
    names = [ast.unparse(each.target) for each in typed if (name, ast.unparse(each.target)) not in DIFFERS]
    cls = getattr(experiments, name)
    own = [each.name for each in dataclasses.fields(cls)] if typed else []
    assert [each for each in own if each in names] == names


def test_statuses() -> None:
    typed = {ast.unparse(each) for each in CLASSES["ExpStatus"].body}
    assert typed == {f"{each.name} = {each.value!r}" for each in experiments.ExpStatus}


def parameters(function: Any) -> list[str]:
    """The names of a function's parameters; those of keywords are ``kwargs``."""
    return [*inspect.signature(function).parameters]


@pytest.mark.parametrize(
    ("owner", "typed"),
    [
        *(
            (name, each)
            for name, cls in CLASSES.items()
            for each in cls.body
            if isinstance(each, ast.FunctionDef)
        ),
        *((None, each) for each in ast.parse(FUNCTIONS).body if isinstance(each, ast.FunctionDef)),
    ],
)
def test_functions_take_the_same_arguments(owner: str | None, typed: ast.FunctionDef) -> None:
    place = getattr(experiments, owner) if owner else experiments
    names = [each.arg for each in (*typed.args.args, *filter(None, [typed.args.kwarg]))]
    assert parameters(getattr(place, typed.name)) == names


def test_names_that_differ() -> None:
    """``ALL_EXPERIMENT_CLASSES`` is no name here: `make_experiment` finds experiments, and its error names them."""
    assert not hasattr(experiments, "ALL_EXPERIMENT_CLASSES")
    register_experiment("areal-none", Experiment)
    with pytest.raises(UsageError, match="areal-none"):
        make_experiment("areal-nine")
    assert isinstance(make_experiment("areal-none"), Experiment)


def test_defaults_of_resources_ask_for_less() -> None:
    """AReaL's ask for what its own clusters have: 16 processors and 20 GiB for a master. What is given counts."""
    assert Scheduling.master_worker_default() == Scheduling(1, 0, 0)
    assert Scheduling.model_worker_default() == Scheduling(1, 1, 0)
    given = Scheduling.master_worker_default(cpu=16, mem=20 * 1024, container_image="image")
    assert given == Scheduling(cpu=16, gpu=0, mem=20 * 1024, container_image="image")


# Statements of `lazy_init` and of the functions that it calls, on a configuration with four models.


@pytest.fixture
def config() -> ExperimentConfig:
    """PPO of four models, one of them twice, on eight workers."""
    found = ppo(separate=True)
    found.lazy_init()
    return found


MODEL_NAMES = """
model_names = set()
for w in self.model_worker:
    model_names = model_names.union([s.id.model_name for s in w.shards])
model_names = sorted(list(model_names))
"""

MSID2MWID = """
msid2mwid = {}
for i, mw in enumerate(self.model_worker):
    for m in mw.shards:
        msid2mwid[m.id] = i
"""

TRANSFER = """
data_transfer_pairs = []
G = self.model_rpcs[0]._G
for edge in G.edges():
    mn1 = G.nodes[edge[0]]["object"].model_name
    mn2 = G.nodes[edge[1]]["object"].model_name
    data_transfer_pairs.append((mn1, mn2))
src_rpcs = [rpc for rpc in self.model_rpcs if rpc.is_src]
"""

SYNC = """
sync_param_pairs = []
for rpc in self.model_rpcs:
    for hook in rpc._pre_hooks + rpc._post_hooks:
        if not isinstance(hook, dfg.ParamReallocHook):
            continue
        other_model_name = (
            hook.target if hook.target is not None else hook.source
        )
        sync_param_pairs.append((other_model_name, rpc.model_name))
"""

TRAINED = """
trained = [
    ModelName(rpc.role, rpc.model_name.replica_id)
    for rpc in self.model_rpcs
    if rpc.interface_type == dfg.ModelInterfaceType.TRAIN_STEP
]
"""

NETWORKX = "the graph is no networkx.DiGraph"
HOOKS = "hooks are fields of a call, which does not change"


def test_statements_about_models_and_workers(config: ExperimentConfig) -> None:
    assert config.resolved is not None
    names = run(MODEL_NAMES, {"self": config})["model_names"]
    assert names == [*config.resolved.topologies]
    assert run(MSID2MWID, {"self": config})["msid2mwid"] == config.resolved.workers


def test_statements_about_the_graph(config: ExperimentConfig) -> None:
    assert config.resolved is not None
    found = run(
        TRANSFER,
        {"self": config},
        Differs("._G", ".graph", NETWORKX),
        Differs("G.edges()", "G.edges", NETWORKX),
        Differs('G.nodes[edge[0]]["object"]', "G.calls[edge[0]]", NETWORKX),
        Differs('G.nodes[edge[1]]["object"]', "G.calls[edge[1]]", NETWORKX),
    )
    assert [each.name for each in found["src_rpcs"]] == ["actorGen"]
    assert set(found["data_transfer_pairs"]) < set(config.resolved.data_transfer_pairs)


def test_statements_about_hooks_and_what_is_trained(config: ExperimentConfig) -> None:
    assert config.resolved is not None
    names = {"self": config, "dfg": experiments, "ModelName": ModelName}
    assert run(TRAINED, names)["trained"] == [ModelName("actor"), ModelName("critic")]
    # What differs: hooks that follow from the layouts are in the calls of the graph only.
    config.model_rpcs = calls_with_hooks(config)
    pairs = run(SYNC, names, Differs("rpc._pre_hooks + rpc._post_hooks", "rpc.hooks", HOOKS))
    assert pairs["sync_param_pairs"] == [*config.resolved.sync_param_pairs]


def test_the_neighbours_of_a_call(config: ExperimentConfig) -> None:
    calls = {each.name: each for each in config.model_rpcs}
    gen, train = calls["actorGen"], calls["actorTrain"]
    assert (gen.is_src, gen.is_dst, train.is_src, train.is_dst) == (True, False, False, True)
    assert [each.name for each in gen.parents] == []
    assert [each.name for each in train.parents] == ["actorGen", "criticInf"]
    assert {each.name for each in gen.all_successors()} == {*calls} - {"actorGen"}
    assert (gen.is_dst_of_model_role, train.is_dst_of_model_role) == (False, True)
    assert gen.data_producers["rewards"] == ModelName("reward")
    assert gen.data_consumers["rewards"] == [ModelName("critic")]
    with pytest.raises(UsageError, match=r"is in no graph yet; ExperimentConfig.lazy_init\(\) makes it"):
        _ = ppo(separate=True).model_rpcs[0].is_src


def test_a_worker_is_found_and_told_which_one_it_is(config: ExperimentConfig) -> None:
    config.set_worker_information(experiment_name="ppo", trial_name="first_try")
    worker = config.resolve_worker_config("model_worker", 1)
    assert worker is config.model_worker[1]
    assert worker.worker_info == WorkerInformation(
        experiment_name="ppo",
        trial_name="first_try",
        worker_type="model_worker",
        worker_index=1,
        worker_count=8,
    )
    master = config.resolve_worker_config("master_worker", 0)
    assert (master.base_seed, master.n_model_workers) == (1, 8)


def test_none_and_names_of_datasets() -> None:
    assert ModelWorker(1, [], datasets=None, tokenizer_name_or_path=None) == ModelWorker(1, [])  # type: ignore[arg-type]
    assert ModelWorker(1, [], datasets=["tests-prompts"]).datasets == [PROMPTS]  # type: ignore[list-item]


# Errors of the document, each of which is one of `lazy_init` here, with all others.


def two_shards_of_one_model() -> ExperimentConfig:
    """A worker with two shards of the actor."""
    (worker,) = model_workers({ACTOR: at()}, datasets=[PROMPTS])
    worker.shards *= 2
    return config_with([call("a", ["prompt"])], [worker])


def a_rank_without_a_worker() -> ExperimentConfig:
    """A worker less than the topology has ranks."""
    return config_with(
        [call("a", ["prompt"])], model_workers({ACTOR: at(topology(data=2))}, datasets=[PROMPTS])[:1]
    )


def replicas_that_are_not_counted() -> ExperimentConfig:
    """A replica 1 without a replica 0."""
    return config_of([call("a", ["prompt"], model=COPY)], {COPY: at()})


def sizes_that_do_not_divide() -> ExperimentConfig:
    """Tensor-parallel sizes of 2 and 3."""
    return config_of(
        [call("a", ["prompt"], ["x"], COPY, GENERATE), call("b", ["x"], model=ACTOR, kind=TRAIN)],
        {ACTOR: at(topology(tensor=2)), COPY: at(topology(tensor=3), 2)},
    )


def parameters_from_itself() -> ExperimentConfig:
    """A hook with its own model."""
    return config_of([call("a", ["prompt"], pre_hooks=(realloc(ACTOR),))], {ACTOR: at()})


def two_train_steps() -> ExperimentConfig:
    """Two calls that train one role."""
    return config_of([call(name, ["prompt"], kind=TRAIN) for name in "ab"], {ACTOR: at()})


ERRORS = {
    two_shards_of_one_model: ("ModelWorker cannot have multiple shards", "it has 2 shards of actor@0"),
    a_rank_without_a_worker: ("Parallelism rank check failed", "no worker has rank 1"),
    replicas_that_are_not_counted: ("Model replica ids should be 0, 1, 2", "its replicas are [1]"),
    sizes_that_do_not_divide: ("must be a multiple of each other", "their tensor sizes are 2 and 3"),
    parameters_from_itself: ("within the same model", "a ParamReallocHook of actor@0 with itself"),
    two_train_steps: ("Multiple train_step for the same role", "'a' and 'b' both train it"),
}
"""By configuration: AReaL's ValueError, and ours."""


@pytest.mark.parametrize("made", ERRORS)
def test_errors(made: Callable[[], ExperimentConfig]) -> None:
    _, ours = ERRORS[made]
    with pytest.raises(SpecError) as caught:
        made().lazy_init()
    assert ours in str(caught.value).replace("a and b", "'a' and 'b'")


def test_a_hook_has_one_other_model() -> None:
    both = ParamReallocHook(source=COPY, target=COPY)
    with pytest.raises(SpecError, match="both source and target"):
        config_of([call("a", ["prompt"], pre_hooks=(both,))], {ACTOR: at()}).lazy_init()


def test_each_group_of_tasks_counts(config: ExperimentConfig) -> None:
    scheduling = experiments.ExperimentScheduling(
        model_worker=TasksGroup(count=7, scheduling=Scheduling.model_worker_default()),
        master_worker=TasksGroup(count=1, scheduling=Scheduling.master_worker_default()),
    )
    trial = experiments.experiment.Trial("ppo", "first", "/tmp/none")
    with pytest.raises(UsageError, match="has 7 model workers, initial_setup"):
        job_mapping(trial, config, scheduling)

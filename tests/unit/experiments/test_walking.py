"""The calls of one step or of two that run beside each other, in whatever order they end."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.effort import examples
from tests.unit.experiments.sample_configs import (
    ACTOR,
    COPY,
    CRITIC,
    INFERENCE,
    REF,
    TRAIN,
    call,
    ppo,
    realloc,
)
from unirun.experiments.graph import Graph, ModelInterfaceType, ModelName, build_graph, topology
from unirun.experiments.orders import (
    STEPS_IN_FLIGHT,
    MFCRequest,
    Step,
    StepProgress,
    dispatch,
    seed_of,
    startable,
)
from unirun.experiments.sample import SequenceSample

Workers = Mapping[ModelName, frozenset[int]]


@st.composite
def steps(draw: st.DrawFn) -> tuple[Graph, Workers]:
    """Calls of a few models on a few workers, some of which train their model or read another one."""
    models = [ModelName(f"m{number}") for number in range(draw(st.integers(1, 4)))]
    workers = {name: frozenset(draw(st.sets(st.integers(0, 5), min_size=1, max_size=3))) for name in models}
    calls = []
    for number in range(draw(st.integers(1, 7))):
        model = draw(st.sampled_from(models))
        others = [other for other in models if other != model]
        sources = draw(st.lists(st.sampled_from(others), max_size=1)) if others else []
        needs = draw(st.sets(st.integers(0, number - 1), max_size=2)) if number else set()
        made = call(
            f"c{number}",
            [f"k{before}" for before in sorted(needs)] or ["prompt"],
            [f"k{number}"],
            model,
            draw(st.sampled_from(ModelInterfaceType)),
            pre_hooks=tuple(map(realloc, sources)),
        )
        calls.append(made)
    return build_graph(draw(st.permutations(calls)), {"prompt"}), workers


def check_beside(graph: Graph, workers: Workers, running: list[str]) -> None:
    """Check the conditions of calls that run at the same time."""
    used = [worker for name in running for worker in workers[graph.calls[name].model_name]]
    assert len(used) == len(set(used))
    for name in running:
        for other in running:
            assert name == other or not graph.calls[name].reads & graph.calls[other].writes


def alone(done: Collection[str], running: Collection[str]) -> list[StepProgress]:
    """The only step in flight."""
    return [StepProgress(done, running)]


def names(found: Sequence[tuple[int, str]]) -> list[str]:
    """The calls of the only step."""
    assert {at for at, _ in found} <= {0}
    return [name for _, name in found]


@given(steps(), st.data())
def test_no_call_beside_another_that_disturbs_it_and_all_run_once(
    step: tuple[Graph, Workers], data: st.DataObject
) -> None:
    graph, workers = step
    done: set[str] = set()
    running: list[str] = []
    began: list[str] = []
    while len(done) < len(graph.calls):
        found = names(startable(graph, workers, alone(done, running)))
        for name in found:
            assert graph.parents(name).keys() <= done
        began += found
        running += found
        check_beside(graph, workers, running)
        assert running, "no call runs, and some have not run yet"
        ended = data.draw(st.sampled_from(running))
        running.remove(ended)
        done.add(ended)
    assert sorted(began) == sorted(graph.calls)
    assert startable(graph, workers, alone(done, ())) == []


Version = dict[ModelName, int]


@examples(200)
@given(steps(), st.integers(1, 5), st.data())
def test_with_two_steps_in_flight_each_call_reads_what_it_reads_when_steps_run_in_turn(
    step: tuple[Graph, Workers], count: int, data: st.DataObject
) -> None:
    graph, workers = step
    versions: Version = dict.fromkeys(workers, 0)
    changes = {model: sum(model in each.writes for each in graph.calls.values()) for model in workers}
    first = 0
    flight = [(set[str](), list[str]())]
    began: list[tuple[int, str]] = []
    while first < count:
        if len(flight) < STEPS_IN_FLIGHT and first + 1 < count and data.draw(st.booleans(), "data is there"):
            flight.append((set(), []))
        for at, name in startable(graph, workers, [StepProgress(*each) for each in flight]):
            done, running = flight[at]
            assert graph.parents(name).keys() <= done
            running.append(name)
            began.append((first + at, name))
            call = graph.calls[name]
            for model in call.reads if at else ():
                assert versions[model] == (first + 1) * changes[model]
            for model in call.writes:
                assert not at
                versions[model] += 1
        both = [name for _, running in flight for name in running]
        check_beside(graph, workers, both)
        assert both, "no call runs, and some have not run yet"
        at = data.draw(st.sampled_from([at for at, (_, running) in enumerate(flight) if running]))
        done, running = flight[at]
        ended = data.draw(st.sampled_from(running))
        running.remove(ended)
        done.add(ended)
        if len(flight[0][0]) == len(graph.calls):
            # What a checkpoint has now.
            assert versions == {model: (first + 1) * each for model, each in changes.items()}
            flight.pop(0)
            first += 1
            flight = flight or [(set(), [])]
    for name in graph.calls:
        assert [number for number, each in began if each == name] == [*range(count)]


@given(steps())
def test_what_may_run_is_found_in_the_order_of_the_graph(step: tuple[Graph, Workers]) -> None:
    graph, workers = step
    found = names(startable(graph, workers, alone((), ())))
    assert found == [name for name in graph.calls if name in found]
    assert found[0] == graph.sources[0]


def test_calls_of_different_workers_run_beside_each_other() -> None:
    resolved = ppo(separate=True).lazy_init()
    workers = {name: frozenset(resolved.workers_of(name)) for name in resolved.topologies}
    graph = resolved.graph
    assert names(startable(graph, workers, alone((), ()))) == ["actorGen"]
    assert names(startable(graph, workers, alone(["actorGen"], ()))) == ["rewInf", "refInf"]
    assert names(startable(graph, workers, alone(["actorGen"], ["rewInf"]))) == ["refInf"]
    before = ["actorGen", "rewInf", "refInf"]
    assert names(startable(graph, workers, alone(before, ()))) == ["criticInf"]
    assert names(startable(graph, workers, alone([*before, "criticInf"], ()))) == [
        "actorTrain",
        "criticTrain",
    ]


def test_on_one_set_of_workers_they_run_one_after_the_other() -> None:
    resolved = ppo(separate=False).lazy_init()
    workers = dict.fromkeys(resolved.topologies, frozenset({0, 1}))
    assert names(startable(resolved.graph, workers, alone(["actorGen"], ()))) == ["rewInf"]
    assert names(startable(resolved.graph, workers, alone(["actorGen"], ["rewInf"]))) == []


WORKERS: Workers = {name: frozenset({at}) for at, name in enumerate((ACTOR, COPY, CRITIC, REF))}
"""Each model has a worker of its own."""


class TestParameters:
    GRAPH = build_graph(
        [
            call("train", ["prompt"], kind=TRAIN),
            call("copy", ["prompt"], model=COPY, pre_hooks=(realloc(ACTOR),)),
            call("again", ["prompt"], model=REF, pre_hooks=(realloc(ACTOR),)),
            call("apart", ["prompt"], model=CRITIC),
        ],
        ["prompt"],
    )

    def test_a_reader_waits_for_the_writer(self) -> None:
        assert names(startable(self.GRAPH, WORKERS, alone((), ["train"]))) == ["apart"]

    def test_the_writer_waits_for_a_reader(self) -> None:
        assert names(startable(self.GRAPH, WORKERS, alone((), ["copy"]))) == ["again", "apart"]

    def test_of_two_that_could_begin_the_first_one_does(self) -> None:
        assert names(startable(self.GRAPH, WORKERS, alone((), ()))) == ["train", "apart"]


class TestTwoSteps:
    GRAPH = build_graph(
        [
            call("refInf", ["prompt"], ["ref"], REF, INFERENCE),
            call("before", ["prompt"], ["old"], ACTOR, INFERENCE),
            call("criticInf", ["prompt"], ["values"], CRITIC, INFERENCE),
            call("train", ["prompt", "ref", "old", "values"], kind=TRAIN),
            call("criticTrain", ["prompt", "values"], (), CRITIC, TRAIN),
        ],
        ["prompt"],
    )
    INFERRED = ("refInf", "before", "criticInf")

    def after(
        self, *done: str, running: Collection[str], next_done: Collection[str] = ()
    ) -> list[tuple[int, str]]:
        """Both have their data."""
        return startable(self.GRAPH, WORKERS, [StepProgress(done, running), StepProgress(next_done, ())])

    def test_what_does_not_depend_on_the_weights_that_are_trained_runs_meanwhile(self) -> None:
        assert self.after(*self.INFERRED, running=["train", "criticTrain"]) == [(1, "refInf")]
        found = self.after(*self.INFERRED, "criticTrain", running=["train"])
        assert found == [(1, "refInf"), (1, "criticInf")]

    def test_no_step_changes_parameters_before_the_one_before_has_ended(self) -> None:
        found = self.after(
            *self.INFERRED, "criticTrain", running=["train"], next_done=["refInf", "criticInf"]
        )
        assert found == []

    def test_the_older_step_comes_first(self) -> None:
        assert self.after(running=()) == [(0, "refInf"), (0, "before"), (0, "criticInf")]

    def test_a_call_waits_for_the_same_one_of_the_step_before(self) -> None:
        assert self.after("before", "criticInf", running=["refInf"]) == [(0, "criticTrain")]


@pytest.mark.parametrize("workers", [*itertools.permutations([4, 5, 6])])
def test_each_worker_gets_the_part_of_its_rank_whatever_the_order_of_the_workers(
    workers: tuple[int, ...],
) -> None:
    """A group has its calls and its answers in the order of the workers."""
    made = call("score", ["prompt"], ["reward"], REF, INFERENCE, 3)
    sent: dict[int, MFCRequest] = {}

    class Group:
        def options(self, target: list[int]) -> Group:
            self.target = target
            return self

        def call_async(self, parts: list[MFCRequest]) -> object:
            assert self.target == sorted(self.target)
            sent.update(zip(self.target, parts, strict=True))
            return object()

        call: Any = property(lambda self: self)

    graph: Any = SimpleNamespace(calls={"score": made})
    resolved: Any = SimpleNamespace(
        graph=graph, topologies={REF: topology(data=3)}, workers_of=lambda name: list(workers)
    )
    step = Step(Group(), resolved, 1, 0, 1)
    step._batch = SequenceSample.of({"prompt": [torch.zeros(n) for n in (1, 2, 3)]}, ["a", "b", "c"]).meta()
    step._has(step._batch, (9,))
    step.start("score", 0)
    places = dispatch(step._batch.sizes("prompt"), 3, equal=made.balanced_dp)
    for rank, worker in enumerate(workers):
        assert sent[worker].seed == seed_of(1, 0, "score", rank)
        assert sent[worker].meta.ids == step._batch.reorder(places[rank]).ids
    step._counts["score"] = [1.0, 10.0, 100.0]
    answers: dict[int, Any] = {
        worker: (None, {"rank": float(rank)}, Counter()) for rank, worker in enumerate(workers)
    }
    assert step._finish(made, [answers[worker] for worker in sorted(workers)])["rank"] == pytest.approx(
        210 / 111
    )

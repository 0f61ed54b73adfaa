"""The calls of a step that run beside each other, in whatever order they end."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.experiments.sample_configs import ACTOR, COPY, CRITIC, REF, TRAIN, call, ppo, realloc
from unirun.experiments.graph import Graph, ModelInterfaceType, ModelName, build_graph
from unirun.experiments.orders import startable

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


@given(steps(), st.data())
def test_no_call_beside_another_that_disturbs_it_and_all_run_once(
    step: tuple[Graph, Workers], data: st.DataObject
) -> None:
    graph, workers = step
    done: set[str] = set()
    running: list[str] = []
    began: list[str] = []
    while len(done) < len(graph.calls):
        found = startable(graph, workers, done, running)
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
    assert startable(graph, workers, done, ()) == []


@given(steps())
def test_what_may_run_is_found_in_the_order_of_the_graph(step: tuple[Graph, Workers]) -> None:
    graph, workers = step
    found = startable(graph, workers, (), ())
    assert found == [name for name in graph.calls if name in found]
    assert found[0] == graph.sources[0]


def test_calls_of_different_workers_run_beside_each_other() -> None:
    resolved = ppo(separate=True).lazy_init()
    workers = {name: frozenset(resolved.workers_of(name)) for name in resolved.topologies}
    graph = resolved.graph
    assert startable(graph, workers, (), ()) == ["actorGen"]
    assert startable(graph, workers, ["actorGen"], ()) == ["rewInf", "refInf"]
    assert startable(graph, workers, ["actorGen"], ["rewInf"]) == ["refInf"]
    before = ["actorGen", "rewInf", "refInf"]
    assert startable(graph, workers, before, ()) == ["criticInf"]
    assert startable(graph, workers, [*before, "criticInf"], ()) == ["actorTrain", "criticTrain"]


def test_on_one_set_of_workers_they_run_one_after_the_other() -> None:
    resolved = ppo(separate=False).lazy_init()
    workers = dict.fromkeys(resolved.topologies, frozenset({0, 1}))
    assert startable(resolved.graph, workers, ["actorGen"], ()) == ["rewInf"]
    assert startable(resolved.graph, workers, ["actorGen"], ["rewInf"]) == []


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
        assert startable(self.GRAPH, WORKERS, (), ["train"]) == ["apart"]

    def test_the_writer_waits_for_a_reader(self) -> None:
        assert startable(self.GRAPH, WORKERS, (), ["copy"]) == ["again", "apart"]

    def test_of_two_that_could_begin_the_first_one_does(self) -> None:
        assert startable(self.GRAPH, WORKERS, (), ()) == ["train", "apart"]

"""Graphs of calls: who waits for whom, in which order they may run, and all that can be wrong with them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.experiments.sample_configs import (
    ACTOR,
    COPY,
    CRITIC,
    GENERATE,
    TRAIN,
    call,
    realloc,
    texts_of,
)
from unirun.errors import SpecError
from unirun.experiments.graph import (
    Graph,
    Hook,
    MFCDef,
    MicroBatchSpec,
    OffloadHook,
    ParamReallocHook,
    build_graph,
    graph_faults,
    with_hooks,
)


def linked(links: Sequence[tuple[int, int]], count: int, order: Sequence[int]) -> list[MFCDef]:
    """Calls ``c0`` … in this order; for each link the second one needs a key that the first one makes."""
    return [
        call(
            f"c{number}",
            [f"k{one}-{other}" for one, other in links if other == number] or ["prompt"],
            [f"k{one}-{other}" for one, other in links if one == number],
        )
        for number in (order or range(count))
    ]


@st.composite
def acyclic(draw: st.DrawFn) -> list[MFCDef]:
    """Calls that do not wait for each other in a circle, in any order."""
    count = draw(st.integers(1, 7))
    ahead = [(one, other) for other in range(count) for one in range(other)]
    links = draw(st.sets(st.sampled_from(ahead))) if ahead else set()
    return linked(sorted(links), count, draw(st.permutations(range(count))))


@st.composite
def circular(draw: st.DrawFn) -> list[MFCDef]:
    """Calls of which some wait for each other."""
    count = draw(st.integers(2, 7))
    ring = draw(st.permutations(range(count)))[: draw(st.integers(2, count))]
    pairs = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1))
    more = draw(st.sets(pairs.filter(lambda pair: pair[0] != pair[1]), max_size=5))
    around = {(one, ring[(at + 1) % len(ring)]) for at, one in enumerate(ring)}
    return linked(sorted(more | around), count, draw(st.permutations(range(count))))


def found(calls: Sequence[MFCDef], keys: Sequence[str] = ("prompt",)) -> list[str]:
    return texts_of(graph_faults(calls, keys))


def only(calls: Sequence[MFCDef], keys: Sequence[str] = ("prompt",)) -> str:
    """The only fault."""
    (fault,) = found(calls, keys)
    return fault


class TestWhoWaitsForWhom:
    def test_a_call_waits_for_those_whose_data_it_needs(self) -> None:
        graph = build_graph(
            [
                call("train", ["prompt", "tokens", "mask", "reward"], kind=TRAIN),
                call("generate", ["prompt"], ["tokens", "mask"]),
                call("judge", ["tokens"], ["reward"]),
            ],
            {"prompt"},
        )
        assert graph.parents("train") == {"generate": ("tokens", "mask"), "judge": ("reward",)}
        assert graph.children("generate") == ["train", "judge"]
        assert graph.sources == ["generate"]
        assert graph.edges == [
            ("generate", "train", ("tokens", "mask")),
            ("judge", "train", ("reward",)),
            ("generate", "judge", ("tokens",)),
        ]

    @given(acyclic())
    def test_there_is_an_edge_for_each_producer_of_what_a_call_needs(self, calls: list[MFCDef]) -> None:
        graph = build_graph(calls, {"prompt"})
        assert {(a, b, keys) for a, b, keys in graph.edges} == {
            (one.name, other.name, tuple(key for key in other.input_keys if key in one.output_keys))
            for one in calls
            for other in calls
            if {*one.output_keys} & {*other.input_keys}
        }

    @given(acyclic())
    def test_what_waits_for_nothing_begins_with_data(self, calls: list[MFCDef]) -> None:
        graph = build_graph(calls, {"prompt"})
        assert graph.sources == [each.name for each in calls if "prompt" in each.input_keys]


class TestLevels:
    @given(acyclic())
    def test_all_calls_are_in_one_level_each(self, calls: list[MFCDef]) -> None:
        levels = build_graph(calls, {"prompt"}).levels()
        assert sorted(name for level in levels for name in level) == sorted(each.name for each in calls)
        assert all(levels)

    @given(acyclic())
    def test_a_call_is_in_the_level_after_the_last_one_that_it_waits_for(self, calls: list[MFCDef]) -> None:
        graph = build_graph(calls, {"prompt"})
        at = {name: number for number, level in enumerate(graph.levels()) for name in level}
        for name in graph.calls:
            assert at[name] == max((at[parent] + 1 for parent in graph.parents(name)), default=0)


class TestCircles:
    @given(circular())
    def test_a_circle_is_found_and_named_in_the_order_in_which_each_waits_for_the_one_before(
        self, calls: list[MFCDef]
    ) -> None:
        fault = only(calls)
        assert fault.startswith("model_rpcs: the calls ")
        assert fault.endswith(" wait for each other")
        names = fault.removeprefix("model_rpcs: the calls ").removesuffix(" wait for each other").split(" → ")
        assert names[0] == names[-1]
        assert len(set(names)) == len(names) - 1 >= 2
        by_name = {each.name: each for each in calls}
        for before, after in pairwise(names):
            assert {*by_name[before].output_keys} & {*by_name[after].input_keys}

    @given(acyclic())
    def test_calls_in_no_circle_are_right(self, calls: list[MFCDef]) -> None:
        assert found(calls) == []

    def test_what_waits_for_a_circle_is_not_in_it(self) -> None:
        calls = [call("late", ["a"]), call("x", ["b"], ["a"]), call("y", ["a"], ["b"])]
        assert only(calls) == "model_rpcs: the calls x → y → x wait for each other"


class TestWhatIsWrong:
    def test_an_experiment_without_calls(self) -> None:
        assert only([]) == "model_rpcs: there are no model function calls"

    def test_two_calls_with_one_name(self) -> None:
        assert only([call("a", ["prompt"], ["x"]), call("a", ["prompt"], ["y"])]) == (
            "model_rpcs: 2 calls have the name 'a'"
        )

    def test_two_calls_that_make_one_key(self) -> None:
        assert only([call("a", ["prompt"], ["x"]), call("b", ["prompt"], ["x"])]) == (
            "model_rpcs: 'a' and 'b' both make 'x'"
        )

    def test_a_call_that_needs_what_it_makes(self) -> None:
        assert only([call("a", ["prompt", "x"], ["x"])]) == (
            "model_rpcs.a: it needs 'x', which it makes itself"
        )

    def test_a_key_that_nobody_makes(self) -> None:
        (fault,) = graph_faults([call("a", ["prompt", "x"], ["y"])], {"prompt", "answer"})
        assert texts_of([fault]) == ["model_rpcs.a: nothing makes 'x': neither a call nor the dataset"]
        assert fault.remedy == "there are: answer, prompt, y"

    def test_an_output_that_the_dataset_has(self) -> None:
        assert only([call("a", ["prompt"], ["prompt2"])], ["prompt", "prompt2"]) == (
            "model_rpcs.a: it makes 'prompt2', which the dataset has"
        )

    def test_no_sequences(self) -> None:
        assert only([call("a", ["prompt"], n_seqs=0)]) == "model_rpcs.a: n_seqs=0"

    def test_a_call_that_needs_no_data(self) -> None:
        assert texts_of(graph_faults([call("a", (), ["x"])], ())) == ["model_rpcs.a: it needs no data"]

    def test_micro_batches_that_are_none(self) -> None:
        (fault,) = graph_faults([call("a", ["x"], mb_spec=MicroBatchSpec(0, 1))], ["x"])
        assert "MicroBatchSpec(n_mbs=0, max_tokens_per_mb=1)" in fault.problem

    def test_calls_with_different_numbers_of_sequences(self) -> None:
        calls = [call("a", ["prompt"], ["x"], n_seqs=4), call("b", ["x"], n_seqs=8)]
        assert only(calls) == "model_rpcs: calls differ in n_seqs: a 4, b 8"

    def test_two_keys_with_one_name_in_the_interface(self) -> None:
        calls = [call("a", ["prompt", "answer"], input_key_remap={"prompt": "text", "answer": "text"})]
        assert (
            only(calls, ["prompt", "answer"]) == "model_rpcs.a: input_key_remap gives 2 keys the name 'text'"
        )

    def test_a_circle_beside_other_faults(self) -> None:
        calls = [call("a", ["y", "z"], ["x"]), call("b", ["x"], ["y"])]
        assert [each for each in found(calls) if "wait for each other" in each]
        assert [each for each in found(calls) if "nothing makes 'z'" in each]

    def test_a_remap_of_an_input_that_it_does_not_have(self) -> None:
        calls = [call("a", ["prompt"], input_key_remap={"prompt": "x", "promt": "y"})]
        assert only(calls) == "model_rpcs.a: input_key_remap names 'promt', which is no such key of it"

    def test_a_remap_to_an_output_that_it_does_not_have(self) -> None:
        calls = [call("a", ["prompt"], ["x"], output_key_remap={"x": "y"})]
        assert only(calls) == "model_rpcs.a: output_key_remap names 'y', which is no such key of it"

    def test_the_names_in_the_interface_are_free(self) -> None:
        remap: dict[str, Any] = {"input_key_remap": {"prompt": "text"}, "output_key_remap": {"logprobs": "x"}}
        assert found([call("a", ["prompt"], ["x"], **remap)]) == []

    @pytest.mark.parametrize("hook", [ParamReallocHook(), ParamReallocHook(source=CRITIC, target=COPY)])
    @pytest.mark.parametrize("when", ["pre_hooks", "post_hooks"])
    def test_a_realloc_hook_with_neither_source_nor_target_or_both(self, hook: Hook, when: str) -> None:
        hooks: dict[str, Any] = {when: (hook,)}
        assert only([call("a", ["prompt"], **hooks)]) == (
            "model_rpcs.a: a ParamReallocHook has both source and target, or neither"
        )

    @pytest.mark.parametrize("hook", [ParamReallocHook(source=ACTOR), ParamReallocHook(target=ACTOR)])
    def test_a_realloc_hook_of_a_model_with_itself(self, hook: Hook) -> None:
        assert only([call("a", ["prompt"], post_hooks=(hook,))]) == (
            "model_rpcs.a: a ParamReallocHook of actor@0 with itself"
        )

    @pytest.mark.parametrize("eta", [0.0, -0.5, 1.5, float("nan")])
    def test_a_moving_average_with_a_weight_that_is_none(self, eta: float) -> None:
        assert only([call("a", ["prompt"], pre_hooks=(realloc(COPY, eta),))]) == (
            f"model_rpcs.a: a ParamReallocHook with eta={eta:g}"
        )

    @pytest.mark.parametrize("eta", [1e-6, 0.5, 1.0])
    def test_a_weight_above_0_and_1_at_most_is_right(self, eta: float) -> None:
        assert (
            found([call("a", ["prompt"], pre_hooks=(realloc(COPY, eta),), post_hooks=(OffloadHook(),))]) == []
        )

    def test_parameters_are_offloaded_before_a_call_that_needs_them(self) -> None:
        (told,) = found([call("a", ["prompt"], pre_hooks=(OffloadHook(),))])
        assert "model_rpcs.a: an OffloadHook is in its pre_hooks" in told

    def test_all_of_it_is_told_at_once(self) -> None:
        calls = [
            call("a", ["prompt"], ["x"], n_seqs=4),
            call("a", ["prompt", "y"], ["x", "answer"], n_seqs=8, pre_hooks=(realloc(ACTOR, 2.0),)),
        ]
        with pytest.raises(SpecError) as caught:
            build_graph(calls, ["prompt", "answer"])
        assert texts_of(caught.value.faults) == [
            "model_rpcs: 2 calls have the name 'a'",
            "model_rpcs: 'a' and 'a' both make 'x'",
            "model_rpcs.a: it makes 'answer', which the dataset has",
            "model_rpcs.a: nothing makes 'y': neither a call nor the dataset",
            "model_rpcs.a: a ParamReallocHook of actor@0 with itself",
            "model_rpcs.a: a ParamReallocHook with eta=2",
            "model_rpcs: calls differ in n_seqs: a 4, a 8",
        ]


class TestWhatACallReadsAndWrites:
    def test_a_train_step_writes_its_model(self) -> None:
        trains = call("a", kind=TRAIN)
        assert (trains.reads, trains.writes) == (frozenset({ACTOR}), frozenset({ACTOR}))

    def test_inference_writes_nothing(self) -> None:
        assert call("a").writes == set()

    def test_a_hook_with_a_source_reads_that_and_writes_the_model_of_the_call(self) -> None:
        copies = call("a", model=COPY, pre_hooks=(realloc(ACTOR),))
        assert (copies.reads, copies.writes) == (frozenset({ACTOR, COPY}), frozenset({COPY}))

    def test_a_hook_with_a_target_writes_that(self) -> None:
        copies = call("a", kind=TRAIN, post_hooks=(ParamReallocHook(target=COPY), OffloadHook()))
        assert (copies.reads, copies.writes) == (frozenset({ACTOR}), frozenset({ACTOR, COPY}))

    def test_its_role_is_that_of_its_model(self) -> None:
        assert call("a", model=COPY).role == "actor"


class TestHooksThatAreAdded:
    CALLS = (
        call("train", ["tokens"], kind=TRAIN),
        call("generate", ["prompt"], ["tokens"], COPY),
        call("judge", ["tokens"], model=CRITIC),
    )

    def test_another_replica_of_a_role_that_is_trained_gets_the_parameters_before_each_call(self) -> None:
        trains, generates, judges = with_hooks(self.CALLS, ())
        assert generates == self.CALLS[1].hooked(pre=realloc(ACTOR))
        assert (trains, judges) == (self.CALLS[0], self.CALLS[2])

    def test_where_its_devices_have_other_models_too_it_gives_the_memory_back(self) -> None:
        generates = with_hooks(self.CALLS, {ACTOR, COPY, CRITIC})[1]
        assert generates.pre_hooks == (realloc(ACTOR),)
        assert generates.post_hooks == (OffloadHook(),)

    def test_hooks_that_are_there_are_not_added_again(self) -> None:
        once = with_hooks(self.CALLS, {COPY})
        assert with_hooks(once, {COPY}) == once

    def test_one_that_says_from_where_its_parameters_come_keeps_that(self) -> None:
        averages = call("generate", ["prompt"], model=COPY, pre_hooks=(realloc(ACTOR, 0.1),))
        assert with_hooks([self.CALLS[0], averages], ())[1] == averages

    def test_one_that_is_a_moving_average_is_not_overwritten(self) -> None:
        average = ParamReallocHook(target=COPY, eta=0.1)
        calls = [
            call("gen", ["prompt"], ["x"], model=COPY, kind=GENERATE),
            call("train", ["x"], kind=TRAIN, post_hooks=(average,)),
        ]
        first, last = with_hooks(calls, shared=())
        assert (first.pre_hooks, last.post_hooks) == ((), (average,))

    def test_a_moving_average_of_one_call_is_not_overwritten_before_another_one(self) -> None:
        averages = call("average", ["prompt"], ["x"], model=COPY, pre_hooks=(realloc(ACTOR, 0.1),))
        uses = call("use", ["x"], model=COPY)
        assert with_hooks([self.CALLS[0], averages, uses], ()) == [self.CALLS[0], averages, uses]

    def test_a_role_that_is_not_trained_gets_nothing(self) -> None:
        calls = [call("a", ["prompt"]), call("b", ["prompt"], model=COPY)]
        assert with_hooks(calls, {ACTOR, COPY}) == calls

    def test_a_hook_is_added_once(self) -> None:
        plain, hook = call("a"), OffloadHook()
        twice = plain.hooked(pre=hook, post=hook).hooked(pre=hook, post=hook)
        assert (twice.pre_hooks, twice.post_hooks) == ((hook,), (hook,))
        assert plain.hooked() == plain


def test_a_graph_has_its_calls_in_the_order_in_which_they_were_given() -> None:
    graph = build_graph([call("b", ["x"]), call("a", ["prompt"], ["x"])], ["prompt"])
    assert isinstance(graph, Graph)
    assert [*graph.calls] == ["b", "a"]
    assert graph.levels() == [["a"], ["b"]]

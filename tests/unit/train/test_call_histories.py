"""Calls of a trainer in any order, whose ranks fail, hang and are lost, beside a reference of what each process has.

`Attempts` is real. A rank has its process, with its hook and its object. A call runs when the driver waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.effort import examples
from unirun.errors import EncodingError, InvocationTimeout, RemoteTraceback, TrainingFailed, WorkerLost
from unirun.train import running
from unirun.train.losses import LIMIT
from unirun.train.running import RECOVERY_TIMEOUT, UNWIND_TIMEOUT, Attempts
from unirun.train.task import Attempt

Outcome = Literal["value", "error", "lost", "own loss", "Ctrl-C"]
"""The end of a function in one of the ranks that are called. An `own loss` is that of a worker of another role, which the
function has called itself."""

OUTCOMES: tuple[Outcome, ...] = ("value", "value", "error", "lost", "own loss", "Ctrl-C")
ARGS: tuple[Any, dict[str, Any]] = (1, 2), {"key": 3}
END = "was killed by SIGSEGV"
HINT = "see unirun logs w"
RANK = st.integers(0, 2)


class Ref:
    """A call that runs, once, when the driver waits for it."""

    def __init__(self, finish: Callable[[], Any]) -> None:
        self._finish, self._over = finish, False
        self._callbacks: list[Callable[[Any], None]] = []
        self._error: BaseException | None = None

    def go_on(self) -> None:
        """Let it end."""
        if not self._over:
            self._over = True
            try:
                self._value = self._finish()
            except BaseException as error:  # noqa: BLE001 - Ctrl-C is one of them
                self._error = error
            for callback in self._callbacks:
                callback(self)

    def done(self) -> bool:
        return self._over

    def exception(self) -> BaseException | None:
        self.go_on()
        return self._error

    def result(self) -> Any:
        if (error := self.exception()) is not None:
            raise error
        return self._value

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def wake_with(self, wake: Callable[[Any], None]) -> None:
        self.go_on()

    def forget_wake(self, wake: Callable[[Any], None]) -> None: ...


class Process:
    """One rank. `made` is its object: the class, and the attempt in which it was made."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation, self.lives, self.hangs = incarnation, True, False
        self.hooked: list[Program] = []
        self.made: tuple[Program, int] | None = None


class Program:
    """A hook, or a class. It `fails` so often: it raises, or a process that calls it is killed."""

    def __init__(self, name: str, fails: int = 0, *, kills: bool = False) -> None:
        self.__name__, self.fails, self.kills = name, fails, kills

    def __call__(self) -> None: ...


class Method:
    """A method that is called and not waited for."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call_async = call


class Some:
    """All workers, or one of them."""

    def __init__(self, workers: Workers, ranks: Sequence[int]) -> None:
        self.workers, self.ranks = workers, ranks
        self.execute, self.prepare = Method(self._execute), Method(self._prepare)
        self.interrupt, self.kill = Method(self._interrupt), Method(self._kill)
        self.idle, self.describe = Question(self, idle=True), Question(self, idle=False)

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, rank: int) -> Some:
        return Some(self.workers, (self.ranks[rank],))

    def __iter__(self) -> Iterator[Some]:
        return iter([self[rank] for rank in range(len(self))])

    def _execute(
        self,
        turn: Attempt,
        function: Function,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        alone: bool = False,
    ) -> Ref:
        assert (args, kwargs) == ARGS
        function.finds(self.workers)
        return self._begun(turn, partial(function.ends, self, turn), alone)

    def _prepare(
        self,
        turn: Attempt,
        hook: Program | None,
        kind: Program | None,
        fresh: Collection[int],
        *,
        alone: bool,
    ) -> Ref:
        def prepared() -> None:
            for rank in self.ranks:
                process = self.workers.processes[rank]
                for each in (hook if rank in fresh else None, kind):
                    if each is not None and each.fails:
                        each.fails -= 1
                        raise self.workers.loses(rank) if each.kills else ValueError(each.__name__)
                if hook is not None and rank in fresh:
                    process.hooked.append(hook)
                process.made = None if kind is None else (kind, turn.attempt)

        return self._begun(turn, prepared, alone)

    def _begun(self, turn: Attempt, finish: Callable[[], Any], alone: bool) -> Ref:
        assert alone == (len(self) < len(self.workers.processes))
        self.workers.begins(turn, alone)

        def finished() -> Any:
            try:
                return finish()
            except BaseException as error:
                self.workers.broken = True
                self.workers.failed[turn.attempt] = type(error).__name__
                raise

        return Ref(finished)

    def _interrupt(self, attempt: int, reason: str) -> None:
        (rank,) = self.ranks
        self.workers.interrupts.setdefault(attempt, []).append((rank, reason))

    def _kill(self) -> None:
        (rank,) = self.ranks
        assert self.workers.processes[rank].hangs or self.workers.deaf, "a rank is killed that does nothing"
        self.workers.killed.append(rank)
        self.workers.loses(rank)


class Question:
    """A call that ranks answer at once, or when nothing runs in them."""

    def __init__(self, asked: Some, *, idle: bool) -> None:
        self._workers, self._ranks, self._idle = asked.workers, asked.ranks, idle

    def options(self, *, timeout: float) -> Question:
        assert timeout == UNWIND_TIMEOUT
        return self

    def call(self) -> None:
        workers = self._workers
        workers.time += workers.look
        assert all(each.lives for each in workers.processes)
        if workers.untold:
            raise workers.untold[0] if workers.dying else workers.untold.pop()
        slow = [rank for rank in self._ranks if workers.processes[rank].hangs]
        if workers.deaf or (slow and self._idle):
            workers.time += UNWIND_TIMEOUT
            missing = tuple(f"w:{rank}" for rank in slow or self._ranks)
            raise InvocationTimeout("they are late", missing=missing, results={})


class Workers:
    """The job behind a trainer. The process group is `broken` when something has failed since it was formed."""

    name = "w"
    lives = True
    deaf = dying = False
    """No rank answers, or one is lost each time."""
    look = 1.0
    """Seconds until a question is answered."""

    def __init__(self, world: int) -> None:
        self.processes = [Process(0) for _ in range(world)]
        self.generation, self.time = 0, 100.0
        self.untold: list[WorkerLost] = []
        self.turns: list[Attempt] = []
        self.interrupts: dict[int, list[tuple[int, str]]] = {}
        self.failed: dict[int, str] = {}
        self.killed: list[int] = []
        self.broken, self._met = False, (0, 0)

    @property
    def group(self) -> Some:
        return Some(self, range(len(self.processes)))

    @property
    def incarnations(self) -> tuple[int, ...]:
        return tuple(each.incarnation for each in self.processes)

    def wait_until_whole(self, timeout: float) -> None:
        assert timeout == RECOVERY_TIMEOUT
        for rank, each in enumerate(self.processes):
            if not each.lives:
                self.processes[rank] = Process(each.incarnation + 1)
                self.generation, self.broken = self.generation + 1, False

    def loses(self, rank: int) -> WorkerLost:
        process = self.processes[rank]
        process.lives = process.hangs = False
        return WorkerLost("it was lost", worker=f"w:{rank}")

    def loss(self, error: WorkerLost, called: Sequence[int]) -> str:
        """The process that was called is the one that was there when all were ready."""
        rank = int(error.worker.rpartition(":")[2])
        assert self.processes[rank].incarnation == called[rank]
        return f"{error.worker} {END}"

    def begins(self, turn: Attempt, alone: bool) -> None:
        """A call begins, as in a worker: all ranks form their group anew, if something has failed in it, once. Several
        ranks may be prepared alone in one turn."""
        if not alone or turn not in self.turns[-1:]:
            self.turns.append(turn)
        assert [each.attempt for each in self.turns] == [*range(1, len(self.turns) + 1)]
        if not alone:
            met = turn.generation, turn.failed_attempts
            assert self.broken == (turn.failed_attempts > 0 and met != self._met)
            self._met, self.broken = met, False


class Function:
    """A function, and its end in one of the ranks that are called; those with it may hang then. It finds the hook called
    once in each process, and objects that were made together."""

    __name__ = "f"

    def __init__(
        self,
        outcome: Outcome,
        rank: int,
        prepared: tuple[Program | None, Program | None],
        *,
        hangs: bool = False,
    ) -> None:
        self.outcome, self.rank, self.prepared, self.hangs = outcome, rank, prepared, hangs
        self.error: BaseException | None = None

    def ends(self, called: Some, turn: Attempt) -> Any:
        workers, rank = called.workers, called.ranks[self.rank % len(called)]
        match self.outcome:
            case "value":
                values = [(each, turn.attempt) for each in called.ranks]
                return values if len(called) == len(workers.processes) else values[0]
            case "error":
                self.error = ValueError("of the function")
            case "own loss":
                self.error = WorkerLost("engine:0 was lost", worker="engine:0")
                self.error.__cause__ = RemoteTraceback(f"w:{rank}", "")
            case "lost":
                self.error = workers.loses(rank)
            case "Ctrl-C":
                self.error = KeyboardInterrupt()
        for each in called.ranks:
            process = workers.processes[each]
            process.hangs |= self.hangs and process.lives and each != rank
        raise self.error

    def finds(self, workers: Workers) -> None:
        """Look at all processes when it begins."""
        hook, kind = self.prepared
        for process in workers.processes:
            assert process.hooked == ([] if hook is None else [hook])
            assert (process.made is None) == (kind is None)
        made = {process.made for process in workers.processes}
        assert len(made) == 1
        assert kind is None or {each[0] for each in made if each is not None} == {kind}


class Calls(RuleBasedStateMachine):
    """The reference: the hook and the class, and the calls for which the driver has not waited."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared: tuple[Program | None, Program | None] = (None, None)
        self.open: list[tuple[Ref, Function, int]] = []

    @initialize(world=st.integers(2, 3))
    def begins(self, world: int) -> None:
        self.world, self.workers = world, Workers(world)
        workers: Any = self.workers
        self.attempts = Attempts(workers, lambda: self.workers.time)

    @rule(
        which=st.sampled_from(["hook", "class", "both"]),
        fails=st.integers(0, LIMIT),
        kills=st.booleans(),
        of_hook=st.booleans(),
    )
    def prepares(self, which: str, fails: int, kills: bool, of_hook: bool) -> None:
        """Another hook and class, in the same processes. They may raise, or their processes may be killed."""
        hook = Program("hook", fails * of_hook, kills=kills) if which != "class" else None
        kind = Program("kind", fails * (not of_hook), kills=kills) if which != "hook" else None
        self.prepared = hook, kind
        for each in self.workers.processes:
            each.hooked, each.made = [], None
        self.attempts.prepare_with(hook, kind)
        bad = next((each for each in self.prepared if each is not None and each.fails), None)
        if bad is None:
            return
        if not bad.kills:
            for _ in range(bad.fails):
                with pytest.raises(ValueError, match=bad.__name__):
                    self.attempts.ready()
        elif bad.fails == LIMIT:
            names = {"hook": "the initialization hook hook", "class": "the class kind"}
            where = names.get(which, " or ".join(names.values()))
            told = rf"^w:\d {END}, {LIMIT} times in a row, in {where}; {HINT} for its output$"
            with pytest.raises(TrainingFailed, match=told) as raised:
                self.attempts.ready()
            assert isinstance(raised.value.__cause__, WorkerLost)

    @rule(rank=RANK)
    def loses(self, rank: int) -> None:
        """A rank is lost while nothing is called: the call that comes next does not fail by it."""
        if self.workers.processes[rank % self.world].lives:
            self.workers.untold.append(self.workers.loses(rank % self.world))

    @rule(outcome=st.sampled_from(OUTCOMES), rank=RANK, hangs=st.booleans(), alone=st.booleans())
    def calls(self, outcome: Outcome, rank: int, hangs: bool, alone: bool) -> None:
        """A function in all ranks, or in one. Its result, or its error, is that of the function."""
        self.answers()
        rank %= self.world
        function = Function(outcome, rank, self.prepared, hangs=hangs and not alone)
        called: Any = function
        before = [ref.done() for ref, _, _ in self.open]
        try:
            found = (
                self.attempts.execute_single(rank, called, *ARGS)
                if alone
                else self.attempts.execute(called, *ARGS)
            )
        except (ValueError, WorkerLost, KeyboardInterrupt) as error:
            self.says(function, error)
        else:
            values = [(each, self.workers.turns[-1].attempt) for each in range(self.world)]
            assert found == (values[rank] if alone else values)
        assert [ref.done() for ref, _, _ in self.open] == before, "what was called before goes on beside it"

    def says(self, function: Function, error: BaseException) -> None:
        if function.outcome != "lost":
            assert error is function.error
            return
        assert isinstance(error, WorkerLost)
        lost = f"w:{function.rank}"
        assert (error.worker, error.problem, error.remedy) == (lost, f"{lost} {END}", HINT)
        assert error.__cause__ is function.error

    def answers(self) -> None:
        """A function that hangs is in the way of the next one."""
        if any(process.hangs for process in self.workers.processes):
            self.waits_for_all()

    @rule(outcome=st.sampled_from(OUTCOMES[:-1]), rank=RANK)
    def calls_and_does_not_wait(self, outcome: Outcome, rank: int) -> None:
        self.answers()
        called: Any = Function(outcome, rank, self.prepared)
        ref: Any = self.attempts.execute_async(called, *ARGS)
        self.open.append((ref, called, self.workers.turns[-1].attempt))

    @rule(number=st.integers(0, 3))
    def goes_on(self, number: int) -> None:
        """A call that nobody waits for ends."""
        if self.open:
            self.open[number % len(self.open)][0].go_on()

    @rule()
    def waits_for_all(self) -> None:
        """Before a run nothing is left of calls, and what does not end is killed."""
        self.attempts.ready()
        assert all(ref.done() for ref, _, _ in self.open)
        assert not any(process.hangs for process in self.workers.processes)

    @invariant()
    def all_ranks_are_told_of_a_failure_once_and_of_nothing_else(self) -> None:
        if hasattr(self, "workers"):
            waits = {attempt: ref.done() for ref, _, attempt in self.open}
            assert self.attempts._open.keys() == {attempt for attempt, done in waits.items() if not done}
            assert self.workers.interrupts == {
                attempt: [
                    (
                        rank,
                        f"{'another rank has failed' if attempt in waits else 'the call has ended'}: {error}",
                    )
                    for rank in range(self.world)
                ]
                for attempt, error in self.workers.failed.items()
            }


TestCalls = Calls.TestCase
TestCalls.settings = settings(examples(200), stateful_step_count=15)


@pytest.mark.parametrize("idle", [True, False])
@pytest.mark.parametrize("how", ["late", "lost"])
def test_workers_that_do_not_answer_have_the_time_in_which_lost_ones_come_back(idle: bool, how: str) -> None:
    workers: Any = Workers(2)
    workers.deaf, workers.dying = how == "late", how == "lost"
    workers.untold += [WorkerLost("it was lost", worker="w:0")] * workers.dying
    # The last answer comes just then.
    workers.look = RECOVERY_TIMEOUT / 10 - UNWIND_TIMEOUT * workers.deaf
    began = workers.time
    with pytest.raises(WorkerLost if workers.dying else InvocationTimeout):
        Attempts(workers, lambda: workers.time).ready(idle=idle)
    assert workers.time - began == RECOVERY_TIMEOUT
    assert bool(workers.killed) == (idle and workers.deaf)


def test_a_call_that_was_waited_for_takes_nothing_from_the_time_in_which_lost_workers_come_back() -> None:
    workers: Any = Workers(2)
    attempts = Attempts(workers, lambda: workers.time)

    def ends(*args: Any) -> Any:
        workers.time += RECOVERY_TIMEOUT
        workers.untold.append(workers.loses(1))

    function: Any = Function("value", 0, (None, None))
    function.ends = ends
    attempts.execute_async(function, ARGS[0], ARGS[1])
    attempts.ready()
    assert [each.incarnation for each in workers.processes] == [0, 1]


def test_workers_that_are_lost_while_they_are_prepared_have_that_time_too() -> None:
    workers: Any = Workers(2)
    workers.look = RECOVERY_TIMEOUT / (LIMIT - 1)
    attempts = Attempts(workers, lambda: workers.time)
    attempts.prepare_with(None, Program("kind", LIMIT, kills=True))
    with pytest.raises(TrainingFailed, match=f"{END}, {LIMIT - 1} times in a row, in the class kind"):
        attempts.ready()


def test_workers_that_have_ended_are_told_nothing() -> None:
    workers: Any = Workers(2)
    attempts = Attempts(workers)
    turn = attempts.next()
    workers.lives = False
    attempts.end(turn, "it has failed")
    assert workers.interrupts == {}
    assert attempts.next() == Attempt(2, 0, 1)


class Refusing:
    """Workers to which nothing can be sent."""

    def __getattr__(self, name: str) -> Any:
        def refuse(*args: Any, **kwargs: Any) -> None:
            raise EncodingError("it cannot be sent")

        return Method(refuse)

    def __len__(self) -> int:
        return 1


def test_a_value_that_cannot_be_sent_is_named() -> None:
    lock = threading.Lock()

    def f(*args: Any, **kwargs: Any) -> None: ...

    workers: Any = Workers(1)
    attempts, group = Attempts(workers), Refusing()
    calls: dict[str, Callable[[], object]] = {
        "argument 2 of `f`": lambda: running._called(group, attempts.next(), f, (1, lock), {}),
        "argument key of `f`": lambda: running._called(group, attempts.next(), f, (1,), {"key": lock}),
        "the function f": lambda: running._called(group, attempts.next(), named("f", lock), (), {}),
        "the initialization hook": lambda: prepare(attempts, group, named("hook", lock), None),
        "the class": lambda: prepare(attempts, group, None, named("kind", lock)),
    }
    for what, call in calls.items():
        with pytest.raises(EncodingError, match=rf"{what}.* cannot be sent: TypeError: cannot pickle"):
            call()
    assert workers.interrupts == {}


def named(name: str, value: object) -> Any:
    """A function that holds this value."""

    def function() -> object:
        return value

    function.__name__ = name
    return function


def prepare(attempts: Attempts, group: Any, hook: Any, kind: Any) -> None:
    attempts.prepare_with(hook, kind)
    attempts._prepare(group)

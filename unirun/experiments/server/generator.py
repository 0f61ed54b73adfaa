"""`Generator`: the thread of a server that has its network. It draws tokens, and takes new weights between two steps.

All that concerns the network happens in this thread, in the order in which it was asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Literal, TypeVar

import torch

from unirun.errors import Fault, UsageError, WeightsError
from unirun.experiments.models.api import Place
from unirun.experiments.models.generation import Continuation, Slots
from unirun.experiments.models.stage import Stage
from unirun.weights.integrations.sending import read
from unirun.wire.reporting import gave_up

T = TypeVar("T")

DEFAULT = "default"
"""The label of the weights that the server was started with, as vLLM has it."""

IDLE_SECONDS = 1.0
"""Seconds without a request after which a server that has nothing to do drops what ended sequences have left."""

PauseMode = Literal["abort", "wait", "keep"]

NAMES = "publish the tensors under the names, and of the shapes, of the model's checkpoint"


class Generator:
    """Continues sequences with the network `stage`, `count` of them at the same time, until `stop`."""

    def __init__(
        self, place: Place, stage: Stage, count: int, decode: Callable[[list[int]], str] | None = None
    ) -> None:
        """`decode` gives the text of tokens, for stop strings."""
        self._slots = Slots(place, stage, count, decode, chunks=True)
        self._named = stage.named(stage.state_dict(keep_vars=True))
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # Sequences whose end is waited for, with their reasons.
        self._open: dict[Continuation, Future[str]] = {}
        # Those that are continued only after the pause, as it has dropped their keys and values, or came meanwhile.
        self._held: list[Continuation] = []
        self._pause: PauseMode | None = None
        self._drained: list[Future[None]] = []
        self._updating = False
        self._labels = [DEFAULT]
        self._over = self._ended = False
        # Held while what was asked for after the end of the thread is answered.
        self._ending = threading.RLock()
        self._thread = threading.Thread(target=self._run, name="generates", daemon=True)
        self.failed: Future[None] = Future()
        """Has an exception when the thread has ended by it, after which the server is of no use."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End all sequences, with the reason ``abort``, and then the thread."""

        def end() -> None:
            self._abort()
            self._over = True

        self._ask(end)

    def join(self, timeout: float) -> None:
        """Wait for the end of the thread, which would otherwise be ended by that of the process amid a step."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            gave_up("the thread that generates", timeout)

    @property
    def label(self) -> str:
        """The label of the present weights."""
        return self._labels[-1]

    @property
    def paused(self) -> bool:
        """True from the beginning of a pause until `resume`."""
        return self._pause is not None

    @property
    def running(self) -> int:
        """The number of sequences that have not ended."""
        return len(self._open)

    def spans(self, sequence: Continuation) -> list[dict[str, Any]]:
        """The labels of the weights that have made its tokens, as vLLM has them: runs of tokens."""
        found: list[dict[str, Any]] = []
        for place, version in enumerate(sequence.versions):
            if found and found[-1]["version"] == self._labels[version]:
                found[-1]["end"] = place + 1
            else:
                found.append({"version": self._labels[version], "start": place, "end": place + 1})
        return found

    def generate(self, sequence: Continuation) -> Future[str]:
        """Continue a sequence. The result is the reason of its end: ``stop``, ``length`` or ``abort``. When the future
        is cancelled, the sequence is no longer continued."""
        ended: Future[str] = Future()

        def begin() -> None:
            self._open[sequence] = ended
            if self._pause is None:
                self._slots.add(sequence)
            else:
                self._held.append(sequence)

        def leave(future: Future[str]) -> None:
            if future.cancelled():
                self._ask(lambda: self._drop(sequence))

        ended.add_done_callback(leave)
        self._ask(begin)
        return ended

    def pause(self, mode: PauseMode, *, clear_cache: bool) -> Future[None]:
        """Stop between two steps. Sequences end now (``abort``), are waited for (``wait``), or go on after the pause
        (``keep``): from keys and values that are computed anew with `clear_cache`, and else from those that they have.
        Those that another pause has kept are waited for, too.

        The one who waits for sequences gets `UsageError` when another pause or `resume` comes before they have ended.
        """
        paused: Future[None] = Future()

        def begin() -> None:
            if not paused.set_running_or_notify_cancel():
                return
            if mode == "keep":
                self._end_waits()
            if mode == "wait" and self._pause == "keep":
                self._continue()
            self._pause = mode
            if mode == "abort":
                self._abort()
            if mode == "wait" and self._slots.busy:
                self._drained.append(paused)
                return
            if clear_cache or mode == "wait":
                self._held = [*self._slots.clear(), *self._held]
            paused.set_result(None)

        self._ask(begin)
        return paused

    def resume(self) -> Future[None]:
        """Go on after a pause."""
        return self._do(self._resume)

    def _resume(self) -> None:
        self._end_waits()
        self._pause = None
        self._continue()

    def _continue(self) -> None:
        """Give the sequences that were held their slots."""
        held, self._held = self._held, []
        for sequence in held:
            self._slots.add(sequence)

    def _end_waits(self) -> None:
        """Tell those who wait for sequences in a pause that this will not come to its end."""
        drained, self._drained = self._drained, []
        for paused in drained:
            paused.set_exception(
                UsageError(
                    "the pause was ended, or became one that keeps sequences, before they had ended",
                    "pause again",
                )
            )

    def check(self, path: str, token: str) -> Future[None]:
        """Look whether the file with this token has the tensors of the network. It raises `UsageError` if it is not
        there, and `WeightsError` with the tensors that do not fit."""
        return self._do(lambda: self._refuse(read(path, token)))

    def begin_update(self) -> Future[None]:
        """Prepare for new weights. It raises `UsageError` when an update has begun already."""

        def begin() -> None:
            self._expect_update(begun=False)
            self._updating = True

        return self._do(begin)

    def _expect_update(self, *, begun: bool) -> None:
        if self._updating is not begun:
            raise UsageError(
                f"an update {'has not begun' if begun else 'has begun already'}",
                "call /start_weight_update, /update_weights and /finish_weight_update in turn",
            )

    def load(self, path: str, token: str) -> Future[None]:
        """Take the weights in the file with this token. It raises as `check` does, and then the weights are the old
        ones."""

        @torch.no_grad()
        def take() -> None:
            self._expect_update(begun=True)
            tensors = read(path, token)
            self._refuse(tensors)
            for name, tensor in tensors.items():
                self._named[name].copy_(tensor)

        return self._do(take)

    def finish_update(self, label: str | None) -> Future[None]:
        """From now on, tokens are made by weights with this label."""

        def finish() -> None:
            self._expect_update(begun=True)
            self._updating = False
            # Another version also without a label: nothing goes on from what the one before has computed.
            self._labels.append(self.label if label is None else label)
            self._slots.version = len(self._labels) - 1

        return self._do(finish)

    def _refuse(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise `WeightsError` unless each parameter has a tensor of its shape, under one of its names."""
        own = self._named
        faults = [Fault(name, "the model has no such tensor") for name in tensors if name not in own]
        faults += [
            Fault(name, f"it is {list(tensor.shape)}, and the model has {list(own[name].shape)}")
            for name, tensor in tensors.items()
            if name in own and tensor.shape != own[name].shape
        ]
        given = {id(own[name]) for name in tensors if name in own}
        faults += [Fault(name, "no tensor is for it") for name, each in own.items() if id(each) not in given]
        if faults:
            raise WeightsError("the model does not take these tensors", NAMES, faults=faults)

    def _do(self, act: Callable[[], T]) -> Future[T]:
        """The result of `act` in the thread, between two steps. Nothing is done when the future is cancelled before."""
        done: Future[T] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(act())
            except Exception as error:  # noqa: BLE001
                done.set_exception(error)

        self._ask(run)
        return done

    def _ask(self, act: Callable[[], None]) -> None:
        """Have the thread do this. Once it has ended, what is asked for ends at once: a client whose request was
        aborted may send it again."""
        self._inbox.put(act)
        if self._ended:
            self._give_up()

    def _give_up(self) -> None:
        """End what was asked for, and who waits for it."""
        with self._ending:
            with suppress(Empty):
                while True:
                    self._inbox.get_nowait()()
            self._abort()
            self._end_waits()

    def _run(self) -> None:
        try:
            while not self._over:
                self._step()
        except BaseException as error:  # noqa: BLE001
            self.failed.set_exception(error)
        finally:
            self._ended = True
            self._give_up()

    def _step(self) -> None:
        """Do what has been asked for, and draw tokens if there are any to draw."""
        works = self._slots.busy and self._pause in (None, "wait")
        try:
            while True:
                self._inbox.get(block=not works, timeout=IDLE_SECONDS if self._slots.resting else None)()
                works = True
        except Empty:
            if not works:
                self._slots.forget()
        if self._pause in (None, "wait") and self._slots.busy:
            for sequence in self._slots.step():
                self._end(sequence, "stop" if sequence.ended else "length")
        if self._drained and not self._slots.busy:
            self._slots.clear()
            drained, self._drained = self._drained, []
            for paused in drained:
                paused.set_result(None)

    def _end(self, sequence: Continuation, reason: str) -> None:
        ended = self._open.pop(sequence, None)
        if ended is not None and ended.set_running_or_notify_cancel():
            ended.set_result(reason)

    def _abort(self) -> None:
        """End all sequences as they are."""
        self._slots.clear()
        self._held.clear()
        for sequence in [*self._open]:
            self._end(sequence, "abort")

    def _drop(self, sequence: Continuation) -> None:
        """Forget a sequence for which nobody waits."""
        if self._open.pop(sequence, None) is not None:
            if sequence in self._held:
                self._held.remove(sequence)
            else:
                self._slots.remove(sequence)

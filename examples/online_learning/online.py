"""Online learning: a stream of data is drawn, preprocessed and learnt from, and the learner follows its drifts.

    cd examples/online_learning
    unirun --config job.yaml

Three roles and a trainer that keeps them all busy at once: while the learner is at one batch, the preprocessors
are at the next two and the source is at the one after that.
"""

from __future__ import annotations

import pickle
import time
from pathlib import Path

import torch
from curves import Scores, plot, table
from incremental import Incremental
from pipeline import pipelined
from stream import FEATURES, PHASES, Batch, Digits, features

import unirun

CHECKPOINT = 10  # batches between two times that the learner and the trainer keep what they have


class Source(unirun.Workload):
    """The stream. It is stateless, so a source that was started again continues with any batch."""

    def setup(self) -> None:
        """Load the data."""
        self.digits = Digits(self.config.seed, self.config.batch, self.config.phase)

    @unirun.trainer_invocation(target="ANY", blocking=False, idempotent=True)
    def draw(self, t: int) -> Batch:
        """Batch ``t``, after the time between two batches."""
        time.sleep(self.config.pace)
        return self.digits.draw(t)


class Preprocessor(unirun.Workload):
    """Computes features. Any worker that is free takes the next batch."""

    @unirun.trainer_invocation(target="ANY", blocking=False, idempotent=True)
    def prepare(self, batch: Batch) -> Batch:
        """The same batch with ``[B, FEATURES]`` in place of the images."""
        images, labels = batch
        return features(images), labels


class Learner(unirun.Workload):
    """Takes the batches in their order."""

    def setup(self) -> None:
        """Begin with the weights of the seed, or with the saved state of a learner that died."""
        torch.set_num_threads(1)  # the model is tiny, and roles share the cores
        torch.manual_seed(self.config.seed)
        self.model = Incremental(FEATURES, 10, freeze=self.config.phase)
        self.scores: dict[int, tuple[float, float]] = {}
        saved = self.master_handle.load_state()
        if saved is not None:
            self.scores, state = pickle.loads(saved)  # noqa: S301 - this rank wrote it
            self.model.restore(state)

    @unirun.trainer_invocation(target="RANK0", blocking=False, idempotent=True)
    def learn(self, t: int, batch: Batch) -> tuple[float, float]:
        """The accuracies on batch ``t`` before it was learnt: of the learner, and of its frozen copy."""
        if t not in self.scores:  # a trainer that was started again asks for some a second time
            inputs, labels = (torch.from_numpy(each) for each in batch)
            self.scores[t] = self.model.step(t, inputs, labels)
            if t % CHECKPOINT == 0:
                self.master_handle.save_state(pickle.dumps((self.scores, self.model.state())))
        return self.scores[t]


class OnlineTrainer(unirun.BaseTrainer):
    """Sends the stream through the roles. It may die as well, as the scores are saved."""

    def init(self) -> None:
        """Continue with the saved state of an earlier trainer."""
        saved = self.load_state()
        self.scores: Scores = pickle.loads(saved) if saved else []  # noqa: S301 - this trainer wrote it

    def is_recoverable(self) -> bool:
        """Return True: the trainer may be restarted, as the stream goes on."""
        return True

    def fit(self) -> dict[str, list[float]]:
        """Returns the accuracy on each batch."""
        started, first = time.monotonic(), len(self.scores)
        todo = range(first, self.config.phase * len(PHASES))
        stages = [
            lambda t, _: self.RG_SOURCE.draw(t),
            lambda t, batch: self.RG_PREPROCESS.prepare(batch),
            lambda t, batch: self.RG_LEARNER.learn(t, batch),
        ]
        for t, score in pipelined(todo, stages, depth=self.config.depth):
            self.scores.append(score)
            if t % CHECKPOINT == 0:
                self.save_state(pickle.dumps(self.scores))
                self.master_handle.report({"batch": t, "accuracy": score[0], "frozen": score[1]})
        seconds = time.monotonic() - started
        print(table(self.scores, list(PHASES), self.config.phase), flush=True)
        print(f"{len(todo)} batches in {seconds:.1f} s, {self.config.depth} at a time", flush=True)
        out = Path(self.config.out)
        plot(self.scores, list(PHASES), self.config.phase, out)
        print(f"accuracy over time in {out}", flush=True)
        learner, frozen = zip(*self.scores, strict=True)
        return {"learner": [*learner], "frozen": [*frozen]}

"""The times at which an experiment saves, checkpoints, evaluates and ends."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from unirun.errors import Fault
from unirun.values import Value


@dataclass
class ExperimentSaveEvalControl:
    """The length of an experiment, and the intervals at which it saves, checkpoints and evaluates: every so
    many epochs, steps or seconds, whichever comes first. None: this unit does not trigger it. Models are
    always saved at the end.

    It *saves* models for other programs, writes *checkpoints* from which it can be resumed, and *evaluates*.
    `benchmark_steps` ends it after so many steps.
    """

    total_train_epochs: int = 1
    save_freq_epochs: int | None = None
    save_freq_steps: int | None = None
    save_freq_secs: float | None = None
    ckpt_freq_epochs: int | None = None
    ckpt_freq_steps: int | None = None
    ckpt_freq_secs: float | None = None
    eval_freq_epochs: int | None = None
    eval_freq_steps: int | None = None
    eval_freq_secs: float | None = None
    benchmark_steps: int | None = None

    def every(self, what: str) -> Every:
        """The interval at which it does `what`: ``save``, ``ckpt`` or ``eval``."""
        return Every(*(getattr(self, f"{what}_freq_{unit}") for unit in ("epochs", "steps", "secs")))

    def faults(self) -> list[Fault]:
        """Settings that are not positive numbers of the right type."""
        found = []
        for name, value in vars(self).items():
            whole = not name.endswith("secs")
            wrong = (
                isinstance(value, bool)
                or not isinstance(value, int if whole else int | float)
                or not value > 0
            )
            if value is None and name != "total_train_epochs":
                continue
            if wrong:
                kind = "a whole number" if whole else "a number of seconds"
                found.append(Fault(f"exp_ctrl.{name}", f"{value!r} is not {kind} above 0", "None: never"))
        return found


class Every(Value):
    """Every so many epochs, steps or seconds; None: this unit does not trigger it."""

    epochs: int | None = None
    steps: int | None = None
    secs: float | None = None


class Since(Value):
    """The steps, epochs and seconds since something was last done. It is part of `RecoverInfo`. Seconds are
    those spent in the calls of steps: evaluations, saves, checkpoints, and times when the job does not run,
    do not count."""

    epochs: int = 0
    steps: int = 0
    secs: float = 0.0

    def passed(self, *, epochs: int = 0, steps: int = 0, secs: float = 0.0) -> Since:
        """So much more has passed."""
        return Since(self.epochs + epochs, self.steps + steps, self.secs + secs)

    def due(self, every: Every) -> bool:
        """Return True if it is time to do it again."""
        return (
            (every.epochs is not None and self.epochs >= every.epochs)
            or (every.steps is not None and self.steps >= every.steps)
            or (every.secs is not None and self.secs >= every.secs)
        )


class Frequencies(Value):
    """The steps, epochs and seconds since each thing was last done."""

    save: Since = Since()
    ckpt: Since = Since()
    eval: Since = Since()

    def passed(self, *, epochs: int = 0, steps: int = 0, secs: float = 0.0) -> Frequencies:
        """So much more has passed."""
        return Frequencies(
            *(
                since.passed(epochs=epochs, steps=steps, secs=secs)
                for since in (self.save, self.ckpt, self.eval)
            )
        )

    def due(self, control: ExperimentSaveEvalControl) -> list[str]:
        """Those of ``save``, ``ckpt`` and ``eval`` that are to be done now."""
        return [what for what in ("save", "ckpt", "eval") if getattr(self, what).due(control.every(what))]

    def done(self, *what: str) -> Frequencies:
        """These were done now."""
        return replace(self, **{name: Since() for name in what})

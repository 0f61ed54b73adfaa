"""A trainer that calls its workloads all the time, and counts the results."""

import json
import os
import time
from pathlib import Path

from unirun import BaseTrainer, BaseWorkload, WorkerLost, trainer_invocation


class Adder(BaseWorkload):
    @trainer_invocation()
    def add(self, number):
        return self.rank + number

    @trainer_invocation(blocking=False)
    def think(self, number):
        time.sleep(0.05)
        return self.rank + number

    @trainer_invocation(idempotent=True)
    def who(self):
        return [os.getpid(), int(os.environ["UNIRUN_INCARNATION"])]


class Adding(BaseTrainer):
    """Goes on until the file `enough` is there: a call is in flight while another is made and awaited.

    Two adders and one thinker: round n gives 2n + 1 and n. `rounds` counts them for who looks on.
    """

    def init(self):
        pass

    def fit(self):
        enough = Path(self.config.folder, "enough")
        before = self._who()
        print("pids", os.getpid(), *(pid for pid, _ in before), flush=True)
        rounds, blocking, flying, lost = 0, 0, 0, 0
        while not enough.exists():
            try:
                thought = self.RG_THINKER.think(rounds)
                added = self.RG_ADDER.add(rounds)
                flying += sum(thought.result())
                blocking += sum(added)
                rounds += 1
            except WorkerLost:
                lost += 1
            enough.with_name("rounds").write_text(str(rounds))
        said = {"rounds": rounds, "blocking": blocking, "flying": flying, "lost": lost}
        print(json.dumps({**said, "before": before, "after": self._who()}), flush=True)

    def _who(self):
        return [*self.RG_ADDER.who(), *self.RG_THINKER.who()]

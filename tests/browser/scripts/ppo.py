"""A small job of calls: actors, rollouts, and a trainer that goes on when one of them dies."""

import math
import random
import time

import unirun
from unirun import BaseTrainer, BaseWorkload, trainer_invocation


class Actor(BaseWorkload):
    @trainer_invocation()
    def update(self, step, data):
        time.sleep(0.02)
        loss = math.exp(-step / 40) + random.random() * 0.05
        self.master_handle.report(
            {"loss": loss, "step": step, "tokens_per_second": 900 + 80 * random.random()}
        )
        if step % 20 == 0:
            print(f"step {step}: loss {loss:.4f} <script>alert(1)</script>", flush=True)
        return step


class Rollout(BaseWorkload):
    @trainer_invocation(blocking=False)
    def generate(self, step):
        time.sleep(0.03)
        reward = 1 - math.exp(-step / 60) + random.random() * 0.1
        self.master_handle.report({"reward": reward, "step": step})
        if step == self.config.get("fails_at") and self.rank == 1:
            raise ValueError(f"the reward of step {step} is <b>nan</b>")
        return bytes(5000)


class PPOTrainer(BaseTrainer):
    def init(self):
        pass

    def fit(self):
        for step in range(self.config.steps):
            while True:
                try:
                    self.RG_ACTOR.update(step, self.RG_ROLLOUT.generate(step).result())
                    break
                except unirun.WorkerLost:
                    time.sleep(0.1)

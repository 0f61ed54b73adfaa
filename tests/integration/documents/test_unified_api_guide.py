"""The programs of DLRover's "Unified API Guide" run here, as one job on this host.

The files are what a reader has after the guide's three steps, with the examples of its tables in the classes. Not run:
`enable_ray_auto_visible_device`, which means nothing without Ray; the builder takes it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.integration.harness import Unirun

from .programs import Differs, ours

ACTOR = """
@ray.remote
class UserActorModel(BaseWorkload):

    def __init__(self, master_handle, config):
        super().__init__(master_handle, config)

        # define your actor property
        ...

    def init_model(self):
        # preparation before training
        ...

    def update_actor(self):
        # policy updating
        ...

     # other implement
    ...
"""

EXAMPLES = """
@trainer_invocation(blocking=False)
def a(xxx):
      xxx

@trainer_invocation(is_async=True,timeout=30)
def a(xxx):
      xxx

def filter_func(input: int):
      if input < -1:
              return 0
      return input

@trainer_invocation(is_async=True,timeout=30，pre_function=filter_func)
def a(input: int):
      return input + 1
"""

TRAINER = """
class UserTrainer(BaseTrainer):

    def __init__(self, actor_handles, actor_classes, config):
        super().__init__(actor_handles, actor_classes, config)

        # define your trainer property
        self.field0 = xxx
        self.field1 = xxx
        ...

    def init(self):
        # define process logic for training preparation,
        # such as: tokenizer, dataloader
        ...

    def fit(self):
        # define the main process logic for training
        # operate the multi workloads of different roles defined above
        ...

    # other implement
    ...
"""

FIT = """
self.RG_ACTOR.update(parameter_x)
self.RG_ROLLOUT.generate(parameter_0, parameter_1)
"""

SUBMIT = """
dl_job = (
    DLJobBuilder()
    .dl_type("SFT")
    .node_num(1)
    .device_per_node(4)
    .config({"k1": "v1"})
    .trainer("xxx", "xxx")
    ...
    .build())

dl_job.submit()
"""

NO_RAY = Differs("@ray.remote\n", "", "there is no Ray")


def test_the_three_steps_of_the_guide(unirun: Unirun, tmp_path: Path) -> None:
    methods = ours(
        EXAMPLES,
        Differs("(xxx):\n      xxx", "(self, xxx):\n    return self.rank, xxx", "methods, and a placeholder"),
        Differs(
            "blocking=False)\ndef a",
            "blocking=False)\ndef update",
            "three methods of one class have three names",
        ),
        Differs(
            "timeout=30)\ndef a", "timeout=30)\ndef generate", "three methods of one class have three names"
        ),
        Differs(
            "，pre_function=filter_func)", ", pre_func=filter_func)", "the guide's table calls it pre_func"
        ),
        Differs("def a(input: int):\n      return", "def a(self, input: int):\n    return", "a method"),
    )
    # The functions of the examples become methods of the workload.
    before, pre_func, after = methods.partition("def filter_func(input: int):")
    filtered, _, last = after.partition("\n\n")
    body = "\n".join(f"    {line}" if line else "" for line in f"{before}{last}".splitlines())
    actor = ours(ACTOR, NO_RAY, Differs("     # other implement\n    ...", body, "the guide's examples"))
    (tmp_path / "roles.py").write_text(
        "from unirun import BaseTrainer, BaseWorkload, trainer_invocation\n\n"
        f"{pre_func}{filtered}\n\n{actor}\n"
        + ours(
            TRAINER,
            Differs("xxx", "7", "a placeholder"),
            Differs(
                "        # operate the multi workloads of different roles defined above\n        ...\n",
                "        ref = self.RG_ACTOR.update(3)\n"
                "        assert ref.result() == [(0, 3), (1, 3)]\n"
                "        assert self.RG_ROLLOUT.generate(5) == [(0, 5), (1, 5)]\n"
                "        assert self.RG_ACTOR.a(-4) == [1, 1]\n"
                "        assert self.RG_ACTOR.update_actor() == [None, None]\n"
                "        assert self.config.k1 == 'v1' and self.field0 == 7\n"
                "        assert sorted(self.get_role_groups()) == ['RG_ACTOR', 'RG_ROLLOUT']\n"
                "        assert len(self.actor_handles['actor']) == 2\n"
                "        print('trained')\n",
                "a placeholder; RG_ACTOR.update(…) and RG_ROLLOUT.generate(…) are the guide's",
            ),
        )
    )
    (tmp_path / "submit.py").write_text(
        "from unirun.train import DLJobBuilder\n\n"
        + ours(
            SUBMIT,
            Differs(
                '.trainer("xxx", "xxx")\n    ...',
                '.trainer("roles", "UserTrainer")\n'
                '    .workload("actor", "roles", "UserActorModel").total(2).per_node(2)\n'
                '    .workload("rollout", "roles", "UserActorModel").total(2).per_node(2)',
                "placeholders; a workload has the name of its role first",
            ),
        )
    )
    program = unirun.start_program([sys.executable, "submit.py"], cwd=tmp_path)
    end = program.end()
    assert end.code == 0, end.err
    assert "trained" in end.out

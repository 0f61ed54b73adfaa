"""The built-in server in a job: it takes the versions that a role publishes while it answers requests."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import yaml

from .harness import Script, Unirun
from .warm import ONE_THREAD

PUBLISHER = """
    import os, sys, time
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    import unirun

    channel, folder = unirun.WeightsChannel("policy"), sys.argv[1]
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(f"{folder}/model"))
    version = 1
    open(f"{folder}/ready", "w").close()
    while not os.path.exists(f"{folder}/end"):
        if os.path.exists(f"{folder}/publish-{version}"):
            channel.publish(model, version)
            version += 1
        time.sleep(0.01)
"""

ASKER = """
    import asyncio, os, sys, time
    from pathlib import Path
    from unirun.rollout import EngineClient, EngineCompleter

    folder = Path(sys.argv[1])

    async def main():
        async with EngineClient("engine") as client:
            completer = EngineCompleter(client)
            async def ask(number):
                # Until the version has come. Lengths differ, so that it does not come between two answers of each.
                found = []
                while not found or found[-1].versions[-1] == 0:
                    count = 200 + 40 * number
                    found.append(await completer.complete([1, 2, number], max_tokens=count))
                    assert len(found[-1].token_ids) == len(found[-1].logprobs) == len(found[-1].versions) == count
                return found
            while not (folder / "ready").exists():
                await asyncio.sleep(0.01)
            asked = [asyncio.create_task(ask(number)) for number in range(8)]
            await asyncio.sleep(0.2)
            (folder / "publish-1").touch()
            found = [each for some in await asyncio.gather(*asked) for each in some]
            for each in found:
                assert list(each.versions) == sorted(each.versions)
            print("versions", sorted({*map(tuple, map(sorted, (set(each.versions) for each in found)))}), flush=True)
            chunked = EngineCompleter(client, new_tokens_per_chunk=100)
            while not (folder / "killed").exists():
                asked = (chunked.complete([number], max_tokens=200) for number in range(16))
                found = await asyncio.gather(*asked)
                assert all(len(each.token_ids) == len(each.versions) == 200 for each in found)
            print("all answered by version", {each.versions[-1] for each in found}, flush=True)
            (folder / "end").touch()

    asyncio.run(main())
"""


CONFIG = {
    "model_type": "llama",
    "vocab_size": 32,
    "max_position_embeddings": 8192,
    "eos_token_id": None,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
}


def test_versions_come_while_requests_run_and_a_dead_server_loses_no_request(
    unirun: Unirun, script: Script, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    random_weights = ["--load-format", "dummy"]
    roles = {
        "actor": {"script": str(script(PUBLISHER)), "args": [str(tmp_path)]},
        "engine": {"kind": "builtin", "model": str(model), "count": 2, "args": random_weights},
        "asker": {"script": str(script(ASKER, "asker.py")), "args": [str(tmp_path)], "after": ["engine"]},
    }
    channels = {"policy": {"publisher": "actor", "receivers": ["engine"]}}
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump({"roles": roles, "channels": channels}))
    # Threads of the two servers would mostly wait for each other.
    job = unirun.start("--config", file, env=ONE_THREAD)
    (line,) = job.lines(r"versions (.*)")
    assert "(0, 1)" in line
    os.kill(int(unirun.workers()["engine:0"]["pid"]), signal.SIGKILL)
    (tmp_path / "killed").touch()
    job.lines(r"all answered by version \{1\}")
    assert job.end().code == 0

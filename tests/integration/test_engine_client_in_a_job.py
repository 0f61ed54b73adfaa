"""`unirun.EngineClient` in a program of a job, whose engines the agents start again."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import yaml

from tests.testbed.engine import tokens
from tests.waiting import eventually

from .harness import Script, Unirun

STUB = Path(__file__).parents[1] / "testbed" / "engine.py"

ASK = """
    import asyncio, json, sys
    import unirun

    async def main():
        async with unirun.EngineClient("engine", timeout=120) as client:
            print("asking .", flush=True)
            asked = await asyncio.gather(*(client.generate([number, 1], max_tokens=4) for number in range(40)))
            async for engines in client.changes():
                if all(engine.ready for engine in engines) and engines[0].incarnation == 1:
                    break
            later = await asyncio.gather(*(client.generate([number, 1], max_tokens=4) for number in range(4)))
        print(json.dumps({
            "tokens": [answer.token_ids for answer in asked],
            "later": sorted({f"{answer.engine} {answer.engine.incarnation}" for answer in later}),
            "torch": "torch" in sys.modules,
        }), flush=True)

    asyncio.run(main())
"""


def test_requests_go_on_while_an_engine_is_killed_and_started_again(unirun: Unirun, script: Script) -> None:
    stub = [str(STUB), "--port", "{port}", "--enable-scale-out", "--latency", "0.5"]
    engine = {
        "program": sys.executable,
        "args": stub,
        "count": 2,
        "service": True,
        "ready": "http://{addr}/health",
    }
    ask = {"program": sys.executable, "args": [str(script(ASK))], "after": ["engine"]}
    file = unirun.root / "job.yaml"
    file.write_text(yaml.safe_dump({"roles": {"engine": engine, "ask": ask}}))
    job = unirun.start("--config", file)
    job.lines(r"asking \.$")
    pid = eventually(lambda: unirun.workers()["engine:0"]["pid"], "engine:0 runs")
    os.kill(pid, signal.SIGKILL)
    (told,) = job.lines(r"(\{.*\})$")
    result = json.loads(told)
    assert job.end().code == 0
    assert result == {
        "tokens": [tokens([number, 1], 4) for number in range(40)],
        "later": ["engine:0 1", "engine:1 0"],
        "torch": False,
    }

"""An agent whose episodes are those of an environment of the package ``verifiers``, with tools, in its own virtual
environment: it brings packages that this project has not."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.documents import ROOT
from tests.engines.environment import python_with

PACKAGE = "verifiers==0.1.14"
"""The last version whose environments run in the process of their caller, with any client."""

LIMIT = 1800.0

SCRIPT = '''
import asyncio
import json

import verifiers as vf
from datasets import Dataset
from openai.types.chat import ChatCompletion
from verifiers.clients import OpenAIChatCompletionsClient

from unirun.rollout import Completion, Pool


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def right(completion, answer, **kwargs) -> float:
    return float(completion[-1]["content"] == answer)


class Tokenizer:
    """A token for each character, and the template of ChatML."""

    def encode(self, text, add_special_tokens=False):
        return [1 if each == "$" else ord(each) for each in text]

    def decode(self, tokens, skip_special_tokens=True):
        return "".join(chr(each) for each in tokens if each != 1)

    def apply_chat_template(self, messages, tools, tokenize, add_generation_prompt):
        text = f"{json.dumps(tools)}$" if tools else ""
        for each in messages:
            calls = "".join(f"<tool_call>{json.dumps(call['function'])}</tool_call>" for call in each.get("tool_calls") or ())
            text += f"@{each['role']}:{each['content'] or ''}{calls}$\\n"
        return text + "@assistant:" * add_generation_prompt


class Model:
    """Asks the tool for each sum, and answers with its result; or with another number."""

    def __init__(self):
        self.serial = 0

    async def complete(self, token_ids, *, conversation="", **sampling):
        text = Tokenizer().decode(token_ids)
        said = text.rsplit("@tool:", 1)
        if len(said) == 1:
            a, b = text.rsplit("@user:", 1)[1].split("@")[0].strip().split("+")
            answer = f'<tool_call>{{"name": "add",  "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'
        else:
            self.serial += 1
            answer = said[1].split("@")[0].strip() if self.serial % 2 else "0"
        tokens = (*Tokenizer().encode(answer), 1)
        return Completion(tokens, (-0.5,) * len(tokens), (7,) * len(tokens), "stop")


class OpenAI:
    """The client of OpenAI, as far as verifiers asks it, over a recorder."""

    def __init__(self, client):
        self.chat, self.completions, self._client = self, self, client

    async def create(self, *, model, messages, tools=(), extra_headers=None, **sampling):
        reply = await self._client.chat(messages, tools=tools, **sampling)
        choice = {"index": 0, "finish_reason": reply.finish_reason, "message": reply.message}
        return ChatCompletion.model_validate(
            {"id": "0", "created": 0, "model": model, "object": "chat.completion", "choices": [choice]}
        )


rows = [{"question": f"{n}+{n}", "answer": str(2 * n)} for n in range(1, 4)]
environment = vf.ToolEnv(tools=[add], dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]))


async def agent(data, client):
    model = OpenAIChatCompletionsClient(OpenAI(client))
    state = await environment.run_rollout(data, model, "policy", {"max_completion_tokens": 99})
    if state["error"]:
        raise RuntimeError(state["error"])
    return state["reward"]


async def main():
    pool = Pool(Model(), agent, group_size=2, tokenizer=Tokenizer())
    prompts = ({**row, "id": str(row["example_id"])} for row in environment.get_dataset())
    async for group in pool.run(prompts):
        for each in group.trajectories:
            parts = "".join(chr(token) if trained else "\\x02" for token, trained in zip(each.token_ids, each.trained))
            made = [part.replace("\\x01", "$") for part in parts.split("\\x02") if part]
            versions = sorted(set(each.versions))
            print(json.dumps({"question": group.data["prompt"][-1]["content"], "made": made, "reward": each.reward, "versions": versions}), flush=True)


asyncio.run(main())
'''


def test_episodes_of_an_environment_with_tools_are_recorded_by_their_tokens(tmp_path: Path) -> None:
    script = tmp_path / "rollouts.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [python_with("verifiers", PACKAGE), script], env=env, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 6, done.stdout + done.stderr
    for each in found:
        a, b = each["question"].split("+")
        call, answer = each["made"]
        # As it was made, with its blanks, and not as a template would write it.
        assert call == f'<tool_call>{{"name": "add",  "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>$'
        assert (answer == f"{int(a) + int(b)}$") is (each["reward"] == 1.0)
        assert each["versions"] == [-1, 7]
    assert {each["reward"] for each in found} == {0.0, 1.0}

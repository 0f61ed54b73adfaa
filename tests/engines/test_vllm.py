"""Weights of an actor in a real vLLM: the tokens that follow are those of transformers with the same weights."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from textwrap import dedent

import pytest
from transformers import LlamaForCausalLM

from tests.engines.concurrent_requests import COUNT, ConcurrentRequests, tokens_match_versions
from tests.engines.environment import binaries
from tests.engines.llama import greedy, llama, prompts
from tests.engines.server import START_TIMEOUT, Engine, Server
from tests.integration.harness import Unirun
from tests.testbed.fixtures import available
from tests.testbed.hosts import Hosts
from unirun.errors import ServerError
from unirun.weights.integrations import vllm
from unirun.weights.integrations.vllm_guard import is_open

ROUTES = """
    import json
    import os

    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    for mode in "01":
        os.environ["VLLM_SERVER_DEV_MODE"] = mode
        app = build_app(args, ("generate", "embed", "transcription", "realtime"))
        print(json.dumps([*app.openapi()["paths"]]))
"""

ASKING = """
    import sys
    import urllib.error
    import urllib.request

    for request in sys.argv[2:]:
        method, path = request.split()
        try:
            with urllib.request.urlopen(urllib.request.Request(sys.argv[1] + path, method=method)) as answer:
                print(answer.status)
        except urllib.error.HTTPError as error:
            print(error.code, error.read().decode())
"""

PUBLISHING = """
    import sys
    import torch
    import unirun
    from safetensors.torch import load_file
    from unirun.weights.integrations import vllm

    url, *folders = sys.argv[1:]
    ctx = unirun.init()
    channel = unirun.WeightsChannel("policy", publisher="actor", receivers=["rollout"])
    weights = load_file(f"{folders[0]}/model.safetensors")
    engine = vllm.TrainerEngine(vllm.VLLMClient(url), vllm.Source(weights)) if ctx.role == "rollout" else None
    for version, folder in enumerate(folders, 1):
        if engine is None:
            channel.publish(load_file(f"{folder}/model.safetensors"), version)
        else:
            channel.receive(into=weights, min_version=version, assign=True)
            with vllm.VLLMClient(url).paused("keep"):
                engine.send_weights(str(version))
        torch.distributed.barrier(group=ctx.group("actor", "rollout"))
"""


@pytest.fixture(scope="module")
def engine(serve: Callable[..., Server]) -> Server:
    """One engine, which other hosts reach; blocks of its cache are shorter than prompts, so that it has prefixes of
    them."""
    return serve("--block-size", "32", "--host", "0.0.0.0").wait()


@pytest.fixture(scope="module")
def versions() -> dict[str, LlamaForCausalLM]:
    """The models that are published, by the label of their version."""
    return {"default": llama(0), **{str(seed): llama(seed) for seed in (1, 2, 3)}}


def sending(
    engine: Server,
    model: LlamaForCausalLM,
    version: str,
    pause: Callable[[vllm.VLLMClient], AbstractContextManager[None]],
) -> Callable[[], None]:
    """Brings a version into the engine."""

    def send() -> None:
        client = vllm.VLLMClient(engine.url)
        sender = vllm.TrainerEngine(client, vllm.Source(model))
        with pause(client):
            sender.send_weights(version)
        sender.shutdown()

    return send


def test_versions_of_an_actor_arrive_and_are_what_transformers_has(
    engine: Server,
    versions: Mapping[str, LlamaForCausalLM],
    models: Callable[[int], Path],
    unirun: Unirun,
    script: Callable[[str], Path],
) -> None:
    prompt = prompts(1)[0]
    before = engine.generate(prompt, 20)
    assert before["token_ids"] == greedy(versions["default"], prompt, 20)
    job = unirun("--roles", "actor=1,rollout=1", script(PUBLISHING), engine.url, models(1), models(2))
    assert job.code == 0, job.err
    after = engine.generate(prompt, 20)
    assert after["weight_versions"] == [{"version": "2", "start": 0, "end": 20}]
    assert after["token_ids"] == greedy(versions["2"], prompt, 20)
    assert before["token_ids"] != after["token_ids"]


def test_another_host_generates_and_calls_no_route_of_developers(engine: Server) -> None:
    ways = (
        "GET /health",
        "GET /metrics",
        "GET /v1/models",
        "GET /is_paused",
        "POST /pause",
        "POST /collective_rpc",
    )
    with available(), Hosts(1) as hosts:
        url = f"http://{hosts.gateway}:{engine.port}"
        asked = [sys.executable, "-c", dedent(ASKING), url, *ways]
        answers = hosts[0].run(asked).stdout.splitlines()
        assert answers[:3] == ["200", "200", "200"]
        for answer, path in zip(answers[3:], ("/is_paused", "/pause", "/collective_rpc"), strict=True):
            assert answer.startswith("403 ")
            assert f"{path} is closed to other hosts" in answer
            assert f"the request came from {hosts[0].address}" in answer
        assert Engine(url).ask("/is_paused") == {"is_paused": False}, "this host may, at any of its addresses"


def test_each_route_that_developers_have_more_is_closed_to_other_hosts_and_no_other() -> None:
    command = [str(binaries() / "python"), "-c", dedent(ROUTES)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=START_TIMEOUT).stdout
    usual, all_routes = (set(json.loads(line)) for line in printed.splitlines()[-2:])
    assert {"/pause", "/update_weights", "/collective_rpc", "/sleep"} <= all_routes - usual
    assert {path for path in all_routes if not is_open(path)} == all_routes - usual


def test_requests_that_are_kept_go_on_with_the_new_weights_as_if_they_began_there(
    engine: Server, versions: Mapping[str, LlamaForCausalLM]
) -> None:
    requests = ConcurrentRequests(engine)
    answers = requests.answers_during(
        sending(engine, versions["3"], "3", lambda client: client.paused("keep"))
    )
    assert all(len(answer["token_ids"]) == COUNT for answer in answers)
    assert any(len(answer["weight_versions"]) == 2 for answer in answers)
    assert all(tokens_match_versions(a, p, versions) for a, p in zip(answers, requests.prompts, strict=True))
    fresh = [engine.generate(prompt, 10) for prompt in requests.prompts[:4]]
    assert [a["token_ids"] for a in fresh] == [greedy(versions["3"], p, 10) for p in requests.prompts[:4]]


def test_without_clearing_the_cache_tokens_are_of_neither_version(
    engine: Server, versions: Mapping[str, LlamaForCausalLM]
) -> None:
    """vLLM's documentation says that ``clear_cache`` has no effect with ``keep``. It has."""
    requests = ConcurrentRequests(engine)
    mixed = sending(engine, versions["1"], "1", lambda client: client.paused("keep", clear_cache=False))
    answers = requests.answers_during(mixed)
    two = [(a, p) for a, p in zip(answers, requests.prompts, strict=True) if len(a["weight_versions"]) == 2]
    assert two
    assert not all(tokens_match_versions(a, p, versions) for a, p in two)
    # Also of prompts that come later: their first block is in the cache.
    fresh = [engine.generate(prompt, 10) for prompt in requests.prompts[:8]]
    assert [a["token_ids"] for a in fresh] != [greedy(versions["1"], p, 10) for p in requests.prompts[:8]]
    sending(engine, versions["1"], "1", lambda client: client.paused("keep"))()
    fresh = [engine.generate(prompt, 10) for prompt in requests.prompts[:8]]
    assert [a["token_ids"] for a in fresh] == [greedy(versions["1"], p, 10) for p in requests.prompts[:8]]


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_the_other_modes_end_requests_with_the_old_weights(
    mode: str, engine: Server, versions: Mapping[str, LlamaForCausalLM]
) -> None:
    requests = ConcurrentRequests(engine)
    answers = requests.answers_during(sending(engine, versions["2"], "2", lambda client: client.paused(mode)))
    began = [(a, p) for a, p in zip(answers, requests.prompts, strict=True) if a["token_ids"]]
    assert all(len(answer["weight_versions"]) == 1 for answer, _ in began)
    assert all(tokens_match_versions(answer, prompt, versions) for answer, prompt in began)
    assert ("abort" in {a["finish_reason"] for a in answers}) == (mode == "abort")


def test_numbers_of_another_dtype_are_cast(engine: Server, versions: Mapping[str, LlamaForCausalLM]) -> None:
    weights = {name: value.bfloat16() for name, value in versions["3"].state_dict().items()}
    client = vllm.VLLMClient(engine.url)
    sender = vllm.TrainerEngine(client, vllm.Source(weights))
    with client.paused("keep"):
        sender.send_weights("cast")
    sender.shutdown()
    cast = llama(3)
    cast.load_state_dict({name: value.float() for name, value in weights.items()})
    prompt = prompts(1)[0]
    assert engine.generate(prompt, 20)["token_ids"] == greedy(cast, prompt, 20)


def test_a_tensor_that_the_model_does_not_take_is_named_and_the_engine_stays_paused(
    engine: Server, versions: Mapping[str, LlamaForCausalLM]
) -> None:
    """The last one: this engine has to be started again."""
    named = dict(versions["1"].state_dict())
    named["model.other.weight"] = named.pop("model.norm.weight")
    client = vllm.VLLMClient(engine.url)
    with pytest.raises(ServerError, match="model.other.weight: ") as caught, client.paused("keep"):
        vllm.TrainerEngine(client, vllm.Source(named)).send_weights("bad")
    assert caught.value.status == 500
    assert "start it again" in str(caught.value)
    assert engine.ask("/is_paused") == {"is_paused": True}

"""Weights into servers of vLLM and SGLang: bit for bit, or an error that says what is wrong, and in time."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch

from tests.unit.weights.integrations import fake_servers
from tests.unit.weights.test_disk import DTYPES
from tests.unit.weights.test_moving import noise, same
from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.errors import ServerError, ServerTimeout, UsageError, WeightsError
from unirun.weights.integrations import sglang, vllm
from unirun.weights.integrations.sending import SERVER, Param, file_for, read
from unirun.weights.publishing import Blocks

KINDS = pytest.mark.parametrize("kind", ["vllm", "sglang"])


class ServersHarness:
    """Servers of a kind, and what sends to them; all end with the test."""

    def __init__(self) -> None:
        self.opened: list[Callable[[], None]] = []

    def server(self, kind: str, like: dict[str, torch.Tensor], **options: Any) -> Any:
        made = (
            fake_servers.FakeVllm(like, **options)
            if kind == "vllm"
            else fake_servers.FakeSglang(like, **options)
        )
        self.opened.append(made.close)
        return made

    def sender(
        self, kind: str, url: str, weights: Any, timeout: float = WAIT_TIMEOUT
    ) -> tuple[Any, AbstractContextManager[None]]:
        """The iterator that sends `weights`, and the pause for one round."""
        if kind == "vllm":
            client = vllm.VLLMClient(url, timeout=timeout)
            sender: Any = vllm.TrainerEngine(client, vllm.Source(weights))
            pause: AbstractContextManager[None] = nullcontext()
        else:
            other = sglang.SGLangClient(url, timeout=timeout)
            sender = sglang.TrainerEngine(other, sglang.Source(weights))
            pause = other.paused()
        self.opened.append(partial(self._shut_down, sender))
        return sender, pause

    @staticmethod
    def _shut_down(sender: Any) -> None:
        assert len(sender._blocks._blocks) <= 1, "each round has the memory of the one before"
        sender.shutdown()


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[ServersHarness]:
    for name, module in fake_servers.vllm_modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "unirun.weights.integrations.vllm_worker", raising=False)
    made = ServersHarness()
    yield made
    while made.opened:
        made.opened.pop()()
    watches = [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
    eventually(lambda: not any(each.is_alive() for each in watches), "the deadlines of requests have ended")


def tensors() -> dict[str, torch.Tensor]:
    """One of each dtype, of odd sizes first, and shapes that are easily forgotten."""
    found = {
        f"layers.{n}.{name}": noise(3, n + 1, dtype=dtype) for n, (name, dtype) in enumerate(DTYPES.items())
    }
    return found | {"even": noise(4, 3), "scalar": noise(dtype=torch.bfloat16), "empty": torch.empty(0, 5)}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(
        same(one[n], other[n]) and one[n].dtype == other[n].dtype and one[n].shape == other[n].shape
        for n in one
    )


@KINDS
def test_a_round_is_bit_exact_for_each_dtype_and_so_is_the_next_one(
    kind: str, servers: ServersHarness
) -> None:
    weights = tensors()
    server = servers.server(kind, weights)
    for version in ("1", "2"):
        sender, pause = servers.sender(kind, server.url, weights)
        with pause:
            for _ in range(2):
                sender.send_weights(version)
        assert equal(server.weights, weights)
        assert server.version == version
        # Without a name, the server keeps the one that it has.
        sender, pause = servers.sender(kind, server.url, weights)
        with pause:
            sender.send_weights()
        assert server.version == version
        for name, value in tensors().items():
            weights[name].copy_(value)


def test_each_worker_of_a_model_takes_its_part(servers: ServersHarness) -> None:
    weights = {"a": noise(4, 3), "b": noise(3, dtype=torch.bfloat16), "c": noise(2, 5)}
    server = servers.server("vllm", weights, workers=2)
    sender, _ = servers.sender("vllm", server.url, weights)
    sender.send_weights()
    assert equal(server.weights, weights)


def test_vllm_gets_its_four_phases_in_order_while_it_is_paused_and_has_forgotten_old_keys(
    servers: ServersHarness,
) -> None:
    weights = tensors()
    server = servers.server("vllm", weights)
    client = vllm.VLLMClient(server.url, timeout=WAIT_TIMEOUT)
    sender = vllm.TrainerEngine(client, vllm.Source(weights))
    for _ in range(2):
        with client.paused("keep"):
            sender.send_weights()
    sender.shutdown()
    phases = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
    assert server.seen == ["/pause", "/init_weight_transfer_engine", *phases, "/resume"] * 2
    assert server.paused == ""
    assert server.transfer.cleared


def test_a_server_that_was_started_again_behind_the_same_url_gets_the_next_round(
    servers: ServersHarness,
) -> None:
    weights = {"a": noise(3)}
    server = servers.server("vllm", weights)
    client = vllm.VLLMClient(server.url, timeout=WAIT_TIMEOUT)
    sender = vllm.TrainerEngine(client, vllm.Source(weights))
    for _ in range(2):
        sender.send_weights()
        assert equal(server.weights, weights)
        server.start_again()
    sender.shutdown()


def test_sglang_is_paused_for_an_update(servers: ServersHarness) -> None:
    server = servers.server("sglang", tensors())
    sender, pause = servers.sender("sglang", server.url, tensors())
    with pause:
        sender.send_weights()
    assert server.seen == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]


def test_other_tensors_of_the_next_round_are_sent_as_they_are(servers: ServersHarness) -> None:
    weights = {"a": noise(3)}
    server = servers.server("vllm", {"a": noise(3), "b": noise(2)})
    sender, _ = servers.sender("vllm", server.url, weights)
    with pytest.raises(ServerError, match="b: no tensor is for it"):
        sender.send_weights()
    weights["b"] = noise(2)
    sender.send_weights()
    assert equal(server.weights, weights)


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("update_weights", "start_weight_update must be called before update_weights"),
        ("finish_weight_update", "finish_weight_update called without a matching start_weight_update"),
    ],
)
def test_a_phase_in_the_wrong_order_is_refused_with_the_words_of_the_server(
    phase: str, words: str, servers: ServersHarness
) -> None:
    server = servers.server("vllm", tensors())
    client = vllm.VLLMClient(server.url, timeout=WAIT_TIMEOUT)
    args: list[dict[str, object]] = [{}] if phase == "update_weights" else []
    with pytest.raises(ServerError, match=rf"refused \(500\): Call to .*{words}") as caught:
        getattr(client, phase)(*args)
    assert (caught.value.server, caught.value.status) == (server.url, 500)


def test_fields_that_the_server_does_not_know_are_refused(servers: ServersHarness) -> None:
    server = servers.server("vllm", tensors())
    client = vllm.VLLMClient(server.url, timeout=WAIT_TIMEOUT)
    with pytest.raises(
        ServerError, match="Invalid init_info for WorkerEngine.*unexpected keyword argument 'port'"
    ):
        client.init_weight_transfer_engine({"path": "x", "token": "y", "port": 1})


def test_all_tensors_that_a_model_in_sglang_does_not_take_are_in_one_error(servers: ServersHarness) -> None:
    server = servers.server("sglang", {"a": noise(3), "b": noise(3), "c": noise(3), "d": noise(3)})
    weights = {"a": noise(3), "model.b": noise(3), "c": noise(4), "d": noise(3, dtype=torch.bfloat16)}
    sender, pause = servers.sender("sglang", server.url, weights)
    with pytest.raises(ServerError) as caught, pause:
        sender.send_weights()
    words = str(caught.value)
    assert all(
        each in words for each in ("model.b: ", "c: ", "expected [3], got [4]", "d: ", "got torch.bfloat16")
    )
    assert "a: " not in words.replace("model.a: ", "")
    assert caught.value.status == 400
    # Half new, perhaps: it does not generate.
    assert server.paused


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"a": noise(3), "model.b": noise(3)}, "model.b: KeyError"),
        (
            {"a": noise(3), "b": noise(4), "model.b": noise(3)},
            r"b: AssertionError: expected \[3\], got \[4\]",
        ),
    ],
)
def test_the_first_tensor_that_a_model_in_vllm_does_not_take_is_in_the_error(
    weights: dict[str, torch.Tensor], words: str, servers: ServersHarness
) -> None:
    """Others cannot be tried after it: vLLM's layers are in no state for that."""
    server = servers.server("vllm", {"a": noise(3), "b": noise(3)})
    client = vllm.VLLMClient(server.url, timeout=WAIT_TIMEOUT)
    with (
        pytest.raises(ServerError, match=f"(?s)does not take this tensor.*{words}") as caught,
        client.paused("keep"),
    ):
        vllm.TrainerEngine(client, vllm.Source(weights)).send_weights()
    assert caught.value.status == 500
    assert server.paused == "keep"


def test_what_a_model_misses_is_told_with_all_names(servers: ServersHarness) -> None:
    server = servers.server("vllm", {"a": noise(3), "b": noise(3), "c": noise(3)})
    sender, _ = servers.sender("vllm", server.url, {"b": noise(3)})
    with pytest.raises(
        ServerError, match="(?s)did not get these parameters.*a: no tensor is for it.*c: no tensor"
    ):
        sender.send_weights()


ANSWERS = {
    '{"detail": "no"}': "no",
    '{"error": {"message": "no"}}': "no",
    '{"error": "no"}': "no",
    '{"message": "no", "success": false}': "no",
    "{}": "{}",
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_the_words_of_a_refusal_are_found_wherever_a_server_puts_them(
    answer: str, servers: ServersHarness
) -> None:
    server = servers.server("vllm", tensors(), before=lambda path: (503, json.loads(answer)))
    with pytest.raises(ServerError, match=rf"/start_weight_update refused \(503\): {ANSWERS[answer]};"):
        vllm.VLLMClient(server.url, timeout=WAIT_TIMEOUT).start_weight_update()


def test_a_success_that_is_none_is_an_error(servers: ServersHarness) -> None:
    server = servers.server(
        "sglang", tensors(), before=lambda path: (200, {"success": False, "message": "busy"})
    )
    with pytest.raises(ServerError, match="busy"):
        sglang.SGLangClient(server.url, timeout=WAIT_TIMEOUT).update_weights_from_disk("/nowhere")


@KINDS
def test_a_server_that_breaks_off_is_told_at_once(kind: str, servers: ServersHarness) -> None:
    def broken(path: str) -> None:
        if path.startswith("/update_weights"):
            (block,) = sender._blocks._blocks
            read_late.update(read(block.path, block.token))
            raise ConnectionAbortedError

    weights, read_late = tensors(), dict[str, torch.Tensor]()
    before = {name: value.clone() for name, value in weights.items()}
    server = servers.server(kind, weights, before=broken)
    sender, pause = servers.sender(kind, server.url, weights)
    began = time.monotonic()
    with pytest.raises(ServerError, match="did not answer: .*does it still run there") as caught, pause:
        sender.send_weights()
    assert time.monotonic() - began < WAIT_TIMEOUT
    assert caught.value.status == 0
    # With the next one it goes on.
    server.before = lambda path: None
    if kind == "vllm":
        server.transfer.updating = False
    _, pause = servers.sender(kind, server.url, weights)
    for name, value in tensors().items():
        weights[name].copy_(value)
    with pause:
        sender.send_weights()
    assert equal(server.weights, weights)
    # A server that reads what it was told of before finds that, and nothing of the next round.
    assert equal({name: read_late[name] for name in before}, before)


def test_a_server_that_is_not_there_is_told_at_once() -> None:
    with pytest.raises(
        ServerError, match="http://127.0.0.1:1/start_weight_update did not answer: Connection refused"
    ):
        vllm.VLLMClient("http://127.0.0.1:1", timeout=WAIT_TIMEOUT).start_weight_update()


def test_a_server_that_says_nothing_is_waited_for_until_the_deadline(servers: ServersHarness) -> None:
    ends = threading.Event()
    server = servers.server("vllm", tensors(), before=lambda path: ends.wait(WAIT_TIMEOUT) and None)
    try:
        with pytest.raises(
            ServerTimeout, match=r"/start_weight_update did not answer within 0.1 s"
        ) as caught:
            vllm.VLLMClient(server.url, timeout=0.1).start_weight_update()
        assert isinstance(caught.value, TimeoutError)
        assert "start it again" in caught.value.remedy
    finally:
        ends.set()


def test_a_server_whose_answer_trickles_is_waited_for_until_the_deadline() -> None:
    """Each byte comes soon after the one before."""
    gone = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answers() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{")
                for _ in range(200):
                    connection.sendall(b" ")
                    gone.wait(0.02)
                connection.sendall(b"}")

        thread = threading.Thread(target=answers)
        thread.start()
        client = vllm.VLLMClient(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=0.2)
        try:
            with pytest.raises(ServerTimeout):
                client.post("/pause")
        finally:
            gone.set()
            thread.join(WAIT_TIMEOUT)


@pytest.mark.parametrize("stalls", [False, True])
@pytest.mark.parametrize("head", ["Content-Length: 100", "Connection: close"])
def test_an_answer_that_was_cut_is_none(head: str, stalls: bool) -> None:
    """The server ends in the middle of it, or goes no further. Without a length, its end is that of the answer."""
    ends = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answers() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(f"HTTP/1.1 200 OK\r\n{head}\r\n\r\n{{".encode())
                assert not stalls or ends.wait(WAIT_TIMEOUT)
                connection.shutdown(socket.SHUT_WR)
                # A connection that is closed with unread bytes is reset: the rest of the request may come now.
                while connection.recv(1 << 16):
                    pass

        thread = threading.Thread(target=answers)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        client = vllm.VLLMClient(url, timeout=0.2 if stalls else WAIT_TIMEOUT)
        try:
            if stalls:
                with pytest.raises(ServerTimeout):
                    client.post("/pause")
            elif "Length" in head:
                with pytest.raises(ServerError, match="did not answer") as caught:
                    client.post("/pause")
                assert not isinstance(caught.value, ServerTimeout)
            else:
                assert client.post("/pause") == {}
        finally:
            ends.set()
            thread.join(WAIT_TIMEOUT)


def test_the_key_of_a_server_is_sent(servers: ServersHarness) -> None:
    server = servers.server("vllm", tensors())
    vllm.VLLMClient(server.url, timeout=WAIT_TIMEOUT, api_key="secret").start_weight_update()
    assert server.headers["Authorization"] == "Bearer secret"
    assert server.headers["Content-Type"] == "application/json"
    vllm.VLLMClient(server.url, timeout=WAIT_TIMEOUT).finish_weight_update()
    assert "Authorization" not in server.headers


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "https://host", "http://", "http://host/v1", "http://host:port", "http://[::1"]
)
def test_a_url_that_is_no_server_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="write http://host:port"):
        vllm.VLLMClient(url)


def test_a_source_that_declares_other_tensors_than_it_yields_is_told_with_all_of_them(
    servers: ServersHarness,
) -> None:
    class Wrong:
        def metadata(self) -> list[Param]:
            return [
                Param("a", torch.float32, (3,)),
                Param("b", torch.float32, (3,)),
                Param("c", torch.float32, (3,)),
            ]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from [("a", torch.zeros(3)), ("b", torch.zeros(2))]

    server = servers.server("vllm", tensors())
    sender = vllm.TrainerEngine(vllm.VLLMClient(server.url, timeout=WAIT_TIMEOUT), Wrong())
    with pytest.raises(WeightsError) as caught:
        sender.send_weights()
    assert [str(fault) for fault in caught.value.faults] == [
        "b: float32 [3]: then came b: float32 [2]",
        "c: float32 [3]: then came nothing",
    ]
    assert server.seen == []


def test_dtypes_that_no_checkpoint_has_are_told_before_anything_is_sent(servers: ServersHarness) -> None:
    weights = {
        "a": torch.zeros(2, dtype=torch.complex32),
        "b": torch.zeros(1),
        "c": torch.zeros(2, dtype=torch.complex128),
    }
    sender, _ = servers.sender("vllm", "http://127.0.0.1:1", weights)
    with pytest.raises(
        WeightsError, match=r"(?s)a: safetensors has no torch.complex32; cast it.*c: .*complex128"
    ):
        sender.send_weights()


@pytest.mark.leaves
def test_parts_of_tensors_are_refused_with_all_names(servers: ServersHarness) -> None:
    from torch.distributed import (  # type: ignore[attr-defined]
        HashStore,
        destroy_process_group,
        init_process_group,
    )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    try:
        mesh = init_device_mesh("cpu", (1,))
        parts = {name: distribute_tensor(torch.zeros(4), mesh, [Shard(0)]) for name in ("a", "c")}
        with pytest.raises(WeightsError, match="(?s)a: a DTensor is a part.*c: a DTensor is a part"):
            vllm.Source(parts | {"b": torch.zeros(1)})
    finally:
        destroy_process_group()


def test_memory_of_another_process_than_the_trainer_is_not_taken_for_its_weights() -> None:
    param = Param("a", torch.float32, (3,))
    blocks = Blocks()
    (_, one), (_, other) = (file_for([param], blocks, SERVER) for _ in range(2))
    try:
        assert list(read(one.path, one.token)) == ["a"]
        for path in (other.path, "/proc/self/status", "/proc/self/fd/99999", "/dev/null"):
            with pytest.raises(UsageError, match="run the server on the host of the worker that sends"):
                read(path, one.token)
    finally:
        blocks.close()


def test_a_module_can_be_sent_and_its_parameters_stay_leaves(servers: ServersHarness) -> None:
    model = torch.nn.Linear(3, 2)
    server = servers.server("vllm", {"weight": model.weight.detach(), "bias": model.bias.detach()})
    sender, _ = servers.sender("vllm", server.url, model)
    sender.send_weights()
    assert equal(server.weights, dict(model.state_dict()))
    assert all(parameter.is_leaf and parameter.requires_grad for parameter in model.parameters())


@pytest.mark.starts_processes
@KINDS
def test_a_server_that_is_killed_in_the_middle_is_told_long_before_the_deadline(
    kind: str, servers: ServersHarness
) -> None:
    command = [sys.executable, "-m", fake_servers.__name__, kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            weights = {"a": torch.ones(4)}
            sender, pause = servers.sender(kind, url, weights, timeout=2 * WAIT_TIMEOUT)
            with pause:
                sender.send_weights()
            _, pause = servers.sender(kind, url, weights, timeout=2 * WAIT_TIMEOUT)
            began = time.monotonic()
            with pytest.raises(ServerError, match="did not answer") as caught, pause:
                sender.send_weights()
            assert time.monotonic() - began < WAIT_TIMEOUT
            assert not isinstance(caught.value, ServerTimeout)
        finally:
            process.kill()

"""A stand-in for a script with TRL's ``GRPOTrainer``: its options, and the requests that its ``VLLMClient`` makes.

Put your own script in its place. This one needs torch alone: its policy has four weights, and rewards are for token 3.
As in TRL, rank 0 talks to the server for all ranks.
"""

from __future__ import annotations

import argparse
import json
import socket
import threading
import urllib.request
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

GENERATIONS = 8
"""Completions of each prompt; each rank has one prompt."""


class Client:
    """The requests of ``trl.generation.vllm_client.VLLMClient`` (TRL 1.16), in its order."""

    def __init__(self, base_url: str, group_port: int) -> None:
        self.base_url, self.group_port = base_url, group_port
        self._request("/health")
        self.model = self._request("/v1/models")["data"][0]["id"]

    def init_communicator(self) -> None:
        """Let the server join the group for weights: it connects to a port of this process."""
        world_size = self._request("/get_world_size")["world_size"] + 1
        server = urlsplit(self.base_url)
        assert server.hostname is not None
        with socket.create_connection((server.hostname, server.port or 80)) as way:
            address = way.getsockname()[0]
        info = {
            "master_address": address,
            "master_port": self.group_port,
            "rank_offset": 1,
            "world_size": world_size,
            "packed": True,
        }
        with socket.create_server((address, self.group_port)) as listener:
            post = threading.Thread(
                target=self._request, args=("/init_weight_transfer_engine", {"init_info": info})
            )
            post.start()
            self.group, _ = listener.accept()
            post.join()

    def update(self, weights: list[float]) -> None:
        """Send new weights."""
        names = {"names": ["weight"], "dtype_names": ["float32"], "shapes": [[len(weights)]]}
        self._request("/start_weight_update", {})
        self.group.sendall(f"{json.dumps(weights)}\n".encode())
        self._request("/update_weights", {"update_info": names})
        self._request("/finish_weight_update", {})
        self._request("/reset_prefix_cache", {})

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        """Completions of each prompt, prompt by prompt."""
        body = {
            "model": self.model,
            "prompt": prompts,
            "n": GENERATIONS,
            "return_token_ids": True,
            "logprobs": 0,
        }
        return [choice["token_ids"] for choice in self._request("/v1/completions", body)["choices"]]

    def _request(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(f"{self.base_url}{path}", data, timeout=600) as answer:
            return json.load(answer)


def completions_of(client: Client | None) -> torch.Tensor:
    """The completions of this rank's prompt, which rank 0 has asked for."""
    count = dist.get_world_size()
    asked = [client.generate([[rank] for rank in range(count)]) if client else None]
    dist.broadcast_object_list(asked)
    assert asked[0] is not None
    return torch.tensor(asked[0]).reshape(count, GENERATIONS, -1)[dist.get_rank()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name_or_path")
    parser.add_argument("--max_steps", type=int)
    parser.add_argument("--use_vllm")
    parser.add_argument("--vllm_mode")
    parser.add_argument("--vllm_server_base_url")
    parser.add_argument("--vllm_group_port", type=int)
    options = parser.parse_args()
    dist.init_process_group()
    client = Client(options.vllm_server_base_url, options.vllm_group_port) if dist.get_rank() == 0 else None
    if client:
        client.init_communicator()
    policy = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.zeros_(policy.weight)
    model = DistributedDataParallel(policy)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.3)
    for step in range(options.max_steps):
        tokens = completions_of(client)
        rewards = (tokens == 3).float().mean(dim=1)
        advantages = rewards - rewards.mean()
        chosen = torch.log_softmax(model(torch.eye(4)).squeeze(1), dim=0)[tokens].sum(dim=1)
        optimizer.zero_grad()
        (-(advantages * chosen).mean()).backward()
        optimizer.step()
        mean = rewards.mean()
        dist.all_reduce(mean)
        if client:
            client.update(policy.weight[0].tolist())
            print(f"step {step}: reward {mean.item() / dist.get_world_size():.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

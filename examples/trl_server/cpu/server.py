"""A stand-in for ``vllm serve``, with the routes that TRL's ``VLLMClient`` uses, and a model of four weights.

Tokens are 0 to 3, whatever the prompt is. Instead of NCCL, weights come as text over a connection to the trainer.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Model:
    """The weights, and the routes."""

    def __init__(self, name: str) -> None:
        self.name, self.weights = name, [0.0] * 4
        self.updating = False
        self.trainer = socket.socket()

    def answer(self, path: str, body: Any) -> Any:
        """The answer to a request. Raises `LookupError` for other routes."""
        if path == "/health":
            return {}
        if path == "/v1/models":
            return {"data": [{"id": self.name}]}
        if path == "/get_world_size":
            return {"world_size": 1}
        if path == "/v1/completions":
            return {"choices": [self._choice(prompt) for prompt in body["prompt"] for _ in range(body["n"])]}
        if path == "/init_weight_transfer_engine":
            info = body["init_info"]
            self.trainer = socket.create_connection((info["master_address"], info["master_port"]), timeout=60)
        elif path == "/start_weight_update":
            self.updating = True
        elif path == "/update_weights" and self.updating:
            self.weights = json.loads(self.trainer.makefile().readline())
        elif path == "/finish_weight_update":
            self.updating = False
        elif path != "/reset_prefix_cache":
            raise LookupError(path)
        return {"success": True}

    def _choice(self, prompt: list[int]) -> dict[str, Any]:
        chances = [math.exp(weight) for weight in self.weights]
        tokens = random.choices(range(4), chances, k=4)
        chosen = [math.log(chances[token] / sum(chances)) for token in tokens]
        names = [f"token_id:{token}" for token in tokens]
        logprobs = {"tokens": names, "token_logprobs": chosen, "top_logprobs": [None] * len(tokens)}
        return {"prompt_token_ids": prompt, "token_ids": tokens, "logprobs": logprobs}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    options, _ = parser.parse_known_args()
    model = Model(options.model)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            try:
                status, answer = 200, model.answer(self.path, json.loads(body) if body else None)
            except LookupError as error:
                status, answer = 404, {"error": f"no route {error}"}
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *words: object) -> None:
            """Requests are not logged."""

    server = ThreadingHTTPServer((options.host, options.port), Handler)
    print(f"{options.model} at {options.host}:{options.port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()

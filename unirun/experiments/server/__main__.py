"""``python -m unirun.experiments.server MODEL --port 8000``: generation with a network of transformers, over HTTP.

Its options are named as those of ``vllm serve``. The routes that stop it or change its weights are for processes of its
own host (`unirun.weights.integrations.vllm_guard`).
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from typing import Any

import torch

from unirun.errors import UnirunError, UsageError
from unirun.experiments.graph import ModelName, topology
from unirun.experiments.models.api import Place
from unirun.experiments.models.backends import causal_lm
from unirun.experiments.server.generator import Generator
from unirun.experiments.server.routes import Routes
from unirun.launcher.process import spare_descriptors
from unirun.weights.integrations.vllm_guard import SameHost
from unirun.wire.reporting import report

SWITCH_INTERVAL = 0.0005
"""Seconds for which the thread that draws tokens, or that of the routes, runs Python while the other waits."""

SHUTDOWN_TIMEOUT = 10
"""Seconds in which answers may be sent after SIGTERM."""


def options_of(argv: Sequence[str]) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(prog="python -m unirun.experiments.server", allow_abbrev=False)
    parser.add_argument("model", help="folder, or name, of a causal language model that transformers knows")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16, …; auto: that of the model")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="sequences at the same time")
    parser.add_argument("--max-model-len", type=int, help="tokens of a sequence; default: the network's")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: random")
    parser.add_argument("--seed", type=int, default=0, help="of random weights")
    return parser.parse_args(argv)


def routes_of(options: argparse.Namespace) -> tuple[Routes, Generator]:
    """The application, and what generates for it. Raises `UnirunError` when the model cannot be loaded."""
    from transformers import AutoConfig

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config: Any = AutoConfig.from_pretrained(options.model)
    dtype = str(getattr(config, "dtype", None) or "float32") if options.dtype == "auto" else options.dtype
    place = Place(ModelName("server"), topology(), 0, device, seed=options.seed)
    source = {"path": options.model} if options.load_format == "auto" else {"config": config.to_dict()}
    stage = causal_lm(place, dtype=dtype.removeprefix("torch."), **source)
    stage.to(device).requires_grad_(False).eval()
    tokenizer = _tokenizer(options.model)
    generator = Generator(place, stage, options.max_num_seqs, None if tokenizer is None else tokenizer.decode)
    routes = Routes(
        generator,
        model=options.model,
        vocabulary=config.vocab_size,
        longest=options.max_model_len or config.max_position_embeddings,
        stops=stage.stops,
        tokenizer=tokenizer,
    )
    return routes, generator


def _tokenizer(model: str) -> Any:
    """The tokenizer of a model; None if it has none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError):
        return None


def serve(options: argparse.Namespace) -> int:
    """Run until a signal, or until generation has failed. Returns the exit code."""
    try:
        import transformers  # noqa: F401 - `routes_of` needs it
        import uvicorn
    except ModuleNotFoundError as error:
        raise UsageError(
            f"the built-in server needs the package {error.name}", "pip install 'torch-unirun[server]'"
        ) from error

    routes, generator = routes_of(options)
    config = uvicorn.Config(
        SameHost(routes),
        host=options.host,
        port=options.port,
        lifespan="off",
        proxy_headers=False,
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT,
        backlog=4096,
    )

    class Server(uvicorn.Server):
        """Ends all requests when it is told to end itself, with what they have."""

        def handle_exit(self, sig: int, frame: Any) -> None:
            generator.stop()
            self.should_exit = True

    server = Server(config)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        generator.failed.add_done_callback(
            lambda _: loop.call_soon_threadsafe(setattr, server, "should_exit", True)
        )
        generator.start()
        await server.serve()

    sys.setswitchinterval(SWITCH_INTERVAL)
    # Each open request has a connection.
    spare_descriptors()
    asyncio.run(run())
    generator.stop()
    generator.join(SHUTDOWN_TIMEOUT)
    if generator.failed.done():
        report(f"unirun: generation has failed: {generator.failed.exception()!r}")
        return 1
    return 0


if __name__ == "__main__":
    # A signal that comes before the server has its own handlers ends the process as well as one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        sys.exit(serve(options_of(sys.argv[1:])))
    except UnirunError as error:
        sys.exit(f"unirun: {error}")

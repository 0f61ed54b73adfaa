"""Stand-ins for servers of vLLM and SGLang.

That of vLLM answers as vLLM 0.32.0 does; that of SGLang holds strictly to what its documentation says. Both are written to
the same pages as `unirun.weights.integrations`, which name them with their versions.
"""

from __future__ import annotations

import glob
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import torch
from safetensors import safe_open

from tests.testbed.engine import NotFound, Transfer, fields
from unirun.errors import UnirunError

Weights = Iterable[tuple[str, torch.Tensor]]
Answer = tuple[int, dict[str, Any]]


class Model:
    """Parameters of which this is the part of one of `shards` workers: rows of each tensor that divides by their number.

    `casts`: numbers of another dtype are cast.
    """

    def __init__(
        self, like: Mapping[str, torch.Tensor], shard: int = 0, shards: int = 1, *, casts: bool = False
    ) -> None:
        self._casts = casts
        self._whole = {name: (value.dtype, value.shape) for name, value in like.items()}
        self._shard, self._shards = shard, shards
        self.parameters = {name: torch.zeros_like(self._part(value)) for name, value in like.items()}
        self.reload: dict[str, torch.Tensor] | None = None

    def _part(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0 or tensor.shape[0] % self._shards:
            return tensor
        rows = tensor.shape[0] // self._shards
        return tensor.narrow(0, self._shard * rows, rows)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.parameters.items()

    def load_weights(self, weights: Weights) -> set[str]:
        """As vLLM's: the first name that it does not know ends it. With a reload, tensors are read when that is finished."""
        loaded = set()
        for name, tensor in weights:
            dtype, shape = self._whole[name]
            assert tensor.shape == shape, f"expected {list(shape)}, got {list(tensor.shape)}"
            assert self._casts or tensor.dtype == dtype, f"expected {dtype}, got {tensor.dtype}"
            if self.reload is None:
                self.parameters[name].copy_(self._part(tensor))
            else:
                self.reload[name] = tensor
            loaded.add(name)
        return loaded


def initialize_layerwise_reload(model: Model) -> None:
    """The same as vLLM's function, as far as an engine sees it: loaded tensors are kept until later."""
    model.reload = {}


def finalize_layerwise_reload(model: Model, model_config: object) -> None:
    """They are read now."""
    assert model.reload is not None
    kept, model.reload = model.reload, None
    model.load_weights(kept.items())


class InitInfo:
    """``WeightTransferInitInfo``"""


class UpdateInfo:
    """``WeightTransferUpdateInfo``"""


class Engine:
    """``WeightTransferEngine`` of base.md."""

    init_info_cls: type[Any]
    update_info_cls: type[Any]

    def __init__(self, config: object, vllm_config: Any, device: torch.device, model: Model) -> None:
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model
        self.model_config = vllm_config.model_config

    def parse_init_info(self, values: dict[str, Any]) -> Any:
        try:
            return self.init_info_cls(**values)
        except TypeError as error:
            raise ValueError(f"Invalid init_info for {type(self).__name__}: {error}") from error

    def update_weights(self, values: dict[str, Any]) -> None:
        try:
            info = self.update_info_cls(**values)
        except TypeError as error:
            raise ValueError(f"Invalid update_info for {type(self).__name__}: {error}") from error
        self.receive_weights(info)

    def receive_weights(self, info: Any) -> None:
        raise NotImplementedError

    def init_transfer_engine(self, info: Any) -> None:
        raise NotImplementedError

    def start_weight_update(self) -> None:
        raise NotImplementedError

    def finish_weight_update(self) -> None:
        raise NotImplementedError


class Factory:
    """``WeightTransferEngineFactory``"""

    def __init__(self) -> None:
        self.registered: dict[str, tuple[str, str]] = {}

    def register_engine(self, name: str, module: str, class_name: str) -> None:
        if name in self.registered:
            raise ValueError(f"Weight transfer engine '{name}' is already registered.")
        self.registered[name] = module, class_name


def vllm_modules() -> dict[str, ModuleType]:
    """The modules of vLLM that an engine imports, by name."""
    names = (
        *(
            "vllm",
            "vllm.distributed",
            "vllm.distributed.weight_transfer",
            "vllm.distributed.weight_transfer.base",
        ),
        *(
            "vllm.model_executor",
            "vllm.model_executor.model_loader",
            "vllm.model_executor.model_loader.reload",
        ),
    )
    made: dict[str, Any] = {name: ModuleType(name) for name in names}
    base = made["vllm.distributed.weight_transfer.base"]
    base.WeightTransferEngine, base.WeightTransferInitInfo, base.WeightTransferUpdateInfo = (
        Engine,
        InitInfo,
        UpdateInfo,
    )
    made["vllm.distributed.weight_transfer"].WeightTransferEngineFactory = Factory()
    reload = made["vllm.model_executor.model_loader.reload"]
    reload.initialize_layerwise_reload = initialize_layerwise_reload
    reload.finalize_layerwise_reload = finalize_layerwise_reload
    return made


class Server:
    """An HTTP server on a port of its own. `before` is called with the path of each request, and may do anything."""

    def __init__(self, before: Callable[[str], Answer | None] = lambda path: None) -> None:
        self.before, self.seen, self.headers = before, [], {}
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                parts = urlsplit(self.path)
                owner.seen.append(parts.path)
                owner.headers = dict(self.headers)
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                try:
                    status, answer = owner.before(parts.path) or owner.answer(
                        parts.path, parse_qs(parts.query), json.loads(raw)
                    )
                except ConnectionAbortedError:
                    self.close_connection = True
                    return
                body = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Tests look at `seen`."""

        class Quiet(ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None:
                """A client that waits no longer has closed its connection."""

        self._http = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()

    seen: list[str]
    headers: dict[str, str]

    def answer(self, path: str, query: dict[str, list[str]], body: Any) -> Answer:
        raise NotImplementedError

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


class FakeVllm(Server):
    """``vllm serve`` with ``VLLM_SERVER_DEV_MODE=1``: the router of weight transfers, and the workers behind it.

    Its answers and errors are those that vLLM 0.32.0 gives (``make engines`` has tests of it).
    """

    def __init__(self, like: Mapping[str, torch.Tensor], workers: int = 1, **options: Any) -> None:
        from unirun.weights.integrations import vllm

        # Each server is a process of its own.
        factory: Factory = sys.modules["vllm.distributed.weight_transfer"].WeightTransferEngineFactory
        factory.registered.clear()
        vllm.register.cache_clear()
        vllm.register()
        vllm.register()
        module, name = factory.registered["unirun"]
        self._engine = getattr(__import__(module, fromlist=[name]), name)
        self._like, self._workers = like, workers
        self.start_again()
        super().__init__(**options)

    def start_again(self) -> None:
        """Forget everything, as a server that has been started again at the same port."""
        config = SimpleNamespace(model_config=SimpleNamespace(quantization=None))
        self.models = [Model(self._like, shard, self._workers, casts=True) for shard in range(self._workers)]
        self.engines: list[Engine] = [
            self._engine(None, config, torch.device("cpu"), each) for each in self.models
        ]
        self.transfer = Transfer(self._do)

    @property
    def paused(self) -> str:
        return self.transfer.paused

    @property
    def version(self) -> str:
        return self.transfer.version

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The parameters of all workers, put together."""
        found = {}
        for name, first in self.models[0].parameters.items():
            whole = first.dim() == 0 or first.shape == self.models[0]._whole[name][1]
            found[name] = first if whole else torch.cat([model.parameters[name] for model in self.models])
        return found

    def answer(self, path: str, query: dict[str, list[str]], body: Any) -> Answer:
        try:
            return 200, self.transfer.answer(path, query, body)
        except NotFound:
            return 404, {"detail": "Not Found"}
        except LookupError as error:
            message = f"1 validation error:\n  {error.args[0]}"
            return 400, {"error": {"message": message, "type": "Bad Request", "code": 400}}
        except (AssertionError, RuntimeError, TypeError, ValueError, UnirunError) as error:
            message = (
                f"Call to collective_rpc method failed: Worker failed with error '{error}', "
                "please check the stack trace above for the root cause"
            )
            return 500, {"error": {"message": message, "type": "InternalServerError", "code": 500}}

    def _do(self, phase: str, values: dict[str, Any]) -> None:
        for engine in self.engines:
            if phase == "init":
                engine.init_transfer_engine(engine.parse_init_info(values))
            elif phase == "start":
                engine.start_weight_update()
            elif phase == "update":
                engine.update_weights(values)
            else:
                engine.finish_weight_update()


class FakeSglang(Server):
    """SGLang's routes for weights from a disk."""

    FIELDS: ClassVar[dict[str, type]] = {
        "load_format": str,
        "abort_all_requests": bool,
        "weight_version": str,
        "is_async": bool,
        "torch_empty_cache": bool,
        "keep_pause": bool,
        "recapture_cuda_graph": bool,
        "token_step": int,
        "flush_cache": bool,
    }

    def __init__(self, like: Mapping[str, torch.Tensor], **options: Any) -> None:
        self.model, self.paused, self.version = Model(like), False, "default"
        super().__init__(**options)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return self.model.parameters

    def answer(self, path: str, query: dict[str, list[str]], body: Any) -> Answer:
        if path == "/pause_generation":
            assert body == {"mode": "abort"}
            self.paused = True
        elif path == "/continue_generation":
            self.paused = False
        elif path != "/update_weights_from_disk":
            return 404, {"detail": "Not Found"}
        elif wrong := fields(body, {"model_path": str}, self.FIELDS):
            return 422, {"detail": wrong}
        elif not self.paused:
            return 400, {"success": False, "message": "requests are running", "num_paused_requests": 0}
        elif wrong := self._load(body["model_path"], body.get("load_format", "dummy")):
            return 400, {"success": False, "message": wrong, "num_paused_requests": 0}
        else:
            self.version = body.get("weight_version", self.version)
        return 200, {
            "success": True,
            "message": "Succeeded to update model weights.",
            "num_paused_requests": 0,
        }

    def _load(self, folder: str, load_format: str) -> str:
        """Load the checkpoint in `folder`. Returns its fault, or an empty text."""
        files = glob.glob(os.path.join(folder, "*.safetensors"))
        if load_format not in ("auto", "safetensors") or not files:
            return f"Failed to get weights iterator: {load_format} in {folder}."
        wrong = []
        for path in files:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118
                    try:
                        self.model.load_weights([(name, file.get_tensor(name))])
                    except (AssertionError, KeyError) as error:
                        wrong.append(f"{name}: {error}")
        return f"Failed to update weights: {', '.join(wrong)}." if wrong else ""


class KillDuringUpdate:
    """The end of this process in the middle of update number `number`."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, path: str) -> Answer | None:
        self.left -= path.startswith("/update_weights")
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return None


if __name__ == "__main__":
    sys.modules |= vllm_modules()
    kind = {"vllm": FakeVllm, "sglang": FakeSglang}[sys.argv[1]]
    print(kind({"a": torch.zeros(4)}, before=KillDuringUpdate(2)).url, flush=True)

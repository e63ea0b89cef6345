"""An engine that is a server, for what is told of servers without starting one."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from pydantic import BaseModel

from pdd_runtime.plugins import hookimpl
from pdd_runtime.plugins.engine import Capabilities, Engine, ModelSpec, Sampling, Token
from pdd_runtime.server.engine import Readings, ServerEngine
from pdd_runtime.server.http import HttpClient
from pdd_runtime.server.launch import Launch
from pdd_runtime.server.metrics import Metrics


class StockEngine(ServerEngine):
    name = "stock"

    @classmethod
    def promises(cls, model: ModelSpec, config: BaseModel) -> Capabilities:
        return Capabilities()

    def launch(self, model: Path, port: int, socket: str) -> Launch:
        server = Path(__file__).with_name("stock_server.py")
        argv = [self.config.interpreter, str(server), "--model", str(model), "--port", str(port)]
        argv += ["--connector", json.dumps({"socket": socket}), *self.config.args]
        return Launch(
            tuple(argv), {"STOCK_MODE": "fast", **self.config.env}, {"parts/flags.yaml": f"tp: {self.config.tp}\n"}
        )

    async def inspect(self, http: HttpClient) -> Capabilities:
        raise NotImplementedError

    def generate(
        self, http: HttpClient, id: str, tokens: Sequence[int], max_tokens: int, sampling: Sampling, salt: str
    ) -> AsyncGenerator[tuple[Token, ...], None]:
        raise NotImplementedError

    def readings(self, metrics: Metrics) -> Readings:
        raise NotImplementedError


@hookimpl
def pdd_register_engines() -> list[type[Engine]]:
    return [StockEngine]

"""A process that registers one member and waits to be killed: `discovery_suite` runs it.

Reads one line of JSON from standard input: the discovery's class (`module`, `file`, `cls`), and what it is made of
(`config`, `address`, `secret`). Says `registered` when it is.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from typing import Any

from pdd_runtime.plugins.discovery import Discovery
from pdd_runtime.testing.discovery_suite import GRAPH, member


def find(module: str, file: str, cls: str) -> type[Discovery]:
    """The class: by its module's name, or from the file, where that is a test module that only pytest can name."""
    try:
        found: Any = importlib.import_module(module)
    except ImportError:
        spec = importlib.util.spec_from_file_location(module, file)
        assert spec is not None
        assert spec.loader is not None
        found = importlib.util.module_from_spec(spec)
        sys.modules[module] = found
        spec.loader.exec_module(found)
    result: type[Discovery] = getattr(found, cls)
    return result


async def serve(order: dict[str, Any]) -> None:
    cls = find(order["module"], order["file"], order["cls"])
    discovery = cls(cls.Config.model_validate(order["config"]), order["address"], order["secret"], GRAPH)
    await discovery.register(member("relay"))
    print("registered", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.stdin.readline())))

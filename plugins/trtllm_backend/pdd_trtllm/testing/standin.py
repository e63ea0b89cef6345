"""Starting the stand-in: as an engine's server, or by itself for engines to attach to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import yaml

from pdd_runtime.plugins.engine import ModelSpec
from pdd_runtime.server.process import free_port
from pdd_runtime.testing.running_server import RunningServer
from pdd_trtllm.config import TrtllmConfig
from pdd_trtllm.launch import FILE, launch

SITE = Path(__file__).parent / "site"
"""Has a `tensorrt_llm` that is the stand-in."""


def environment(**more: str) -> dict[str, str]:
    """With which an interpreter that has this package and torch runs the stand-in for TensorRT-LLM."""
    return {"PYTHONPATH": str(SITE), **more}


@contextmanager
def running(config: TrtllmConfig, model: ModelSpec, directory: Path, socket: Path | None, **env: str) -> Iterator[str]:
    """A stand-in for the model in `model.source`, whose connector dials `socket`, or that has none; gives its url. The
    connector waits for a worker before the server listens, so that nothing is awaited here. `directory` is for its
    files and its log."""
    port = free_port()
    found = launch(config.model_copy(update={"env": environment(**env)}), model, Path(model.source), port, str(socket))
    if socket is None:
        file = yaml.safe_load(found.files[FILE])
        del file["kv_connector_config"]
        found = replace(found, files={FILE: yaml.safe_dump(file)})
    with RunningServer(found, directory):
        yield f"http://127.0.0.1:{port}"

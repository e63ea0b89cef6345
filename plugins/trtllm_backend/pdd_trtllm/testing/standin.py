"""Starting the stand-in: as an engine's server, or by itself for engines to attach to."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import yaml

from pdd_runtime.plugins.engine import ModelSpec
from pdd_runtime.server import guardian
from pdd_runtime.server.process import free_port
from pdd_trtllm.config import TrtllmConfig
from pdd_trtllm.launch import FILE, launch

SITE = Path(__file__).parent / "site"
"""Has a `tensorrt_llm` that is the stand-in."""
_PATIENCE = 120.0
"""Seconds until it listens: it imports torch."""


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
    found.write_files(directory)
    with (directory / "log").open("w") as log:
        # Ends it when this process does, whatever ends that.
        process = subprocess.Popen(
            (sys.executable, "-I", "-S", guardian.__file__, *found.argv),
            cwd=directory,
            env=found.environment(os.environ),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.communicate()


def listens(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def await_listening(url: str) -> None:
    """Raises `TimeoutError`."""
    deadline = time.monotonic() + _PATIENCE
    while not listens(url):
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing listens at {url}")
        time.sleep(0.1)

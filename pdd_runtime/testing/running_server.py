"""A server for tests that runs by itself, outside any worker: engines attach to it, or it is asked as it is."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Self

import httpx

from pdd_runtime.clock import now
from pdd_runtime.errors import EngineError
from pdd_runtime.plugins.engine import Engine
from pdd_runtime.server import guardian
from pdd_runtime.server.launch import Launch
from pdd_runtime.testing.engine_harness import StoreHost

_EVERY = 0.5
"""Seconds between two looks."""
_ANSWER = 30.0
"""Seconds for one answer."""
_TOLD = 4000
"""Characters of the log's end that an error quotes."""


class RunningServer:
    """Runs as long as a `with`, under a guardian: whatever ends this process ends it as well."""

    def __init__(self, launch: Launch, directory: Path) -> None:
        """`directory` is the server's own: it runs there, and writes its log there."""
        self.log = directory / "log"
        self._launch, self._directory = launch, directory

    def __enter__(self) -> Self:
        self._launch.write_files(self._directory)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", guardian.__file__, *self._launch.argv],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._directory,
                env=self._launch.environment(os.environ),
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def check(self) -> None:
        """Raises `EngineError`, with the end of its log, when it has ended."""
        code = self._process.poll()
        if code is not None:
            raise EngineError(f"the server ended: exit code {code}", where=str(self.log), why=self._last_words())

    def until_well(self, url: str, timeout: float) -> None:
        """Return when `url`, where it says so, answers 200. Raises `EngineError` when it ends, or after `timeout`
        seconds."""
        until = now() + timeout
        while not _is_well(url):
            self.check()
            if now() > until:
                why = self._last_words()
                raise EngineError(f"the server is not well after {timeout:g} s", where=str(self.log), why=why)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_EVERY)

    async def until_served(self, engine: Engine) -> None:
        """Return when `engine`, which attaches to it, has come and gone: a connector waits a minute for the first
        worker, and no longer. Raises `EngineError` when the server ends, or as `engine.start` does."""
        starting = asyncio.ensure_future(engine.start(StoreHost()))
        try:
            while not starting.done():
                await asyncio.wait({starting}, timeout=_EVERY)
                if not starting.done():
                    self.check()
            await starting
        finally:
            starting.cancel()
            await asyncio.wait({starting})
            await engine.close()

    def _last_words(self) -> str:
        return self.log.read_text(errors="replace")[-_TOLD:]


def _is_well(url: str) -> bool:
    try:
        return httpx.get(url, timeout=_ANSWER).status_code == 200
    except httpx.TransportError:
        return False

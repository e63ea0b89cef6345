"""Whether a server lives: it answers, its connector is there, and what was asked of it goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from pdd_runtime.clock import now
from pdd_runtime.errors import CapacityError, EngineError

PERIOD = 1.0
"""Seconds between two looks at a server."""
USUAL = 4.0
"""Seconds from one look that finds it well to the next, at most: some servers think about how busy they are."""


class Pulse:
    """Looks at one server until it is dead. A look has half of `health_timeout`, and no single one decides: this
    process may have been stopped meanwhile, and not the server."""

    def __init__(
        self,
        name: str,
        url: str,
        *,
        look: Callable[[], Awaitable[object]],
        connected: Callable[[], bool],
        probe: Callable[[], Awaitable[object]],
        busy: Callable[[], bool],
        health_timeout: float,
        stall_timeout: float,
    ) -> None:
        """`look` asks how busy it is, `connected` whether its connector is there, `probe` has it make a token; `busy`:
        there are requests at it. `health_timeout`: seconds without an answer, or a connector, after which it is dead.
        `stall_timeout`: seconds in which no request has a word of it, after which it is probed, and of a probe."""
        self._name, self._url = name, url
        self._look, self._connected, self._probe, self._busy = look, connected, probe, busy
        self._health_timeout, self._stall_timeout = health_timeout, stall_timeout
        self._well = self._heard = now()

    @property
    def silent(self) -> int:
        """Whole seconds since it was well; 0 where that is not long."""
        seconds = now() - self._well
        return int(seconds) if seconds > USUAL else 0

    def heard(self) -> None:
        """A request has had a word of it."""
        self._heard = now()

    async def death(self, *signs: asyncio.Future[EngineError]) -> EngineError:
        """Returns when it is dead, at the latest when one of `signs` is done, with why."""
        stopped = asyncio.create_task(self._stopped(), name=f"pulse of {self._name}")
        try:
            done, _ = await asyncio.wait({stopped, *signs}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            await asyncio.wait({stopped})
        return next((sign.result() for sign in signs if sign in done), None) or stopped.result()

    async def _stopped(self) -> EngineError:
        failed, why = 0, ""
        self.heard()
        self._well = now()
        while failed < 2 or now() - self._well < self._health_timeout:
            try:
                async with asyncio.timeout(self._health_timeout / 2):
                    await self._look()
                why = "" if self._connected() else "its connector has left"
            except TimeoutError:
                why = f"no answer in {self._health_timeout / 2:g} s"
            except Exception as error:  # an answer that makes no sense is none
                why = f"{type(error).__name__}: {error}"
            if why:
                failed += 1
            else:
                failed, self._well = 0, now()
                if await self._stands_still():
                    return EngineError(
                        f"{self._name} answers, and makes no tokens any more",
                        where=self._url,
                        why=f"its requests had no word of it for {self._stall_timeout:g} s, and it made no token of a "
                        "small request in as many",
                        fix="see the server's log: `pdd-runtime logs`",
                    )
            await asyncio.sleep(PERIOD)
        return EngineError(
            f"{self._name} does not answer any more",
            where=self._url,
            why=why,
            fix="see the server's log: `pdd-runtime logs`; where it is well but slow, raise the pool's health_timeout",
        )

    async def _stands_still(self) -> bool:
        if not self._busy():
            self.heard()
        if now() - self._heard < self._stall_timeout:
            return False
        try:
            async with asyncio.timeout(self._stall_timeout):
                await self._probe()
        except CapacityError:
            pass  # it has no room, and says so
        except Exception:
            return True
        self.heard()
        return False

"""A frontend as discovery knows it."""

from __future__ import annotations

import asyncio
import logging
from typing import Literal

import msgspec

from pdd_runtime.errors import PddError
from pdd_runtime.frontend.bulletin import Bulletin
from pdd_runtime.plugins.discovery import Discovery, Member

log = logging.getLogger(__name__)


class Presence:
    """Its state, and what it has to tell the others."""

    def __init__(self, discovery: Discovery, member: Member, bulletin: Bulletin | None = None) -> None:
        """`bulletin`: of a graph with variants, where others may be told."""
        self._discovery, self._member, self._bulletin = discovery, member, bulletin
        self._shown = False
        self._telling = asyncio.Lock()

    @property
    def member(self) -> Member:
        """As it was shown last."""
        return self._member

    async def show(self, state: Literal["starting", "ready", "draining"]) -> None:
        """Raises as `Discovery.register`."""
        self._shown = True
        self._member = msgspec.structs.replace(self._member, state=state)
        await self._tell()

    async def keep(self) -> None:
        """Tell what there is to tell, whenever that changes. Endless; cancel it before `leave`."""
        if self._bulletin is None:
            return
        while True:
            await self._bulletin.news.wait()
            self._bulletin.news.clear()
            if self._shown:
                try:
                    await self._tell()
                except PddError as error:
                    log.warning("the other frontends are not told what was decided: %s", error)

    async def leave(self) -> None:
        """Be there no more."""
        self._shown = False
        await self._discovery.unregister(self._member.key)

    async def _tell(self) -> None:
        # One after another, so that what is told last is the newest.
        async with self._telling:
            text = self._bulletin.text() if self._bulletin else ""
            self._member = msgspec.structs.replace(self._member, bulletin=text)
            await self._discovery.register(self._member)

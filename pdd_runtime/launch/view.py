"""What discovery shows of a launcher's processes."""

from __future__ import annotations

from collections.abc import Sequence

from pdd_runtime.launch.child import Child
from pdd_runtime.plugins.discovery import Member


class View:
    """Members by epoch; of a process whose place its successor has taken over, the last that was seen."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}

    def take(self, members: Sequence[Member], children: Sequence[Child]) -> None:
        """They are there now; `children`: all processes of this launcher."""
        there = {(member.key.pool, member.key.index): member for member in members}
        ours = {child.epoch for child in children}
        self._members = {
            epoch: member
            for epoch, member in self._members.items()
            if epoch in ours and (heir := there.get((member.key.pool, member.key.index))) and heir.key.epoch != epoch
        }
        self._members.update((member.key.epoch, member) for member in members)

    def of(self, child: Child) -> Member | None:
        """As what the process of its epoch shows itself."""
        return self._members.get(child.epoch)

    def is_ready(self, child: Child) -> bool:
        member = self.of(child)
        return member is not None and member.state == "ready" and child.recorded is not None

    def frontends(self, children: Sequence[Child]) -> list[Member]:
        """Those of the children that are there, the ready ones first."""
        members = [self.of(child) for child in children if child.spec.role == "frontend"]
        return sorted((member for member in members if member), key=lambda member: member.state != "ready")

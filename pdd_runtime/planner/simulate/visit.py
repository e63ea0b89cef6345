"""One user's session in a simulation: its requests, one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdd_runtime.planner.session import Session

if TYPE_CHECKING:
    from pdd_runtime.planner.simulate.world import World


class Visit:
    """It sends a request when the one before has ended and its user has thought."""

    __slots__ = ("_world", "due", "measured", "number", "session", "single", "turn")

    def __init__(self, world: World, session: Session) -> None:
        self._world, self.session = world, session
        self.number = 0
        """Of the request that is sent next, or was sent last."""
        self.turn = session.turns[0]
        self.due = 0.0
        self.measured = False
        self.single = world.sessions_apart and len(session.turns) == 1
        """Nobody will ever ask for what is this request's own."""

    def ask(self) -> None:
        """Send the next request."""
        world = self._world
        if not world.recorder.enough:
            self.due = world.events.now
            world.arrive(self)

    def answered(self) -> None:
        """The user has an answer, or a refusal."""
        turns, world = self.session.turns, self._world
        self.number += 1
        if self.number < len(turns):
            self.turn = turns[self.number]
            world.events.push(world.events.now + self.turn.think, self.ask)
        else:
            world.left()

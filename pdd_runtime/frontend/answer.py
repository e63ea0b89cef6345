"""Answering one request: run its sessions, send what they make, stop them when nobody reads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdd_runtime.clock import now
from pdd_runtime.errors import DeadlineExceeded, Overloaded, PddError, RemoteError, RequestError
from pdd_runtime.frontend.bell import Bell, ClientGone, Write
from pdd_runtime.frontend.choice import FinishReason, Piece
from pdd_runtime.frontend.errors import Answered, answer_for
from pdd_runtime.frontend.form import Whole
from pdd_runtime.frontend.job import Job
from pdd_runtime.frontend.reading import joined
from pdd_runtime.frontend.sending import end, send_error, start
from pdd_runtime.frontend.service import Listed, Service
from pdd_runtime.frontend.visit import Visit
from pdd_runtime.observe.pace import Pace
from pdd_runtime.pipeline import Finish, SessionRequest
from pdd_runtime.plugins.engine import Token

log = logging.getLogger(__name__)

EVENT_STREAM = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # Proxies of nginx's kind would gather chunks otherwise.
    "x-accel-buffering": "no",
}
CLIENT_GONE = 499
"""The status under which a request that its client gave up is counted; nobody receives it."""
LINGER = 10.0
"""Seconds for a client to take the end of an answer that was ended for it; then its connection is cut."""


class Socket(Protocol):
    """A client's, to which the server lets us write."""

    @property
    def full(self) -> bool: ...
    def write_chunk(self, data: bytes) -> None: ...
    def abort(self) -> None: ...


class Answer(Response):
    """A response that begins with the first token: until then an error still has a status of its own.

    After that an error is the stream's last event, and no `[DONE]` follows it.
    """

    def __init__(self, service: Service, job: Job, arrived: float, visit: Visit, deadline: float | None = None) -> None:
        """`deadline`: seconds from arrival after which it is ended."""
        # Response.__init__ would render a body; this one is made while it is sent.
        self.status_code, self.background = 200, None
        self.init_headers()
        self._service, self._job, self._visit = service, job, visit
        self._deadline, self._arrived = deadline, arrived
        self._bell = Bell(service.turn)
        self._tasks: list[asyncio.Task[None]] = []
        """One for each session."""
        self._socket: Socket | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._left = len(job.choices)
        """Choices that have not finished."""
        self._moved: dict[int, FinishReason | None] = {}
        """Choices that have something to say, and why those end that do."""
        self._opened: set[int] = set()
        """Choices of a stream that have said something."""
        self._paces = [Pace(arrived) for _ in job.sessions]
        self._begun = {job.leader(i): asyncio.Event() for i, _ in enumerate(job.sessions) if job.leader(i) != i}
        """Whom others wait for."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._socket = scope.get("pdd_socket")
        status = CLIENT_GONE

        async def answer() -> None:
            nonlocal status
            try:
                status = await (self._stream(send) if self._job.stream else self._whole(send))
            finally:
                self._stop("the server failed on this request")
                watching.cancel()

        with self._service.running(self):
            try:
                async with asyncio.TaskGroup() as group:
                    self._tasks = [group.create_task(self._run(s, i)) for i, s in enumerate(self._job.sessions)]
                    watching = group.create_task(self._watch(receive))
                    # In a task of its own: to wake this one up means going through every layer of the application.
                    group.create_task(answer())
                    if self._deadline is not None:
                        self._after(max(self._arrived + self._deadline - now(), 0.0), self._overdue)
            finally:
                for timer in self._timers:
                    timer.cancel()
                self._record(status)

    def fail(self, error: Exception, why: str = "") -> None:
        """End it, and at once its sessions on all workers, whether its client reads or not. That is told what was made
        before, then `error`; the first one counts. `why`: for the timelines of sessions that are well."""
        self._bell.fail(error)
        self._stop(why or (error.what if isinstance(error, PddError) else str(error)))
        self._after(LINGER, self._cut_off)

    def listed(self) -> list[Listed]:
        """How far its sessions are."""
        seconds = round(now() - self._arrived, 6)
        return [
            Listed(session.id, None, seconds, pace.tokens, self._visit.name, session.variant)
            for session, pace in zip(self._job.sessions, self._paces, strict=True)
        ]

    def _stop(self, why: str) -> None:
        for session, task in zip(self._job.sessions, self._tasks, strict=True):
            if not task.done() and task is not asyncio.current_task():
                timeline = self._service.timelines.get(session.id)
                if timeline is not None:
                    timeline.cancelled(why)
                # This is also what cancels the session on its workers.
                task.cancel()

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(seconds, call))

    def _overdue(self) -> None:
        self.fail(DeadlineExceeded(f"the answer was not complete within its deadline of {self._deadline:g} s"))

    def _cut_off(self) -> None:
        if self._socket is not None:
            log.warning("request %s: its client does not read; its connection is cut", self._job.sessions[0].id)
            self._socket.abort()

    async def _watch(self, receive: Receive) -> None:
        """Notice the client leaving; its request has been read."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.fail(ClientGone("the client went away before the answer was complete"))

    async def _run(self, session: SessionRequest, index: int) -> None:
        """Have one session's items taken, in the step in which they come."""
        last: Token | Finish | None = None
        leader = self._job.leader(index)
        begun = self._begun.get(index)

        def put(made: Token | Finish) -> None:
            nonlocal last
            last = made
            self._take(index, made)
            self._bell.ring()
            if begun is not None:
                begun.set()

        if leader != index:
            await self._begun[leader].wait()
        try:
            await self._service.driver.deliver(session, put)
        except Exception as error:
            self.fail(error, f"request {session.id} failed, and with it all of its answer")
        else:
            if not isinstance(last, Finish):
                self.fail(RemoteError("the session ended without an end", where=f"request {session.id}"))

    def _take(self, index: int, made: Token | Finish) -> None:
        choice = self._job.choices[index]
        cut = choice.cut
        if choice.push(made):
            self._left -= 1
            self._moved[index] = choice.finish_reason
            return
        self._moved[index] = None
        if choice.cut and not cut:
            self._service.driver.stop(self._job.sessions[index].id)

    def _said(self, index: int, at: float) -> Piece:
        """What there is to say of a choice, at this moment."""
        choice, pace = self._job.choices[index], self._paces[index]
        if choice.tokens > pace.tokens:
            pace.sent(choice.tokens - pace.tokens, at)
        return choice.take()

    def _events(self) -> bytes:
        """What there is to say of all choices, as events of a stream."""
        form, at = self._job.form, now()
        events: list[bytes] = []
        for index, reason in self._moved.items():
            if index not in self._opened:
                self._opened.add(index)
                events.append(form.opening(index))
            if piece := self._said(index, at):
                events.append(form.delta(index, piece))
            if reason is not None:
                events.append(form.closing(index, reason))
        self._moved.clear()
        return b"".join(events)

    async def _stream(self, send: Send) -> int:
        """Begin and end it, and wait where the client's socket is full. Chunks in between go to the socket straight
        away; where there is none, as under another server than ours, they are sent from here, too."""
        data, begun, bell, socket = b"", False, self._bell, self._socket

        def straight() -> Write | None:
            if socket is None or socket.full or not self._left:
                return None
            return partial(socket.write_chunk, self._events())

        try:
            await bell.wait()
            data = self._events()
            begun = True
            await send(start(200, EVENT_STREAM | self._visit.headers()))
            while self._left:
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                await bell.wait(straight)
                data = self._events()
        except ClientGone:
            return CLIENT_GONE
        except Exception as error:
            answered = self._failed(error)
            if begun:
                await end(send, b"data: " + answered.body() + b"\n\n")
            else:
                await self._refuse(send, answered)
            return answered.status
        # The last text, why it ended, and the end are one write.
        await end(send, data + self._events() + self._job.form.ending(self._job.usage()))
        return 200

    async def _whole(self, send: Send) -> int:
        pieces: list[list[Piece]] = [[] for _ in self._job.choices]
        try:
            while True:
                await self._bell.wait()
                at = now()
                for index, said in enumerate(pieces):
                    said.append(self._said(index, at))
                if not self._left:
                    break
        except ClientGone:
            return CLIENT_GONE
        except Exception as error:
            answered = self._failed(error)
            await self._refuse(send, answered)
            return answered.status
        choices = [
            Whole(_joined(said), choice.finish_reason or "stop")
            for said, choice in zip(pieces, self._job.choices, strict=True)
        ]
        body = self._job.form.whole(choices, self._job.usage())
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        await send(start(200, headers | self._visit.headers()))
        await end(send, body)
        return 200

    async def _refuse(self, send: Send, answered: Answered) -> None:
        await send_error(send, answered._replace(headers=answered.headers | self._visit.headers()))

    def _failed(self, error: Exception) -> Answered:
        """What the client is told; the log is told all."""
        if isinstance(error, RequestError):
            error = self._job.in_fields(error)
        unexpected = not isinstance(error, PddError)
        if isinstance(error, Overloaded):  # One in a flood of them: admission tells of the flood.
            return answer_for(error)
        log.warning("request %s failed: %s", self._job.sessions[0].id, error, exc_info=error if unexpected else None)
        return answer_for(error)

    def _record(self, status: int) -> None:
        self._visit.end(sum(choice.tokens for choice in self._job.choices))
        for session, pace in zip(self._job.sessions, self._paces, strict=True):
            self._service.ended(session.id, status, now() - self._arrived, pace, self._visit.name)


def _joined(pieces: list[Piece]) -> Piece:
    return Piece(
        "".join(piece.text for piece in pieces),
        [entry for piece in pieces for entry in piece.entries],
        joined(part for piece in pieces for part in piece.parts),
    )

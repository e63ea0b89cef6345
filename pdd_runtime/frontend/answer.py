"""Answering one request: run its sessions, send what they make, stop them when nobody reads."""

from __future__ import annotations

import asyncio
import logging

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdd_runtime.clock import now
from pdd_runtime.errors import PddError, RemoteError, RequestError
from pdd_runtime.frontend.choice import FinishReason, Piece
from pdd_runtime.frontend.errors import Answered, answer_for
from pdd_runtime.frontend.form import Whole
from pdd_runtime.frontend.inbox import ClientGone, Inbox
from pdd_runtime.frontend.job import Job
from pdd_runtime.frontend.reading import joined
from pdd_runtime.frontend.service import Listed, Service
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


Progress = tuple[int, Piece, FinishReason | None]
"""The number of a choice, what it has to say now, and with the last of it why it ends."""


class Answer(Response):
    """A response that begins with the first token: until then an error still has a status of its own.

    After that an error is the stream's last event, and no `[DONE]` follows it.
    """

    def __init__(self, service: Service, job: Job, arrived: float) -> None:
        # Response.__init__ would render a body; this one is made while it is sent.
        self.status_code, self.background = 200, None
        self.init_headers()
        self._service, self._job = service, job
        self._left = len(job.choices)
        """Choices that have not finished."""
        self._paces = [Pace(arrived) for _ in job.sessions]
        self._begun = [asyncio.Event() for _ in job.sessions]
        self._arrived = arrived

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        inbox = Inbox()
        status = CLIENT_GONE

        async def answer() -> None:
            nonlocal status
            try:
                if self._job.stream:
                    status = await self._stream(inbox, send, scope["pdd_send"])
                else:
                    status = await self._whole(inbox, send)
            finally:
                # This is also what cancels the sessions on their workers.
                for task in others:
                    task.cancel()

        with self._service.running(inbox, self._listed):
            try:
                async with asyncio.TaskGroup() as group:
                    others = [group.create_task(self._run(s, i, inbox)) for i, s in enumerate(self._job.sessions)]
                    others.append(group.create_task(_watch(receive, inbox)))
                    # In a task of its own: to wake this one up means going through every layer of the application.
                    group.create_task(answer())
            finally:
                self._record(status)

    async def _run(self, session: SessionRequest, index: int, inbox: Inbox) -> None:
        """Have one session's items put into the inbox."""
        last: Token | Finish | None = None

        def put(made: Token | Finish) -> None:
            nonlocal last
            last = made
            inbox.put(index, made)
            self._begun[index].set()

        if (leader := self._job.leader(index)) != index:
            await self._begun[leader].wait()
        try:
            await self._service.driver.deliver(session, put)
        except Exception as error:
            inbox.fail(error)
        else:
            if not isinstance(last, Finish):
                inbox.fail(RemoteError("the session ended without an end", where=f"request {session.id}"))

    async def _progress(self, inbox: Inbox) -> list[Progress]:
        """Wait for something to say, and take all of it."""
        moved: dict[int, FinishReason | None] = {}
        for index, made in await inbox.take():
            choice = self._job.choices[index]
            cut = choice.cut
            if choice.push(made):
                self._left -= 1
                moved[index] = choice.finish_reason
                continue
            moved[index] = None
            if choice.cut and not cut:
                self._service.driver.stop(self._job.sessions[index].id)
        at = now()
        return [(index, self._said(index, at), reason) for index, reason in moved.items()]

    def _said(self, index: int, at: float) -> Piece:
        """What is to be sent of a choice, at this moment."""
        choice, pace = self._job.choices[index], self._paces[index]
        if choice.tokens > pace.tokens:
            pace.sent(choice.tokens - pace.tokens, at)
        return choice.take()

    async def _stream(self, inbox: Inbox, send: Send, send_chunk: Send) -> int:
        form = self._job.form
        opened: set[int] = set()
        data = b""
        try:
            while self._left:
                steps = await self._progress(inbox)
                events: list[bytes] = []
                started = bool(opened)
                for index, piece, reason in steps:
                    if index not in opened:
                        opened.add(index)
                        events.append(form.opening(index))
                    if piece:
                        events.append(form.delta(index, piece))
                    if reason is not None:
                        events.append(form.closing(index, reason))
                if not started:
                    await send(_start(200, EVENT_STREAM))
                data = b"".join(events)
                if data and self._left:
                    # Every answer that has something to say makes it first, then all are written one after another:
                    # a client, or a proxy, that is woken for one of them finds the others, and is woken once.
                    await asyncio.sleep(0)
                    await send_chunk({"type": "http.response.body", "body": data, "more_body": True})
        except ClientGone:
            return CLIENT_GONE
        except Exception as error:
            answered = self._failed(error)
            if opened:
                await _end(send, b"data: " + answered.body() + b"\n\n")
            else:
                await _send(send, answered)
            return answered.status
        # The last text, why it ended, and the end are one write.
        await _end(send, data + form.ending(self._job.usage()))
        return 200

    async def _whole(self, inbox: Inbox, send: Send) -> int:
        pieces: list[list[Piece]] = [[] for _ in self._job.choices]
        try:
            while self._left:
                for index, piece, _ in await self._progress(inbox):
                    pieces[index].append(piece)
        except ClientGone:
            return CLIENT_GONE
        except Exception as error:
            answered = self._failed(error)
            await _send(send, answered)
            return answered.status
        choices = [
            Whole(_joined(said), choice.finish_reason or "stop")
            for said, choice in zip(pieces, self._job.choices, strict=True)
        ]
        body = self._job.form.whole(choices, self._job.usage())
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        await send(_start(200, headers))
        await _end(send, body)
        return 200

    def _failed(self, error: Exception) -> Answered:
        """What the client is told; the log is told all."""
        if isinstance(error, RequestError):
            error = self._job.in_fields(error)
        unexpected = not isinstance(error, PddError)
        log.warning("request %s failed: %s", self._job.sessions[0].id, error, exc_info=error if unexpected else None)
        return answer_for(error)

    def _listed(self) -> list[Listed]:
        seconds = round(now() - self._arrived, 6)
        return [
            Listed(session.id, None, seconds, pace.tokens)
            for session, pace in zip(self._job.sessions, self._paces, strict=True)
        ]

    def _record(self, status: int) -> None:
        for session, pace in zip(self._job.sessions, self._paces, strict=True):
            self._service.ended(session.id, status, now() - self._arrived, pace)


async def _watch(receive: Receive, inbox: Inbox) -> None:
    """Notice the client leaving; its request has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    inbox.fail(ClientGone())


def _joined(pieces: list[Piece]) -> Piece:
    return Piece(
        "".join(piece.text for piece in pieces),
        [entry for piece in pieces for entry in piece.entries],
        joined(part for piece in pieces for part in piece.parts),
    )


def _start(status: int, headers: dict[str, str]) -> dict[str, object]:
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": raw}


async def _end(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _send(send: Send, answered: Answered) -> None:
    body = answered.body()
    await send(
        _start(
            answered.status,
            {"content-type": "application/json", "content-length": str(len(body)), **answered.headers},
        )
    )
    await _end(send, body)

"""The HTTP API: which path leads where."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Literal, TypeVar

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from pdd_runtime import __version__
from pdd_runtime.clock import now
from pdd_runtime.errors import NoRoute, PddError
from pdd_runtime.frontend import body
from pdd_runtime.frontend.answer import CLIENT_GONE, Answer
from pdd_runtime.frontend.chat import chat_job
from pdd_runtime.frontend.completions import completion_job
from pdd_runtime.frontend.doors import Access, Doors
from pdd_runtime.frontend.errors import Answered, NotFoundError, answer_for, answer_for_status
from pdd_runtime.frontend.job import Job
from pdd_runtime.frontend.model import ServedModel
from pdd_runtime.frontend.openapi import describe
from pdd_runtime.frontend.request_ids import RequestIds
from pdd_runtime.frontend.requests import Body, ChatRequest, CompletionRequest
from pdd_runtime.frontend.service import Service
from pdd_runtime.frontend.siblings import Siblings
from pdd_runtime.frontend.variants import add_variants
from pdd_runtime.frontend.visit import Visit
from pdd_runtime.plugins.discovery import Member
from pdd_runtime.plugins.engine import Load

R = TypeVar("R", bound=Body)
Part = Literal["api", "admin"]


def create_app(
    service: Service,
    siblings: Siblings | None = None,
    access: Access | None = None,
    parts: Collection[Part] = ("api", "admin"),
) -> ASGIApp:
    """The ASGI application of one frontend process; without `siblings` it is the only one, without `access` whoever
    reaches it may come in. `parts`: what is served on this port."""
    siblings = siblings or Siblings(service)
    app = FastAPI(title="pdd-runtime", version=__version__, redoc_url=None)
    if "api" in parts:
        _add_openai(app, service)
        _add_tokenizer(app, service)
    _add_health(app, service)
    if "admin" in parts:
        _add_inspection(app, service, siblings)
    _add_errors(app)
    describe(app, keys=access is not None)
    return RequestIds(Doors(app, access))


def _add_openai(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _answer(service, request, ChatRequest, chat_job)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _answer(service, request, CompletionRequest, completion_job)

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [_model(await service.model())]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        served = await service.model()
        served.check_name(name)
        return _json(_model(served))


def _add_health(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> Response:
        """The process is alive. Says nothing about workers: a restart of the frontend would not help them."""
        return _json({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        """200 only while a whole route of workers exists."""
        if (why := service.why_not_ready()) is not None:
            raise NoRoute(why)
        return _json({"status": "ready"})


def _add_inspection(app: FastAPI, service: Service, siblings: Siblings) -> None:
    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await siblings.metrics(), media_type=service.metrics.content_type)

    @app.get("/pdd/requests")
    async def requests() -> Response:
        """The running ones and the last that ended, newest first."""
        return _json({"requests": await siblings.requests()})

    @app.get("/pdd/requests/{request_id}")
    async def timeline(request_id: str) -> Response:
        body = await siblings.timeline(request_id)
        if body is None:
            raise NotFoundError(
                f"no timeline of request {request_id!r}",
                where="id",
                why=f"it never got as far as a route, or is older than the last {service.timelines.limit} that did",
            )
        return _json(body)

    @app.delete("/pdd/requests/{request_id}")
    async def cancel(request: Request, request_id: str) -> Response:
        """End a running request, with all its choices, on all workers. Its client is told."""
        visit: Visit = request.scope["pdd_visit"]
        by = f"an operator, key {visit.name}" if visit.name else "an operator"
        if not await siblings.cancel(request_id, by):
            raise NotFoundError(f"no request {request_id!r} is running", where="id", why="it has ended, or never began")
        return _json({"id": request_id, "cancelled": True})

    if service.experiment is not None:
        add_variants(app, service.experiment, siblings)

    @app.get("/pdd/workers")
    async def workers() -> Response:
        """Those that take new sessions, and how busy they are, as they last said: a moment ago."""
        return _json({"workers": [_worker(member, load) for member, load in service.driver.workers()]})


def _add_tokenizer(app: FastAPI, service: Service) -> None:
    @app.get("/pdd/tokenizer/tokenizer.json")
    async def tokenizer() -> Response:
        """The model's, for tools that make prompts of so many tokens."""
        await service.model()
        files = await service.driver.tokenizer()
        return Response(files.tokenizer_json, media_type="application/json")

    @app.get("/pdd/tokenizer/tokenizer_config.json")
    async def tokenizer_config() -> Response:
        await service.model()
        files = await service.driver.tokenizer()
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **files.special_tokens}
        return _json(config | ({} if files.chat_template is None else {"chat_template": files.chat_template}))


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(PddError)
    async def refused(request: Request, error: Exception) -> Response:
        return _error(answer_for(error))

    @app.exception_handler(HTTPException)
    async def unknown_path(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _error(answer_for_status(error.status_code, error.headers))

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        # Starlette raises it again behind this answer, and so the server logs it with its traceback.
        return _error(answer_for(error))


async def _answer(
    service: Service,
    request: Request,
    model: type[R],
    make: Callable[[R, ServedModel, str], Awaitable[Job]],
) -> Response:
    request_id: str = request.scope["pdd_request_id"]
    arrived: float = request.scope["pdd_arrived"]
    visit: Visit = request.scope["pdd_visit"]
    try:
        visit.begin()
        asked = await body.read(request, model)
        job = visit.admit(asked, await make(asked, await service.model(), request_id))
        if service.experiment is not None:
            job = service.experiment.assign(asked, job, request.scope["headers"])
            request.scope["pdd_variant"] = job.sessions[0].variant
    except BaseException as error:
        visit.end(0)
        if isinstance(error, ClientDisconnect):
            service.ended(request_id, CLIENT_GONE, now() - arrived, key=visit.name)
            return Response(status_code=CLIENT_GONE)
        if not isinstance(error, PddError):
            raise
        answered = answer_for(error)
        service.ended(request_id, answered.status, now() - arrived, key=visit.name)
        return _error(answered._replace(headers=visit.headers() | answered.headers))
    deadlines = [seconds for seconds in (service.deadline, asked.timeout) if seconds is not None]
    return Answer(service, job, arrived, visit, min(deadlines, default=None))


def _model(served: ServedModel) -> dict[str, object]:
    return {
        "id": served.name,
        "object": "model",
        "created": 0,
        "owned_by": "pdd-runtime",
        "max_model_len": served.context_length,
    }


def _worker(member: Member, load: Load) -> dict[str, object]:
    return {
        "worker": str(member.key),
        "pool": member.key.pool,
        "index": member.key.index,
        "epoch": member.key.epoch,
        "role": member.role,
        "cluster": member.cluster,
        "pid": member.pid,
        "load": load,
    }


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


def _error(answered: Answered) -> Response:
    return Response(
        answered.body(), status_code=answered.status, headers=answered.headers, media_type="application/json"
    )

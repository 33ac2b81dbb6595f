"""The application: routes, errors in OpenAI's shape, the API key."""

import asyncio
import functools
import hmac
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paxpage.config import VERSION
from paxpage.server.chat import create_chat_completion
from paxpage.server.completions import create_completion
from paxpage.server.debug import explain_cache
from paxpage.server.errors import ApiError, error_response
from paxpage.server.generation import REQUEST_ID_HEADER, ServerContext
from paxpage.server.http import JSON_TYPE, ClientLeftError
from paxpage.server.loop_care import collect_garbage, watch_loop_lag
from paxpage.server.openapi import describe_api
from paxpage.server.protocol import MAX_REQUEST_ID_LENGTH
from paxpage.server.responses import ModelCard, ModelList
from paxpage.server.tokens import detokenize, tokenize
from paxpage.server.turns import Turns

LOGGER = logging.getLogger(__name__)
ENGINE_STOP_TIMEOUT_S = 2.0
STATUS_CLIENT_LEFT = 499  # nobody reads it

Handler = Callable[[Request], Awaitable[Response]]


def create_app(context: ServerContext, *, api_key: str | None = None) -> FastAPI:
    """The ASGI application. Its lifespan starts and stops the engine thread of context.async_engine."""
    app = FastAPI(title="paxpage", openapi_url=None, lifespan=functools.partial(_lifespan, context))
    routes: dict[str, tuple[str, Handler]] = {
        "/v1/completions": ("POST", functools.partial(create_completion, context)),
        "/v1/chat/completions": ("POST", functools.partial(create_chat_completion, context)),
        "/v1/models": ("GET", functools.partial(list_models, context)),
        "/v1/models/{model_name:path}": ("GET", functools.partial(get_model, context)),
        "/tokenize": ("POST", functools.partial(tokenize, context)),
        "/detokenize": ("POST", functools.partial(detokenize, context)),
        "/debug/explain_cache": ("POST", functools.partial(explain_cache, context)),
        "/health": ("GET", functools.partial(get_health, context)),
        "/version": ("GET", get_version),
        "/metrics": ("GET", functools.partial(get_metrics, context)),
        "/openapi.json": ("GET", functools.partial(get_description, bool(api_key))),
    }
    for path, (method, handler) in routes.items():
        app.add_route(path, handler, methods=[method])
    _add_error_handlers(app)
    if api_key:
        app.add_middleware(ApiKeyGuard, api_key=api_key)
    app.add_middleware(RequestIds)
    app.add_middleware(TakesTurns, turns=context.async_engine.turns)
    return app


@asynccontextmanager
async def _lifespan(context: ServerContext, app: FastAPI) -> AsyncIterator[None]:
    context.async_engine.start()
    engine = context.async_engine
    tasks = [
        asyncio.create_task(watch_loop_lag(engine.metrics.event_loop_lag.observe)),
        asyncio.create_task(collect_garbage(lambda: not engine.has_open_streams)),
    ]
    yield
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if not await context.async_engine.stop(ENGINE_STOP_TIMEOUT_S):
        LOGGER.warning("the engine is still in a step after %s s; leaving it", ENGINE_STOP_TIMEOUT_S)


async def list_models(context: ServerContext, request: Request) -> Response:
    """The one model there is, under each of its names."""
    models = ModelList(object="list", data=[_model_card(context, name) for name in context.model_names])
    return Response(models.to_json(), media_type=JSON_TYPE)


async def get_model(context: ServerContext, request: Request) -> Response:
    """The model of that name."""
    name = request.path_params["model_name"]
    context.check_model(name)
    return Response(_model_card(context, name).to_json(), media_type=JSON_TYPE)


def _model_card(context: ServerContext, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        object="model",
        created=context.created_s,
        owned_by="paxpage",
        max_model_len=context.max_model_len,
    )


async def get_health(context: ServerContext, request: Request) -> Response:
    """200 without a body while the engine lives, else 503."""
    return Response(status_code=503 if context.async_engine.is_dead else 200)


async def get_version(request: Request) -> Response:
    """The version of paxpage."""
    return JSONResponse({"version": VERSION})


async def get_description(has_key: bool, request: Request) -> Response:
    """The API in OpenAPI's words."""
    return JSONResponse(describe_api(VERSION, has_key))


async def get_metrics(context: ServerContext, request: Request) -> Response:
    """Prometheus' text format."""
    return Response(context.async_engine.metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(ApiError, _answer_api_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(ClientLeftError, _answer_nobody)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)


async def _answer_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {404: f"there is no route {request.url.path}", 405: f"{request.method} is not allowed here"}
    return error_response(ApiError(error.status_code, messages.get(error.status_code, error.detail)), error.headers)


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=STATUS_CLIENT_LEFT)


class TakesTurns:
    """Requests that come at once begin one after another, some in each turn of the event loop."""

    def __init__(self, app: ASGIApp, turns: Turns):
        self._app = app
        self._turns = turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on when it is the request's turn."""
        await self._turns.take()
        await self._app(scope, receive, send)


def new_request_id() -> str:
    """128 random bits, by no system call: that would give the interpreter's lock away, and wait to get it back."""
    return f"{random.getrandbits(128):032x}"


class RequestIds:
    """Every answer has an X-Request-Id: the request's own, or a new one. A fault is logged under it, and answered."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on with request.state.request_id, which the route may change; 400 for a header that is no id."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_HEADER)
        state = scope.setdefault("state", {})
        state["request_id"] = given or new_request_id()

        has_begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = state["request_id"]
            await send(message)

        if given and not _is_request_id(given):
            state["request_id"] = new_request_id()
            allowed = f"at most {MAX_REQUEST_ID_LENGTH} printable ASCII characters"
            error = ApiError(400, f"{REQUEST_ID_HEADER} is {given[:40]!r}; allowed: {allowed}", REQUEST_ID_HEADER)
            await error_response(error)(scope, receive, send_with_id)
            return
        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            if has_begun:
                raise
            LOGGER.exception("request %s failed", state["request_id"])
            error = ApiError(500, "a fault of the server; its log has the details")
            await error_response(error)(scope, receive, send_with_id)


def _is_request_id(text: str) -> bool:
    return len(text) <= MAX_REQUEST_ID_LENGTH and text.isascii() and text.isprintable()


class ApiKeyGuard:
    """Lets a request through when it carries the key as a bearer token; /health is open to all."""

    def __init__(self, app: ASGIApp, api_key: str):
        self._app = app
        self._expected = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on or answers 401."""
        if scope["type"] != "http" or scope["path"] == "/health" or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(401, "the API key is missing or wrong; send it as Authorization: Bearer KEY")
        await error_response(error, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        return hmac.compare_digest(key, self._expected) and scheme.lower() == b"bearer"

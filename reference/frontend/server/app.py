"""The web application: which address does what, and what becomes of an error."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

from reference.frontend.async_engine import AsyncLLM
from reference.frontend.logger import logger
from reference.frontend.server.args import ServerArgs
from reference.frontend.server.errors import APIError
from reference.frontend.server.metrics import ServerMetrics
from reference.frontend.server.middleware import KeyRing, RequestGate
from reference.frontend.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from reference.frontend.server.service import Service
from reference.frontend.server.streaming import ClientGoneError
from reference.frontend.server.ui import UI_PATH, OpenPages, PageRequests, find_ui

BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
CLIENT_GONE = 499  # nginx's status; nobody reads it but the access log


def build_app(engine: AsyncLLM, args: ServerArgs, model: str) -> FastAPI:
    """The application for an engine; `model` is the name clients use."""
    # Swagger's page would be loaded from the net: there is none. /openapi.json describes the interface.
    app = FastAPI(title="Twinfer", version=version("twinfer"), docs_url=None, redoc_url=None)
    keys = KeyRing(args.api_keys)
    metrics = ServerMetrics(model, engine.config)
    service = Service(engine, args, model, keys, metrics)
    engine.on_news = metrics.observe
    _add_routes(app, service)
    _add_state_routes(app, service, metrics)
    if args.enable_dev_endpoints:
        _add_dev_routes(app, service)
    _add_error_handlers(app)
    app.state.pages = OpenPages()
    if args.app:
        _add_ui(app)
    app.add_middleware(
        RequestGate, limits=args.limits, keys=keys, access_log=args.access_log, on_answer=metrics.count_http
    )
    if args.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(args.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
            expose_headers=["X-Request-Id"],
        )
    _describe_bodies(app)
    return app


def _body(path: str) -> dict[str, Any]:
    """Bodies are read by hand, off the event loop (see `body`): FastAPI has to be told what they are."""
    schema = {"$ref": f"#/components/schemas/{BODIES[path].__name__}"}
    error = {"description": "An error: see the message"}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {str(status): error for status in (400, 401, 404, 413, 429, 500, 503)},
    }


def _add_routes(app: FastAPI, service: Service) -> None:
    # Through a function each: FastAPI reads a handler's signature.
    @app.post("/v1/completions", openapi_extra=_body("/v1/completions"))
    async def completions(request: Request) -> Response:
        return await service.completions(request)

    @app.post("/v1/chat/completions", openapi_extra=_body("/v1/chat/completions"))
    async def chat_completions(request: Request) -> Response:
        return await service.chat_completions(request)

    @app.post("/tokenize", openapi_extra=_body("/tokenize"))
    async def tokenize(request: Request) -> Response:
        return await service.tokenize(request)

    @app.post("/detokenize", openapi_extra=_body("/detokenize"))
    async def detokenize(request: Request) -> Response:
        return await service.detokenize(request)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return service.models()

    # A model's name may be a path.
    @app.get("/v1/models/{name:path}", responses={404: {"description": "No such model"}})
    async def model(name: str) -> dict[str, Any]:
        return service.model_card(name)


def _add_state_routes(app: FastAPI, service: Service, metrics: ServerMetrics) -> None:
    @app.get("/health", responses={503: {"description": "The engine is not running"}})
    async def health() -> Response:
        service.check_health()
        return Response()

    @app.get("/version")
    async def show_version() -> dict[str, str]:
        return {"version": app.version}

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_dev_routes(app: FastAPI, service: Service) -> None:
    @app.post("/reset_prefix_cache", responses={503: {"description": "Requests are running"}})
    async def reset_prefix_cache() -> Response:
        return await service.reset_prefix_cache()

    @app.get("/v1/trace/steps", include_in_schema=False)  # it never ends
    async def trace_steps() -> Response:
        return service.trace_steps()


def _add_ui(app: FastAPI) -> None:
    find_ui()(app, UI_PATH)
    app.add_middleware(PageRequests, pages=app.state.pages)

    @app.get("/favicon.ico", include_in_schema=False)  # browsers ask for it at the root, and without a key
    async def favicon() -> Response:
        return Response(status_code=204)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(APIError)
    async def on_api_error(request: Request, error: APIError) -> JSONResponse:
        return error.response()

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        return APIError(error.status_code, f"{error.detail}.", headers=error.headers).response()

    @app.exception_handler(RequestValidationError)
    async def on_validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        return APIError(400, "The address or its parameters are not valid.").response()

    @app.exception_handler(ClientGoneError)
    async def on_client_gone(request: Request, error: ClientGoneError) -> Response:
        return Response(status_code=CLIENT_GONE)

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> JSONResponse:
        logger.error("A request failed in the server.", exc_info=error)
        return APIError(500, "The server failed to handle the request; its log says why.").response()


def _describe_bodies(app: FastAPI) -> None:
    """Add the models of the bodies to /openapi.json."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        document = original()
        _, schemas = models_json_schema(
            [(model, "validation") for model in BODIES.values()],
            ref_template="#/components/schemas/{model}",
        )
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        return document

    app.openapi = openapi  # type: ignore[method-assign]

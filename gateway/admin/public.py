"""What the public port answers besides inference: ``/health``, ``/ready`` and the merged ``/v1/models``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response

from gateway.errors import BadRequest, GatewayError, NotFound, UnknownModel
from gateway.fleet.models import merged_models

if TYPE_CHECKING:
    from gateway.app import Gateway


def public_app(gateway: Gateway) -> FastAPI:
    """Build the app behind the public port; inference paths never reach it."""
    app = FastAPI(title="kvway", docs_url=None, redoc_url=None, openapi_url=None)
    install_error_handlers(app, "Inference is under /v1/, metrics and /admin on the admin port (server.admin_port).")

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> dict[str, str]:
        """The process is alive; true as long as it can answer at all."""
        return {"status": "ok"}

    @app.api_route("/ready", methods=["GET", "HEAD"])
    async def ready() -> JSONResponse:
        """New requests can be served here."""
        if gateway.draining:
            return JSONResponse({"status": "draining"}, 503)
        if not gateway.registry.any_ready():
            return JSONResponse({"status": "no worker is ready"}, 503)
        return JSONResponse({"status": "ready"})

    @app.api_route("/v1/models", methods=["GET", "HEAD"])
    async def models() -> dict[str, Any]:
        """Every worker's models and adapters, each once."""
        return {"object": "list", "data": merged_models(gateway.registry)}

    @app.api_route("/v1/models/{model:path}", methods=["GET", "HEAD"])
    async def model(model: str) -> dict[str, Any]:
        """One model's card."""
        for card in merged_models(gateway.registry):
            if card["id"] == model:
                return card
        raise UnknownModel(f"The model {model!r} is not served here.", param="model")

    return app


def install_error_handlers(app: FastAPI, hint: str) -> None:
    """Make every error an OpenAI-shaped one.

    Args:
        app: whose errors.
        hint: where to look instead of an unknown path.
    """

    @app.exception_handler(GatewayError)
    async def on_gateway_error(_: Request, error: GatewayError) -> Response:
        return Response(error.body(), error.status, media_type="application/json")

    @app.exception_handler(RequestValidationError)
    async def on_wrong_parameter(request: Request, error: RequestValidationError) -> Response:
        mistakes = (f"{mistake['loc'][-1]}: {mistake['msg']}" for mistake in error.errors())
        return await on_gateway_error(request, BadRequest("; ".join(mistakes)))

    @app.exception_handler(404)
    async def on_unknown_path(request: Request, _: Exception) -> Response:
        error = NotFound(f"There is nothing at {request.url.path}. {hint}")
        return Response(error.body(), error.status, media_type="application/json")

    @app.exception_handler(405)
    async def on_wrong_method(request: Request, refusal: HTTPException) -> Response:
        error = BadRequest(f"{request.url.path} does not take {request.method}.")
        return Response(error.body(), 405, refusal.headers, media_type="application/json")

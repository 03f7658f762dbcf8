"""Shows the state of the gateway to programs that watch it."""

from __future__ import annotations

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from omnistage.client.errors import OmniError
from omnistage.gateway.answering import unless_gone
from omnistage.gateway.door import Door
from omnistage.gateway.parsed import new_router


def routes(door: Door) -> APIRouter:
    router = new_router("", "state")

    @router.head("/health", include_in_schema=False)
    @router.get("/health")
    async def health() -> dict[str, str]:
        """The process lives."""
        return {"status": "ok"}

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", responses={503: {"description": "It cannot answer now.", "content": {"application/json": {}}}})
    async def ready(request: Request) -> Response:
        """The gateway takes requests, its router answers, and a pipeline is ready."""
        reason = await unless_gone(request, _not_ready(door))
        if reason:
            return JSONResponse({"status": "not ready", "why": reason}, 503, {"Retry-After": "1"})
        return JSONResponse({"status": "ready"})

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Metrics of this process, for Prometheus."""
        return Response(generate_latest(door.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return router


async def _not_ready(door: Door) -> str:
    """The reason why the gateway cannot answer now; empty if it can."""
    if not door.serves:
        return "it is ending"
    try:
        pipelines = await door.offer.pipelines()
    except OmniError as error:
        return error.message
    return "" if any(one.state == "ready" for one in pipelines) else "no pipeline is ready"

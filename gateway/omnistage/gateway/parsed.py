"""Makes routes that use the body as the guard has parsed it, and do not parse it a second time."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.responses import Response


class _Parsed(APIRoute):
    """A route that takes the JSON of the body from the guard."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def parsed(request: Request) -> Response:
            request._json = request.scope["state"]["json"]
            return await handle(request)

        return parsed


def new_router(prefix: str, tag: str) -> APIRouter:
    """A router of such routes. tag: of its endpoints in our document."""
    return APIRouter(prefix=prefix, tags=[tag], route_class=_Parsed)

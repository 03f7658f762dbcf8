"""Makes routes that use the body as the guard has parsed it, and do not parse it a second time; those of GET take HEAD too."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send


class _Parsed(APIRoute):
    """A route that takes the JSON of the body from the guard."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """As of a route of GET, if this is a HEAD for one."""
        return super().matches({**scope, "method": "GET"} if self._is_head(scope) else scope)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_head(scope):  # The server sends the head of the answer alone.
            await self.app(scope, receive, send)
        else:
            await super().handle(scope, receive, send)

    def _is_head(self, scope: Scope) -> bool:
        """Whether this is a HEAD for a route of GET."""
        return bool(scope["type"] == "http" and scope["method"] == "HEAD" and "GET" in (self.methods or ()))

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def parsed(request: Request) -> Response:
            request._json = request.scope["state"]["json"]
            return await handle(request)

        return parsed


def new_router(prefix: str, tag: str) -> APIRouter:
    """A router of such routes. tag: of its endpoints in our document."""
    return APIRouter(prefix=prefix, tags=[tag], route_class=_Parsed)

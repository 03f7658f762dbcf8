"""POST /v1/responses."""

from __future__ import annotations

from fastapi import APIRouter

from omnistage.gateway.door import Door


def routes(door: Door) -> APIRouter:
    return APIRouter(prefix="/v1", tags=["responses"])

"""POST /v1/audio/speech: a text is spoken."""

from __future__ import annotations

from fastapi import APIRouter

from omnistage.gateway.door import Door


def routes(door: Door) -> APIRouter:
    return APIRouter(prefix="/v1", tags=["speech"])

"""POST /v1/images/generations and /v1/images/edits, and the pictures that their URLs stand for."""

from __future__ import annotations

from fastapi import APIRouter

from omnistage.gateway.door import Door


def routes(door: Door) -> APIRouter:
    return APIRouter(prefix="/v1", tags=["pictures"])

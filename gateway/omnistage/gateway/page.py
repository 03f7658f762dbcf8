"""The page: a few static files."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

from omnistage.gateway.failure import ApiError

FOLDER = Path(__file__).parent / "page"

HOME, DOCS = "index.html", "docs.html"

SCRIPTS = (
    "app",
    "api",
    "ask",
    "docs",
    "elements",
    "film",
    "history",
    "pictures",
    "player",
    "ring",
    "snippet",
    "thread",
    "timeline",
    "worker",
)

FILES = {
    **dict.fromkeys((HOME, DOCS), "text/html; charset=utf-8"),
    **dict.fromkeys(("style.css", "docs.css"), "text/css; charset=utf-8"),
    **{f"{name}.js": "text/javascript; charset=utf-8" for name in SCRIPTS},
    "icon.svg": "image/svg+xml",
}
"""All files of the page, and of the page of endpoints, by name: nothing else in the folder is served."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; media-src 'self' blob: data:;"
    " worker-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The content that a browser may load and run: files of this gateway, and pictures and sound that the page itself made."""

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # A browser asks each time, and by the ETag it gets 304 if nothing changed.
}


@dataclass(frozen=True, slots=True)
class _PageFile:
    body: bytes
    media_type: str
    etag: str


def _respond(request: Request, file: _PageFile) -> Response:
    """The response with a file; 304 without it if the browser has it already."""
    # The worker is a file below /page, and must be allowed to answer for the page at /.
    headers = {**HEADERS, "ETag": file.etag, "Service-Worker-Allowed": "/"}
    tags = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if file.etag in tags:
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers=headers, media_type=file.media_type)


def _read(name: str, media_type: str) -> _PageFile:
    body = (FOLDER / name).read_bytes()
    return _PageFile(body, media_type, f'"{hashlib.sha256(body).hexdigest()[:32]}"')


PAGE_FILES = {name: _read(name, media_type) for name, media_type in FILES.items()}

router = APIRouter(include_in_schema=False)


@router.api_route("/", methods=["GET", "HEAD"])
async def home(request: Request) -> Response:
    """The page itself."""
    return _respond(request, PAGE_FILES[HOME])


@router.api_route("/docs", methods=["GET", "HEAD"])
async def endpoints(request: Request) -> Response:
    """The page of endpoints, which a browser makes of /openapi.json."""
    return _respond(request, PAGE_FILES[DOCS])


@router.api_route("/page/{name}", methods=["GET", "HEAD"])
async def file(request: Request, name: str) -> Response:
    """A file that the page needs."""
    if name not in PAGE_FILES:
        raise ApiError(404, f"the page has no file {name[:128]}", code="unknown_url")
    return _respond(request, PAGE_FILES[name])

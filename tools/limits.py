"""Writes docs/limits.md from `limits.md.jinja` and the limits in the code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from omnistage.client import request
from omnistage.gateway import accounts, body, chat, failure, fetching, film_jobs, guard, kept, messages, pictures, port, responses
from omnistage.gateway.settings import GatewaySettings
from omnistage.host import descriptors, metrics, places
from omnistage.models.media import hidden_work, terms
from omnistage.router import admission, callers, conversation
from omnistage.router.settings import RouterSettings
from omnistage.wire import channel, limits

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "limits.md"
TEMPLATE = ROOT / "tools" / "limits.md.jinja"

MODULES = (
    *(request, accounts, body, chat, failure, fetching, film_jobs, guard, kept, messages, pictures, port, responses),
    *(descriptors, metrics, places, hidden_work, terms, admission, callers, conversation, channel, limits),
)
"""The modules whose constants the page names."""


def page() -> str:
    """The text of docs/limits.md."""
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    environment.filters |= {
        "kib": lambda size_bytes: size_bytes >> 10,
        "mib": lambda size_bytes: size_bytes >> 20,
        "gib": lambda size_bytes: size_bytes >> 30,
        "thousands": "{:,}".format,
        "short": "{:g}".format,
        "size": _size,
    }
    values = {module.__name__.rpartition(".")[2]: module for module in MODULES}
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(values, default=_default, media=terms.MediaLimits(), film=terms.FilmPreprocessing())


def _default(setting: str) -> Any:
    """The default of an option of the router or of the gateway."""
    return (RouterSettings.model_fields | GatewaySettings.model_fields)[setting].default


def _size(size_bytes: int | None) -> str:
    """A number of bytes in words; None means a field that only the size of the request limits."""
    if size_bytes is None:
        return "the size of the request"
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes // unit} {name}"
    return f"{size_bytes} bytes"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

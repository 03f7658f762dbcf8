"""The router that a command asks, and the user's key."""

from __future__ import annotations

from dataclasses import dataclass

from omnistage.cli.layout import Layout
from omnistage.client.connection import Found
from omnistage.client.options import Options
from omnistage.client.routers import ApiKey, key_of


@dataclass(frozen=True, slots=True)
class Where:
    """The router to ask, with key and pipeline. at: a router, or the stack to start for this call. api_key: None: there is no key.
    pipeline: the name to put into each request; empty: the router chooses."""

    at: Found | Layout
    api_key: ApiKey | None = None
    pipeline: str = ""

    @property
    def address(self) -> str:
        """HOST:PORT of the router; empty until one is started."""
        return self.at.address if isinstance(self.at, Found) else ""

    def options(self, options: Options) -> Options:
        """The options of a request, with the pipeline added."""
        return Options(**options, pipeline=self.pipeline) if self.pipeline else options


def typed_key(key_text: str | None) -> ApiKey | None:
    """The key that was typed by `--api-key`, else the one in the variable for it; None if there is neither. Raises BadRequestError."""
    return key_of(key_text, "--api-key")


def where_of(address: str, api_key: str | None, pipeline: str = "") -> Where:
    """The router that `--address` names. Raises BadRequestError for a text that is no key."""
    return Where(Found(address, is_named=True), typed_key(api_key), pipeline=pipeline)

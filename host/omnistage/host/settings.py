"""Settings that every server process has.

Each is a command-line flag (`--max-message-bytes`) and an environment variable (`OMNISTAGE_MAX_MESSAGE_BYTES`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from omnistage.host.addresses import check_address, host_and_port, is_loopback
from omnistage.wire.channel import MAX_MESSAGE_BYTES
from omnistage.wire.limits import HOP_ROOM_BYTES

Address = Annotated[str, AfterValidator(check_address), Field(json_schema_extra={"metavar": "HOST:PORT"})]
"""HOST:PORT; port 0 takes a free one."""


def _check_loopback(address: str) -> str:
    """Return `address` if it is empty, or HOST:PORT that only this host can reach. Raises ValueError."""
    if address and not is_loopback(host_and_port(check_address(address))[0]):
        raise ValueError(f"{address!r} can be reached from other hosts, and channelz names every connection; use 127.0.0.1:PORT")
    return address


def _check_collector(url: str) -> str:
    """Return `url` if it is empty, or http:// or https:// and HOST:PORT without a path. Raises ValueError."""
    scheme, _, address = url.removesuffix("/").partition("://")
    if url and (scheme not in ("http", "https") or not address):
        raise ValueError(f"{url[:80]!r} is no collector: give http://HOST:PORT such as http://127.0.0.1:4317, or https:// for TLS")
    if "/" in address:
        raise ValueError(f"{url[:80]!r} has a path: spans go by OTLP over gRPC, to a port such as 4317; give {scheme}://HOST:PORT alone")
    if url and host_and_port(check_address(address))[1] == 0:
        raise ValueError(f"{url[:80]!r} has no port that a collector can have; its usual one is 4317")
    return url


class ServerSettings(BaseSettings):
    """Settings of a server process; stages and the router add their own."""

    model_config = SettingsConfigDict(
        env_prefix="OMNISTAGE_", cli_kebab_case=True, cli_hide_none_type=True, extra="forbid", allow_inf_nan=False
    )

    address: Address = Field("127.0.0.1:0", description="where to listen; port 0 takes a free one")
    metrics_address: Address = Field("127.0.0.1:0", description="Prometheus metrics")
    channelz_address: Annotated[str, AfterValidator(_check_loopback)] = Field(
        "",
        description="channelz, on the loopback address only, for whoever debugs a stuck chain; empty: none",
        json_schema_extra={"metavar": "HOST:PORT"},
    )
    otlp: Annotated[str, AfterValidator(_check_collector)] = Field(
        "",
        description="OpenTelemetry collector that gets the spans of requests, over gRPC; needs the extra otel; empty: none",
        json_schema_extra={"metavar": "URL"},
    )
    kept_port: bool = Field(
        False,
        description="the port of --address is kept for this server by another process of the same user, bound with SO_REUSEPORT",
        json_schema_extra={"metavar": "BOOL"},
    )
    grace: float = Field(
        30.0, ge=0, description="seconds that running sessions get to finish after SIGTERM", json_schema_extra={"metavar": "SECONDS"}
    )
    session_limit: float = Field(
        600.0, gt=0, description="seconds that an answer without a deadline may take", json_schema_extra={"metavar": "SECONDS"}
    )
    max_message_bytes: int = Field(
        MAX_MESSAGE_BYTES,
        ge=1 << 20,
        description=f"largest request of a client; stages take {HOP_ROOM_BYTES >> 20} MiB more between each other",
        json_schema_extra={"metavar": "BYTES"},
    )
    token_file: str = Field(
        "",
        description="file with the token of the stack, which stages ask for; or the token itself in OMNISTAGE_TOKEN",
        json_schema_extra={"metavar": "FILE"},
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level that is logged")
    log_format: Literal["auto", "json", "console"] = Field("auto", description="auto: console in a terminal, else JSON lines")
    ready_fd: int = Field(
        -1, description="file descriptor that gets one JSON line when the server is SERVING", json_schema_extra={"metavar": "FD"}
    )
    lifeline_fd: int = Field(-1, description="drain and exit when the other end of this pipe closes", json_schema_extra={"metavar": "FD"})
    liveness_fd: int = Field(
        -1, description="socket on which every question gets a byte while the event loop turns", json_schema_extra={"metavar": "FD"}
    )

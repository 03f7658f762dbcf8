"""Settings of the router."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator
from pydantic_settings import NoDecode

from omnistage.host.addresses import check_replica_address
from omnistage.host.places import HOST_SHARE
from omnistage.host.settings import ServerSettings, setting
from omnistage.router.pipeline import FurtherName

LONE_PATIENCE_S = 5.0
"""The default of `--lone-patience`. A small model is served again in less time."""


class RouterSettings(ServerSettings):
    """Settings that the router takes."""

    pipeline: Annotated[tuple[str, ...], NoDecode] = Field(
        ("smol",),
        description="pipeline names or YAML files, comma-separated, each after NAME= where it is to have another name; "
        "the first is the default",
        json_schema_extra={"metavar": "[NAME=]PIPELINE,..."},
    )
    names: dict[str, tuple[FurtherName, ...]] = Field(
        default_factory=dict,
        description="further names by which a request may name a pipeline, such as those of its checkpoint, as a JSON object of lists",
        json_schema_extra={"metavar": "JSON"},
    )
    stages: Annotated[tuple[tuple[str, str], ...], NoDecode] = Field(
        (),
        description="addresses of the stages, comma-separated; also PIPELINE/KIND=HOST:PORT; repeat a kind for replicas, "
        "or write dns:///NAME:PORT for one at every address of a name",
        json_schema_extra={"metavar": "KIND=HOST:PORT,..."},
    )
    max_sessions: int = Field(0, ge=0, le=4096, description="answers at once; 0: as many as the replicas of the scarcest stage take")
    stall_limit: float = setting(10.0, "SECONDS", "seconds that a client may leave its answer unread", is_of_stack=True, gt=0)
    client_share: float = setting(
        HOST_SHARE,
        "PART",
        "greatest part of the places that one host may hold; also one client of a host, told by its x-api-key",
        is_of_stack=True,
        gt=0,
        le=1,
    )
    lone_patience: float = setting(
        LONE_PATIENCE_S,
        "SECONDS",
        "seconds that an answer waits for a lost stage without another replica, if no launcher says that it starts it again",
        ge=0,
    )
    idle_unload: Annotated[tuple[tuple[str, float], ...], NoDecode] = Field(
        (),
        description="have the launcher unload a pipeline after so many seconds without a request",
        json_schema_extra={"metavar": "PIPELINE=SECONDS,..."},
    )
    launcher_fd: int = Field(
        -1, description="a socket to the launcher, which tells what it starts again", json_schema_extra={"metavar": "FD"}
    )
    start_fd: int = Field(
        -1, description="do not look for the stages before the other end of this pipe closes", json_schema_extra={"metavar": "FD"}
    )

    @field_validator("pipeline", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("stages", mode="before")
    @classmethod
    def _pairs(cls, value: object) -> object:
        """KIND=HOST:PORT,... as pairs of kind and address; a value that is no text is returned itself."""
        pairs = _name_pairs(value, "KIND=HOST:PORT")
        return value if pairs is None else tuple((stage, check_replica_address(address)) for stage, address in pairs)

    @field_validator("idle_unload", mode="before")
    @classmethod
    def _limits(cls, value: object) -> object:
        """PIPELINE=SECONDS,... as pairs; a value that is no text is returned itself."""
        pairs = _name_pairs(value, "PIPELINE=SECONDS")
        return value if pairs is None else pairs


def _name_pairs(value: object, form: str) -> list[tuple[str, str]] | None:
    """The pairs of a text NAME=VALUE,...; None for a value that is no text. form: of one pair, for the error. Raises ValueError."""
    if not isinstance(value, str):
        return None
    pairs = [part.strip().partition("=") for part in value.split(",") if part.strip()]
    if not all(name and equals and each for name, equals, each in pairs):
        raise ValueError(f"must be {form}[,{form}...]")
    return [(name, each) for name, _, each in pairs]

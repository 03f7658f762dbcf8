"""Settings of the router."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator
from pydantic_settings import NoDecode

from omnistage.host.addresses import check_replica_address
from omnistage.host.places import HOST_SHARE
from omnistage.host.settings import ServerSettings, setting
from omnistage.router.pipeline import FurtherName


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
        if not isinstance(value, str):
            return value
        pairs = [part.strip().partition("=") for part in value.split(",") if part.strip()]
        if not all(stage and equals and address for stage, equals, address in pairs):
            raise ValueError("must be KIND=HOST:PORT[,KIND=HOST:PORT...]")
        return tuple((stage, check_replica_address(address)) for stage, _, address in pairs)

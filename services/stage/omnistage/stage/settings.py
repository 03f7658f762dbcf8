"""Settings of a stage server."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator
from pydantic_settings import NoDecode

from omnistage.host.settings import ServerSettings


class StageSettings(ServerSettings):
    """What every kind of stage can be told."""

    model: str = Field(description="name of the model family in the registry")
    model_path: str = Field("", description="folder of a checkpoint; empty: the family's own default")
    options: dict[str, int | float | str | bool] = Field(default_factory=dict, description="JSON object of options of the family")
    device: str = Field("cpu", description="cpu or cuda:N")
    dtype: str = Field("auto", description="auto, float32 or bfloat16")
    threads: int = Field(1, ge=1, le=64, description="torch threads; more than one only where it was measured to help")
    max_sessions: int = Field(0, ge=0, le=4096, description="sessions at once; 0: the model's own limit")
    allow: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="HOST:PORT patterns of next hops that may be dialled, comma-separated"
    )
    inline_limit: int = Field(64 << 10, ge=0, description="tensors below this many bytes travel in the message")
    arena_bytes: int = Field(-1, ge=-1, description="shared memory for tensors; -1: a share of what is free; 0: none")
    replay_limit: int = Field(
        64 << 20, ge=0, description="bytes that a session keeps of what it sent to the next hop, for a replacement of it"
    )
    session_limit: float = Field(600.0, gt=0, description="seconds that a session without a deadline may take")

    @field_validator("allow", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

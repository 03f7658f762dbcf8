"""Settings of a stage server, and the allow-list in them: the addresses that a stage may dial."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable
from typing import Annotated, Any, Literal, get_type_hints

import structlog
from pydantic import AfterValidator, Field, create_model, field_validator
from pydantic_settings import NoDecode

from omnistage.connector import INLINE_LIMIT
from omnistage.host.addresses import Name, Resolver, SystemResolver, check_address, check_replica_address, name_of
from omnistage.host.background import SHORTAGES
from omnistage.host.settings import ServerSettings, setting
from omnistage.models.options import DEFAULTS, SETTING_ABOUT, LoadOptions

log = structlog.get_logger("omnistage.stage.allowlist")

KEPT_S = 1.0
"""Seconds for which the result of a lookup, even an empty result, counts as current."""

_NUMERIC = re.compile(r"(\[.*\]|[0-9.]+):[0-9]+")


def check_entry(entry: str) -> str:
    """The entry, if it is a valid one of an allow-list: HOST:PORT, or dns:///NAME:PORT. Raises ValueError that says what to write."""
    if "*" in entry or "?" in entry:
        raise ValueError(
            f"{entry!r} is a pattern: write each address, HOST:PORT,HOST:PORT, or a name that stands for all addresses it has, such as "
            f"talker:50051"
        )
    return check_replica_address(entry)


class AllowList:
    """The addresses that a stage may dial. An address is allowed if an entry is written the same way, or if an entry's name has it now. An
    address that is not plain HOST:PORT, such as a gRPC target with a scheme, is never allowed.
    """

    def __init__(self, entries: Iterable[str], resolve: Resolver | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """resolve: finds the addresses of names; None: the system's resolver. clock: in seconds. Raises ValueError for a pattern."""
        checked = [check_entry(entry) for entry in entries]
        self._exact = frozenset(checked)
        # A name with a port stands for all addresses of the name, like an entry dns:///NAME:PORT.
        names = [name_of(entry if name_of(entry) else f"dns:///{entry}") for entry in checked if not _NUMERIC.fullmatch(entry)]
        self._names = tuple(dict.fromkeys(name for name in names if name is not None))
        self._resolve = resolve or SystemResolver()
        self._clock = clock
        self._lookups: dict[Name, tuple[float, Collection[str]]] = {}  # time and result of the last lookup

    async def allows(self, address: str) -> bool:
        """Whether the address may be dialled now. If a name is on the list, waits for its lookup as long as the resolver does."""
        try:
            check_address(address)
        except ValueError:
            return False
        if address in self._exact:
            return True
        port = address.rpartition(":")[2]
        for name in self._names:
            if str(name.port) == port and address in await self._addresses(name):
                return True
        return False

    async def _addresses(self, name: Name) -> Collection[str]:
        """The addresses of the name now; if the lookup fails, its last addresses, because DNS is down more often than a name moves."""
        looked_up_at, addresses = self._lookups.get(name, (-KEPT_S, ()))  # -KEPT_S: long ago for every clock.
        if self._clock() < looked_up_at + KEPT_S:
            return addresses
        try:
            addresses = frozenset(await self._resolve(name))
        except SHORTAGES as error:
            log.warning("allow.name_not_found", name=str(name), why=str(error))
        self._lookups[name] = (self._clock(), addresses)
        return addresses


def check_device(text: str) -> str:
    """The text, if it names a device. Raises ValueError."""
    if not re.fullmatch(r"cpu|cuda(:\d{1,2})?", text, re.ASCII):
        raise ValueError(f"{text[:80]!r} is no device: give cpu, cuda or cuda:N")
    return text


Device = Annotated[str, AfterValidator(check_device), Field(json_schema_extra={"metavar": "cpu|cuda:N"})]


def _load_settings() -> Any:
    """The settings of a server that loads a model: a field for each setting of `LoadOptions` that not every model uses."""
    kinds, made = get_type_hints(LoadOptions), dict[str, Any]()
    for name, about in SETTING_ABOUT.items():
        default: Any = DEFAULTS[name]
        bounds: dict[str, Any] = {"gt" if about.above_least else "ge": about.least, "le": about.most}
        text = f"{about.text[:1].lower()}{about.text[1:].removesuffix('.')}"
        if not default:
            bounds, text = {"ge": None if default is None else 0, "le": about.most}, f"{text}; {default or 0}: {about.default_text}"
        made[name] = (kinds[name], setting(default, about.metavar, text, **bounds))
    return create_model("LoadSettings", __base__=ServerSettings, **made)


class StageSettings(_load_settings()):  # type: ignore[misc]  # A class that is made when this runs.
    """Settings that every kind of stage takes."""

    family: str = Field(description="family of models, such as smol", json_schema_extra={"metavar": "FAMILY"})
    checkpoint: str = Field("", description="folder of a checkpoint; empty: the family's own default", json_schema_extra={"metavar": "DIR"})
    options: dict[str, int | float | str | bool] = Field(
        default_factory=dict, description="options of the family as a JSON object", json_schema_extra={"metavar": "JSON"}
    )
    device: Device = Field("cpu", description="where to compute")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="number format of the weights; auto: by the processor or device; replicas in unlike formats have unlike revisions",
    )
    max_sessions: int = Field(0, ge=0, le=4096, description="sessions at once; 0: the model's own limit")
    allow: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="next hops that may be dialled, comma-separated; a name stands for all addresses that it has",
        json_schema_extra={"metavar": "HOST:PORT,..."},
    )
    inline_limit: int = setting(INLINE_LIMIT, "BYTES", "tensors below this many bytes travel in the message", is_of_stack=True, ge=0)
    arena_bytes: int = Field(
        -1, ge=-1, description="shared memory for tensors; -1: a share of what is free; 0: none", json_schema_extra={"metavar": "BYTES"}
    )
    replay_limit: int = Field(
        64 << 20,
        ge=0,
        description="bytes that a session keeps of what it sent to the next hop, for a replacement of it",
        json_schema_extra={"metavar": "BYTES"},
    )
    trusted_uids: Annotated[tuple[int, ...], NoDecode] = Field(
        (),
        description="users besides our own whose tensors are read out of their shared memory, by copies; comma-separated",
        json_schema_extra={"metavar": "UID,..."},
    )

    @field_validator("allow", "trusted_uids", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("allow", mode="after")
    @classmethod
    def _check_entries(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(check_entry(entry) for entry in value)

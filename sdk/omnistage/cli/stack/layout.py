"""Describes a stack: its stages, their models and devices, and how many processes each stage has."""

from __future__ import annotations

import ipaddress
import json
import math
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omnistage.host.settings import ServerSettings

ANY_PORT = "127.0.0.1:0"

DEFAULT_ADDRESS = "127.0.0.1:50050"
"""Where `omnistage serve` listens by default."""

DEFAULT_HTTP = "127.0.0.1:8000"
"""Where its gateway listens by default; if that port is taken, at the next free one. A typed port is not moved."""

ROUTER, GATEWAY = "router", "gateway"
"""Names of the two processes that are no stages."""

DEFAULT_PIPELINES = ("smol", "picture")
"""The pipelines that are served if none is named, as far as this machine can serve them; the first of them starts first. Only this place
names them."""


LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "[::1]"}
"""By kind of address: the host by which this machine reaches a server that listens at all addresses."""


@dataclass(frozen=True, slots=True)
class StageLayout:
    """The settings with which the servers of one stage are started.

    kind: of the stage, such as thinker. family: the family of its model. checkpoint: the folder of the model; empty: the family's own.
    device, dtype: where and in which numbers the model computes. replicas: number of processes. settings: further options of the servers,
    by name. options: the family's own, from the pipeline's file.
    """

    kind: str
    family: str
    checkpoint: str = ""
    device: str = "cpu"
    dtype: str = "auto"
    replicas: int = 1
    settings: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options that the servers of one stack share. address, metrics_address: HOST:PORT of the router and of its metrics. http: HOST:PORT of
    the gateway; empty: there is none. http_may_move: if its port is taken, the gateway takes the next free one. metrics: HOST:PORT where
    the launcher shows the metrics of all processes; empty: nowhere. otlp: URL of the collector that gets the spans of all processes; empty:
    none, unless a variable names one. idle_limit_s: the stack ends by itself after so many seconds without a request; 0: never.
    idle_unload_s: after how many seconds without a request a pipeline is unloaded, by its name; "" stands for all others; 0: never.
    max_sessions: 0: the servers' own. settings: further settings, by name, each for the servers that have it."""

    address: str = ANY_PORT
    http: str = ""
    http_may_move: bool = False
    metrics_address: str = ANY_PORT
    metrics: str = ""
    max_sessions: int = 0
    grace_s: float = 5.0
    idle_limit_s: float = 0.0
    idle_unload_s: Mapping[str, float] = field(default_factory=dict)
    otlp: str = ""
    settings: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PipelineLayout:
    """One pipeline of a stack. name: as typed, or of its file, or made of its checkpoint. source: the name, or the path of the file, by
    which the router finds it. names: further names by which people know it, those of its checkpoint."""

    name: str
    source: str
    stages: Sequence[StageLayout]
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StageServers:
    """The servers of one stage, shared by all pipelines that have this stage. name: of its processes, for people and logs; it begins with
    the name of a pipeline if the stack has other servers of the same kind. pipelines: their names."""

    name: str
    stage: StageLayout
    pipelines: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """The names of its processes."""
        return [self.name] if self.stage.replicas == 1 else [f"{self.name}-{index}" for index in range(self.stage.replicas)]


@dataclass(frozen=True, slots=True)
class Layout:
    """A whole stack. pipelines: the first of them starts first. notes: lines for the user who starts the stack."""

    pipelines: Sequence[PipelineLayout]
    servers: ServerOptions = field(default_factory=ServerOptions)
    notes: Sequence[str] = ()

    @property
    def names(self) -> str:
        """The names of the pipelines in one text, for people."""
        return ", ".join(pipeline.name for pipeline in self.pipelines)

    @property
    def fronts(self) -> list[str]:
        """The names of the processes that clients ask."""
        return [GATEWAY, ROUTER] if self.servers.http else [ROUTER]

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of all stages."""
        return frozenset(stage.kind for pipeline in self.pipelines for stage in pipeline.stages)

    @property
    def only_draws(self) -> bool:
        """Whether all pipelines only draw, so that none answers a question."""
        return "diffusion" in self.kinds and "thinker" not in self.kinds

    @property
    def groups(self) -> list[StageServers]:
        """The servers of all stages. Two pipelines share servers if their stages are equal in all settings."""
        servers: list[StageServers] = []
        for pipeline in self.pipelines:
            for stage in pipeline.stages:
                position = next((index for index, group in enumerate(servers) if group.stage == stage), None)
                if position is None:
                    servers.append(StageServers(stage.kind, stage, (pipeline.name,)))
                else:
                    servers[position] = replace(servers[position], pipelines=(*servers[position].pipelines, pipeline.name))
        kinds = [group.stage.kind for group in servers]
        return [group if kinds.count(group.name) == 1 else replace(group, name=f"{group.pipelines[0]}-{group.name}") for group in servers]

    def stage_arguments(self, stage: StageLayout, neighbours: Sequence[str]) -> list[str]:
        """The command line of one stage server, without its own addresses. neighbours: HOST:PORT of the stage servers that it may connect
        to."""
        from omnistage.stage.settings import StageSettings  # Imported here, because a help text does without.

        options = {
            "family": stage.family,
            "allow": ",".join(neighbours),
            "device": stage.device,
            "dtype": stage.dtype,
            "grace": self.servers.grace_s,
            **stage.settings,
            "checkpoint": stage.checkpoint or None,
            "options": json.dumps(dict(stage.options)) if stage.options else None,
        }
        return option_words(options | self._shared_options(StageSettings))

    def router_arguments(self, addresses: Sequence[tuple[str, str]]) -> list[str]:
        """The command line of the router, without its own addresses. addresses: (PIPELINE/KIND, HOST:PORT) of every stage server."""
        from omnistage.router.settings import RouterSettings  # Imported here, because a help text does without.

        limits_s = self.servers.idle_unload_s
        limits = [f"{one.name}={limit:g}" for one in self.pipelines if (limit := limits_s.get(one.name, limits_s.get("", 0.0)))]
        options = {
            "pipeline": ",".join(one.source if one.source == one.name else f"{one.name}={one.source}" for one in self.pipelines),
            "names": json.dumps(names) if (names := {one.name: one.names for one in self.pipelines if one.names}) else None,
            "idle_unload": ",".join(limits) or None,
            "stages": ",".join(f"{stage}={address}" for stage, address in addresses),
            "grace": self.servers.grace_s,
        }
        return option_words(options | self._shared_options(RouterSettings))

    def _shared_options(self, kind: type[ServerSettings]) -> dict[str, object]:
        """Options of the servers with settings of this kind that are given for the whole stack."""
        settings = {name: value for name, value in self.servers.settings.items() if name in kind.model_fields}
        return {"max_sessions": self.servers.max_sessions or None, "otlp": self.servers.otlp or None, **settings}

    def gateway_arguments(self, router: str) -> list[str]:
        """The command line of the gateway, without its own addresses. router: HOST:PORT of the router that it asks."""
        return ["--router", reachable_address(router), "--grace", str(self.servers.grace_s)]


def reachable_address(address: str) -> str:
    """The address by which this machine reaches a server that listens at HOST:PORT. It is loopback if the server listens at all addresses,
    else the same address."""
    host, _, port = address.rpartition(":")
    try:
        # "All addresses" has several spellings: 0, 0.0.0.0, [::], [::0].
        places = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except OSError:
        return address  # The host is a name.
    family, *_, (ip_text, *_) = places[0]
    ip = ipaddress.ip_address(str(ip_text).partition("%")[0])  # In IPv6 the name of an interface may stand after a percent sign.
    return f"{LOOPBACK[family]}:{port}" if ip.is_unspecified else address


def move_port(address: str, others: Collection[str]) -> str:
    """HOST:PORT with the first port that no address in `others` has, counted up from the port of `address`."""
    host, _, port = address.rpartition(":")
    return address if int(port) not in _ports(others) else move_port(f"{host}:{int(port) + 1}", others)


def room(address: str, others: Collection[str], max_ports: int) -> int:
    """The number of successive ports that no address in `others` has; the first is that of `address`. At most `max_ports`."""
    first = int(address.rpartition(":")[2])
    return next((count for count in range(1, max_ports) if first + count in _ports(others)), max_ports)


def _ports(addresses: Collection[str]) -> set[int]:
    """The ports of addresses; an empty address and port 0 have none."""
    return {int(address.rpartition(":")[2] or 0) for address in addresses} - {0}


def flag(setting: str) -> str:
    """The command-line option of a setting."""
    return f"--{setting.replace('_', '-')}"


def option_words(options: Mapping[str, object]) -> list[str]:
    """Options as words of a command line, without those that are None."""
    return [word for name, value in options.items() if value is not None for word in (flag(name), str(value))]


def by_stage(words: Sequence[str], option: str) -> dict[str, str]:
    """Read [PIPELINE/]STAGE=VALUE words into a mapping from stages to values. A bare VALUE is for every stage and has the key "". option:
    the option by which they were typed, for errors. Raises ValueError that says what is wrong."""
    from omnistage.wire.proto_values import KINDS  # Imported here, because a help text does without the protos.

    values: dict[str, str] = {}
    for word in words:
        stage, equals, value = word.partition("=")
        pipeline, slash, kind = stage.rpartition("/")
        if not equals and word:
            values[""] = word
        elif kind not in KINDS or not value or (slash and not pipeline):
            raise ValueError(f"{option} {word}: expected [PIPELINE/]STAGE=VALUE with a stage of {', '.join(KINDS)}")
        else:
            values[stage] = value
    return values


def of_pipeline(values: Mapping[str, str], pipeline: str) -> dict[str, str]:
    """The values for the stages of one pipeline, by stage. A value for PIPELINE/STAGE wins over a value for STAGE. The key "" stands for
    all stages."""
    prefix = f"{pipeline}/"
    shared = {stage: value for stage, value in values.items() if "/" not in stage}
    return shared | {stage.removeprefix(prefix): value for stage, value in values.items() if stage.startswith(prefix)}


def counts(words: Sequence[str], option: str) -> dict[str, str]:
    """Read [PIPELINE/]STAGE=N words, N from 1 to 64, into a mapping from stages to N. option: as in `by_stage`. Raises ValueError."""
    values = by_stage(words, option)
    for stage, value in values.items():
        if not stage or not value.isdecimal() or not 1 <= int(value) <= 64:
            word = f"{stage}={value}" if stage else value
            raise ValueError(f"{option} {word}: expected [PIPELINE/]STAGE=N such as talker=2, N from 1 to 64")
    return values


def seconds_by_pipeline(words: Sequence[str], option: str) -> dict[str, float]:
    """Read [PIPELINE=]SECONDS words into a mapping from pipelines to seconds. A bare SECONDS is for every pipeline and has the key "".
    option: as in `by_stage`. Raises ValueError."""
    limits_s: dict[str, float] = {}
    for word in words:
        pipeline, _, seconds = word.rpartition("=")
        if pipeline in limits_s:
            raise ValueError(f"{option} {word}: {pipeline or 'a time for all pipelines'} is given twice")
        try:
            limits_s[pipeline] = float(seconds)
        except ValueError:
            limits_s[pipeline] = math.nan
        if not 0 <= limits_s[pipeline] < math.inf or word.startswith("="):
            raise ValueError(f"{option} {word}: expected [PIPELINE=]SECONDS, such as 600 or picture=60; 0 is never")
    return limits_s

"""Finds errors in a stack's settings before any of its processes is started, and before torch is imported."""

from __future__ import annotations

import os
from collections.abc import Mapping

from omnistage.cli.layout import Layout
from omnistage.client.errors import StackError
from omnistage.host.addresses import check_address, check_can_listen
from omnistage.host.errors import StartError
from omnistage.host.settings import read_settings
from omnistage.host.token import FILE_VARIABLE, read_token
from omnistage.models.options import LoadOptions
from omnistage.models.registry import check as check_model
from omnistage.models.reports import LoadError
from omnistage.router.settings import RouterSettings
from omnistage.stage.settings import StageSettings

PROGRAM = "omnistage serve"
UNKNOWN = "127.0.0.1:1"
"""Stands for the address of a stage, which is not chosen yet."""


def check(layout: Layout, *, of_models: bool = True) -> None:
    """Run the checks that the servers themselves make of their settings. of_models: run the models' checks too. Raises StackError with a
    text of one line."""
    servers = layout.servers
    try:
        for pipeline in layout.pipelines:
            if "," in pipeline.source:
                raise StartError(f"{pipeline.source}: a router takes several pipelines with commas between; rename the file")
        read_token(os.environ.get(FILE_VARIABLE, ""), os.environ)
        listening = {"--address": servers.address, "--metrics-address": servers.metrics_address}
        if servers.metrics:
            listening["--metrics"] = servers.metrics
        if servers.http:
            _check_typed("--http", servers.http)
            check_can_listen(f"{servers.http.rpartition(':')[0]}:0", "--http")  # If its port is taken, the gateway takes the next.
        for option, address in listening.items():
            _check_typed(option, address)
        for stage in (group.stage for group in layout.groups):
            settings = read_settings(StageSettings, layout.stage_arguments(stage, [UNKNOWN]), PROGRAM)
            if of_models:
                check_model(stage.family, stage.kind, LoadOptions.of(settings))
        stages = [(f"{pipeline.name}/{stage.kind}", UNKNOWN) for pipeline in layout.pipelines for stage in pipeline.stages]
        words = layout.router_arguments(stages)
        read_settings(RouterSettings, [*words, "--address", servers.address, "--metrics-address", servers.metrics_address], PROGRAM)
        _check_apart(listening)
        for option, address in listening.items():
            check_can_listen(address, option)
    except (StartError, LoadError) as error:
        raise StackError(str(error)) from None


def _check_apart(listening: Mapping[str, str]) -> None:
    """Raises StartError if two options have the same address. listening: by option, the address at which a server will listen."""
    option_by_address: dict[str, str] = {}
    for option, address in listening.items():
        other = option_by_address.setdefault(address, option)
        if other != option and not address.endswith(":0"):
            raise StartError(f"{option}: {address} is the {other} too; give each its own port")


def _check_typed(option: str, address: str) -> None:
    """Raises StartError for a text that is no address."""
    try:
        check_address(address)
    except ValueError as error:
        raise StartError(f"{option}: {error}") from None

"""Tables, or JSON, of what a router offers and what runs behind it."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from omnistage.cli.connect import connected
from omnistage.cli.layout import Layout
from omnistage.client.listing import Model, Replica

STATUS_KEYS = ("stage", "address", "pid", "state", "sessions", "queue", "transport")


async def show_models(target: str | Layout, as_json: bool, timeout_s: float, verbose: bool) -> None:
    """The pipelines of a router; as JSON {"models": [{name, stages, inputs, outputs, voices, description}]}."""
    async with connected(target, timeout_s, verbose) as omni:
        models = await omni.models(timeout_s=timeout_s)
    print(json.dumps({"models": [asdict(model) for model in models]})) if as_json else _console().print(_models_table(models))


async def show_status(target: str | Layout, as_json: bool, timeout_s: float, verbose: bool) -> None:
    """The stage servers behind a router; as JSON {"replicas": [{stage, address, pid, state, sessions, queue, transport}]}."""
    async with connected(target, timeout_s, verbose) as omni:
        replicas = await omni.replicas(timeout_s=timeout_s)
    if as_json:
        print(json.dumps({"replicas": [{key: getattr(replica, key) for key in STATUS_KEYS} for replica in replicas]}))
    else:
        _console().print(_status_table(replicas))


def _console() -> Console:
    """As wide as the terminal; wide enough for every column where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=200)


def _models_table(models: list[Model]) -> Table:
    table = Table("name", "stages", "takes", "gives", "voices", "about", box=None, header_style="dim")
    for model in models:
        lists = (" > ".join(model.stages), ", ".join(model.inputs), ", ".join(model.outputs), ", ".join(model.voices))
        table.add_row(f"[bold]{model.name}[/]", *lists, model.description)
    return table


def _status_table(replicas: list[Replica]) -> Table:
    table = Table("pipeline", "stage", "model", box=None, header_style="dim")
    for name in ("address", "pid", "state", "sessions", "queue"):
        table.add_column(name, no_wrap=True)
    table.add_column("transport")
    colours = {"serving": "green", "draining": "yellow"}
    for replica in replicas:
        state = f"[{colours.get(replica.state, 'red')}]{replica.state}[/]"
        # Of a lost one nobody knows; its process has probably ended.
        pid, sessions, queue = ("-",) * 3 if replica.state == "lost" else map(str, (replica.pid, replica.sessions, replica.queue))
        known = (replica.pipeline, f"[bold]{replica.stage}[/]", replica.model or "-", replica.address)
        table.add_row(*known, pid, state, sessions, queue, replica.transport or "-")
    return table

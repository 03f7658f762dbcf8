"""Tables, or JSON, of what a router offers and what runs behind it. Neither starts anything."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from omnistage.cli.connect import connected
from omnistage.cli.notices import Notices
from omnistage.cli.targets import DEFAULT_ADDRESS, must_run, running
from omnistage.client.listing import Model, Replica
from omnistage.router.pipeline import load_pipeline, shipped_pipelines

STATUS_KEYS = ("stage", "address", "pid", "state", "sessions", "queue", "transport")
COLUMNS = ("pipeline", "stage", "model", "address", "pid", "state", "sessions", "queue", "transport")
DROPPED = ("transport", "model", "pipeline", "queue", "pid")
"""The columns that a narrow terminal does without, the first of them first."""

WIDE = 200
"""Wider than any row."""

COLOURS = {"serving": "green", "draining": "yellow"}


async def show_models(address: str | None, as_json: bool, timeout_s: float, verbose: bool) -> None:
    """The pipelines of a router; as JSON {"models": [{name, stages, inputs, outputs, voices, description}]}.

    address: None for the one where `omnistage serve` puts it, and without one there the pipelines that it could serve.
    """
    target = address if address is not None else await running()
    if target is None:
        models = [_model_of(name) for name in shipped_pipelines()]
        Notices().say(f"[dim]nothing serves at {DEFAULT_ADDRESS}; these are what `omnistage serve NAME` can start[/]")
    else:
        async with connected(target, timeout_s, verbose) as omni:
            models = await omni.models(timeout_s=timeout_s)
    print(json.dumps({"models": [asdict(model) for model in models]})) if as_json else _console().print(_models_table(models))


async def show_status(address: str | None, as_json: bool, timeout_s: float, verbose: bool) -> None:
    """The stage servers behind a router; as JSON {"replicas": [{stage, address, pid, state, sessions, queue, transport}]}.

    address: None for the one where `omnistage serve` puts it. Raises UnavailableError where nothing runs.
    """
    async with connected(address if address is not None else await must_run(), timeout_s, verbose) as omni:
        replicas = await omni.replicas(timeout_s=timeout_s)
    if as_json:
        print(json.dumps({"replicas": [{key: getattr(replica, key) for key in STATUS_KEYS} for replica in replicas]}))
    else:
        console = _console()
        console.print(_fitting(replicas, console))


def _model_of(pipeline_name: str) -> Model:
    """What its file says. Which voices a pipeline has, only its stages know."""
    pipeline = load_pipeline(pipeline_name)
    return Model(
        name=pipeline.name,
        stages=tuple(stage.kind for stage in pipeline.stages),
        inputs=pipeline.inputs,
        outputs=pipeline.outputs,
        voices=(),
        description=pipeline.description,
    )


def _console() -> Console:
    """As wide as the terminal; wide enough for every column where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDE)


def _models_table(models: Sequence[Model]) -> Table:
    table = Table(box=None, header_style="dim")
    for name in ("name", "stages", "takes", "gives", "voices", "about"):
        table.add_column(name, no_wrap=name == "name")
    for model in models:
        lists = (" > ".join(model.stages), ", ".join(model.inputs), ", ".join(model.outputs), ", ".join(model.voices))
        table.add_row(f"[bold]{model.name}[/]", *lists, model.description)
    return table


def _fitting(replicas: Sequence[Replica], console: Console) -> Table:
    """The table with as many columns as fit; what stays is whole."""
    unbounded = console.options.update(width=WIDE)
    columns = list(COLUMNS)
    table = _status_table(replicas, columns)
    for dropped in DROPPED:
        if console.measure(table, options=unbounded).maximum <= console.width:
            break
        columns.remove(dropped)
        table = _status_table(replicas, columns)
    return table


def _status_table(replicas: Sequence[Replica], columns: Sequence[str]) -> Table:
    table = Table(box=None, header_style="dim")
    for name in columns:
        table.add_column(name, no_wrap=True)
    for replica in replicas:
        cells = _cells(replica)
        table.add_row(*(cells[name] for name in columns))
    return table


def _cells(replica: Replica) -> dict[str, str]:
    # Of a lost one nobody knows; its process has probably ended.
    pid, sessions, queue = ("-",) * 3 if replica.state == "lost" else map(str, (replica.pid, replica.sessions, replica.queue))
    return {
        "pipeline": replica.pipeline,
        "stage": f"[bold]{replica.stage}[/]",
        "model": replica.model or "-",
        "address": replica.address,
        "pid": pid,
        "state": f"[{COLOURS.get(replica.state, 'red')}]{replica.state}[/]",
        "sessions": sessions,
        "queue": queue,
        "transport": replica.transport or "-",
    }

"""Shows the pipelines of a router and its stage servers, as tables or as JSON. It starts nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from omnistage.cli.console import Console, Notices
from omnistage.cli.show.inventory import models_here
from omnistage.cli.stack.layout import reachable_address
from omnistage.cli.stack.served import open_page, served_here
from omnistage.cli.targets import connect_client, must_run, running
from omnistage.client import connection
from omnistage.client.connection import Pipeline, Replica
from omnistage.models.registry import voices
from omnistage.models.reports import bytes_told
from omnistage.router.pipeline import load_pipeline, shipped_pipelines

STATUS_KEYS = ("pipeline", "stage", "address", "pid", "state", "sessions", "queue", "transport", "settings")
COLUMNS = ("pipeline", "stage", "model", "address", "pid", "state", "sessions", "queue", "transport")
DROPPED = ("transport", "model", "pipeline", "queue", "pid", "sessions")
DROPPED_OF_SEVERAL = ("transport", "model", "queue", "pid", "pipeline", "sessions")
"""The columns that a narrow terminal leaves out, in this order. If there are several pipelines, the second list counts: then their names
stand above their stages."""

WIDE = 200
"""More columns than any row needs."""

_NUMBER = re.compile(r"[0-9]+\b")

COLOURS = {"serving": "green", "draining": "yellow", "starting": "yellow", "unloaded": "yellow"}


async def show_pipelines(address: str | None, api_key: str | None, as_json: bool, timeout_s: float, verbose: bool) -> None:
    """Print the pipelines of a router; as JSON {"pipelines": [{name, stages, inputs, outputs, voices, description, on_request, state,
    names, unsure_outputs}]}.

    address: of the router; None: the one that runs here. If none runs here, this prints the pipelines that `omnistage serve` can start,
    without a state and further names.
    """
    nothing_runs = address is None and running() is None
    if nothing_runs:
        pipelines = [_pipeline_of(name) for name in shipped_pipelines()]
        Notices().tell(f"[dim]nothing serves at {connection.LOCAL_ADDRESS}; these are what `omnistage serve NAME` can start[/]")
    else:
        async with connect_client(must_run(address, api_key), timeout_s, verbose) as omni:
            pipelines = await omni.pipelines(timeout_s=timeout_s)
    if not as_json:
        console = _console()
        console.print(_table_or_lines(*_pipeline_rows(pipelines), console, unwrapped=("name",)))
        return
    hidden = ("state", "names", "unsure_outputs") if nothing_runs else ()
    rows = [{key: value for key, value in asdict(pipeline).items() if key not in hidden} for pipeline in pipelines]
    print(json.dumps({"pipelines": rows}))


async def show_status(address: str | None, api_key: str | None, as_json: bool, timeout_s: float, verbose: bool) -> None:
    """Print the stage servers of a router, by pipeline, and the URL of the page and the folder of the logs if the stack is this user's; as
    JSON {"replicas": [{pipeline, stage, address, pid, state, sessions, queue, transport, settings}], "page": URL or null, "logs": folder or
    null}.

    address: of the router; None: the one that runs here. Raises UnavailableError if none does.
    """
    target = must_run(address, api_key)
    async with connect_client(target, timeout_s, verbose) as omni:
        replicas = _group_replicas(await omni.replicas(timeout_s=timeout_s))
    stacks = [served for served in served_here() if served.address == reachable_address(target.address)]
    page = next(filter(None, map(open_page, stacks)), None)
    logs = next((served.log_folder for served in stacks if served.log_folder), None)
    if as_json:
        rows = [{key: getattr(replica, key) for key in STATUS_KEYS} for replica in replicas]
        print(json.dumps({"replicas": rows, "page": page, "logs": logs}))
    else:
        console = _console()
        console.print(_fit_status(replicas, console))
        places = [(name, place) for name, place in (("page", page), ("logs", logs)) if place]
        # A path that is too long for the terminal is left out; `omnistage logs` finds it anyway.
        lines = [
            f"[bold]{name}[/]  {escape(place)}" for name, place in places if place == page or verbose or len(place) < console.width - 6
        ]
        for line in [*(settings_lines(replicas) if verbose else ()), *([""] if lines else []), *lines]:
            console.tell(line)


async def show_voices(address: str | None, api_key: str | None, as_json: bool, timeout_s: float, verbose: bool) -> None:
    """Print the voices; as JSON {"voices": {pipeline: [name]}}. The first voice of a pipeline is its default.

    address: of the router; None: the one that runs here. If none runs here, this prints the voices that pipelines have with every
    checkpoint.
    """
    if address is None and running() is None:
        pipelines = [load_pipeline(name) for name in shipped_pipelines()]
        speaking = {one.name: [voice for stage in one.stages for voice in voices(stage.family, stage.kind)] for one in pipelines}
        Notices().tell("[dim]nothing serves; of checkpoints that have voices of their own, a router that serves them tells[/]")
    else:
        async with connect_client(must_run(address, api_key), timeout_s, verbose) as omni:
            speaking = {name: list(voice_names) for name, voice_names in (await omni.voices(timeout_s=timeout_s)).items()}
    speaking = {name: voice_names for name, voice_names in speaking.items() if voice_names}
    if as_json:
        print(json.dumps({"voices": speaking}))
        return
    console = _console()
    rows = [(f"[bold]{escape(name)}[/]", escape(", ".join(voice_names))) for name, voice_names in speaking.items()]
    console.print(_table_or_lines(("pipeline", "voices"), rows, console))


def show_models(as_json: bool) -> None:
    """Print the models on this machine; as JSON {"models": [{name, family, bytes, is_here, pipelines, takes, gives}]}."""
    models = models_here()
    if as_json:
        print(json.dumps({"models": [asdict(model) for model in models]}))
        return
    rows = list[tuple[str, ...]]()
    for model in models:
        size = bytes_told(model.bytes) if model.is_here else "not here yet"
        lists = (", ".join(names) for names in (model.takes, model.gives, model.pipelines))
        rows.append((f"[bold]{escape(model.name)}[/]", size, *map(escape, lists)))
    console = _console()
    console.print(_table_or_lines(("name", "size", "takes", "gives", "pipelines"), rows, console, unwrapped=("name", "size")))
    Notices().tell("[dim]serve one: omnistage serve NAME; fetch another: omnistage pull OWNER/NAME[/]")


def settings_lines(replicas: Sequence[Replica]) -> list[str]:
    """The lines below the table, with the settings that the stages chose. Replicas of a stage that chose the same have one line."""
    kinds = [kind for _, kind in {(replica.pipeline, replica.stage) for replica in replicas}]
    lines = list[str]()
    for replica in replicas:
        if replica.settings:
            name = f"{replica.pipeline}/{replica.stage}" if kinds.count(replica.stage) > 1 else replica.stage
            values = (f"[dim]{escape(key)}[/] {escape(_for_humans(key, value))}" for key, value in sorted(replica.settings.items()))
            lines.append(f"[bold]{escape(name)}[/]  {', '.join(values)}")
    return ["", *dict.fromkeys(lines)] if lines else []


def _for_humans(name: str, value: str) -> str:
    """The value of a setting for people: a number of bytes at its beginning becomes one with a unit, and the text after it stays. (--json
    shows the value unchanged.)"""
    number = _NUMBER.match(value)
    if not name.endswith("_bytes") or number is None:
        return value
    return f"{bytes_told(int(number[0]))}{value[number.end() :]}"


def _pipeline_of(pipeline_name: str) -> Pipeline:
    """A shipped pipeline as its file describes it; without voices, which only running stages know."""
    pipeline = load_pipeline(pipeline_name)
    return Pipeline(
        name=pipeline.name,
        stages=tuple(stage.kind for stage in pipeline.stages),
        inputs=pipeline.could_take,
        outputs=pipeline.outputs,
        voices=(),
        description=pipeline.description,
        on_request=pipeline.could_give,
    )


def _console() -> Console:
    """A console as wide as the terminal; if there is none, wide enough for every column."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDE)


def _pipeline_rows(pipelines: Sequence[Pipeline]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """The heads of the columns, and the cells of a row for each pipeline."""
    rows = list[Sequence[str]]()
    for pipeline in pipelines:
        unsure = {name: f"{name} (perhaps)" for name in pipeline.unsure_outputs}
        outputs = [unsure.get(name, name) for name in pipeline.outputs]
        gives = ", ".join([*outputs, *(f"{unsure.get(name, name)} (on request)" for name in pipeline.on_request)])
        lists = (" > ".join(pipeline.stages), ", ".join(pipeline.inputs), gives, ", ".join(pipeline.voices), pipeline.description)
        state = "" if pipeline.state == "ready" else f" [yellow]({pipeline.state})[/]"
        rows.append((f"[bold]{escape(pipeline.name)}[/]{state}", escape(", ".join(pipeline.names)), *map(escape, lists)))
    return ("name", "also called", "stages", "takes", "gives", "voices", "about"), rows


def _table_or_lines(names: Sequence[str], rows: Sequence[Sequence[str]], console: Console, unwrapped: Sequence[str] = ()) -> RenderableType:
    """A table, or lines for each row if a word does not fit into its column. names: of the columns. unwrapped: without line breaks."""
    table = Table(box=None, header_style="dim")
    for name in names:
        table.add_column(name, no_wrap=name in unwrapped)
    for row in rows:
        table.add_row(*row)
    if console.measure(table, options=console.options.update(width=WIDE)).minimum <= console.width:
        return table
    lines = list[RenderableType]()
    for first, *others in rows:
        cells = (f"[dim]{name}:[/] {cell}" for name, cell in zip(names[1:], others, strict=True) if cell)
        lines += [first, *(Padding(line, (0, 0, 0, 2)) for line in cells)]
    return Group(*lines)


def _group_replicas(replicas: Sequence[Replica]) -> list[Replica]:
    """The replicas, those of one pipeline after the other, in the router's order of pipelines."""
    order = list(dict.fromkeys(replica.pipeline for replica in replicas))
    return sorted(replicas, key=lambda replica: order.index(replica.pipeline))


def _fit_status(replicas: Sequence[Replica], console: Console) -> RenderableType:
    """The table of the servers with as many columns as fit uncut. If not even the table with the fewest columns fits, two lines for each
    server."""
    unbounded = console.options.update(width=WIDE)
    columns = list(COLUMNS)
    for dropped in ("", *(DROPPED_OF_SEVERAL if _several(replicas) else DROPPED)):  # The first try has all columns.
        if dropped:
            columns.remove(dropped)
        table = _status_table(replicas, columns)
        if console.measure(table, options=unbounded).maximum <= console.width:
            return table
    cells = [_cells(replica) for replica in replicas]
    return Group(*(f"{one['pipeline']} {one['stage']} {one['state']}\n{one['address']}" for one in cells))


def _several(replicas: Sequence[Replica]) -> bool:
    """Whether the servers belong to several pipelines."""
    return len({replica.pipeline for replica in replicas}) > 1


def _status_table(replicas: Sequence[Replica], columns: Sequence[str]) -> Table:
    """A table of servers with these columns. Without a column for several pipelines, the name of each stands above its servers."""
    table = Table(box=None, header_style="dim")
    for name in columns:
        table.add_column(name, no_wrap=True)
    above = ""
    for replica in replicas:
        if "pipeline" not in columns and _several(replicas) and replica.pipeline != above:
            above = replica.pipeline
            table.add_row(f"[dim]{escape(above)}:[/]")
        cells = _cells(replica)
        table.add_row(*(cells[name] for name in columns))
    return table


def _cells(replica: Replica) -> dict[str, str]:
    """All cells of a server's row, by column."""
    # A lost server's values are unknown, and its process has probably ended; a server that is starting has not reported yet.
    is_away = replica.state in ("lost", "starting", "unloaded")
    pid, sessions, queue = ("-",) * 3 if is_away else map(str, (replica.pid, replica.sessions, replica.queue))
    return {
        "pipeline": escape(replica.pipeline),
        "stage": f"[bold]{escape(replica.stage)}[/]",
        "model": escape(replica.model or "-"),
        "address": escape(replica.address),
        "pid": pid,
        "state": f"[{COLOURS.get(replica.state, 'red')}]{escape(replica.state)}[/]",
        "sessions": sessions,
        "queue": queue,
        "transport": escape(replica.transport or "-"),
    }

"""Prints lines about a stack that serves, in the foreground or detached."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from rich.markup import escape

from omnistage.cli.layout import Layout, flag, reachable_address
from omnistage.cli.notices import Notices
from omnistage.cli.served import Served
from omnistage.client import connection
from omnistage.host.addresses import host_and_port, is_loopback
from omnistage.models.options import GPU_MEMORY

CONNECT_LIMIT_S = 1.0


def warn(layout: Layout, notices: Notices) -> None:
    """Print all warnings about a stack before it starts."""
    for note in layout.notes:
        notices.tell(escape(note))
    stages = [group.stage for group in layout.groups]
    shares = {stage.settings[GPU_MEMORY] for stage in stages if stage.device == "cpu" and GPU_MEMORY in stage.settings}
    if shares:
        notices.tell(f"{flag(GPU_MEMORY)} {escape(', '.join(sorted(shares)))} means nothing on a CPU")
    addresses = dict.fromkeys(filter(None, (layout.servers.address, layout.servers.http)))
    open_ones = [address for address in addresses if not is_loopback(host_and_port(address)[0])]
    if open_ones:
        notices.tell(
            f"[yellow]{escape(' and '.join(open_ones))} can be reached from other hosts: nothing is encrypted, and nobody is asked for a "
            "key; see docs/security.md[/]"
        )


def announce(
    notices: Notices,
    address: str,
    layout: Layout,
    *,
    pid: int = 0,
    http: str = "",
    metrics: str = "",
    log_folder: str = "",
) -> None:
    """Print where a stack serves. layout: its first pipeline serves, and its others are starting. pid: of the launcher; 0: this process is
    it. http: HOST:PORT of the gateway. metrics: HOST:PORT of the metrics of all processes. log_folder: where the processes' output goes;
    empty: to the terminal."""
    router_address = reachable_address(address)
    is_found = router_address == connection.LOCAL_ADDRESS  # Other commands look for a router at this address by themselves.
    end = f"pid {pid}; `omnistage stop{'' if is_found else f' {router_address}'}` ends it" if pid else "Ctrl-C ends it"
    notices.tell(f"[bold green]serving[/] on {escape(address)}   ({escape(end)})")
    option = "" if is_found else f" --address {router_address}"
    if http:
        notices.tell(f"page:     [bold]{page(http)}[/]   [dim]({escape(_about_http(layout.servers.http, http))})[/]")
    for name, text in _lines(option, layout, metrics, log_folder):
        notices.say(f"[dim]{f'{name}:':<10}{escape(text)}[/]")
    if layout.servers.idle_limit_s:
        notices.tell(f"[dim]idle:     it ends by itself when nobody has asked for {layout.servers.idle_limit_s:g} s[/]")


def page(http: str) -> str:
    """The URL of a gateway for a browser on this machine."""
    return f"http://{reachable_address(http)}"


def open_page(served: Served) -> str:
    """The URL of a stack's page; empty if no process listens there, because the stack has no gateway, or has given it up."""
    if not served.http:
        return ""
    try:
        with socket.create_connection(host_and_port(reachable_address(served.http)), CONNECT_LIMIT_S):
            return page(served.http)
    except OSError:
        return ""


def _about_http(configured_http: str, http: str) -> str:
    """A text about the gateway. configured_http: HOST:PORT where it should listen. http: HOST:PORT where it listens."""
    moved = f"the port of {configured_http} is taken; " if configured_http != http and not configured_http.endswith(":0") else ""
    return f"{moved}OpenAI's interface is below /v1; any key is taken"


def _lines(option: str, layout: Layout, metrics: str, log_folder: str) -> Iterator[tuple[str, str]]:
    """Yields further lines as (name, text). option: that names the router; empty if commands find it by themselves."""
    if layout.only_draws:  # The example is no question, which would be drawn; only the checkpoint says what it can draw.
        yield "ask it", f'omnistage draw "A hill in the rain."{option}   (or film, or sound: `omnistage pipelines{option}` shows which)'
    else:
        yield "ask it", f'omnistage ask "What is a kite?"{option}'
    if starting := [pipeline.name for pipeline in layout.pipelines[1:]]:
        yield "starting", f"{', '.join(starting)}; `omnistage status{option}` shows how far"
    if metrics:
        yield "metrics", f"http://{reachable_address(metrics)}/metrics"
    if log_folder:
        yield "logs", log_folder

"""What is said of a stack that serves, wherever it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.markup import escape

from omnistage.cli.notices import Notices
from omnistage.client import found


def announce(
    notices: Notices, address: str, *, pid: int = 0, starting: Sequence[str] = (), metrics: str = "", log_folder: str = ""
) -> None:
    """pid: of its launcher; 0: this process. starting: the pipelines that do not serve yet. metrics: HOST:PORT of those of all processes.
    log_folder: where the output of the processes goes; empty: onto the terminal."""
    is_found = address == found.LOCAL_ADDRESS  # Where commands look by themselves.
    end = f"pid {pid}; `omnistage stop{'' if is_found else f' {address}'}` ends it" if pid else "Ctrl-C ends it"
    notices.say(f"[bold green]serving[/] on {escape(address)}   ({escape(end)})")
    named = "" if is_found else f" --address {address}"
    for name, text in _lines(named, starting, metrics, log_folder):
        notices.say(f"[dim]{f'{name}:':<10}{escape(text)}[/]")


def _lines(named: str, starting: Sequence[str], metrics: str, log_folder: str) -> Iterator[tuple[str, str]]:
    yield "ask it", f'omnistage ask "What is a kite?"{named}'
    if starting:
        yield "starting", f"{', '.join(starting)}; `omnistage status{named}` shows how far"
    if metrics:
        yield "metrics", f"http://{metrics}/metrics"
    if log_folder:
        yield "logs", log_folder

"""`python -m omnistage.<server>`: from the command line to the exit code."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

from omnistage.host.commandline import read
from omnistage.host.descriptors import raise_limit
from omnistage.host.errors import StartError
from omnistage.host.logs import configure_logs
from omnistage.host.process import cannot_start, run
from omnistage.host.settings import ServerSettings
from omnistage.host.terminal import guard_standard_streams
from omnistage.wire.channel import Credentials as Credentials

S = TypeVar("S", bound=ServerSettings)


def main(name: str, kind: type[S], serve: Callable[[S, Credentials], Awaitable[None]]) -> int:
    """Read the settings and serve until the process is to end. name: the module that `python -m` runs. kind: class of the settings. Returns
    the exit code: 0, or 1 for a server that cannot start. A process that breaks ends with BROKEN."""
    guard_standard_streams()
    try:
        settings = read(kind, sys.argv[1:], f"python -m {name}")
    except StartError as error:
        configure_logs("info", "auto")
        return cannot_start(error)
    configure_logs(settings.log_level, settings.log_format)
    raise_limit()
    return run(lambda: serve(settings, Credentials()), settings.ready_fd)

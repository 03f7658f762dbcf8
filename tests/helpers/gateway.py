"""A gateway of a test's own, as a process, and what asks it over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers.servers import ServerProcess

STARTS = ("omnistage.gateway",)


@contextmanager
def gateway(router: str, log_folder: Path, *flags: str) -> Iterator[ServerProcess]:
    """One in front of the router at this address; its own address is where HTTP is."""
    with ServerProcess("omnistage.gateway", "--router", router, *flags, log_folder=log_folder) as server:
        server.wait_ready()
        yield server

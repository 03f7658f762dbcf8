"""Several HTTP servers of one test, each on a thread, from `with` to its end."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from socketserver import BaseServer


@contextmanager
def running(servers: Sequence[BaseServer], over: threading.Event) -> Iterator[None]:
    """over: set at the end, before they are shut down, for requests that still wait in them."""
    threads = [threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for server in servers:
            server.shutdown()
            server.server_close()
        for thread in threads:
            thread.join()

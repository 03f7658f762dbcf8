"""A poor server: it may have few descriptors, or everything fails that it can do without.

    python -m helpers.poor MODULE DESCRIPTORS ERROR FLAGS...

DESCRIPTORS: as many as it may have; 0: as this process. ERROR: the error that the work of every thread and task raises, once for each when
it begins, if a server can do without that work; empty: none. Each writes its name on standard error when it has failed.
"""

from __future__ import annotations

import errno
import os
import resource
import runpy
import sys
from collections.abc import Callable
from typing import Any

SPARE = {
    "settle": ("omnistage.host.process", "use_huge_pages"),
    "log": ("omnistage.host.logs", "LogWriter._write"),
    "metrics": ("omnistage.host.metrics", "_Server.serve_forever"),
    "visitor": ("omnistage.host.metrics", "_Server.finish_request"),
    "visitor's error": ("omnistage.host.metrics", "_Server.handle_error"),
    "watchdog's look": ("omnistage.host.watchdog", "read_threads"),
    "tidy": ("omnistage.stage.server", "tidy"),
}
"""Where a server does what it can do without: a module, and a function in it."""

ERRORS: dict[str, BaseException] = {
    "OSError": OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
    "MemoryError": MemoryError(),
    "RuntimeError": RuntimeError("can't start new thread"),
}


def fail_once(name: str, module: str, path: str, error: BaseException) -> None:
    """Have a function fail the first time that it is called."""
    owner: Any = sys.modules.get(module) or __import__(module, fromlist=["_"])
    *parts, last = path.split(".")
    for part in parts:
        owner = getattr(owner, part)
    works: Callable[..., Any] = getattr(owner, last)
    told: list[str] = []

    def fails(*arguments: Any, **named: Any) -> Any:
        if told:
            return works(*arguments, **named)
        told.append(name)
        os.write(2, f'{{"event": "failed", "what": "{name}"}}\n'.encode())
        raise error

    setattr(owner, last, fails)


def main() -> None:
    module, descriptors, error = sys.argv[1:4]
    if int(descriptors):
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(descriptors), int(descriptors)))
    if error:
        from omnistage.host import process
        from omnistage.stage import server

        process.SETTLE_AFTER_S = server.SWEEP_PERIOD_S = 0.01
        for name, (where, path) in SPARE.items():
            fail_once(name, where, path, ERRORS[error])
    del sys.argv[1:4]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

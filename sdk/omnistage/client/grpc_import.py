"""The first import of gRPC, without its own handlers of a fork; `omnistage.client.fork` has ours.

They are on unless an environment variable says otherwise, which gRPC reads once, when it is imported. Where calls of asyncio are under way
they end a forked child with SIGSEGV, inside `os.fork`, about once in ten times (gRPC 1.85), and do not make gRPC work in the others either.
"""

from __future__ import annotations

import os
from importlib import import_module

VARIABLE = "GRPC_ENABLE_FORK_SUPPORT"


def import_grpc() -> None:
    """Import gRPC. A variable that is set stays as it is, and none is left behind for the processes that this one starts."""
    is_given = VARIABLE in os.environ
    os.environ.setdefault(VARIABLE, "0")
    import_module("grpc")
    if not is_given:
        del os.environ[VARIABLE]


import_grpc()

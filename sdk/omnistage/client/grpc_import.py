"""Imports gRPC first, with its own handlers for forks turned off; `omnistage.client.threads` has ours.

gRPC's handlers are on unless an environment variable says otherwise, which gRPC reads once, when it is imported. If calls of asyncio are
under way, they end a forked child with SIGSEGV, inside `os.fork`, about once in ten times (gRPC 1.85); in the other children they do not
make gRPC work either."""

from __future__ import annotations

import os
from importlib import import_module

VARIABLE = "GRPC_ENABLE_FORK_SUPPORT"


def import_grpc() -> None:
    """Import gRPC. If the variable is set already, it keeps its value; if not, it is removed again, so that child processes do not
    inherit it."""
    is_given = VARIABLE in os.environ
    os.environ.setdefault(VARIABLE, "0")
    import_module("grpc")
    if not is_given:
        del os.environ[VARIABLE]


import_grpc()

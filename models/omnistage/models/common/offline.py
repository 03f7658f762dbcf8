"""Keeps the loading of a model from reaching a hub or any other host. Anybody may have made a checkpoint's folder, and its configs may name
things that a library would fetch.

Only the launcher fetches, before a model is loaded (`models/hub.py`). Environment variables tell the libraries to stay offline. A library
that ignores them is stopped at the socket, which all Python code needs to reach a host.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

SAID = {
    **dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"), "1"),
    **dict.fromkeys(("HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_IMPLICIT_TOKEN", "DO_NOT_TRACK"), "1"),
    "DIFFUSERS_TRUST_REMOTE_KERNELS": "0",
}
"""Environment variables that libraries read when they are imported; child processes inherit them. With them the libraries do not send the
user's token for the hub, which only fetching needs."""

CONSTANTS = ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_IMPLICIT_TOKEN")
"""Names of the constants in huggingface_hub that hold the values of these variables after its import."""

DIALS = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname")
"""Names of Python's audit events for connecting to a host, or looking up its address."""


class Unreachable(OSError):
    """Loading tried to reach another host."""


class _Thread(threading.local):
    """Whether this thread loads a model now."""

    loads = False


_thread = _Thread()


def say_offline() -> None:
    """Set the variables that keep the libraries of this process and of its children offline, for its whole life. Call this before the
    libraries are imported."""
    os.environ.update(SAID)


@contextmanager
def offline() -> Iterator[None]:
    """While the context is open, libraries fetch nothing, even libraries that were imported before, and this thread connects to no host."""
    _watch_sockets()
    hub: Any = sys.modules.get("huggingface_hub.constants")
    before = {name: os.environ.get(name) for name in SAID}
    constants = {} if hub is None else {name: getattr(hub, name) for name in CONSTANTS}
    loads, _thread.loads = _thread.loads, True
    try:
        say_offline()
        for name in constants:
            setattr(hub, name, True)
        yield
    finally:
        _thread.loads = loads
        for name, value in constants.items():
            setattr(hub, name, value)
        for name, old_value in before.items():
            if old_value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = old_value


@cache
def _watch_sockets() -> None:
    """Install the audit hook, once for the life of the process, because Python cannot remove it."""
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    """Audit hook: raises Unreachable if a thread that loads a model reaches for another host."""
    if event in DIALS and _thread.loads:
        target = arguments[1] if event == "socket.connect" else arguments[0]
        # A path is the socket of another process of this machine, such as another rank.
        if event != "socket.connect" or not isinstance(target, str | bytes):
            raise Unreachable(f"it names something that would have to be fetched from {target}, and loading fetches nothing")

"""A server starts without the packages that only a person's terminal needs."""

from __future__ import annotations

import subprocess
import sys

from helpers import lengths

SERVERS = ("thinker", "talker", "code2wav", "diffusion", "router")


@lengths.drawn_cells(2, "server", SERVERS)
def test_a_server_starts_without_rich_and_does_not_keep_others_from_it(server: str) -> None:
    code = f"""
import importlib, sys
importlib.import_module("omnistage.{server}.__main__")
import structlog
assert structlog.dev.default_exception_formatter is structlog.dev.plain_traceback
assert not [name for name in sys.modules if name.partition(".")[0] == "rich"]
import rich.console
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr

"""`make demo`: a question is asked and answered. On a terminal the stack that answers stays, for the page in the browser."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from omnistage.cli.announcement import page
from omnistage.cli.served import Served, served_here
from omnistage.client import Omni
from omnistage.client.found import named_router

OMNISTAGE = Path(sys.executable).with_name("omnistage")
QUESTION = ("How do plants make food?", "--out", "demo.wav", "--timeline", "demo-timeline.png")
IDLE_LIMIT_S = 1800
LOAD_LIMIT_S = 60.0
LOOK_S = 0.2


def main(words: Sequence[str]) -> int:
    """The exit code of the question. Whatever of the stack does not start, the question starts for itself."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pipeline", nargs="*", help="what is served, and asked, the first of it; default: the default ones")
    pipelines: list[str] = parser.parse_args(words).pipeline
    asked = ["--pipeline", pipelines[0]] if pipelines else []
    if os.environ.get("CI") or not sys.stdout.isatty() or named_router() is not None:
        return _omnistage("ask", *QUESTION, *asked)
    served = _serving()
    if served is None:
        _omnistage("serve", *pipelines, "--detach", "--idle-limit", str(IDLE_LIMIT_S))
        served = _serving()
        if served is not None:
            _wait_for_all(served.address)
    code = _omnistage("ask", *QUESTION, *asked, *(["--address", served.address] if served else []))
    if served is not None:
        _tell(served)
    return code


def _omnistage(*words: str) -> int:
    return subprocess.run([OMNISTAGE, *words], check=False).returncode


def _serving() -> Served | None:
    """A stack of this user, one with a page if there is one."""
    return max(served_here(), key=lambda served: bool(served.http), default=None)


def _wait_for_all(address: str) -> None:
    """A pipeline that is still loading would take the processor from the answer."""
    until = time.monotonic() + LOAD_LIMIT_S
    with Omni(address=address) as omni:
        while any(one.state == "starting" for one in omni.pipelines()) and time.monotonic() < until:
            time.sleep(LOOK_S)


def _tell(served: Served) -> None:
    command = os.path.relpath(OMNISTAGE)
    if served.http:
        print(f"\nGo on in a browser: {page(served.http)}   (any key is taken)")
    print(f"The stack stays until nobody has asked it for a while, or you end it: {command} stop {served.address}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

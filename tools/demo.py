"""`make demo`: asks a question and shows the answer. On a terminal the answering stack stays, for the page in the browser."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from omnistage.cli.stack.layout import ANY_PORT, DEFAULT_ADDRESS
from omnistage.cli.stack.pipelines import default_pipelines
from omnistage.cli.stack.served import Served, open_page, served_here
from omnistage.client import Omni
from omnistage.client.connection import named_router
from omnistage.host.addresses import check_can_listen
from omnistage.host.errors import StartError

OMNISTAGE = Path(sys.executable).with_name("omnistage")
QUESTION = ("How do plants make food?", "--max-tokens", "96", "--out", "demo.wav", "--timeline", "demo-timeline.png")
IDLE_LIMIT_S = 1800
LOAD_LIMIT_S = 60.0
LOOK_S = 0.2


def main(*pipelines: str) -> int:
    """Ask the first of these pipelines the question, by default the default ones, and return the exit code. On a terminal a stack is
    started first, unless one for the same pipelines serves."""
    options = ["--pipeline", pipelines[0]] if pipelines else []
    if os.environ.get("CI") or not sys.stdout.isatty() or named_router() is not None:
        return _omnistage("ask", *QUESTION, *options)
    address = os.environ.get("OMNISTAGE_SERVE_ADDRESS", DEFAULT_ADDRESS)
    served = find_serving(address, pipelines) or _start_stack(address, pipelines)
    code = _omnistage("ask", *QUESTION, *options, *(["--address", served.address] if served else []))
    if served is not None:
        tell(served)
    return code


def _omnistage(*words: str) -> int:
    return subprocess.run([OMNISTAGE, *words], check=False).returncode


def find_serving(address: str, pipelines: Sequence[str]) -> Served | None:
    """A stack of this user that serves exactly the demo's pipelines: at the usual address and with a page, or started by an earlier demo;
    None if there is none."""
    names = ", ".join(pipelines or default_pipelines()[0])
    for served in served_here():
        is_usual = served.address == address and bool(open_page(served))
        if served.pipeline == names and (is_usual or served.idle_limit_s == IDLE_LIMIT_S):
            return served
    return None


def _start_stack(address: str, pipelines: Sequence[str]) -> Served | None:
    """Start a stack that stays; None if it does not serve. If something else listens at the address, the stack gets another one."""
    before = {served.pid for served in served_here()}
    words = [*pipelines, "--detach", "--idle-limit", str(IDLE_LIMIT_S)]
    try:
        check_can_listen(address, "--address")
    except StartError:
        print(f"Something else listens at {address}: the demo starts a stack of its own beside it.", flush=True)
        words += ["--address", ANY_PORT]
    _omnistage("serve", *words)
    served = next((served for served in served_here() if served.pid not in before), None)
    if served is not None:
        _wait_for_all(served.address)
    return served


def _wait_for_all(address: str) -> None:
    """Wait until no pipeline is starting, because loading a pipeline would slow the answer down."""
    until = time.monotonic() + LOAD_LIMIT_S
    announced: list[str] = []
    with Omni(address=address) as omni:
        while (names := [one.name for one in omni.pipelines() if one.state == "starting"]) and time.monotonic() < until:
            if names != announced:
                print(f"The question is asked as soon as {' and '.join(names)} is there too.", flush=True)
                announced = names
            time.sleep(LOOK_S)


def tell(served: Served) -> None:
    """Print where the stack's page is, and how the stack ends."""
    end = f"{os.path.relpath(OMNISTAGE)} stop {served.address}"
    if page := open_page(served):
        print(f"\nGo on in a browser: {page}   (any key is taken)")
    idle = "stays until you end it"
    if served.idle_limit_s:
        idle = f"ends when nobody has asked it for {served.idle_limit_s / 60:g} minutes, or by"
    print(f"The stack {idle}: {end}", flush=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

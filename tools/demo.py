"""`make demo`: asks a question, and the answer is heard and shown. On a terminal the answering stack stays, and its page opens in the
browser of a desktop."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]

if __name__ == "__main__" and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # Ctrl-C during the imports would give a traceback.

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape

from omnistage.cli import interrupt
from omnistage.cli.console import Notices
from omnistage.cli.stack.layout import ANY_PORT, DEFAULT_ADDRESS
from omnistage.cli.stack.pipelines import default_pipelines
from omnistage.cli.stack.served import Served, open_page, served_here
from omnistage.cli.wording import word_error
from omnistage.client import Omni
from omnistage.client.connection import named_router
from omnistage.client.errors import OmniError
from omnistage.client.loudspeaker import PLAYER_VARIABLE, find_loudspeaker, is_silenced
from omnistage.host.addresses import check_can_listen
from omnistage.host.errors import StartError

OMNISTAGE = Path(sys.executable).with_name("omnistage")
SOUND_FILE = "demo.wav"
QUESTION = ("How do plants make food?", "--out", SOUND_FILE, "--timeline", "demo-timeline.png", "--max-tokens", "96")
IDLE_LIMIT_S = 1800
LOAD_LIMIT_S = 60.0
LOOK_S = 0.2
BROWSER_LIMIT_S = 3.0
"""A browser that has not said for so many seconds whether it opened the page has opened it."""

OPEN_PAGE = "import sys, webbrowser; sys.exit(not webbrowser.open(sys.argv[1]))"
CONTAINER_FILES = ("/.dockerenv", "/run/.containerenv")
"""One of these is there in a container of Docker or Podman."""


def main(*pipelines: str) -> int:
    """Ask the first of these pipelines the question, by default the default ones, and return the exit code. On a terminal a stack is
    started first, unless one for the same pipelines serves."""
    silence = silence_reason()
    options = [*(["--pipeline", pipelines[0]] if pipelines else []), "--play" if silence is None else "--no-play"]
    stays = sys.stdout.isatty() and not os.environ.get("CI") and named_router() is None
    address = os.environ.get("OMNISTAGE_SERVE_ADDRESS", DEFAULT_ADDRESS)
    served = (find_serving(address, pipelines) or _start_stack(address, pipelines)) if stays else None
    code = _omnistage("ask", *QUESTION, *options, *(["--address", served.address] if served else []))
    if silence and code == 0:
        Notices().tell(escape(silence))
    if served is not None:
        tell(served, may_open=code == 0)
    return code


def silence_reason() -> str | None:
    """A sentence that says why nothing plays the answer, and how to hear it; empty: nobody wants to hear it; None: it is heard."""
    if is_silenced() or (os.environ.get("CI") and not os.environ.get(PLAYER_VARIABLE)):
        return ""
    try:
        return None if find_loudspeaker() else f"no player works here: open {SOUND_FILE}"
    except OmniError as error:
        message, hint = word_error(error)
        return f"{message}: open {SOUND_FILE}. {hint}".rstrip()


def _omnistage(*words: str) -> int:
    """Run a command to its end, which it decides: Ctrl-C ends the sound of an answer, and not this program with it."""
    own_handler = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        return subprocess.run([OMNISTAGE, *words], check=False).returncode
    finally:
        signal.signal(signal.SIGINT, own_handler)


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


def tell(served: Served, *, may_open: bool = False) -> None:
    """Print how the stack ends, and open its page in a browser, or print where it is. may_open: False: only print."""
    notices = Notices()
    idle = "stays until you end it"
    if served.idle_limit_s:
        idle = f"ends when nobody has asked it for {served.idle_limit_s / 60:g} minutes, or by"
    notices.say("")
    notices.tell(f"The stack {idle}:", escape(f"{os.path.relpath(OMNISTAGE)} stop {served.address}"))
    if page := open_page(served):
        if may_open and open_browser(page):
            notices.tell(f"The page opens in your browser: {page}")
        else:
            notices.tell(f"Go on in a browser: {page}", "(any key is taken)")


def open_browser(page: str) -> bool:
    """Open a URL in the browser of this desktop; returns whether a browser took it. None does without a display, in CI, for root in a
    container, with BROWSER=none, or if there is no browser. The browser gets no terminal, and may live on."""
    is_wanted = not os.environ.get("CI") and os.environ.get("BROWSER") != "none"
    has_display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if not is_wanted or not has_display or (os.geteuid() == 0 and any(Path(file).exists() for file in CONTAINER_FILES)):
        return False
    # Without TERM no browser is chosen that would show the page on a terminal.
    variables = {name: value for name, value in os.environ.items() if name != "TERM"}
    command, null = [sys.executable, "-c", OPEN_PAGE, page], subprocess.DEVNULL
    opening = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True, env=variables)
    try:
        return opening.wait(BROWSER_LIMIT_S) == 0
    except subprocess.TimeoutExpired:
        return True


if __name__ == "__main__":
    interrupt.raise_interrupts()
    try:
        sys.exit(main(*sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)

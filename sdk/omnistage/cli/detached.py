"""`omnistage serve --detach`, which starts a stack that outlives the terminal, and `omnistage stop`, which ends it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from rich.markup import escape

from omnistage.cli.announcement import announce, warn
from omnistage.cli.folders import state_folder
from omnistage.cli.notices import Notices
from omnistage.cli.pipelines import Choice, layout_of
from omnistage.cli.served import Served, StackEnd, all_served, choose_stack
from omnistage.client.errors import StackError

LOG = "serve.log"
"""Log of the launcher, in the folder with the logs of the servers."""

KEPT_LOGS = 8
"""How many folders with logs of detached stacks are kept; the oldest ones go."""

AGAIN_S = 0.5
"""Pause between two signals of `stop --now`."""

MARGIN_S = 15.0
"""How much longer than its grace a stack may take to end."""


def serve_detached(choice: Choice, words: Sequence[str], log_folder: Path | None) -> None:
    """Start a stack in a session of its own, wait until it serves, and leave it running. words: the arguments as typed; the new launcher
    gets them without --detach. log_folder: None: a new folder. Raises StackError, also if the stack ends before it serves."""
    # The launcher makes it too. Made here first, so that errors and the bars of fetches are seen on this terminal.
    layout = layout_of(choice)
    if log_folder is None:
        log_folder = _new_log_folder()
    log_folder.mkdir(parents=True, exist_ok=True)
    notices = Notices()
    warn(layout, notices)
    ready, ours = os.pipe()
    command = [sys.executable, "-m", "omnistage.cli", *(word for word in words if word != "--detach")]
    command += ["--log-dir", str(log_folder), "--ready-fd", str(ours)]
    with os.fdopen(os.open(log_folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
        launcher = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(ours,), start_new_session=True, cwd=Path.cwd()
        )
    os.close(ours)
    try:
        with os.fdopen(ready) as pipe, notices.status("starting the stack"):
            line = pipe.readline()
    except BaseException:
        launcher.terminate()
        launcher.wait()
        raise
    answer = json.loads(line) if line.endswith("\n") else {}
    if "address" not in answer:
        code = launcher.wait()
        error = StackError(
            answer.get("error") or f"the launcher ended with code {code} before it served", hint=f"Its log is {log_folder / LOG}."
        )
        error.log = answer.get("log", "")
        raise error
    address, http, metrics = (answer.get(name, "") for name in ("address", "http", "metrics"))
    logs = str(log_folder)
    announce(notices, address, layout, pid=launcher.pid, http=http, metrics=metrics, log_folder=logs)


def _new_log_folder() -> Path:
    """Make a folder for the logs of this start, and return it. Older folders of this kind are removed, except the newest ones and those of
    stacks that serve."""
    logs = state_folder("logs")
    in_use = {served.log_folder for served in all_served()}
    old = sorted((path for path in logs.iterdir() if str(path) not in in_use), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in old[KEPT_LOGS - 1 :]:
        shutil.rmtree(path, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=logs))


def stop(address: str | None, *, every: bool, is_now: bool) -> None:
    """End stacks of this user, and wait until all their processes have ended. address: HOST:PORT, or the port; None: the only stack. every:
    end all stacks. is_now: do not wait for running answers. Raises RequestError, and StackError for a stack that does not end."""
    stacks = all_served()
    for served in stacks if every and stacks else [choose_stack(stacks, address)]:
        _stop(served, is_now)


def _stop(served: Served, is_now: bool) -> None:
    """End one stack, and print when it has ended. Raises StackError if it does not end in time."""
    notices = Notices()
    try:
        ending = StackEnd(served)
    except ProcessLookupError:
        notices.tell(f"{escape(served.address)} had ended already")
        return
    with closing(ending):
        ending.signal()
        patience = f"answers that run get up to {served.grace_s:g} s"
        with notices.status(f"ending {served.address}{'' if is_now else f': {patience}'}"):
            # A busy launcher may see two signals as one, so they are sent until it has ended.
            has_ended = _ends_now(ending) if is_now else ending.wait(served.grace_s + MARGIN_S)
        if not has_ended:
            raise StackError(
                f"{served.address} has not ended within {served.grace_s + MARGIN_S:g} s",
                hint=f"`omnistage stop --now {served.address}` ends it at once; its launcher is pid {served.pid}.",
            )
    notices.tell(f"ended {escape(served.address)}")


def _ends_now(ending: StackEnd) -> bool:
    """Send the signal again and again until the stack has ended, for MARGIN_S or a little longer; returns whether it has ended."""
    for _ in range(int(MARGIN_S / AGAIN_S)):
        if ending.wait(AGAIN_S):
            return True
        ending.signal()
    return ending.wait(MARGIN_S)

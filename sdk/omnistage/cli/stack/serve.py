"""`omnistage serve`, which runs a stack in the foreground, with --detach one that outlives the terminal, or as the launcher of a private
stack; and `omnistage stop`, which ends a stack."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, closing, nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import typer
from rich.markup import escape

from omnistage.cli import interrupt
from omnistage.cli.console import Notices
from omnistage.cli.places import explain, state_folder
from omnistage.cli.stack.ending import Ending, Owner, error_line, start_stack, watch_requests
from omnistage.cli.stack.layout import Layout, ServerOptions, reachable_address
from omnistage.cli.stack.pipelines import Choice, layout_of
from omnistage.cli.stack.processes import open_log
from omnistage.cli.stack.served import Served, StackEnd, all_served, announce, choose_stack, register_stack, warn
from omnistage.cli.stack.stack import Stack
from omnistage.cli.wording import SHELL
from omnistage.client.errors import OmniError, StackError
from omnistage.client.private_stack import launcher_command
from omnistage.host.background import end_tasks, first_of
from omnistage.host.child import ChildProcess, ConnectedChild, describe_end
from omnistage.host.descriptors import raise_limit

FIRST_PAUSE_S = 5.0
"""Pause before a failed pipeline is started again; doubled after each failure, until it serves."""

MAX_PAUSE_S = 300.0


def serve(choice: Choice, log_folder: Path | None, verbose: bool, owner: Owner | None = None) -> None:
    """Run a stack until SIGTERM, Ctrl-C, or the end of its owner if it is private. Raises StackError if no pipeline is left.

    owner: gets a line of JSON, {"address", "http", "metrics"}, when the first pipeline serves, or {"error", "hint", "log"}. The reader of
    such an error prints it, so typer.Exit is raised here instead of the error. The owner of a private stack writes {"start": NAME} for each
    further pipeline, and gets {"pipeline"} when it serves, or the same with an error. None: a person started it."""
    raise_limit()
    owner = owner or Owner()
    try:
        if log_folder is not None:
            log_folder.mkdir(parents=True, exist_ok=True)
        with owner.ends_all():
            layout = layout_of(choice)
        asyncio.run(_serve(layout, log_folder, verbose, owner))
    except OmniError as error:
        if owner.tell_first(error_line(error)):
            raise typer.Exit(1) from error
        raise
    except OSError as error:
        failure = StackError(explain(error))
        if owner.tell_first(error_line(failure)):
            raise typer.Exit(1) from error
        raise failure from error


def serve_for_owner(fd: int) -> None:
    """Run the stack that a program orders over this end of a socket: the fields of a Choice in JSON, and `log_folder` and `verbose`. Raises
    the errors of `serve`, and StackError if there is no order."""
    owner = Owner(fd)
    try:
        order = owner.read_order()
        log_folder, verbose = order.pop("log_folder"), order.pop("verbose")
        choice = Choice(**order | {"servers": ServerOptions(**order["servers"])})
    except (ValueError, TypeError, KeyError, OSError) as error:
        refusal = StackError(f"no stack was ordered: {error}")
        owner.tell_first(error_line(refusal))
        raise refusal from None
    serve(choice, log_folder and Path(log_folder), verbose, owner)


async def _serve(layout: Layout, log_folder: Path | None, verbose: bool, owner: Owner) -> None:
    """Start the stack, report where it serves, and run until a signal or the owner ends it, or it is broken."""
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("serve runs as a task")
    notices = Notices()
    # The owner of a private stack gets no notes: they are about pipelines that it did not name.
    warn(replace(layout, notes=()) if owner.is_private else layout, notices)
    ending = Ending(task, layout.servers.grace_s, None if owner.is_private else notices)
    ending.heed()
    begins = Begins(owner, notices)
    owner.listen(begins.start_for_owner, partial(ending.begin, "with its owner"))
    limit_s = layout.servers.idle_limit_s
    end_idle = partial(ending.begin, f"as nobody has asked for {limit_s:g} s")

    def prepare(stack: Stack) -> None:
        ending.ends(stack)
        stack.on_wish = begins.wish

    try:
        async with start_stack(layout, log_folder, verbose, prepare) as stack:
            ending.serves = True
            metrics = _show_metrics(layout.servers.metrics, stack)
            address, http, logs = stack.address, stack.http, str(stack.log_folder or "")
            served = Served(reachable_address(address), os.getpid(), layout.names, logs, layout.servers.grace_s, http, limit_s)
            with nullcontext() if owner.is_private else register_stack(served):
                owner.tell_first({"address": address, "http": http, "metrics": metrics})
                if not owner.is_there:
                    announce(notices, address, layout, http=http, metrics=metrics, log_folder=logs)
                elif not owner.is_private:  # Its command tells where it serves; this begins the log of the launcher.
                    notices.report(f"[bold green]serving[/] on {escape(address)} (pid {os.getpid()})")
                async with begins.of(stack, layout):
                    if limit_s:
                        begins.add(watch_requests(limit_s, stack.metrics_addresses, end_idle))
                    raise await stack.broken()
    except asyncio.CancelledError:
        if not ending.has_begun:
            raise
    finally:
        await ending.close()
    if ending.is_now:
        raise typer.Exit(interrupt.exit_code(ending.last_signal))


class Begins:
    """Starts pipelines while the stack runs. If there is an owner, these are the pipelines that it asks for. Without an owner they are all
    pipelines of the layout, and each that fails is started again after a pause."""

    def __init__(self, owner: Owner, notices: Notices) -> None:
        self._owner = owner
        self._notices = notices
        self._stack: Stack | None = None
        self._tasks = set[asyncio.Task[None]]()
        self._turn = asyncio.Lock()  # held while a pipeline is started
        self._load_wishes = defaultdict[str, asyncio.Event](asyncio.Event)
        self._unload_wishes = defaultdict[str, asyncio.Event](asyncio.Event)
        """By pipeline: set while the router wants it, and while it does not."""

    @asynccontextmanager
    async def of(self, stack: Stack, layout: Layout) -> AsyncIterator[None]:
        """A context in which pipelines are started, one at a time: those that the owner asks for, or, without an owner, all. The first one
        of the layout serves already."""
        self._stack = stack
        for pipeline in () if self._owner.is_private else layout.pipelines:
            self.add(self._keep(stack, pipeline.name, serves=pipeline is layout.pipelines[0]))
        try:
            yield
        finally:
            self._stack = None
            await end_tasks(self._tasks)

    def start_for_owner(self, name: str) -> None:
        """Called when the owner asks for a pipeline: start it, and send the owner the result."""
        if self._stack is None:
            self._owner.tell({"pipeline": name, "error": "the stack does not serve", "hint": "Ask when it has said that it does."})
        else:
            self.add(self._answer(self._stack, name))

    def add(self, work: Coroutine[None, None, None]) -> None:
        """Run this as a task, which is cancelled when the block of `of` ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, stack: Stack, name: str) -> None:
        """Start a pipeline, and send the owner a line when it serves, or the error."""
        try:
            await stack.begin(name)
        except OmniError as error:
            self._owner.tell({"pipeline": name, **error_line(error)})
        else:
            self._owner.tell({"pipeline": name})

    def wish(self, name: str, is_wanted: bool) -> None:
        """Called when the router wants a pipeline, or wants it no more; also before `of`, because the gateway may serve long after the
        router."""
        turned_on, turned_off = (self._load_wishes, self._unload_wishes) if is_wanted else (self._unload_wishes, self._load_wishes)
        turned_on[name].set()
        turned_off[name].clear()

    async def _keep(self, stack: Stack, name: str, *, serves: bool) -> None:
        """Start a pipeline, and start it again whenever it has failed, after a pause. Unload it when the router wants it no more, until the
        router wants it. serves: whether it serves already."""
        pause_s = FIRST_PAUSE_S
        while True:
            if serves or await self._serves(stack, name):
                pause_s = FIRST_PAUSE_S
            error = await first_of(stack.gone(name), self._unload_wishes[name].wait())
            if not isinstance(error, StackError):
                await stack.unload(name)
                self._notices.report(f"[yellow]unloaded[/] {escape(name)}, as nobody has asked for it; the next request loads it")
                await self._load_wishes[name].wait()
                serves = False
                continue
            hint = f" {SHELL.hint(error.advice)}" if error.advice else ""
            self._notices.report(f"[bold red]failed[/] {escape(f'{name}: {error.message}.{hint} It is started again in {pause_s:g} s')}")
            await asyncio.sleep(pause_s)
            pause_s, serves = min(2 * pause_s, MAX_PAUSE_S), False

    async def _serves(self, stack: Stack, name: str) -> bool:
        """Start a pipeline when no other is being started; returns whether it serves."""
        try:
            async with self._turn:
                await stack.begin(name)
        except StackError:
            return False  # `_keep` asks `gone` for the reason.
        self._notices.report(f"[bold green]serving[/] {escape(name)}")
        return True


def _show_metrics(address: str, stack: Stack) -> str:
    """Serve a page with the metrics of all processes. Returns its HOST:PORT; empty if `address` is. Raises StackError."""
    if not address:
        return ""
    from omnistage.cli.show.metrics import serve_stack_metrics

    return serve_stack_metrics(address, stack.metrics_addresses)


LOG = "serve.log"
"""Log of the launcher, in the folder with the logs of the servers."""

KEPT_LOGS = 8
"""How many folders with logs of detached stacks are kept; the oldest ones go."""

AGAIN_S = 0.5
"""Pause between two signals of `stop --now`."""

MARGIN_S = 15.0
"""How much longer than its grace a stack may take to end."""


def serve_detached(choice: Choice, log_folder: Path | None, verbose: bool) -> None:
    """Start a stack in a session of its own, wait until it serves, and leave it running. log_folder: None: a new folder. Raises StackError,
    also if the stack ends before it serves."""
    # The launcher makes it too. Made here first, so that errors and the bars of fetches are seen on this terminal.
    layout = layout_of(choice)
    if log_folder is None:
        log_folder = _new_log_folder()
    log_folder.mkdir(parents=True, exist_ok=True)
    notices = Notices()
    warn(layout, notices)
    order = {**asdict(choice), "log_folder": str(log_folder), "verbose": verbose, "is_private": False}
    with open_log(log_folder / LOG) as log:
        launcher = ConnectedChild(launcher_command, output=log.fileno(), errors=log)
    try:
        with notices.status("starting the stack"):
            with suppress(BrokenPipeError):  # It has ended; below it is said how.
                launcher.channel.sendall(json.dumps(order).encode() + b"\n")
            answer = json.loads(next(launcher.lines(), b"{}"))
    except BaseException:
        launcher.terminate()
        _end(launcher)
        raise
    if "address" not in answer:
        end = _end(launcher)
        reason = answer.get("error") or f"the launcher ended with {end} before it served"
        error = StackError(reason, hint=f"Its log is {log_folder / LOG}.")
        error.log = answer.get("log", "")
        raise error
    launcher.leave()
    address, http, metrics = (answer.get(name, "") for name in ("address", "http", "metrics"))
    logs = str(log_folder)
    announce(notices, address, layout, pid=launcher.pid, http=http, metrics=metrics, log_folder=logs)


def _end(launcher: ChildProcess) -> str:
    """Wait for the end of a launcher whose stack does not serve, and kill it if that takes too long. Returns its end in words."""
    launcher.wait(MARGIN_S)
    launcher.close()
    return describe_end(launcher.wait() or 0, "code")


def _new_log_folder() -> Path:
    """Make a folder for the logs of this start, and return it. Older folders of this kind are removed, except the newest ones and those of
    stacks that serve."""
    logs = state_folder("logs")
    in_use = {served.log_folder for served in all_served()}
    unused = (path for path in logs.iterdir() if str(path) not in in_use)
    newest_first = sorted(unused, key=lambda path: path.stat().st_mtime, reverse=True)
    for path in newest_first[KEPT_LOGS - 1 :]:  # The new folder is one of those that are kept.
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

"""`make chaos`: minutes of mixed load while processes are killed, stopped and started again, and then the account of it.

Every request must have been answered correctly, once, or have ended with an error that says when to ask again; afterwards nothing may be
held, nothing may lie around and no memory may have grown. Exits with 1 where that is not so, and says where the logs are.

The whole run has a mount of shared memory of its own, so that it can be filled to the brim without harm to anybody, if this process may
make one (root and unshare(1)); else everything but that is done.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from chaos import checks
from chaos.checks import ALLOWED_BYTES, MemoryOfHouse
from chaos.clients import ANSWERED, CANCELLED, WRONG, ClientLoad, Outcome
from chaos.house import MOUNT, MOUNT_BYTES, Disturbance, House, house, plan
from helpers.processes import MARK, ProcessFamily

CLIENTS = 8
SAMPLE_PERIOD_S = 2.0
SETTLE_LIMIT_S = 60.0
MIN_ANSWERED_SHARE = 0.5
"""The least share of answered requests, among those that no client left. Errors are allowed, but a house that only makes errors has
survived nothing."""

PRIVATE = "--on-private-mount"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long the load and the disturbances last")
    parser.add_argument("--seed", type=int, default=None, help="of an earlier run, to repeat its schedule")
    parser.add_argument(PRIVATE, action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not given.on_private_mount and _may_mount():
        return _again_on_private_mount()
    seed = secrets.randbits(32) if given.seed is None else given.seed
    logs = Path(tempfile.mkdtemp(prefix="omnistage-chaos-"))
    print(f"{given.seconds:g} seconds of chaos, seed {seed}, logs in {logs}", flush=True)
    family = ProcessFamily()
    os.environ[MARK] = family.mark
    wrong = asyncio.run(_run(seed, given.seconds, logs, family, can_fill=given.on_private_mount))
    for line, times in Counter(wrong).items():
        print(f"WRONG: {line}" + (f" ({times} times)" if times > 1 else ""))
    print(f"{len(wrong)} violations, seed {seed}" + (f", logs in {logs}" if wrong else ""))
    if not wrong:
        shutil.rmtree(logs)
    return 1 if wrong else 0


def _may_mount() -> bool:
    return os.geteuid() == 0 and shutil.which("unshare") is not None and subprocess.run(_on_mount("true"), check=False).returncode == 0


def _on_mount(command: str) -> list[str]:
    """A command where shared memory is a small mount of its own; it ends with its last process."""
    return ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o size={MOUNT_BYTES} tmpfs /dev/shm && exec {command} "$@"']


def _again_on_private_mount() -> int:
    command = [*_on_mount('"$0"'), sys.executable, "-m", "chaos", PRIVATE, *sys.argv[1:]]
    os.execvp(command[0], command)


async def _run(seed: int, seconds: float, logs: Path, family: ProcessFamily, *, can_fill: bool) -> list[str]:
    """The whole of it; what was wrong."""
    before = checks.files()
    memory = MemoryOfHouse(warm_s=max(15.0, min(60.0, seconds / 4)))
    spool = (MOUNT if can_fill else logs) / "spool"
    spool.mkdir()
    with house(logs, spool) as running:
        # The seed alone decides what is disturbed and when. A client's next action depends on when it has its answer.
        disturbances = plan(seed, seconds, running.names, can_fill=can_fill)
        load = ClientLoad(running, random.Random(seed))
        async with load.connected():
            await _storm(running, load, disturbances, seconds, memory)
            wrong = await _clean_round(load)
        wrong += [*running.faults, *await checks.held(running), *await checks.orphans(before)]
        await running.trim()
        memory.sample(running.pids())
    wrong += _wrong_answers(load.outcomes)
    if not running.most_segments:
        wrong.append("no tensor went through shared memory: nothing of it was tested")
    wrong += [f"{name} has grown from {warm} to {end}" for name, warm, end, flat in memory.grown() if not flat]
    wrong += [*checks.cut_off(running), *checks.logged(logs), *checks.zombies()]
    wrong += [f"process {pid} is left" for pid in family.pids()]
    wrong += [f"{path} is left" for path in spool.iterdir()]
    wrong += [f"shared memory {name} is left" for name in sorted(checks.files() - before)]
    _print(running, load.outcomes, memory)
    return wrong


async def _storm(running: House, load: ClientLoad, disturbances: list[Disturbance], seconds: float, memory: MemoryOfHouse) -> None:
    """Load and disturbances together; returns when all processes are up and all requests have ended."""
    stopped = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(_watch(running, memory))
        clients = [group.create_task(load.go_on(stopped)) for _ in range(CLIENTS)]
        begun = time.monotonic()
        doing: list[asyncio.Task[None]] = []
        for disturbance in disturbances:
            await asyncio.sleep(begun + disturbance.at_s - time.monotonic())
            doing.append(group.create_task(running.disturb(disturbance)))
        await asyncio.sleep(begun + seconds - time.monotonic())
        stopped.set()
        _, late = await asyncio.wait({*doing, *clients}, timeout=2 * SETTLE_LIMIT_S)
        if late:
            running.faults.append(f"{len(late)} clients or disturbances had no end within {2 * SETTLE_LIMIT_S:g} s")
        for task in late:
            task.cancel()
        watching.cancel()


async def _watch(running: House, memory: MemoryOfHouse) -> None:
    while True:
        running.watch_lives()
        running.most_segments = max(running.most_segments, sum(not name.endswith("-live") for name in checks.files()))
        memory.sample(running.pids())
        await asyncio.sleep(SAMPLE_PERIOD_S)


async def _clean_round(load: ClientLoad) -> list[str]:
    """When all are up again, one request of every client must do; one that was refused in the aftermath is asked again."""
    wrong = []
    for client in load.clients:
        deadline = time.monotonic() + SETTLE_LIMIT_S
        while (outcome := await load.ask(client)).result not in (ANSWERED, CANCELLED, "CLIENT_STALLED", WRONG):
            if time.monotonic() > deadline:
                wrong.append(f"{client}: still {outcome.result} {SETTLE_LIMIT_S:g} s after the last disturbance")
                break
            await asyncio.sleep(0.5)
    return wrong


def _wrong_answers(outcomes: list[Outcome]) -> list[str]:
    kept = [outcome for outcome in outcomes if outcome.result != CANCELLED]
    answered = sum(outcome.result == ANSWERED for outcome in kept)
    wrong = [f"{outcome.client}: {outcome.wrong}" for outcome in outcomes if outcome.result == WRONG]
    if answered < MIN_ANSWERED_SHARE * len(kept):
        wrong.append(f"only {answered} of {len(kept)} requests were answered")
    return wrong


def _print(running: House, outcomes: list[Outcome], memory: MemoryOfHouse) -> None:
    console = Console(width=150)
    results = [ANSWERED, *sorted({outcome.result for outcome in outcomes} - {ANSWERED})]
    table = Table(title="requests")
    for column in ("client", "asked", *results, "failovers", "routers lost", "longest, s"):
        table.add_column(column, justify="left" if column == "client" else "right")
    for client in [*dict.fromkeys(outcome.client for outcome in outcomes), "all"]:
        own = [outcome for outcome in outcomes if client in (outcome.client, "all")]
        counts = Counter(outcome.result for outcome in own)
        sums = (sum(outcome.failovers for outcome in own), sum(outcome.router_losses for outcome in own))
        longest = max(outcome.seconds for outcome in own)
        table.add_row(client, *map(str, (len(own), *(counts[result] for result in results), *sums)), f"{longest:.1f}")
    console.print(table)
    done = ", ".join(f"{action.value}: {count}" for action, count in running.done.items())
    console.print(f"disturbances: {done}; skipped because the process was down or stopped: {running.skipped}")
    console.print(f"segments of shared memory at once: at most {running.most_segments}")
    table = Table(title=f"memory of the processes that lived for {2 * memory.warm_s:g} s or more; {ALLOWED_BYTES >> 20} MiB are allowed")
    for column in ("process", "warm, MiB", "end, MiB", "files", "threads"):
        table.add_column(column, justify="left" if column == "process" else "right")
    for name, warm, end, _ in memory.grown():
        mib = (f"{sample.private_bytes / 2**20:.1f}" for sample in (warm, end))
        table.add_row(name, *mib, f"{warm.files} > {end.files}", f"{warm.threads} > {end.threads}")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())

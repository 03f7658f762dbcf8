"""`omnistage doctor`: looks at this machine and at the stacks that run on it, and says of each thing whether it is well, and what to do.

It starts nothing, and needs neither a model nor root. Each check runs on a thread of its own: a disk or a name server that
hangs delays the end by LIMIT_S and no more. docs/operate.md#doctor says what each line means."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from urllib.request import getproxies, proxy_bypass

from rich.markup import escape
from rich.table import Table

from omnistage.cli.console import Console
from omnistage.cli.places import OF_VARIABLES, STATE_VARIABLE, explain
from omnistage.cli.show.inventory import models_here
from omnistage.cli.stack.layout import DEFAULT_ADDRESS, DEFAULT_HTTP, reachable_address
from omnistage.cli.stack.resources import memory_of_machine
from omnistage.cli.stack.served import Served, served_here
from omnistage.cli.targets import check_target, running
from omnistage.client import loudspeaker
from omnistage.client.errors import OmniError
from omnistage.client.private_stack import LAUNCHER_NEEDS
from omnistage.client.routers import split_addresses
from omnistage.client.threads import run_on_thread
from omnistage.client.version import version as our_version
from omnistage.host.addresses import check_can_listen, host_and_port
from omnistage.host.descriptors import MAX_DESCRIPTORS
from omnistage.host.errors import StartError
from omnistage.host.healthcheck import TIMEOUT_S, find_trouble
from omnistage.models.reports import LoadError, bytes_told

LIMIT_S = 8.0
"""A check that takes longer is given up."""

DEFAULT_BYTES = 5 << 29
"""Memory that the default pipelines take with their router and gateway (docs/compose.md): 2.5 GiB."""
MIN_DISK_BYTES = 1 << 30
MIN_SHARED_BYTES = 64 << 20
MIN_DESCRIPTORS = 4096
MAX_PRESSURE = 20.0
"""Percentage of the last ten seconds in which some task waited; above it answers get slow."""

FAST = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""Instructions with which models compute much faster, by the kernel's names."""

COLOURS = {"ok": "green", "warn": "yellow", "bad": "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """A line. check: what was looked at. fact: what there is. advice: what that means, and what to do; empty: it is well. is_bad: something
    does not work, and not only worse."""

    check: str
    fact: str
    advice: str = ""
    is_bad: bool = False

    @property
    def state(self) -> str:
        """ok, warn or bad."""
        return "bad" if self.is_bad else "warn" if self.advice else "ok"


def examine(address: str | None, as_json: bool) -> bool:
    """Print what all checks found; as JSON {"checks": [{check, state, fact, advice}]}. address: of a router to ask; None: those that run
    here. Returns whether nothing is bad."""
    findings = asyncio.run(_look(address))
    if as_json:
        rows = [{"check": one.check, "state": one.state, "fact": one.fact, "advice": one.advice} for one in findings]
        print(json.dumps({"checks": rows}))
    elif (console := Console(highlight=False)).is_terminal:
        table = Table(box=None, show_header=False, pad_edge=False)
        for one in findings:
            advice = f"\n[dim]{escape(one.advice)}[/]" if one.advice else ""
            table.add_row(f"[{COLOURS[one.state]}]{one.state}[/]", one.check, escape(one.fact) + advice)
        console.print(table)
    else:
        for one in findings:  # A line each, for grep.
            print(f"{one.state:<4}  {one.check:<16}  {one.fact}{f': {one.advice}' if one.advice else ''}")
    return not any(one.is_bad for one in findings)


async def _look(address: str | None) -> list[Finding]:
    """Run all checks at the same time, and return their findings in the order of the checks."""
    checks: Mapping[str, Callable[[], Iterator[Finding]]] = {
        "versions": _versions,
        "processors": _processors,
        "memory": _memory,
        "shared memory": _shared_memory,
        "pressure": _pressure,
        "descriptors": _descriptors,
        "folders": _folders,
        "models": _models,
        "ports": _ports,
        "routers": partial(_routers, address),
        "proxies": _proxies,
        "player": _player,
    }
    return [finding for result in await asyncio.gather(*(_run(*check) for check in checks.items())) for finding in result]


async def _run(name: str, check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """The findings of one check; a warning if it cannot be made, or does not end."""
    try:
        async with asyncio.timeout(LIMIT_S):
            return await run_on_thread(lambda: list(check()), f"omnistage-doctor-{name}")
    except TimeoutError:
        return [Finding(name, f"no result within {LIMIT_S:g} s", "A disk, a name server or a device hangs; the rest was looked at.")]
    except (OSError, OmniError, LoadError, ValueError) as error:
        fact = f"cannot be looked at: {explain(error) if isinstance(error, OSError) else error}"
        return [Finding(name, fact, getattr(error, "hint", "") or "The rest was looked at.", is_bad=True)]


def _versions() -> Iterator[Finding]:
    yield Finding("omnistage", f"{our_version()} on Python {platform.python_version()}, Linux {platform.release()}")
    # `omnistage.client`, which is imported by now, has checked that its stubs fit them.
    yield Finding("gRPC", f"grpcio {_installed('grpcio')}, protobuf {_installed('protobuf')}")
    if missing := [name for name in LAUNCHER_NEEDS if find_spec(name) is None]:
        yield Finding("servers", f"missing: {', '.join(missing)}", "Nothing can be served here, only asked: install omnistage[cli,server].")
    torch, has_gpu = _installed("torch"), any(Path("/dev").glob("nvidia[0-9]*"))
    advice = "" if torch else "Only toys can be served here: install omnistage[models]."
    if has_gpu and torch.endswith("+cpu"):
        advice = "A build for processors, although there is a GPU: `make setup DEVICE=cuda` installs the other one."
    yield Finding("torch", f"{torch or 'not installed'}{', and a GPU is here' if has_gpu else ''}", advice)


def _installed(package: str) -> str:
    """The version of a package; empty: it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _processors() -> Iterator[Finding]:
    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    fast = [name for name in FAST if name in flags]
    fact = (
        f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}, {platform.machine()} with {', '.join(fast) or 'none of ' + ', '.join(FAST)}"
    )
    if (quota := _group("cpu.max")) is not None:
        fact += f"; the container gets {quota / 100_000:g}"
    is_slow = platform.machine() == "x86_64" and "avx2" not in fast
    yield Finding("processors", fact, "Models compute several times slower than with avx2." if is_slow else "")


def _memory() -> Iterator[Finding]:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    free_bytes = next(int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:")
    fact = f"{bytes_told(free_bytes)} free of {bytes_told(memory_of_machine())}"
    if (max_bytes := _group("memory.max")) is not None:
        free_bytes = min(free_bytes, max(max_bytes - (_group("memory.current") or 0), 0))
        fact += f"; the container may take {bytes_told(max_bytes)}, and {bytes_told(free_bytes)} more"
    is_short = free_bytes < DEFAULT_BYTES and not served_here()
    advice = f"The default pipelines take {bytes_told(DEFAULT_BYTES)}: end other programs, or serve one: `omnistage serve smol`."
    yield Finding("memory", fact, advice if is_short else "")


def _shared_memory() -> Iterator[Finding]:
    mount = os.statvfs("/dev/shm")
    free_bytes, can_write = mount.f_bavail * mount.f_frsize, os.access("/dev/shm", os.W_OK)
    fact = f"{bytes_told(free_bytes)} free of {bytes_told(mount.f_blocks * mount.f_frsize)} in /dev/shm"
    advice = "Tensors go inside messages, which is slower: remove old files there, or give a container a larger --shm-size."
    is_short = free_bytes < MIN_SHARED_BYTES or not can_write
    yield Finding("shared memory", fact + ("" if can_write else ", and it cannot be written"), advice if is_short else "")


def _pressure() -> Iterator[Finding]:
    from omnistage.router.process import machine_fields

    fields = machine_fields()
    waits = {name.removesuffix("_pressure"): value for name, value in fields.items() if name.endswith("_pressure")}
    busy = " and ".join(name for name, value in waits.items() if isinstance(value, float) and value > MAX_PRESSURE)
    fact = ", ".join([f"load {fields.get('load')}", *(f"{value} % waited for {name}" for name, value in waits.items())])
    yield Finding("pressure", fact, f"Other work, or many answers at once, take the {busy}: answers come late now." if busy else "")


def _descriptors() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    reachable = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    advice = f"Many clients at once need more: `ulimit -Hn {MAX_DESCRIPTORS}`, or LimitNOFILE of a unit."
    yield Finding("descriptors", f"{soft}; servers raise it to {reachable}", advice if reachable < MIN_DESCRIPTORS else "")


def _folders() -> Iterator[Finding]:
    """A folder that is not there yet is as its nearest parent is."""
    names = {STATE_VARIABLE: "state and logs", "OMNISTAGE_CACHE": "models", "TMPDIR": "temporary files"}
    for variable, find in OF_VARIABLES.items():
        try:
            folder = find()
        except OSError as error:
            yield Finding(names[variable], error.strerror or str(error), is_bad=True)
            continue
        parent = next(path for path in (folder, *folder.parents) if path.exists())
        free_bytes = shutil.disk_usage(parent).free
        is_ours = parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)
        fact = f"{folder}, {bytes_told(free_bytes)} free{'' if is_ours else f'; {parent} cannot be written'}"
        advice = "" if free_bytes >= MIN_DISK_BYTES and is_ours else f"Make room there, or set {variable} to another folder of yours."
        yield Finding(names[variable], fact, advice, is_bad=not is_ours)


def _models() -> Iterator[Finding]:
    """The models of the default pipelines, fetched or not, and those in the cache of a hub."""
    for model in models_here():
        size = f", {bytes_told(model.bytes)}" if model.bytes else ""
        advice = "" if model.is_here else "It is not fetched: the first start does so, or `omnistage fetch-default` now."
        yield Finding("model", f"{model.name} ({model.family}{size})", advice)


def _ports() -> Iterator[Finding]:
    stacks = served_here()
    for address, is_http in ((DEFAULT_ADDRESS, False), (DEFAULT_HTTP, True)):
        name = "HTTP port" if is_http else "router's port"
        if address in {reachable_address(served.http) if is_http and served.http else served.address for served in stacks}:
            yield Finding(name, f"{address} is a stack's of yours")
            continue
        try:
            check_can_listen(address, "--address")
        except StartError as error:
            fact = str(error).partition("; choose")[0].removeprefix("cannot listen on ")
            is_well = is_http or not find_trouble(address)  # The gateway takes the next port; and a router of somebody else can be asked.
            yield Finding(name, fact, "" if is_well else "Serve with another --address, or end what has the port.")
        else:
            yield Finding(name, f"{address} is free")


def _routers(address: str | None) -> Iterator[Finding]:
    """The router that was typed, or that commands ask by themselves, and those of this user's stacks."""
    stacks = served_here()
    target = address or (router.address if (router := running()) is not None else "")
    if target:
        asyncio.run(check_target(target))
    addresses = dict.fromkeys([*(served.address for served in stacks), *(split_addresses(target) if target else ())])
    for one in addresses:
        begun_s = time.monotonic()
        trouble = find_trouble(one)
        advice = f"`omnistage status --address {one}` says more, and its log: `omnistage logs router`." if trouble else ""
        fact = trouble or f"serves, and answered after {1000 * (time.monotonic() - begun_s):.0f} ms"
        yield Finding("router", f"{one}: {fact}", advice, is_bad=bool(trouble))
    yield from (_gateway(served) for served in stacks if served.http)
    if not addresses:
        yield Finding("router", "none runs here: commands start a stack for each call, and `omnistage serve --detach` keeps one")


def _gateway(served: Served) -> Finding:
    """Whether the gateway of a stack answers, and reaches a router that serves."""
    http = reachable_address(served.http)
    connection = HTTPConnection(*host_and_port(http), timeout=TIMEOUT_S)  # Unlike urlopen it uses no proxies.
    try:
        connection.request("GET", "/ready")
        fact = f"/ready answers {connection.getresponse().status}"
    except (OSError, HTTPException) as error:
        fact = f"no answer: {error}"
    finally:
        connection.close()
    is_bad = not fact.endswith("200")
    return Finding("gateway", f"http://{http}: {fact}", "Its log says why: `omnistage logs gateway`." if is_bad else "", is_bad=is_bad)


def _proxies() -> Iterator[Finding]:
    proxies = ", ".join(sorted(name for name in getproxies() if name != "no"))
    is_for_here = not all(proxy_bypass(host) for host in ("127.0.0.1", "localhost"))
    advice = "omnistage asks routers without a proxy, but curl and others ask it for this machine too: no_proxy=127.0.0.1,localhost."
    yield Finding("proxies", f"set for {proxies}" if proxies else "none set", advice if proxies and is_for_here else "")


def _player() -> Iterator[Finding]:
    if loudspeaker.is_silenced():
        yield Finding("player", f"turned off by {loudspeaker.PLAYER_VARIABLE}=none")
    elif (player := loudspeaker.find_loudspeaker()) is not None:  # It raises an error if the variable names one that does not work.
        yield Finding("player", f"{player.name} plays sound")
    else:
        players = ((player, player.installed()) for player in loudspeaker.PLAYERS)
        tried = "; ".join(f"{player.name}: {player.trouble(one) if one else 'not installed'}" for player, one in players)
        advice = f"Sound is not heard here: --out F keeps it, and {loudspeaker.PLAYER_VARIABLE} names another player."
        yield Finding("player", f"none works ({tried})", advice)


def _group(name: str) -> int | None:
    """The first number of a file of the control group; None: it says "max", or this process is in none."""
    path = Path("/sys/fs/cgroup", name)
    word = next(iter(path.read_text().split()), "") if path.is_file() else ""
    return int(word) if word.isdecimal() else None

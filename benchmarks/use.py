"""`python -m benchmarks.use`: the time that a person waits for an answer, and the cost of a stack without requests, as
benchmarks/out/use.json and as a table. Nothing else should run meanwhile."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks import idle
from benchmarks.figures import Figure, Report, median, run, with_children
from omnistage.client import Omni

ROOT = Path(__file__).resolve().parents[1]
COMMAND = [sys.executable, "-m", "omnistage.cli"]
QUESTION = ("ask", "--text-only", "What is a kite?")
ONE_TOKEN = ("--max-tokens", "1")
"""Options for an answer of one token: then nearly all of the time goes to the command, the stack and the way to it."""

COMMANDS = 20
STARTS = 5
ASKS = 3
LIMIT_S = 600.0
LOOK_S = 0.2

SETTLE_S = 30.0
"""Seconds to wait after the last answer: after 10 s the router stops listening to the stages."""
IDLE_S = 60.0
"""Seconds in which wake-ups are counted: the router checks its stages once in this time."""


def _command(report: Report) -> None:
    seconds = [_run("--version") for _ in range(COMMANDS)]
    note = f"omnistage --version, median of {COMMANDS}"
    report.add(Figure("command_start", median(seconds), "s", "<= 0.25", note))


def _install(report: Report) -> None:
    """Measure the size of a new environment that has the client alone."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _check_call("hatchling", "build", "-t", "wheel", "-d", str(folder))
        (wheel,) = folder.glob("*.whl")
        environment = folder / "environment"
        _check_call("venv", "--without-pip", str(environment))
        _check_call("pip", "--python", str(environment), "install", "--quiet", "--disable-pip-version-check", str(wheel))
        files = [path for path in environment.rglob("*") if path.is_file() and not path.is_symlink()]
        megabytes = sum(path.stat().st_size for path in files) / 1e6
        report.add(Figure("client_install", megabytes, "MB", "<= 105", "a new environment with this tree's wheel, pip itself left out"))


def _asks(report: Report) -> None:
    """Measure questions that start a stack of their own, questions to a running stack, and that stack without requests."""
    firsts = [_run(*QUESTION) for _ in range(ASKS)]
    first_tokens = [_run(*QUESTION, *ONE_TOKEN) for _ in range(ASKS)]
    smol, bare = _starts()
    with stack() as (pid, address, seconds):
        _wait_ready(address)
        report.add(
            Figure("stack_start", median(smol), "s", "<= 5", f"serve smol until it says that it serves, median of {STARTS}"),
            Figure("bare_start", median([*bare, seconds]), "s", note="serve without a name: the picture pipeline loads after that"),
            Figure("bare_start_over_smol", median([*bare, seconds]) / median(smol), "ratio", "<= 1.3", "starts in turns"),
        )
        with tempfile.TemporaryDirectory() as folder:
            draw_s = _median_of(("draw", "a red circle on a blue background", "--out", str(Path(folder, "drawn.png"))), address)
        report.add(Figure("draw_beside", draw_s, "s", note="omnistage draw, a running stack found: its whole time"))
        first, second = median(firsts), _question_s(address)
        report.add(
            Figure("first_ask", first, "s", note=f"omnistage ask --text-only with a stack of its own, median of {ASKS}"),
            Figure("second_ask", second, "s", note="the same, a running stack found"),
            Figure("second_ask_over_first", second / first, "ratio", "<= 0.15"),
        )
        first, second = median(first_tokens), _question_s(address, *ONE_TOKEN)
        report.add(
            Figure("first_token", first, "s", note="the same two with --max-tokens 1: without the time that the model writes"),
            Figure("second_token", second, "s"),
            Figure("second_token_over_first", second / first, "ratio"),
        )
        processes = with_children(pid)
        wakeups = idle.measure(processes, SETTLE_S, IDLE_S)
        note = f"{len(processes)} processes, {SETTLE_S:g} s after answers, for {IDLE_S:g} s"
        report.add(
            Figure("idle_wakeups", wakeups.stack, "1/s", note=note),
            Figure("bare_wakeups", wakeups.bare, "1/s", note="as many processes with grpc.aio alone, at the same time"),
            Figure("idle_wakeups_over_bare", wakeups.stack / wakeups.bare, "ratio", "<= 2"),
        )


def _starts() -> tuple[list[float], list[float]]:
    """Seconds of each start, in turns: of the pipeline smol alone, and of all default pipelines, which start once less."""
    smol, bare = [], []
    for number in range(STARTS):
        with stack("smol") as (_, _, seconds):
            smol.append(seconds)
        if number < STARTS - 1:
            with stack() as (_, _, seconds):
                bare.append(seconds)
    return smol, bare


def _wait_ready(address: str) -> None:
    """Wait until all pipelines of the stack are ready. Raises RuntimeError if one is not ready within the limit."""
    with Omni(address=address) as omni:
        until = time.monotonic() + LIMIT_S
        while starting := [pipeline.name for pipeline in omni.pipelines() if pipeline.state != "ready"]:
            if time.monotonic() > until:
                raise RuntimeError(f"{', '.join(starting)} did not start")
            time.sleep(LOOK_S)


def _question_s(address: str, *words: str) -> float:
    """The median seconds of a question to a running stack. words: further options."""
    return _median_of((*QUESTION, *words), address)


def _median_of(words: Sequence[str], address: str) -> float:
    """The median seconds of a command that finds a running stack; the first run only warms it up."""
    return median([_run(*words, router=address) for _ in range(ASKS + 1)][1:])


@contextmanager
def stack(*pipelines: str) -> Iterator[tuple[int, str, float]]:
    """Start a stack of these or the default pipelines; yields the id of its process, the router's address, and seconds until it served."""
    reading, writing = os.pipe()
    begin_s = time.monotonic()
    words = [*COMMAND, "serve", *pipelines, "--address", "127.0.0.1:0", "--no-http", "--ready-fd", str(writing)]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(words, pass_fds=(writing,), stdout=output, stderr=output, env=_environment("none"))
        try:
            os.close(writing)
            with os.fdopen(reading) as pipe:
                line = pipe.readline() if select.select([pipe], [], [], LIMIT_S)[0] else ""
            seconds = time.monotonic() - begin_s
            message = json.loads(line) if line else {}
            if "address" not in message:
                output.seek(0)
                raise RuntimeError(f"the stack did not start: {message.get('error', '')} {output.read().decode(errors='replace')}")
            yield process.pid, str(message["address"]), seconds
        finally:
            process.terminate()
            process.wait(LIMIT_S)


def _run(*words: str, router: str = "none") -> float:
    """Seconds of an omnistage command. router: address of the running router that it finds, or "none". Raises RuntimeError."""
    begin_s = time.monotonic()
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=LIMIT_S, env=_environment(router), check=False)
    if done.returncode:
        raise RuntimeError(f"omnistage {' '.join(words)} ended with {done.returncode}: {done.stderr}")
    return time.monotonic() - begin_s


def _environment(router: str) -> dict[str, str]:
    return {**os.environ, "OMNISTAGE_ROUTER": router}


def _check_call(module: str, *words: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, *words], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{module} ended with {done.returncode}: {done.stderr}")


if __name__ == "__main__":
    sys.exit(run("use", __doc__, {"command": _command, "install": _install, "asks": _asks}))

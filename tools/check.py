"""Runs every static check of the repository, even after one fails, and ends with a table of the failed checks."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import typer

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
PACKAGES = ("sdk", "connector", "host", "wire", "link", "engine", "models", "services", "router", "gateway")
OURS = (*PACKAGES, "benchmarks", "examples", "tests", "tools")


def checks() -> dict[str, list[str]]:
    """Each check by name, with its command."""
    # mypy fails on a folder without code.
    code = [folder for folder in OURS if any((ROOT / folder).rglob("*.py"))]
    dockerfiles = sorted(str(path.relative_to(ROOT)) for pattern in ("*", "services/*") for path in ROOT.glob(f"{pattern}/Dockerfile"))
    return {
        "ruff check": [f"{BIN}/ruff", "check", "--quiet", *OURS],
        "ruff format": [f"{BIN}/ruff", "format", "--quiet", "--check", *OURS],
        "mypy --strict": [f"{BIN}/mypy", *code],
        "buf lint": [f"{BIN}/buf", "lint", "protos"],
        "buf breaking": [sys.executable, "tools/breaking.py"],
        "stubs fresh": [sys.executable, "-m", "tools.protos", "--check"],
        "options fresh": [sys.executable, "-m", "tools.options", "--check"],
        "house rules": [sys.executable, "-m", "pytest", "-q", "tests/house"],
        "compose": [f"{BIN}/docker-compose", "--file", "docker-compose.yml", "--profile", "*", "config", "--quiet"],
        "hadolint": [f"{BIN}/hadolint", *dockerfiles],
    }


def run(command: list[str]) -> tuple[int, str, float]:
    """Run a command. Returns exit status, output, and duration in seconds."""
    start = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.returncode, done.stdout.strip(), time.monotonic() - start


def main(without_tests: bool = False) -> None:
    """Run all checks. Exit status 1 if any failed. without_tests: leave out the house rules, which are tests: `make test` runs them too."""
    failed = []
    commands = {name: command for name, command in checks().items() if not (without_tests and "pytest" in command)}
    # Two at a time, because only mypy and the house rules take long: a minute of one core each.
    with ThreadPoolExecutor(2) as lanes:
        for name, (status, printed, took_s) in zip(commands, lanes.map(run, commands.values()), strict=True):
            print(f"{'FAIL' if status else 'ok  '} {name:<14} {took_s:5.1f} s", flush=True)
            if status:
                failed.append(name)
            if status or name == "buf breaking":
                print("     " + printed.replace("\n", "\n     "), flush=True)
    print(f"check: {len(failed)} failed ({', '.join(failed)})" if failed else "check: all good")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)

"""Makes the virtual environment: finds out what is missing, installs it in pinned versions, and does nothing when nothing changed.

Standard library only, since it runs before anything is installed. Each step prints one line. The PyTorch CPU build comes from pip's
configured sources; where they lack it, from the index in TORCH_INDEX_URL. A set-up into which a CUDA package slipped is refused,
because it would be gigabytes larger and would not be what the tests ran on.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OLDEST, NEWEST = (3, 11), (3, 13)
TORCH = "2.13.0+cpu"
TORCH_INDEX_URL = "https://download.pytorch.org/whl/cpu"
RUNTIME = ("cli", "convert", "models")
DEV = (*RUNTIME, "asr", "dev")
STAMP = "omnistage-setup.json"
PINNED = ("--constraint", str(ROOT / "constraints.txt"))


class SetupError(Exception):
    """The set-up cannot go on; the text says what the user can do."""


def main() -> int:
    """Parses the command line, sets up, and turns a SetupError into one clear message and exit status 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dev", action="store_true", help="also what the tests and checks need")
    parser.add_argument("--extras", help="exactly these extras, comma separated ('' for none), instead of the runtime set")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where the virtual environment is (default: .venv)")
    parser.add_argument("--wheel", action="store_true", help="install the package as a wheel, not as a link to this checkout")
    options = parser.parse_args()
    extras = DEV if options.dev else RUNTIME
    if options.extras is not None:
        extras = tuple(sorted(filter(None, options.extras.split(","))))
    try:
        check_machine()
        # Two runs at once (make -j, two terminals) would install over each other.
        with (ROOT / "pyproject.toml").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            set_up(options.venv.absolute(), extras, editable=not options.wheel)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    return 0


def check_machine() -> None:
    """Raises SetupError on a platform or Python for which there are no packages."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise SetupError(f"omnistage runs on Linux x86-64, and this is {platform.system()} {platform.machine()}.")
    if platform.libc_ver()[0] != "glibc":
        raise SetupError("PyTorch needs a Linux with glibc 2.28 or later (Debian 10, Ubuntu 20.04, RHEL 8 and newer).")
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        raise SetupError(
            f"omnistage needs Python 3.11 to 3.13; {sys.executable} is {platform.python_version()}. Name another: make PYTHON=python3.12"
        )
    try:
        import ensurepip  # noqa: F401  (Debian ships Python without it)
        import venv  # noqa: F401
    except ModuleNotFoundError as error:
        raise SetupError(f"Python's module {error.name} is missing. On Debian and Ubuntu: apt install python3-venv") from error


def set_up(venv: Path, extras: tuple[str, ...], *, editable: bool) -> None:
    """Brings `venv` to the state that pyproject.toml and constraints.txt ask for. Returns at once when it is there already."""
    stamp, digest, made = venv / STAMP, inputs_digest(editable), read_stamp(venv / STAMP)
    if can_use(venv):
        if made.get("digest") == digest and set(extras) <= set(made["extras"]):
            return
    else:
        with step(f"virtual environment {venv.name} with Python {platform.python_version()}"):
            run([sys.executable, "-m", "venv", "--clear", str(venv)])
    # Until the end the environment is half made: without the stamp the next run goes over it again instead of trusting it.
    stamp.unlink(missing_ok=True)
    python = str(venv / "bin" / "python")
    with step("build tools"):
        pip(python, *PINNED, "pip", "hatchling", "editables", "setuptools")
    if "models" in extras:
        with step(f"torch {TORCH} (192 MB)"):
            install_torch(python)
    with step(f"omnistage [{', '.join(extras) or 'core'}]"):
        target = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
        pip(python, *PINNED, "--no-build-isolation", *(["-e"] if editable else []), target)
    refuse_cuda(python)
    stamp.write_text(json.dumps({"digest": digest, "extras": extras}) + "\n", encoding="utf-8")


def inputs_digest(editable: bool) -> str:
    """Names everything the environment is made from."""
    digest = hashlib.sha256(str(editable).encode())
    for name in ("pyproject.toml", "constraints.txt", "tools/setup.py"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def read_stamp(stamp: Path) -> dict[str, Any]:
    """What the last finished set-up wrote, or nothing when there was none."""
    if not stamp.exists():
        return {}
    return dict(json.loads(stamp.read_text(encoding="utf-8")))


def can_use(venv: Path) -> bool:
    """Whether a working environment lies there: not moved, its Python starts, is of a supported version and sees pip."""
    config = venv / "pyvenv.cfg"
    # An environment holds absolute paths (the first line of each script): one that was moved or copied with the checkout is no use.
    if not config.exists() or not re.search(rf"^command = .* {re.escape(str(venv))}$", config.read_text(encoding="utf-8"), re.MULTILINE):
        return False
    probe = "import sys, pip; print(sys.version_info[0], sys.version_info[1])"
    try:
        answer = subprocess.run([str(venv / "bin" / "python"), "-c", probe], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    major, minor = answer.stdout.split()
    return OLDEST <= (int(major), int(minor)) <= NEWEST


def install_torch(python: str) -> None:
    """Installs the CPU build, from pip's configured sources or else from the index in TORCH_INDEX_URL.

    Without its dependencies: those come with the rest, from the configured sources and in the pinned versions.
    """
    torch = ("--no-deps", f"torch=={TORCH}")
    try:
        pip(python, *torch)
        return
    except CommandError as error:
        if "No matching distribution found" not in error.output:
            raise
    index = os.environ.get("TORCH_INDEX_URL") or TORCH_INDEX_URL
    try:
        pip(python, *torch, "--index-url", index)
    except CommandError as error:
        raise SetupError(
            f"torch {TORCH} was found neither in pip's configured sources nor at {index}.\n"
            "Set TORCH_INDEX_URL to an index that has it, or pip's find-links to a folder with its wheel.\n" + error.tail()
        ) from error


def refuse_cuda(python: str) -> None:
    """Raises SetupError when a CUDA package was installed."""
    probe = "import importlib.metadata as m; print(*{d.name.replace('_', '-').lower() for d in m.distributions()})"
    found = [name for name in run([python, "-c", probe]).split() if name.startswith("nvidia-")]
    if found:
        raise SetupError(
            f"CUDA packages got into the environment ({', '.join(sorted(found))}): a dependency has pulled in another torch than {TORCH}.\n"
            "Remove the environment (rm -r .venv) and set it up again."
        )


def pip(python: str, *arguments: str) -> None:
    """Installs with pip."""
    run([python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *arguments])


class CommandError(SetupError):
    """A command failed; `output` is all that it printed."""

    def __init__(self, command: list[str], output: str) -> None:
        self.output = output
        super().__init__(f"{' '.join(command)} failed:\n{self.tail()}")

    def tail(self) -> str:
        """The last lines of the output, where the reason is."""
        return "\n".join(self.output.strip().splitlines()[-15:])


def run(command: list[str]) -> str:
    """Runs a command to its end and returns what it printed. Raises CommandError when it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise CommandError(command, done.stdout)
    return done.stdout


@contextmanager
def step(name: str) -> Iterator[None]:
    """One line of output for one step: its name when it starts, its duration when it ends."""
    print(f"setup: {name} ...", end="", flush=True)
    start = time.monotonic()
    try:
        yield
    except SetupError:
        print(" failed", flush=True)
        raise
    print(f" {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())

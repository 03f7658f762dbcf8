"""Makes the virtual environment: finds out what is missing, installs it in pinned versions, and does nothing when nothing changed.

Standard library only, since it runs before anything is installed. Each step prints one line. Only wheels whose SHA-256 stands in
requirements/ are installed (tools/lock.py writes those files); the project itself is built from this checkout, without an index. The
PyTorch CPU build comes from pip's configured sources; where they lack it, from the index in TORCH_INDEX_URL. A set-up for CPUs into which a
CUDA package slipped is refused, because it would be gigabytes larger and would not be what the tests ran on. With --device cuda PyTorch's
default build for Linux is installed, and the CUDA libraries that it names.
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
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OLDEST, NEWEST = (3, 11), (3, 13)
TORCH = "2.13.0+cpu"
TORCH_CUDA = TORCH.partition("+")[0]
"""The build without a label is the one for CUDA."""
BUILDS = {"cpu": (TORCH, "192 MB"), "cuda": (TORCH_CUDA, "530 MB")}
"""By device, the build of torch and its size."""
CUDA_LIST = "cuda"
"""The list of what the build for CUDA needs beyond the one for CPUs, some 2.5 GB."""
TORCH_INDEX_URL = "https://download.pytorch.org/whl/cpu"
"""Of the CPU build. The other one is on every index."""
RUNTIME = ("cli", "convert", "models", "play")
DEV = (*RUNTIME, "asr", "dev", "otel")
STAMP = "omnistage-setup.json"
REQUIREMENTS = ROOT / "requirements"
PICTURES = ROOT / "pictures"
"""The package with the default picture model. An image is built without it first, and gets it with the code."""
TORCH_HASHES = "torch.json"
HASHED = ("--require-hashes", "--no-deps", "--only-binary=:all:")
"""Options of pip: nothing but what the lists name, and of that only the files that they name."""


class SetupError(Exception):
    """The set-up cannot go on; the text says what the user can do."""


def main() -> int:
    """Parses the command line, sets up, and turns a SetupError into one clear message and exit status 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dev", action="store_true", help="also what the tests and checks need")
    parser.add_argument("--extras", help="exactly these extras, comma separated ('' for none), instead of the runtime set")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where the virtual environment is (default: .venv)")
    parser.add_argument("--device", choices=sorted(BUILDS), help="what torch computes on (default: as the environment was made, else cpu)")
    parser.add_argument("--wheel", action="store_true", help="install the package as a wheel, not as a link to this checkout")
    parser.add_argument("--allow-unhashed-torch", action="store_true", help="install torch unchecked where no hash of it is known")
    options = parser.parse_args()
    extras = DEV if options.dev else RUNTIME
    if options.extras is not None:
        extras = tuple(sorted(filter(None, options.extras.split(","))))
    try:
        check_machine()
        # Two runs at once (make -j, two terminals) would install over each other.
        with (ROOT / "pyproject.toml").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            venv = options.venv.absolute()
            device = options.device or read_stamp(venv / STAMP).get("device", "cpu")
            set_up(venv, extras, editable=not options.wheel, device=device, allow_unhashed_torch=options.allow_unhashed_torch)
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


def set_up(venv: Path, extras: tuple[str, ...], *, editable: bool, device: str = "cpu", allow_unhashed_torch: bool = False) -> None:
    """Brings `venv` to the state that pyproject.toml and requirements/ ask for. Returns at once when it is there already. One that was made
    for another device is made anew."""
    lists = lists_of(extras, device)
    stamp, digest, made = venv / STAMP, inputs_digest(editable), read_stamp(venv / STAMP)
    if can_use(venv) and made.get("device", device) == device:
        if made.get("digest") == digest and set(extras) <= set(made["extras"]):
            return
    else:
        with step(f"virtual environment {venv.name} with Python {platform.python_version()}"):
            run([sys.executable, "-m", "venv", "--clear", str(venv)])
    # Until the end the environment is half made: without the stamp the next run goes over it again instead of trusting it.
    stamp.unlink(missing_ok=True)
    python = str(venv / "bin" / "python")
    with step("build tools"):
        install_hashed(python, [hashed("build")])
    if "models" in extras:
        install_torch(python, device=device, allow_unhashed=allow_unhashed_torch)
    with step(f"what omnistage [{', '.join(extras) or 'core'}] needs"):
        install_hashed(python, lists)
    with step("omnistage"):
        pip(python, "--no-deps", "--no-index", "--no-build-isolation", *(["-e"] if editable else []), str(ROOT))
        if "models" in extras and PICTURES.exists():
            pip(python, "--no-deps", "--no-index", "--no-build-isolation", *(["-e"] if editable else []), str(PICTURES))
        check_complete(python)
    if device == "cpu":
        refuse_cuda(python)
    stamp.write_text(json.dumps({"digest": digest, "extras": extras, "device": device}) + "\n", encoding="utf-8")


def lists_of(extras: tuple[str, ...], device: str) -> list[Path]:
    """The lists to install for the extras on a device. Raises SetupError for an extra that does not exist."""
    more = (CUDA_LIST,) if device == "cuda" and "models" in extras else ()
    return [hashed(name) for name in ("core", *extras, *more)]


def inputs_digest(editable: bool) -> str:
    """Names everything the environment is made from."""
    digest = hashlib.sha256(str(editable).encode())
    for path in (ROOT / "pyproject.toml", PICTURES / "pyproject.toml", *sorted(REQUIREMENTS.iterdir()), Path(__file__)):
        digest.update(path.read_bytes() if path.exists() else b"")
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


def hashed(name: str) -> Path:
    """The list of what `core`, `build` or an extra installs. Raises SetupError where there is none."""
    path = REQUIREMENTS / f"{name}.txt"
    if not path.exists():
        raise SetupError(f"there is no extra named {name!r}: no {path.relative_to(REQUIREMENTS.parent)}.")
    return path


def install_hashed(python: str, lists: list[Path]) -> None:
    """Installs exactly what the lists name. Raises SetupError for a file that is another than the one they name."""
    pip(python, *HASHED, *(f"--requirement={path}" for path in lists))


def install_torch(python: str, *, device: str = "cpu", allow_unhashed: bool = False) -> None:
    """Installs the build for the device, from pip's configured sources or else from the index in TORCH_INDEX_URL.

    Without its dependencies: those come with the rest. Raises SetupError where its hash is not known and not allowed to be missing.
    """
    build, size = BUILDS[device]
    version = run([python, "-c", "import sys; print(*sys.version_info[:2], sep='.')"]).strip()
    known = json.loads((REQUIREMENTS / TORCH_HASHES).read_text(encoding="utf-8")).get(build, {}).get(version, [])
    if not known and not allow_unhashed:
        raise SetupError(
            f"no hash of torch {build} for Python {version} is known (requirements/{TORCH_HASHES}): tools/setup.py --allow-unhashed-torch "
            "(with make: ALLOW_UNHASHED_TORCH=1) installs it unchecked, another Python may have one."
        )
    # Letter for letter: for == the build without a label is every build.
    line = " ".join([f"torch==={build}", *(f"--hash=sha256:{one}" for one in known)])
    with step(f"torch {build} ({size if known else f'{size}, unchecked'})"), tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder) / "torch.txt"
        wanted.write_text(line + "\n", encoding="utf-8")
        _install_torch(python, device, *(HASHED if known else ("--no-deps", "--only-binary=:all:")), f"--requirement={wanted}")


def _install_torch(python: str, device: str, *arguments: str) -> None:
    try:
        pip(python, *arguments)
        return
    except CommandError as error:
        if "No matching distribution found" not in error.output:
            raise
    index = os.environ.get("TORCH_INDEX_URL") or (TORCH_INDEX_URL if device == "cpu" else "")
    build, _ = BUILDS[device]
    if not index:
        raise SetupError(f"torch {build} was not found in pip's configured sources. Set TORCH_INDEX_URL to an index that has it.")
    try:
        pip(python, *arguments, "--index-url", index)
    except CommandError as error:
        raise SetupError(
            f"torch {build} was found neither in pip's configured sources nor at {index}.\n"
            "Set TORCH_INDEX_URL to an index that has it, or pip's find-links to a folder with its wheel.\n" + error.tail()
        ) from error


def check_complete(python: str) -> None:
    """Raises SetupError when something that is installed lacks something else, or has it in a version that does not fit."""
    try:
        run([python, "-m", "pip", "--disable-pip-version-check", "check"])
    except CommandError as error:
        raise SetupError(f"requirements/ and pyproject.toml do not fit together, `make lock` renews the lists:\n{error.tail()}") from error


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
    """Installs with pip. Raises CommandError when that fails, SetupError in one line when a file is not the one that was asked for."""
    try:
        run([python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *arguments])
    except CommandError as error:
        if "DO NOT MATCH THE HASHES" not in error.output:
            raise
        names = ", ".join(re.findall(r"^ +(\S+==\S+) from ", error.output, re.MULTILINE))
        raise SetupError(
            f"{names}: the file that pip's sources gave is not the one whose SHA-256 stands in requirements/. Nothing of it was installed. "
            "Find out where it comes from; a mirror may have changed it, or someone on the way."
        ) from error


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

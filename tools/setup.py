"""Makes the virtual environment: finds out what is missing, installs it in pinned versions, and does nothing if nothing changed.

It uses the standard library only, since it runs before anything is installed. Each step prints one line. Only wheels whose SHA-256 stands
in requirements/ are installed (tools/lock.py writes those files), except for a CPU build of torch without a known hash; the project itself
is built from this checkout, without an index. The build of torch is chosen first (torch_build.py): if none can be had, the environment
stays as it is. The default build brings NVIDIA's libraries. Together with the CPU build they are refused, because then another package has
pulled in gigabytes, and another torch than the requested one.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import torch_build
from tools.commands import HASHED, CommandError, SetupError, pip, run, step

ROOT = Path(__file__).resolve().parent.parent
OLDEST, NEWEST = (3, 11), (3, 13)
CUDA_LIST = "cuda"
"""The list of packages, 2.2 GB, that the default build of torch needs in addition to those of the CPU build."""
RUNTIME = ("cli", "convert", "gateway", "models", "play")
DEV = (*RUNTIME, "asr", "compressed", "dev", "otel")
STAMP = "omnistage-setup.json"
REQUIREMENTS = ROOT / "requirements"
PICTURES = ROOT / "pictures"
"""The package with the default picture model. An image is built without it first, and gets it with the code."""
SOURCES = tuple(Path(__file__).with_name(name) for name in ("setup.py", "torch_build.py", "commands.py"))
"""The code of set-up: the environment is checked again if it changes."""


def main() -> int:
    """Parse the command line and set up. A SetupError becomes one clear message and exit status 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dev", action="store_true", help="also what the tests and checks need")
    parser.add_argument("--extras", help="exactly these extras, comma separated ('' for none), instead of the runtime set")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where the virtual environment is (default: .venv)")
    parser.add_argument(
        "--device", choices=sorted(torch_build.BUILDS), help="what torch computes on (default: as the environment was made, else cpu)"
    )
    parser.add_argument("--wheel", action="store_true", help="install the package as a wheel, not as a link to this checkout")
    parser.add_argument("--require-torch-hash", action="store_true", help="stop where no hash of torch is known, do not take it unchecked")
    parser.add_argument("--allow-unhashed-torch", action="store_true", help="without effect: what it allowed is so")
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
            set_up(venv, extras, editable=not options.wheel, device=device, require_torch_hash=options.require_torch_hash)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    return 0


def check_machine() -> None:
    """Raise SetupError on a platform or Python for which there are no packages."""
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


def set_up(venv: Path, extras: tuple[str, ...], *, editable: bool, device: str = "cpu", require_torch_hash: bool = False) -> None:
    """Bring `venv` to the state that pyproject.toml and requirements/ ask for; return at once if it has that state. editable: install the
    package as a link to this checkout. An environment with another torch than the chosen one is made anew. Raises SetupError; if no torch
    can be had, before anything has changed."""
    lists_of(extras)
    python, digest, stamp, usable = str(venv / "bin" / "python"), inputs_digest(editable), read_stamp(venv / STAMP), can_use(venv)
    torch_choice = None
    if "models" in extras and not (usable and torch_build.can_stay(python, stamp, device, require_hash=require_torch_hash)):
        usable = usable and not torch_build.find_installed(python)
        with python_with_pip(python if usable else sys.executable) as with_pip:
            torch_choice = torch_build.choose(with_pip, device, require_hash=require_torch_hash)
    elif usable and stamp.get("device", device) == device and stamp.get("digest") == digest and set(extras) <= set(stamp["extras"]):
        return
    if not usable:
        with step(f"virtual environment {venv.name} with Python {platform.python_version()}"):
            run([sys.executable, "-m", "venv", "--clear", str(venv)])
    # Until the end the environment is incomplete: its stamp has no digest, so if this run breaks off, the next run does every step anew.
    about: dict[str, Any] = {"device": device, "torch": stamp.get("torch") if usable else None}
    write_stamp(venv, about)
    with step("build tools"):
        install_hashed(python, [list_of("build")])
    if torch_choice:
        about["torch"] = {"build": torch_choice.build, "sha256": torch_build.install(python, torch_choice)}
        write_stamp(venv, about)
    build = torch_build.find_installed(python)
    with step(f"what omnistage [{', '.join(extras) or 'core'}] needs"):
        install_hashed(python, lists_of(extras, build))
    with step("omnistage"):
        pip(python, "--no-deps", "--no-index", "--no-build-isolation", *(["-e"] if editable else []), str(ROOT))
        if "models" in extras and PICTURES.exists():
            pip(python, "--no-deps", "--no-index", "--no-build-isolation", *(["-e"] if editable else []), str(PICTURES))
        check_complete(python)
    if build != torch_build.TORCH_CUDA:
        refuse_cuda(python)
    write_stamp(venv, {**about, "digest": digest, "extras": extras})


@contextmanager
def python_with_pip(python: str) -> Iterator[str]:
    """Yield an interpreter that has pip: `python`, or, if that is the running one and has no pip, as Debian's, one in a throw-away
    environment."""
    if python != sys.executable or find_spec("pip"):
        yield python
        return
    with tempfile.TemporaryDirectory() as folder:
        run([sys.executable, "-m", "venv", folder])
        yield str(Path(folder) / "bin" / "python")


def lists_of(extras: tuple[str, ...], build: str = "") -> list[Path]:
    """The lists to install for the extras, together with a build of torch. Raises SetupError for an extra that does not exist."""
    cuda_lists = (CUDA_LIST,) if build == torch_build.TORCH_CUDA and "models" in extras else ()
    return [list_of(name) for name in ("core", *extras, *cuda_lists)]


def inputs_digest(editable: bool) -> str:
    """A digest of all files from which the environment is made."""
    digest = hashlib.sha256(str(editable).encode())
    for path in (ROOT / "pyproject.toml", PICTURES / "pyproject.toml", *sorted(REQUIREMENTS.iterdir()), *SOURCES):
        digest.update(path.read_bytes() if path.exists() else b"")
    return digest.hexdigest()


def write_stamp(venv: Path, about: Mapping[str, Any]) -> None:
    """Write the stamp of an environment. about: the device, the installed torch, and at the end the extras and the digest of all
    sources."""
    (venv / STAMP).write_text(json.dumps(about) + "\n", encoding="utf-8")


def read_stamp(stamp: Path) -> dict[str, Any]:
    """The stamp of an environment; empty if there is none."""
    if not stamp.exists():
        return {}
    return dict(json.loads(stamp.read_text(encoding="utf-8")))


def can_use(venv: Path) -> bool:
    """Whether the folder has a working environment: it was not moved, and its Python starts, is of a supported version and has pip."""
    config = venv / "pyvenv.cfg"
    # An environment holds absolute paths (the first line of each script), so one that was moved or copied with the checkout does not work.
    if not config.exists() or not re.search(rf"^command = .* {re.escape(str(venv))}$", config.read_text(encoding="utf-8"), re.MULTILINE):
        return False
    probe = "import sys, pip; print(sys.version_info[0], sys.version_info[1])"
    try:
        answer = subprocess.run([str(venv / "bin" / "python"), "-c", probe], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    major, minor = answer.stdout.split()
    return OLDEST <= (int(major), int(minor)) <= NEWEST


def list_of(name: str) -> Path:
    """The path of the list of `core`, `build` or an extra. Raises SetupError if there is none."""
    path = REQUIREMENTS / f"{name}.txt"
    if not path.exists():
        raise SetupError(f"there is no extra named {name!r}: no {path.relative_to(REQUIREMENTS.parent)}.")
    return path


def install_hashed(python: str, lists: list[Path]) -> None:
    """Install exactly the packages that the lists name. Raises SetupError for a file whose hash is not in its list."""
    pip(python, *HASHED, *(f"--requirement={path}" for path in lists))


def check_complete(python: str) -> None:
    """Raise SetupError if an installed package lacks another one, or has it in a version that does not fit."""
    try:
        run([python, "-m", "pip", "--disable-pip-version-check", "check"])
    except CommandError as error:
        raise SetupError(f"requirements/ and pyproject.toml do not fit together, `make lock` renews the lists:\n{error.tail()}") from error


def refuse_cuda(python: str) -> None:
    """Raise SetupError if a CUDA package was installed."""
    probe = "import importlib.metadata as m; print(*{d.name.replace('_', '-').lower() for d in m.distributions()})"
    cuda_packages = [name for name in run([python, "-c", probe]).split() if name.startswith("nvidia-")]
    if cuda_packages:
        raise SetupError(
            f"CUDA packages got into the environment ({', '.join(sorted(cuda_packages))}): a dependency has pulled in another torch than "
            f"{torch_build.TORCH}.\nRemove the environment (rm -r .venv) and set it up again."
        )


if __name__ == "__main__":
    sys.exit(main())

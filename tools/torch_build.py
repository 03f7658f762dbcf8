"""Chooses the build of torch for an environment, and its source, before anything is made: a build may be gigabytes.

On Linux a version has two builds. The build for CPUs is on few indexes; PyTorch's own has it. The default build, made for CUDA, is on every
index, and needs 2.2 GB of NVIDIA's libraries even if it computes on a CPU. So a set-up for CPUs takes the first of these that can be
reached: the CPU build from pip's configured sources, the CPU build from the index in TORCH_INDEX_URL, the default build.
requirements/torch.json lists the hashes of the wheels of each build. A build without a hash there is installed unchecked, unless hashes are
required.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from tools.commands import HASHED, CommandError, SetupError, pip, run, say, step

TORCH = "2.13.0+cpu"
TORCH_CUDA = TORCH.partition("+")[0]
"""The default build, made for CUDA; its version has no label."""
BUILDS = {"cpu": (TORCH, TORCH_CUDA), "cuda": (TORCH_CUDA,)}
"""By device, the builds that compute on it, the best one first."""
SIZES = {TORCH: "192 MB", TORCH_CUDA: "530 MB"}
TORCH_INDEX_URL = "https://download.pytorch.org/whl/cpu"
"""The index of the CPU build. The default build is on every index."""
TABLE = Path(__file__).resolve().parent.parent / "requirements" / "torch.json"
"""SHA-256 of the wheels of each build, by Python; `make lock` writes it."""
FAR = ("--retries=1", "--timeout=15")
"""Options of pip for an index that may be out of reach, so that nobody waits for it longer than half a minute."""


@dataclass(frozen=True)
class Torch:
    """A build for one Python. index: URL of the index that has it; empty: pip's configured sources have it. hashes: SHA-256 of its wheels;
    empty if none is known."""

    build: str
    index: str
    hashes: tuple[str, ...]


def choose(python: str, device: str, *, require_hash: bool = False) -> Torch:
    """Choose the best build for the device that is available for the interpreter `python`, and print anything unusual about it. device: cpu
    or cuda. Only lists of versions are fetched.

    Raises SetupError if no build can be reached, or if no hash of it is known and one is required.
    """
    version = version_of(python)
    with step(f"looking for torch for Python {version}"):
        build, index = _reach(python, device)
    hashes = known_hashes(build, version)
    if build != BUILDS[device][0]:
        say(
            f"the CPU build of torch is out of reach for Python {version}: the default build comes, with its libraries for GPUs, "
            "2.7 GB to fetch, 5 GB on disk (TORCH_INDEX_URL=... names an index with the CPU build)"
        )
    if not hashes and require_hash:
        others = [f"make PYTHON=python{one}" for one in sorted(_table().get(build, {})) if known_hashes(build, one)]
        raise SetupError(
            f"no hash of torch {build} for Python {version} is known here (requirements/{TABLE.name}), and one is required "
            f"(--require-torch-hash, REQUIRE_TORCH_HASH). There is one with: {', '.join(others) or 'no Python'}."
        )
    if not hashes:
        say(f"torch {build} for Python {version} comes unchecked: no hash of it is known here (requirements/{TABLE.name})")
    return Torch(build, index, hashes)


def _reach(python: str, device: str) -> tuple[str, str]:
    """The best build for the device that any source has, and the URL of its index; empty for pip's configured sources. Raises
    SetupError."""
    index = os.environ.get("TORCH_INDEX_URL") or (TORCH_INDEX_URL if device == "cpu" else "")
    places = ("", index) if index else ("",)
    offers: dict[str, str] = {}
    for build, place in product(BUILDS[device], places):
        if place not in offers:
            offers[place] = _offer(python, place)
        if build in re.findall(r"[^\s,]+", offers[place].partition("Available versions:")[2].partition("\n")[0]):
            return build, place
    errors = "\n".join(line for offer in offers.values() for line in offer.splitlines() if line.startswith(("ERROR", "WARNING")))
    raise SetupError(
        f"torch {' or '.join(BUILDS[device])} was found neither in pip's configured sources{f' nor at {index}' if index else ''}.\n"
        f"Set TORCH_INDEX_URL to an index that has it, or pip's find-links to a folder with its wheel.\n{errors}"
    )


def _offer(python: str, index: str) -> str:
    """The text in which pip lists the versions of torch that the interpreter could install, or says why there are none. index: URL; empty:
    pip's configured sources."""
    command = [python, "-m", "pip", "index", "versions", "torch", "--only-binary=:all:", "--disable-pip-version-check", "--no-input"]
    try:
        # Otherwise a pip that is configured as quiet would print nothing.
        return run([*command, *((f"--index-url={index}", *FAR) if index else ())], PIP_QUIET="0")
    except CommandError as error:
        return error.output


def install(python: str, torch: Torch) -> str:
    """Install a build without its dependencies, which are in the other lists. Returns the SHA-256 of the installed wheel.

    Raises SetupError for a wheel whose hash is not one of the known ones.
    """
    # === compares letter for letter; == without a label would take a build with any label.
    line = " ".join([f"torch==={torch.build}", *(f"--hash=sha256:{one}" for one in torch.hashes)])
    options = HASHED if torch.hashes else ("--no-deps", "--only-binary=:all:")
    with step(f"torch {torch.build} ({SIZES[torch.build]})"), tempfile.TemporaryDirectory() as folder:
        requirement_file, report = Path(folder) / "torch.txt", Path(folder) / "report.json"
        requirement_file.write_text(line + "\n", encoding="utf-8")
        place = (f"--index-url={torch.index}",) if torch.index else ()
        pip(python, *options, f"--report={report}", f"--requirement={requirement_file}", *place)
        (package,) = json.loads(report.read_text(encoding="utf-8"))["install"]
        return str(package["download_info"]["archive_info"]["hashes"]["sha256"])


def can_stay(python: str, venv_stamp: Mapping[str, Any], device: str, *, require_hash: bool = False) -> bool:
    """Whether the torch that is installed for `python` is right for the device: it is the best build, or the one that was chosen for this
    device.

    venv_stamp: of the environment. If the hash of its wheel is not in the table, it is not right; if the wheel or the table has no hash, it
    may stay unless `require_hash`."""
    build, stamp = find_installed(python), venv_stamp.get("torch") or {}
    sha256 = stamp.get("sha256", "") if stamp.get("build") == build else ""
    is_chosen = venv_stamp.get("device") == device and stamp.get("build") == build
    hashes = known_hashes(build, version_of(python))
    if sha256 not in hashes and (require_hash or (sha256 and hashes)):
        return False
    return build == BUILDS[device][0] or (is_chosen and build in BUILDS[device])


def find_installed(python: str) -> str:
    """The build that is installed for `python`; empty if there is none."""
    probe = "import importlib.metadata as m; print(*{d.version for d in m.distributions(name='torch')})"
    return run([python, "-I", "-c", probe]).strip()


def version_of(python: str) -> str:
    """The version of an interpreter, such as 3.11."""
    return run([python, "-c", "import sys; print(*sys.version_info[:2], sep='.')"]).strip()


def known_hashes(build: str, version: str) -> tuple[str, ...]:
    """SHA-256 of the wheels of a build for a version of Python; empty if none is known."""
    return tuple(_table().get(build, {}).get(version, ()))


def _table() -> dict[str, dict[str, list[str]]]:
    """SHA-256 of the wheels of torch, by build and version of Python."""
    return dict(json.loads(TABLE.read_text(encoding="utf-8")))

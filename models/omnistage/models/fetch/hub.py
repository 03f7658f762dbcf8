"""Fetches checkpoints by their name at a hub, such as owner/name or owner/name@revision, into the cache that all programs of this user
share.

A name is resolved to a commit first. Files other than weights, which show the family, are fetched before anything large. A partial file of
weights is continued where it stopped, even after this process was killed, and is compared with the hub's SHA-256 when it is complete. If a
file has another size in the cache than at the hub, it is fetched anew. If the hub cannot be reached, the cache is used.

HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_CACHE and HF_HUB_OFFLINE mean the same as in every program that uses huggingface_hub.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from omnistage.models.checkpoint.files import json_object
from omnistage.models.fetch.own_files import hold_lock
from omnistage.models.fetch.packages import file_sha256, size_of
from omnistage.models.reports import FetchError, ShowProgress, bytes_told

# The library reads these when it is imported, here and in child processes. Xet cannot continue a partial file.
os.environ.update(
    HF_HUB_DISABLE_TELEMETRY="1", HF_HUB_DISABLE_PROGRESS_BARS="1", HF_HUB_DISABLE_SYMLINKS_WARNING="1", HF_HUB_DISABLE_XET="1"
)

import httpx2
from huggingface_hub import HfApi, constants, get_cached_repo_tree, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import build_hf_headers, tqdm, validate_repo_id

T = TypeVar("T")

FILE_PATTERNS = (
    *("*.safetensors", "*.json", "*.jinja", "*.tiktoken"),
    *("*vocab.txt", "*merges.txt", "*spiece.model", "*tokenizer.model", "*spk_dict.pt"),
)
"""Patterns of the files to fetch: weights, configs, processors, tokenizers and speakers. Only the file of speakers is a pickle, because it
exists in no other form."""

NAME = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w][\w./-]*))?", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")
ANSWER_LIMIT_S = 10.0
"""Seconds in which the next bytes of an answer must come."""
LIST_LIMIT_S = 60.0
"""Seconds in which the whole list of files must come."""


class HubError(FetchError):
    """A checkpoint cannot be fetched by its name. The text says why and what to do."""


class UnknownName(HubError):
    """The hub has no such repository, or does not show it to this user, or the repository has no such revision."""


class NoWeights(HubError):
    """The repository has no weights in a supported form."""


class AccessRefused(HubError):
    """The repository is gated, and this user has no access."""


class HubUnreachable(HubError):
    """The hub does not answer, and the cache does not have the checkpoint."""


class DiskFull(HubError):
    """The disk has too little room."""


def endpoint() -> str:
    """The address of the hub."""
    return constants.ENDPOINT


@dataclass(frozen=True, slots=True)
class HubName:
    """The name of a checkpoint at the hub. repository: owner/name. revision: a branch, a tag or a commit."""

    repository: str
    revision: str = constants.DEFAULT_REVISION

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}"


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A checkpoint in the cache: the commit that its name stands for, and its folder."""

    commit: str
    folder: Path


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a commit. size: in bytes. sha256: hash of its content. git: its name as a blob in git. Both are empty if the hub does not
    report them."""

    path: str
    size: int
    sha256: str
    git: str

    @property
    def blob(self) -> str:
        """The file's name in the cache; empty: it is not known before the file is requested."""
        return self.sha256 or self.git


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """The plan of a fetch: the commit that a name stands for, and how many bytes must be fetched. cache: folder of the cache. size: bytes
    of all wanted files. missing: bytes that the cache lacks. free: free bytes of the cache's disk. is_unasked: whether the hub did not
    answer, so that the checkpoint in the cache is used."""

    name: HubName
    commit: str
    cache: Path
    size: int = 0
    missing: int = 0
    free: int = 0
    is_unasked: bool = False


def hub_name(text: str) -> HubName | None:
    """The name at a hub in a text of the form owner/name or owner/name@revision; None: the text has another form. The hub is not asked."""
    match = NAME.fullmatch(text)
    if match is None or ".." in text:
        return None
    try:
        validate_repo_id(match["repository"])
    except HFValidationError:
        return None
    return HubName(match["repository"], match["revision"] or constants.DEFAULT_REVISION)


def fetch(name: HubName, check: Callable[[Path], object], tell: Callable[[FetchPlan], object], progress: ShowProgress) -> FoundCheckpoint:
    """Fetch what the cache lacks of a checkpoint, and return the checkpoint.

    tell: called with the plan before anything is fetched. check: called with the folder when it has all files except weights; an error of
    this call ends the fetch. Raises HubError."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # Our own errors report each fault once.
    cache = Path(constants.HF_HUB_CACHE).expanduser().resolve()
    if COMMIT.fullmatch(name.revision) and (folder := _find_cached(name, needs_list=True)) is not None:
        return _use_cached(folder, FetchPlan(name, name.revision, cache), check, tell)
    try:
        commit, files = _list_files(name)
    except HubUnreachable:
        if (folder := _find_cached(name)) is None:
            raise
        return _use_cached(folder, FetchPlan(name, folder.name, cache, is_unasked=not constants.HF_HUB_OFFLINE), check, tell)
    with _as_hub_errors(name):
        return Fetch(name, commit, files, cache, progress).run(check, tell)


def _use_cached(folder: Path, plan: FetchPlan, check: Callable[[Path], object], tell: Callable[[FetchPlan], object]) -> FoundCheckpoint:
    """The checkpoint in a folder of the cache. First this calls `tell` and `check`, as described in `fetch`."""
    tell(plan)
    check(folder)
    return FoundCheckpoint(plan.commit, folder)


def _list_files(name: HubName) -> tuple[str, list[RemoteFile]]:
    """(the commit that a name stands for, its wanted files). Raises HubError."""
    with _as_hub_errors(name), _of_a_hub():
        listing = _within(
            LIST_LIMIT_S,
            lambda: HfApi().model_info(name.repository, revision=name.revision, files_metadata=True, timeout=ANSWER_LIMIT_S),
        )
        if listing.sha is None or not COMMIT.fullmatch(listing.sha):
            raise ValueError(f"{listing.sha!r} is no commit")
        return listing.sha, [_remote(file) for file in listing.siblings or () if _is_wanted(file.rfilename)]


def _remote(file: RepoSibling) -> RemoteFile:
    """A file of the hub's list. Raises ValueError for impossible values, because the name and the hashes become paths here."""
    remote = RemoteFile(file.rfilename, file.size or 0, file.lfs.sha256 if file.lfs else "", file.blob_id or "")
    if "\0" in remote.path or not {"", ".", ".."}.isdisjoint(remote.path.split("/")):
        raise ValueError(f"{remote.path!r} is no file of a repository")
    if not isinstance(remote.size, int) or remote.size < 0:
        raise ValueError(f"{remote.path} has {remote.size!r} bytes")
    if (remote.sha256 and not SHA256.fullmatch(remote.sha256)) or (remote.git and not COMMIT.fullmatch(remote.git)):
        raise ValueError(f"{remote.path} has no hashes")
    return remote


def _within(limit_s: float, ask: Callable[[], T]) -> T:
    """The result of `ask`, which runs on a thread: nothing else ends an answer that comes byte by byte. Raises HubUnreachable after the
    limit, and what `ask` raises."""
    result: Future[T] = Future()

    def answer() -> None:
        try:
            result.set_result(ask())
        except BaseException as error:  # The thread that waits raises it.
            result.set_exception(error)

    Thread(target=answer, name="hub", daemon=True).start()
    try:
        return result.result(limit_s)
    except TimeoutError:
        raise HubUnreachable(f"{constants.ENDPOINT} has not told its files after {limit_s:g} s: try again later") from None


@contextmanager
def _of_a_hub() -> Iterator[None]:
    """While the context is open, turns errors caused by senseless answers of the hub into HubUnreachable."""
    try:
        yield
    except (OSError, HubError):
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise HubUnreachable(f"{constants.ENDPOINT} does not answer as a hub does: check HF_ENDPOINT") from error


class Fetch:
    """Fetches one commit into the cache, in the layout that huggingface_hub documents: blobs named by hash, snapshots by commit with links
    to blobs, and refs from branches and tags to commits. files: all wanted files of the commit."""

    def __init__(self, name: HubName, commit: str, files: Sequence[RemoteFile], cache: Path, progress: ShowProgress) -> None:
        self._name = name
        self._commit = commit
        self._files = files
        self._cache = cache
        self._progress = progress
        self._size = sum(file.size for file in files)
        self._store = cache / repo_folder_name(repo_id=name.repository, repo_type="model")
        self._folder = self._store / "snapshots" / commit

    def run(self, check: Callable[[Path], object], tell: Callable[[FetchPlan], object]) -> FoundCheckpoint:
        """Fetch the missing files; `check` and `tell` are as in `fetch`. Raises HubError and the library's errors."""
        if not any(map(_is_weights, self._files)):
            raise NoWeights(f"{self._name} has no weights as safetensors, and no others are read: look for a repository that has them")
        missing, free = self._missing_bytes(), _free_disk_bytes(self._cache)
        tell(FetchPlan(self._name, self._commit, self._cache, self._size, missing, free))
        if missing > free:
            raise DiskFull(
                f"{self._name}: {bytes_told(missing)} are to be fetched, and {self._cache} has {bytes_told(free)} free:"
                " make room, or set HF_HOME to a folder on a larger disk"
            )
        is_complete = all(map(self._is_there, self._files))
        with nullcontext() if is_complete else self._hold_lock():
            self._drop_damaged()
            self._snapshot([file for file in self._files if not _is_weights(file)])
            check(self._folder)
            self._weights()
            self._snapshot(self._files)
            self._check_whole()
            self._record_commit()
        return FoundCheckpoint(self._commit, self._folder)

    def _hold_lock(self) -> AbstractContextManager[None]:
        """A context that locks this repository against fetches by other processes, because each lock of the library is for a single
        file."""
        folder = self._cache / ".locks" / self._store.name
        folder.mkdir(parents=True, exist_ok=True)
        return hold_lock(folder / "omnistage.lock", self._progress, lambda: (self._size - self._missing_bytes(), self._size))

    def _is_there(self, file: RemoteFile) -> bool:
        return _has_size(self._folder / file.path, file.size)

    def _drop_damaged(self) -> None:
        """Remove files of a wrong size, because the library would accept them by their name alone."""
        for file in self._files:
            linked = self._folder / file.path
            target = Path(os.path.realpath(linked))
            if not self._is_there(file):
                linked.unlink(missing_ok=True)
                if target.parent == self._store / "blobs":
                    target.unlink(missing_ok=True)
            if file.blob and not _has_size(self._blob(file), file.size):
                self._blob(file).unlink(missing_ok=True)

    def _check_whole(self) -> None:
        """Raises HubError if a file is missing or has another size than in the hub's list."""
        for file in self._files:
            if not self._is_there(file):
                raise HubError(f"{file.path} of {self._name} is not {file.size} bytes long, as the hub says that it is: try again later")

    def _missing_bytes(self) -> int:
        """Number of bytes that must still be fetched."""
        return sum(file.size - self._cached_bytes(file) for file in self._files if not self._is_there(file))

    def _cached_bytes(self, file: RemoteFile) -> int:
        """Number of bytes of a file that the cache has as a blob, complete or partial."""
        if file.blob and _has_size(self._blob(file), file.size):
            return file.size
        partial_bytes = size_of(self._partial(file)) if file.sha256 else 0
        return partial_bytes if partial_bytes <= file.size else 0

    def _blob(self, file: RemoteFile) -> Path:
        return self._store / "blobs" / file.blob

    def _partial(self, file: RemoteFile) -> Path:
        return self._store / "blobs" / f"{file.sha256}.incomplete"

    def _snapshot(self, files: Sequence[RemoteFile]) -> None:
        """Let the library fetch the missing ones of these files, and link them into the snapshot."""
        missing = [file for file in files if not self._is_there(file)]
        if not missing:
            return
        total_bytes = sum(file.size for file in missing)

        def check_count(count: int) -> None:
            if count > total_bytes:
                raise HubError(f"{self._name}: the hub sends more than the {bytes_told(total_bytes)} that it told: try again later")

        patterns = [_exact_pattern(file.path) for file in missing]
        with _of_a_hub():
            snapshot_download(self._name.repository, revision=self._commit, allow_patterns=patterns, tqdm_class=_counting_bar(check_count))

    def _weights(self) -> None:
        """Fetch the files of weights whose SHA-256 is known, one after the other."""
        weights = list(filter(_is_weights, self._files))
        total = sum(file.size for file in weights)
        label, done_bytes = f"fetching {self._name.repository.rpartition('/')[2][-22:]}", 0
        for file in weights:
            # Default values bind the present file and sum, which change with the loop.
            def report(position: int, file: RemoteFile = file, earlier_bytes: int = done_bytes) -> None:
                if position > file.size:
                    raise HubError(
                        f"{file.path} of {self._name}: the hub sends more than the {bytes_told(file.size)} that it told: try again later"
                    )
                self._progress(label, earlier_bytes + position, total, "bytes")

            if file.sha256 and not self._is_there(file) and not self._blob(file).is_file():
                report(self._cached_bytes(file))
                self._weight(file, report)
            done_bytes += file.size
            self._progress(label, done_bytes, total, "bytes")

    def _weight(self, file: RemoteFile, report: Callable[[int], None]) -> None:
        """Fetch one file of weights, continuing its partial file, and check it. report: called with the number of its bytes so far."""
        partial = self._partial(file)
        partial.parent.mkdir(parents=True, exist_ok=True)
        if size_of(partial) > file.size:
            partial.unlink()
        url = hf_hub_url(self._name.repository, file.path, revision=self._commit)
        with partial.open("ab") as out:
            headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
            http_get(url, out, resume_size=out.tell(), headers=headers, expected_size=file.size, tqdm_class=_counting_bar(report))
            out.flush()
            os.fsync(out.fileno())
        if file_sha256(partial) != file.sha256:
            partial.unlink()
            raise HubError(f"{file.path} of {self._name} came with other bytes than the hub says that it has: it was removed; try again")
        partial.rename(self._blob(file))

    def _record_commit(self) -> None:
        """Record the commit of a branch or tag after all of its files have come. The record is read when the hub cannot be reached."""
        reference = self._store / "refs" / self._name.revision
        if COMMIT.fullmatch(self._name.revision) or (reference.is_file() and reference.read_text() == self._commit):
            return
        reference.parent.mkdir(parents=True, exist_ok=True)
        new = reference.with_name(f"{reference.name}.{os.getpid()}.tmp")
        new.write_text(self._commit)
        new.replace(reference)


def _find_cached(name: HubName, *, needs_list: bool = False) -> Path | None:
    """The folder of a name in the cache; None: a file is missing, by the cache's list of the commit's files. The cache may have no such
    list. Then the indices of weights and parts decide, or with needs_list the result is None. The hub is not asked."""
    try:
        folder = Path(snapshot_download(name.repository, revision=name.revision, allow_patterns=list(FILE_PATTERNS), local_files_only=True))
        tree = get_cached_repo_tree(name.repository, revision=folder.name)
    except LocalEntryNotFoundError:
        return None
    except CachedRepoTreeNotFoundError:
        return folder if not needs_list and _has_all_parts(folder) else None
    return folder if all(_has_size(folder / file.path, file.size) for file in tree if _is_wanted(file.path)) else None


def _has_size(path: Path, count: int) -> bool:
    """Whether the path is a file of this many bytes; no error if another process removes or renames it meanwhile."""
    return path.is_file() and size_of(path) == count


def _has_all_parts(folder: Path) -> bool:
    """Whether a folder has weights, all files that their indices name, and a folder for each part in the model_index.json of a drawing
    model. That file has [library, class] for each part, or nulls for a part that the model lacks."""
    listed = json_object(folder / "model_index.json") if (folder / "model_index.json").is_file() else {}
    parts = [name for name, value in listed.items() if isinstance(value, list) and any(value)]
    shards = {
        index.parent / str(shard)
        for index in folder.rglob("*.safetensors.index.json")
        for shard in json_object(index).get("weight_map", {}).values()
    }
    is_whole = all(shard.is_file() for shard in shards) and all(any((folder / part).glob("*")) for part in parts)
    return is_whole and any(folder.rglob("*.safetensors"))


def _counting_bar(report: Callable[[int], None]) -> type[tqdm]:
    """A class of progress bars for the library that draws nothing, and calls `report` with the number of bytes so far, before they are
    written."""

    class Counter(tqdm):
        def __init__(self, *arguments: Any, unit: str = "it", initial: int = 0, **others: Any) -> None:
            super().__init__(*arguments, **others | {"disable": True})  # type: ignore[no-untyped-call]
            self._is_of_bytes = unit == "B"
            self._position = 0
            self.update(initial)

        def update(self, n: float | None = 1) -> None:
            if self._is_of_bytes and n:
                self._position += int(n)
                report(self._position)

    return Counter


def _is_wanted(path: str) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in FILE_PATTERNS)


def _is_weights(file: RemoteFile) -> bool:
    return file.path.endswith(".safetensors")


def _exact_pattern(path: str) -> str:
    """A pattern that matches only this path."""
    return re.sub(r"([*?[])", r"[\1]", path)


def _free_disk_bytes(folder: Path) -> int:
    """Free bytes of the disk that a folder is on; the folder need not exist."""
    return shutil.disk_usage(next(parent for parent in (folder, *folder.parents) if parent.is_dir())).free


@contextmanager
def _as_hub_errors(name: HubName) -> Iterator[None]:
    """While the context is open, turns the library's errors into HubError. name: of the checkpoint, for the texts of the errors."""
    try:
        yield
    except GatedRepoError as error:
        raise AccessRefused(
            f"{name.repository} is gated: ask for access on its page, and give a token of the account that got it in HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise UnknownName(f"the hub has no {name.repository}, or shows it to nobody without the right token in HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise UnknownName(f"{name.repository} has no revision {name.revision!r}: give a branch, a tag or a whole commit of it") from error
    except OfflineModeIsEnabled as error:
        raise HubUnreachable(
            f"{name} is not in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids to fetch it: unset it once"
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise AccessRefused(f"the hub refuses {name} with status {status}: check the token in HF_TOKEN") from error
        raise HubUnreachable(f"the hub answers with status {status} for {name}: try again later") from error
    except (httpx2.HTTPError, httpx2.InvalidURL, LocalEntryNotFoundError) as error:
        raise HubUnreachable(
            f"the hub at {constants.ENDPOINT} is not reached, and the cache has not all of {name}:"
            " check the network and try again; what was fetched is kept"
        ) from error
    except OSError as error:
        raise _disk_error(error, name) from error


def _disk_error(error: OSError, name: HubName) -> HubError:
    """The HubError for an error of reading or writing files."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"the disk of {constants.HF_HUB_CACHE} is full: make room, or set HF_HOME; what was fetched is kept")
    if error.errno is None:  # The library's own error for a file that ended too early.
        return HubUnreachable(f"{name} came in part only: try again; what was fetched is kept")
    return HubError(
        f"{error.filename or constants.HF_HUB_CACHE} cannot be read or written ({error.strerror}): set HF_HOME to a folder of yours"
    )

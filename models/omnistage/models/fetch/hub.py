"""Fetches checkpoints by their name at a hub, such as owner/name or owner/name@revision, into the cache that all programs of this user
share.

A name is resolved to a commit first. huggingface_hub fetches the files other than weights, which show the family, before anything large. A
partial file of weights is continued where it stopped, even after this process was killed, and is compared with the hub's SHA-256 when it is
complete; the library alone begins each file anew. If a file has another size in the cache than at the hub, it is fetched anew. If the hub
cannot be reached, the cache is used.

HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_CACHE and HF_HUB_OFFLINE mean the same as in every program that uses huggingface_hub.
"""

from __future__ import annotations

import errno
import glob
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from omnistage.models.checkpoint.files import json_object
from omnistage.models.fetch.own_files import hold_lock
from omnistage.models.fetch.packages import file_sha256, size_of
from omnistage.models.reports import FetchError, ShowProgress, bytes_told

# The library reads these when it is imported, here and in child processes. Xet cannot continue a partial file.
os.environ.update(
    HF_HUB_DISABLE_TELEMETRY="1", HF_HUB_DISABLE_PROGRESS_BARS="1", HF_HUB_DISABLE_SYMLINKS_WARNING="1", HF_HUB_DISABLE_XET="1"
)

import httpx2
from huggingface_hub import HfApi, constants, errors, get_cached_repo_tree, hf_hub_url, snapshot_download
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.hf_api import ModelInfo, RepoSibling
from huggingface_hub.utils import build_hf_headers, filter_repo_objects, tqdm, validate_repo_id

FILE_PATTERNS = [
    *("*.safetensors", "*.json", "*.jinja", "*.tiktoken"),
    *("*vocab.txt", "*merges.txt", "*spiece.model", "*tokenizer.model", "*spk_dict.pt"),
]
"""Patterns of the files to fetch: weights, configs, processors, tokenizers and speakers. Only the file of speakers is a pickle, because it
exists in no other form."""

NAME = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w][\w./-]*))?", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")
ENDPOINT = constants.ENDPOINT
"""The address of the hub."""
ANSWER_LIMIT_S = 10.0
"""Seconds in which the next bytes of an answer must come."""
LIBRARY_ERRORS = (OSError, httpx2.HTTPError, httpx2.InvalidURL)
"""Errors of the library, and of reading and writing files."""
LIST_LIMIT_S = 60.0
"""Seconds in which the hub must have told the files of a repository."""
SENSELESS = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""Errors of reading an answer that is none of a hub."""


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


@dataclass(frozen=True, slots=True)
class HubName:
    """The name of a checkpoint at the hub. repository: owner/name. revision: a branch, a tag or a commit."""

    repository: str
    revision: str = constants.DEFAULT_REVISION

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}"


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a commit. path: in the repository. size: in bytes. sha256: hash of its content; empty: the hub has none. link: its place
    in the snapshot. blob: the place of its content in the cache."""

    path: str
    size: int
    sha256: str
    link: Path
    blob: Path

    @property
    def partial(self) -> Path:
        return self.blob.with_name(f"{self.blob.name}.incomplete")

    @property
    def is_there(self) -> bool:
        return _has_size(self.link, self.size)

    @property
    def missing_bytes(self) -> int:
        """Number of bytes that the cache lacks."""
        if self.is_there or _has_size(self.blob, self.size):
            return 0
        partial_bytes = size_of(self.partial)
        return self.size - partial_bytes if partial_bytes <= self.size else self.size

    def drop_damaged(self) -> None:
        """Remove what has a wrong size, because the library would accept it by its name alone."""
        if not self.is_there:
            self.link.unlink(missing_ok=True)
        if not _has_size(self.blob, self.size):
            self.blob.unlink(missing_ok=True)


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
    except errors.HFValidationError:
        return None
    return HubName(match["repository"], match["revision"] or constants.DEFAULT_REVISION)


def fetch(name: HubName, check: Callable[[Path], object], tell: Callable[[FetchPlan], object], progress: ShowProgress) -> Path:
    """Fetch what the cache lacks of a checkpoint, and return its folder in the cache, which has the name of the commit.

    tell: called with the plan before anything is fetched. check: called with the folder when it has all files except weights; an error of
    this call ends the fetch. Raises HubError."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # Our own errors report each fault once.
    cache = Path(constants.HF_HUB_CACHE).expanduser().resolve()
    folder = _find_cached(name, needs_list=True) if COMMIT.fullmatch(name.revision) else None
    is_unasked = False
    if folder is None:
        try:
            remote = Fetch(name, cache, progress)
        except (*LIBRARY_ERRORS, *SENSELESS) as error:
            reason = _hub_error(error, name)
            folder = _find_cached(name) if isinstance(reason, HubUnreachable) else None
            if folder is None:
                raise reason from error
            is_unasked = not constants.HF_HUB_OFFLINE
        else:
            try:
                return remote.run(check, tell)
            except LIBRARY_ERRORS as error:
                raise _hub_error(error, name) from error
    tell(FetchPlan(name, folder.name, cache, is_unasked=is_unasked))
    check(folder)
    return folder


class Fetch:
    """Fetches one commit into the cache, in the layout that huggingface_hub documents: blobs named by hash, snapshots by commit with links
    to blobs, and refs from branches and tags to commits."""

    def __init__(self, name: HubName, cache: Path, progress: ShowProgress) -> None:
        """Asks the hub for the commit of the name, and for its files. Raises LIBRARY_ERRORS and SENSELESS."""
        self._name = name
        self._cache = cache
        self._progress = progress
        self._store = cache / repo_folder_name(repo_id=name.repository, repo_type="model")
        info = _ask(name)
        self._commit = info.sha or ""
        if not COMMIT.fullmatch(self._commit):  # It becomes a path.
            raise ValueError(f"{self._commit!r} is no commit")
        self._folder = self._store / "snapshots" / self._commit
        # fspath raises TypeError for a name that is no text.
        files = filter_repo_objects(info.siblings or (), allow_patterns=FILE_PATTERNS, key=lambda file: os.fspath(file.rfilename))
        self._files = list(map(self._remote, files))
        self._weights = [file for file in self._files if file.path.endswith(".safetensors")]
        self._size = sum(file.size for file in self._files)

    def _remote(self, file: RepoSibling) -> RemoteFile:
        """A file of the hub's list. Raises one of SENSELESS for impossible values, because the name and the hash become paths here."""
        path, size, sha256 = file.rfilename, file.size or 0, file.lfs.sha256 if file.lfs else ""
        blob = sha256 or file.blob_id or ""
        path.encode()  # Raises UnicodeEncodeError, a ValueError, for half of a surrogate pair.
        if "\0" in path or not {"", ".", ".."}.isdisjoint(path.split("/")) or not (SHA256 if sha256 else COMMIT).fullmatch(blob):
            raise ValueError(f"{path!r} with the hash {blob!r} is no file of a repository")
        if not isinstance(size, int) or not 0 <= size < 1 << 63:
            raise ValueError(f"{path} has {size!r} bytes")
        return RemoteFile(path, size, sha256, self._folder / path, self._store / "blobs" / blob)

    def run(self, check: Callable[[Path], object], tell: Callable[[FetchPlan], object]) -> Path:
        """Fetch the missing files; `check` and `tell` are as in `fetch`. Raises HubError and LIBRARY_ERRORS."""
        if not self._weights:
            raise NoWeights(f"{self._name} has no weights as safetensors, and no others are read: look for a repository that has them")
        disk = next(folder for folder in (self._cache, *self._cache.parents) if folder.is_dir())
        missing, free = self._missing_bytes(), shutil.disk_usage(disk).free
        tell(FetchPlan(self._name, self._commit, self._cache, self._size, missing, free))
        if missing > free:
            raise DiskFull(
                f"{self._name}: {bytes_told(missing)} are to be fetched, and {self._cache} has {bytes_told(free)} free:"
                " make room, or set HF_HOME to a folder on a larger disk"
            )
        # Each lock of the library is for a single file, so this one keeps other processes from the repository.
        lock, is_complete = self._cache / ".locks" / self._store.name / "omnistage.lock", all(file.is_there for file in self._files)
        with nullcontext() if is_complete else hold_lock(lock, self._progress, lambda: (self._size - self._missing_bytes(), self._size)):
            for file in self._files:
                file.drop_damaged()
            self._snapshot(file for file in self._files if file not in self._weights)
            check(self._folder)
            self._fetch_weights()
            self._snapshot(self._files)
            self._record_commit()
        return self._folder

    def _missing_bytes(self) -> int:
        return sum(file.missing_bytes for file in self._files)

    def _snapshot(self, files: Iterable[RemoteFile]) -> None:
        """Let the library fetch the missing ones of these files, and link them into the snapshot. Raises LIBRARY_ERRORS, and HubError
        if one of them has not the size that the hub says, or the hub's answers are senseless."""
        if missing := [file for file in files if not file.is_there]:
            patterns = [glob.escape(file.path) for file in missing]
            bar = _bar(str(self._name), sum(file.size for file in missing), lambda count: None)
            try:
                snapshot_download(self._name.repository, revision=self._commit, allow_patterns=patterns, tqdm_class=bar)
            except HubError:
                raise
            except SENSELESS as error:
                raise _hub_error(error, self._name) from error
        for file in missing:
            if not file.is_there:
                raise HubError(f"{file.path} of {self._name} is not {file.size} bytes long, as the hub says that it is: try again later")

    def _fetch_weights(self) -> None:
        """Fetch the files of weights whose SHA-256 is known, one after the other."""
        done_bytes = 0
        for file in self._weights:
            if file.sha256 and not file.is_there and not file.blob.is_file():
                self._fetch_file(file, done_bytes)
            done_bytes += file.size
            self._show(done_bytes)

    def _show(self, done_bytes: int) -> None:
        """Show the progress of the weights. done_bytes: how many of their bytes are there."""
        label = f"fetching {self._name.repository.rpartition('/')[2][-22:]}"
        self._progress(label, done_bytes, sum(file.size for file in self._weights), "bytes")

    def _fetch_file(self, file: RemoteFile, earlier_bytes: int) -> None:
        """Fetch a file of weights, continuing its partial file, and compare its SHA-256. earlier_bytes: bytes of the files before it."""
        file.partial.parent.mkdir(parents=True, exist_ok=True)
        if size_of(file.partial) > file.size:
            file.partial.unlink()
        url = hf_hub_url(self._name.repository, file.path, revision=self._commit)
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        self._show(earlier_bytes + size_of(file.partial))
        with file.partial.open("ab") as out:
            bar = _bar(f"{file.path} of {self._name}", file.size, lambda count: self._show(earlier_bytes + count))
            http_get(url, out, resume_size=out.tell(), headers=headers, expected_size=file.size, tqdm_class=bar)
            out.flush()
            os.fsync(out.fileno())
        if file_sha256(file.partial) != file.sha256:
            file.partial.unlink()
            raise HubError(f"{file.path} of {self._name} came with other bytes than the hub says that it has: it was removed; try again")
        file.partial.rename(file.blob)

    def _record_commit(self) -> None:
        """Record the commit of a branch or tag after all of its files have come. The record is read when the hub cannot be reached."""
        reference = self._store / "refs" / self._name.revision
        is_recorded = COMMIT.fullmatch(self._name.revision) or (reference.is_file() and reference.read_text() == self._commit)
        if not is_recorded:
            reference.parent.mkdir(parents=True, exist_ok=True)
            new = reference.with_name(f"{reference.name}.{os.getpid()}.tmp")
            new.write_text(self._commit)
            new.replace(reference)


def _ask(name: HubName) -> ModelInfo:
    """Ask the hub for the commit of a name and its files, on a thread: nothing else ends an answer that comes byte by byte. Raises
    LIBRARY_ERRORS, of these TimeoutError after LIST_LIMIT_S, and SENSELESS."""
    result: Future[ModelInfo] = Future()

    def ask() -> None:
        try:
            result.set_result(HfApi().model_info(name.repository, revision=name.revision, files_metadata=True, timeout=ANSWER_LIMIT_S))
        except BaseException as error:  # The thread that waits raises it.
            result.set_exception(error)

    Thread(target=ask, name="hub", daemon=True).start()
    return result.result(LIST_LIMIT_S)


def _find_cached(name: HubName, *, needs_list: bool = False) -> Path | None:
    """The folder of a name in the cache; None: a file is missing, by the cache's list of the commit's files. Other programs leave no such
    list; then the indices of weights and parts decide, or with needs_list the result is None. The hub is not asked."""
    try:
        folder = Path(snapshot_download(name.repository, revision=name.revision, allow_patterns=FILE_PATTERNS, local_files_only=True))
        tree = get_cached_repo_tree(name.repository, revision=folder.name)
    except errors.LocalEntryNotFoundError:
        return None
    except errors.CachedRepoTreeNotFoundError:
        return folder if not needs_list and _has_all_parts(folder) else None
    files = filter_repo_objects(tree, allow_patterns=FILE_PATTERNS, key=lambda file: file.path)
    return folder if all(_has_size(folder / file.path, file.size) for file in files) else None


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


def _bar(subject: str, max_bytes: int, report: Callable[[int], None]) -> type[tqdm]:
    """A class of progress bars for the library that draws nothing, and calls `report` with the number of bytes so far, before they are
    written. A bar raises HubError if there are more than `max_bytes`. subject: what is fetched, for this error."""

    class Bar(tqdm):
        def __init__(self, *arguments: Any, unit: str = "it", initial: int = 0, **others: Any) -> None:
            super().__init__(*arguments, **others | {"disable": True})  # type: ignore[no-untyped-call]
            self._is_of_bytes = unit == "B"
            self._count = 0
            self.update(initial)

        def update(self, n: float | None = 1) -> None:
            if self._is_of_bytes and n:
                self._count += int(n)
                if self._count > max_bytes:
                    raise HubError(f"{subject}: the hub sends more than the {bytes_told(max_bytes)} that it told: try again later")
                report(self._count)

    return Bar


def _hub_error(error: Exception, name: HubName) -> HubError:
    """The HubError for one of LIBRARY_ERRORS or SENSELESS."""
    match error:
        case errors.GatedRepoError():
            return AccessRefused(
                f"{name.repository} is gated: ask for access on its page, and give a token of the account that got it in HF_TOKEN"
            )
        case errors.RepositoryNotFoundError():
            return UnknownName(f"the hub has no {name.repository}, or shows it to nobody without the right token in HF_TOKEN")
        case errors.RevisionNotFoundError():
            return UnknownName(f"{name.repository} has no revision {name.revision!r}: give a branch, a tag or a whole commit of it")
        case errors.OfflineModeIsEnabled():
            return HubUnreachable(
                f"{name} is not in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids to fetch it: unset it once"
            )
        case errors.HfHubHTTPError(response=response) if response.status_code in (401, 403):
            return AccessRefused(f"the hub refuses {name} with status {response.status_code}: check the token in HF_TOKEN")
        case errors.HfHubHTTPError(response=response):
            return HubUnreachable(f"the hub answers with status {response.status_code} for {name}: try again later")
        case httpx2.HTTPError() | httpx2.InvalidURL() | errors.LocalEntryNotFoundError():
            return HubUnreachable(
                f"the hub at {ENDPOINT} is not reached, and the cache has not all of {name}:"
                " check the network and try again; what was fetched is kept"
            )
        case TimeoutError(errno=None):
            return HubUnreachable(f"{ENDPOINT} has not told its files after {LIST_LIMIT_S:g} s: try again later")
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return DiskFull(f"the disk of {constants.HF_HUB_CACHE} is full: make room, or set HF_HOME; what was fetched is kept")
        case OSError(errno=None):  # The library's own error for a file that ended too early.
            return HubUnreachable(f"{name} came in part only: try again; what was fetched is kept")
        case OSError():
            place = error.filename or constants.HF_HUB_CACHE
            return HubError(f"{place} cannot be read or written ({error.strerror}): set HF_HOME to a folder of yours")
        case _:  # Another server, or a page that wants a login.
            return HubUnreachable(f"{ENDPOINT} does not answer as a hub does: check HF_ENDPOINT")

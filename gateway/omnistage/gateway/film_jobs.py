"""Runs films as jobs: decides which jobs wait, which are made, and how long each job is kept."""

from __future__ import annotations

import asyncio
import errno
import math
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

import structlog

from omnistage.client import AsyncOmni
from omnistage.client.errors import BadRequestError, OmniError, RouterLostError, StageLostError, UnavailableError
from omnistage.gateway.accounts import GatewayMetrics
from omnistage.gateway.failure import ApiError, fields_of, of_omni
from omnistage.gateway.film_store import BEGINNING, GROWING, FilmJob, Growing, Store, facts_of, finish, make_film, run_to_end
from omnistage.gateway.settings import GatewaySettings
from omnistage.host.background import end_tasks
from omnistage.host.places import Client, Places, Refused

log = structlog.get_logger(__name__)

PICTURE = "input_reference"

FIELDS = fields_of("videos", "prompt", dict.fromkeys(("image", "images", "diffusion.images"), PICTURE))
"""The field of this interface, by the name that the client library and the stages use."""

FILM_SHARE = 0.5
"""The largest part of the bytes of all jobs that one film may have."""

MAX_ENDED_JOBS = 1000
"""The most jobs that have ended, failed ones too; if there are more, the oldest ones of those who hold the most are deleted."""

MAX_TRIES = 24
"""The most tries of a film if no server answers. The pauses between them grow; they last seven minutes, in which a server can load its
model."""
LOSS_TRIES = 8
"""Tries that a loss of the server counts for if the server was making the film: the film itself may be the cause."""

AGAIN_S = 2.0
"""Seconds to pause before a retry if the error gives no delay; also the least seconds between two rounds of `Jobs.tidy`."""
MAX_PAUSE_S = 20.0
"""Longest pause between tries, in seconds."""

FULL_AGAIN_S = 30.0
"""Seconds after which clients should ask again if there are too many jobs or the disk failed."""

LOST_FILE_MESSAGE = "the file of this film is gone; ask for it again"

FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of the system for a disk without room."""


@dataclass(slots=True)
class _Run:
    """A job that waits or runs. omni: asks with the key of the client that sent the job; for a job from an earlier process, with the job's
    `who` in place of the key. not_before: time of the event loop before which the job must not begin. is_kept: whether the job is on the
    disk; before that it must not begin."""

    job: FilmJob
    omni: AsyncOmni
    growing: Growing
    task: asyncio.Task[None] | None = None
    not_before: float = 0.0
    is_kept: bool = True


class Jobs:
    """All jobs of one gateway. `resume` reads those that an earlier process left."""

    def __init__(self, store: Store, view: Callable[[str, str], AsyncOmni], settings: GatewaySettings, metrics: GatewayMetrics) -> None:
        """view: gives the client of the router that asks for a sender, by the sender's key and host."""
        self._store, self._view, self._settings, self._metrics = store, view, settings, metrics
        self._jobs: dict[str, FilmJob] = {}
        self._runs: dict[str, _Run] = {}
        self._writing = asyncio.Lock()  # held while the store is changed
        self._job_end = asyncio.Event()  # set when a job ends
        self._closes = False
        self._timer: asyncio.TimerHandle | None = None

    async def resume(self) -> None:
        """Read the jobs that an earlier process left, and go on with those that have not ended. Raises StartError."""
        for job in await asyncio.to_thread(self._store.jobs):
            try:
                omni = self._view(job.who, job.host)
            except BadRequestError as error:
                log.warning("film.damaged", job=job.id, why=error.message)
                continue
            self._jobs[job.id] = job
            if job.status == "completed" and not self._store.film(job).is_file():
                await self._lose(job)
            elif not job.is_over:
                job.status, job.progress = "queued", 0
                self._wait(job, omni)
        self._fill()

    async def close(self) -> None:
        """Cancel all runs and close the store; the next process goes on with the jobs that have not ended."""
        self._closes = True
        if self._timer is not None:
            self._timer.cancel()
        await self._cancel(self._runs.values())
        for run in self._runs.values():
            run.growing.end()
        async with self._writing:
            await asyncio.to_thread(self._store.close)

    async def end_unwatched(self) -> None:
        """Prepare the end of the process: begin no job any more, and cancel running jobs whose growing file no client reads."""
        self._closes = True
        await self._cancel(run for run in self._runs.values() if not run.growing.readers)

    async def _cancel(self, runs: Iterable[_Run]) -> None:
        """Cancel runs, and wait for their end."""
        await end_tasks(run.task for run in runs if run.task is not None)

    # Looking up ----------------------------------------------------------------------------------------------------------------------

    def of(self, client: str) -> list[FilmJob]:
        """This client's jobs, the oldest first."""
        return [job for job in self._jobs.values() if job.who == client and not self._is_past(job)]

    def find(self, client: str, name: str) -> FilmJob:
        """The job of this name. Raises ApiError 404 if there is none or it belongs to another client."""
        job = self._jobs.get(name)
        if job is None or job.who != client or self._is_past(job):
            hint = "GET /v1/videos lists yours; films are deleted after a while."
            raise ApiError(404, f"there is no video {name[:128]}", param="video_id", code="not_found", hint=hint)
        return job

    def expires_at(self, job: FilmJob) -> float | None:
        """Unix time at which the job will be deleted; None if it has not ended."""
        return None if job.ended_at is None else job.ended_at + self._settings.video_kept

    async def film(self, job: FilmJob) -> str:
        """Path of the file of a completed film. Raises ApiError 404 if another program has removed the file."""
        path = self._store.film(job)
        if not await asyncio.to_thread(path.is_file):
            await self._lose(job)
            raise ApiError(404, LOST_FILE_MESSAGE, code="file_lost")
        return str(path)

    async def _lose(self, job: FilmJob) -> None:
        """Note that the file of a completed film is gone, so that the job counts as failed."""
        job.size_bytes = 0
        await self._end(job, "failed", {"code": "file_lost", "message": LOST_FILE_MESSAGE})

    def growing(self, job: FilmJob) -> Growing | None:
        """The growing file of a job that waits or runs; None for other jobs."""
        run = self._runs.get(job.id)
        return None if run is None else run.growing

    def _is_past(self, job: FilmJob) -> bool:
        return (self.expires_at(job) or math.inf) <= time.time()

    # Asking and deleting -------------------------------------------------------------------------------------------------------------

    async def add(self, job: FilmJob, omni: AsyncOmni, picture: bytes | None) -> None:
        """Store a new job, and let it wait for its begin. omni: asks with the client's key. picture: bytes of the file of the first frame;
        None: there is none. Not to be cancelled. Raises ApiError if too many jobs wait or run, or the disk has no room."""
        self._check_place(job)
        job.picture_bytes = 0 if picture is None else len(picture)
        job.row_bytes = len(job.row.encode())
        self._jobs[job.id] = job
        run = self._wait(job, omni, is_kept=False)
        try:
            await self._make_room(0)
            async with self._writing:
                await asyncio.to_thread(self._store.put_new, job, picture)
        except (ApiError, OSError, sqlite3.Error) as error:
            self._jobs.pop(job.id, None)
            self._runs.pop(job.id, None)
            raise error if isinstance(error, ApiError) else _unwritten(job, "keep", error) from None
        run.is_kept = True
        self._fill()

    def _check_place(self, job: FilmJob) -> None:
        """Raises ApiError if there is no place for one more job of this job's host and client."""
        places = Places(self._settings.video_jobs)
        for run in self._runs.values():
            places.hold(Client(run.job.host, run.job.who))
        try:
            places.take(Client(job.host, job.who))
        except Refused as refused:
            hint = "Ask again when one of them is finished, or delete one."
            text = f"too many videos wait or are made: {refused}"
            raise ApiError(503, text, code="overloaded", reason="OVERLOADED", hint=hint, retry_after_s=FULL_AGAIN_S) from None

    async def delete(self, job: FilmJob) -> None:
        """Delete a job, and end its run. Not to be cancelled. Raises ApiError if the disk or the database fails; then the client still has
        the job, as one that has ended."""
        run = self._runs.pop(job.id, None)  # Removed first, so that the cancelled run does not begin anew.
        if run is not None:
            await self._cancel([run])
            run.growing.end()  # Only now, after its last write.
            self._metrics.films_ended.labels("deleted", "CANCELLED").inc()
        try:
            await self._remove(job)
        except (OSError, sqlite3.Error) as error:
            failure = _unwritten(job, "delete", error)
            if not job.is_over:
                job.status, job.error, job.ended_at = "failed", _error_fields(failure), time.time()
            raise failure from None
        finally:
            self._fill()

    async def _remove(self, job: FilmJob) -> None:
        """Remove a job from the store, then from memory. Raises OSError, sqlite3.Error; then the job stays, so that its bytes are counted
        and it can be removed later."""
        async with self._writing:
            await run_to_end(asyncio.to_thread(self._store.remove, job))
            self._jobs.pop(job.id, None)
        self._count()

    # Making ------------------------------------------------------------------------------------------------------------------------

    def _wait(self, job: FilmJob, omni: AsyncOmni, *, is_kept: bool = True) -> _Run:
        """Put a job among those that wait. omni, is_kept: as in `_Run`."""
        run = self._runs[job.id] = _Run(job, omni, Growing(self._store.file(job, GROWING)), is_kept=is_kept)
        self._count()
        return run

    def _fill(self) -> None:
        """Begin as many jobs as may run. Each time it chooses, of the jobs whose `not_before` has passed, the oldest of the host with the
        fewest running jobs, and there of the client with the fewest. A timer calls this at the next `not_before`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now_s = asyncio.get_running_loop().time()
        while not self._closes:
            running = [run for run in self._runs.values() if run.task is not None]
            waiting = [run for run in self._runs.values() if run.task is None and run.is_kept]
            due = [run for run in waiting if run.not_before <= now_s]
            if len(running) >= self._settings.video_runs or not due:
                break
            by_host, by_client = Counter(run.job.host for run in running), Counter(run.job.who for run in running)
            next_run = min(due, key=lambda run: (by_host[run.job.host], by_client[run.job.who]))
            next_run.task = asyncio.create_task(self._make(next_run), name=f"omnistage-film-{next_run.job.id}")
        later_times = [run.not_before for run in self._runs.values() if run.task is None and run.not_before > now_s]
        if later_times and not self._closes:
            self._timer = asyncio.get_running_loop().call_at(min(later_times), self._fill)
        self._count()

    async def _make(self, run: _Run) -> None:
        """Run one try of a job; then the job has ended, or waits for another try."""
        job, begin_s = run.job, time.perf_counter()
        try:
            await self._try(run)
            await self._end(job, "completed", None)
        except OmniError as error:
            again_s = pause_s(error, job)
            if again_s is not None:
                run.not_before = asyncio.get_running_loop().time() + again_s
                job.status, job.progress = "queued", 0
                log.info("film.waits", job=job.id, reason=error.reason, again_s=again_s)
                return
            failure = of_omni(error, FIELDS)
            await self._end(job, "failed", _error_fields(failure))
        except ApiError as failure:
            await self._end(job, "failed", _error_fields(failure))
        except (OSError, sqlite3.Error) as error:
            await self._end(job, "failed", {"code": _code_of(error), "message": f"the gateway cannot write the film: {error}"})
        except Exception:
            log.exception("film.bug", job=job.id)
            await self._end(job, "failed", {"code": "internal", "message": "the gateway failed; its log has the cause"})
        finally:
            run.task = None
            if job.is_over:
                self._runs.pop(job.id, None)
                run.growing.end()
                self._report_end(job, time.perf_counter() - begin_s)
            if not self._closes:
                self._fill()

    def _report_end(self, job: FilmJob, total_s: float) -> None:
        """Count the end of a job in the metrics, and log it. total_s: seconds of its last try."""
        code = "OK" if job.error is None else job.error["code"].upper()
        self._metrics.films_ended.labels(job.status, code).inc()
        facts = {"frames": job.frames, "bytes": job.size_bytes, "total_s": round(total_s, 4)}
        log.info("film.done", job=job.id, status=job.status, code=code, pipeline=job.model, **facts)

    async def _try(self, run: _Run) -> None:
        """Ask the router once for the film, and write its bytes into the growing file. Raises OmniError, ApiError, OSError."""
        job = run.job
        job.status, job.progress, job.frames, job.size_bytes = "in_progress", 0, 0, 0
        await self._put(job)
        picture = await asyncio.to_thread(self._store.file(job, BEGINNING).read_bytes) if job.has_picture else None
        try:
            async with aclosing(make_film(run.omni, job, picture, self._settings.session_limit)) as pieces:
                async for piece in pieces:
                    self._check_size(job.size_bytes + len(piece))
                    await self._make_room(len(piece))
                    await run.growing.write(piece)
                    job.size_bytes += len(piece)
            if not job.frames:
                raise ApiError(500, f"{job.model} made no film", code="no_film", hint="GET /v1/models has what each makes.")
            film = self._store.film(job)
            await run_to_end(asyncio.to_thread(finish, self._store.file(job, GROWING), film))
            facts = await asyncio.to_thread(facts_of, film)
            if facts is not None:
                width, height, rate_hz = facts
                job.size = f"{width}x{height}"
                job.seconds = f"{job.frames / rate_hz:g}" if rate_hz else job.seconds
        except BaseException:
            job.frames = job.size_bytes = 0
            raise
        finally:
            await run.growing.reset(is_whole=job.size_bytes > 0)

    def _check_size(self, size_bytes: int) -> None:
        """Raises ApiError if a film has become larger than FILM_SHARE allows. For so large a film no others are deleted."""
        max_bytes = int(FILM_SHARE * self._settings.video_bytes)
        if size_bytes > max_bytes:
            text = f"the film has more than {max_bytes / (1 << 20):.1f} MiB, half of the room for all films of this gateway"
            raise ApiError(507, text, code="too_large", hint="Ask for a shorter or smaller film.")

    async def _make_room(self, size_bytes: int) -> None:
        """Delete jobs that have ended until so many more bytes fit: the oldest of those who hold the most bytes. Raises ApiError if that is
        not enough."""
        max_bytes = self._settings.video_bytes
        while sum(job.kept_bytes for job in self._jobs.values()) + size_bytes > max_bytes:
            oldest = _first_to_go(self._jobs.values(), lambda job: job.kept_bytes)
            if oldest is None:
                text = f"there is no room for more: the jobs of this gateway have {max_bytes >> 20} MiB together"
                raise ApiError(507, text, code="too_large", hint="Ask for a shorter or smaller film, or again when others are finished.")
            await self._remove(oldest)
            log.info("film.made_way", job=oldest.id, bytes=oldest.kept_bytes)

    async def _end(self, job: FilmJob, status: Any, error: dict[str, str] | None) -> None:
        """Note and store the end of a job, and remove the picture that it began with. error: of `_error_fields`; None: no error."""
        job.status, job.error, job.ended_at = status, error, time.time()
        job.progress = 100 if status == "completed" else job.progress
        job.options, job.picture_bytes = {"seed": job.options["seed"]}, 0  # Nothing reads the other options any more.
        await self._put(job)
        try:
            self._store.file(job, BEGINNING).unlink(missing_ok=True)
        except OSError as fault:
            log.warning("film.not_removed", job=job.id, why=str(fault))
        self._job_end.set()

    async def _put(self, job: FilmJob) -> None:
        """Store a job's state. If that fails, only this process knows the state, and the next process makes the film anew."""
        async with self._writing:
            if job.id not in self._jobs:
                return
            try:
                await run_to_end(asyncio.to_thread(self._store.put, job))
            except sqlite3.Error as error:
                log.warning("film.not_kept", job=job.id, why=str(error))

    # Tidying -----------------------------------------------------------------------------------------------------------------------

    async def tidy(self) -> None:
        """Run for ever: delete jobs when they expire; if there are too many, delete the oldest ones of those who hold the most."""
        while True:
            for job in self._to_remove():
                try:
                    await self._remove(job)
                except (OSError, sqlite3.Error) as error:
                    log.warning("film.not_removed", job=job.id, why=str(error))
            self._job_end.clear()
            expiry_times = [at for job in self._jobs.values() if (at := self.expires_at(job)) is not None]
            wait_s = max(min(expiry_times) - time.time(), AGAIN_S) if expiry_times else None
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._job_end.wait()

    def _to_remove(self) -> list[FilmJob]:
        """The jobs that have expired, and of too many others those that go first."""
        over = [job for job in self._jobs.values() if job.is_over]
        removable = [job for job in over if self._is_past(job)]
        remaining = [job for job in over if not self._is_past(job)]
        # Each job counts as one, whatever its bytes.
        while len(remaining) > MAX_ENDED_JOBS and (job := _first_to_go(remaining, lambda job: 1)) is not None:
            remaining.remove(job)
            removable.append(job)
        return removable

    def _count(self) -> None:
        """Set the gauges of jobs and of bytes."""
        running = sum(run.task is not None for run in self._runs.values())
        self._metrics.films.labels("in_progress").set(running)
        self._metrics.films.labels("queued").set(len(self._runs) - running)
        self._metrics.film_bytes.set(sum(job.kept_bytes for job in self._jobs.values()))


def _first_to_go(jobs: Iterable[FilmJob], size_of: Callable[[FilmJob], int]) -> FilmJob | None:
    """The job to delete first: of the host with the largest total of `size_of`, and there of the client with the largest total, the oldest
    job that has ended. So nobody makes the films of others go. jobs: the oldest first. None: no job has ended."""
    over = [job for job in jobs if job.is_over]
    of_host, of_client = Counter[str](), Counter[tuple[str, str]]()
    for job in over:
        of_host[job.host] += size_of(job)
        of_client[job.host, job.who] += size_of(job)
    return max(over, key=lambda job: (of_host[job.host], of_client[job.host, job.who]), default=None)


def pause_s(error: OmniError, job: FilmJob) -> float | None:
    """Count a failed try in the job. error: of the try. Returns the seconds to pause before the next try; None: no further try, the film
    has failed."""
    if not isinstance(error, UnavailableError):
        return None
    if isinstance(error, StageLostError | RouterLostError):
        has_run = job.progress > 0
        job.tries += LOSS_TRIES if has_run else 1
        if job.tries >= MAX_TRIES:
            return None
        return AGAIN_S if has_run else min(AGAIN_S * 2 ** (job.tries - 1), MAX_PAUSE_S)
    return error.retry_delay_s or AGAIN_S


def _unwritten(job: FilmJob, verb: str, error: OSError | sqlite3.Error) -> ApiError:
    """The error for a job that could not be kept or deleted. verb: "keep" or "delete". error: of the disk or the database."""
    log.warning("film.not_kept" if verb == "keep" else "film.not_removed", job=job.id, why=str(error))
    code, hint = _code_of(error), "Ask again; if it fails again, whoever runs the gateway has to look into its --video-folder."
    if code == "disk_full":
        hint = "Whoever runs the gateway has to make room in its --video-folder."
    return ApiError(503, f"the gateway cannot {verb} a video: {error}", code=code, hint=hint, retry_after_s=FULL_AGAIN_S)


def _code_of(error: OSError | sqlite3.Error) -> str:
    """The code that clients get for an error of the disk or the database."""
    is_full = error.errno in FULL_DISK_ERRORS if isinstance(error, OSError) else error.sqlite_errorname == "SQLITE_FULL"
    return "disk_full" if is_full else "not_written"


def _error_fields(failure: ApiError) -> dict[str, str]:
    """The fields in which a job reports a failure."""
    return {"code": failure.code or "internal", "message": f"{failure.message}. {failure.hint}" if failure.hint else failure.message}

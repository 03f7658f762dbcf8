"""The autoregressive engine: requests in, streams of items out, one thread of computation.

The thread's loop: carry out orders, admit requests, plan a step, compute it, apply the results, publish them. The `Runner` computes: it
runs a step through a decoder, a head and the cache. Only that thread touches the engine's state; callers on event loops leave orders in a
mailbox. At most `SchedulerLimits.max_waiting` requests wait, and an answer is at most `MAX_UNREAD` events ahead of its reader. Nothing
polls: the thread sleeps while there is nothing to run, and after a step wakes each reader's event loop once for all of its streams."""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
from collections.abc import Collection
from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch

from omnistage.engine.adapter import Decoder, DrawnItem, Head
from omnistage.engine.attention import AttentionBackend, BackendChoice, choose_backend
from omnistage.engine.linear import pad_rows
from omnistage.engine.memory import KVCache, PagePool, PrefixCache
from omnistage.engine.plan import NOBODY, Followers, last_rows, make_plan
from omnistage.engine.request import DeadEnd, EngineClosed, EngineStats, SequenceEvent, SequenceFailed, SequenceRequest, Taps
from omnistage.engine.scheduler import IDLE_S, STEP_S, Pace, Run, Scheduler, SchedulerLimits, Step
from omnistage.engine.sequence import End, Mailbox, Sequence, SequenceStream, StepOutputs
from omnistage.engine.types import Activity, FinishReason, Unfit


@dataclass(frozen=True, slots=True)
class Computed:
    """The result of a run. taps: of all its rows; None: no taps were wanted. drawn_item: the next item; None: no item was to be drawn, or
    none could be, because logits were not finite or nothing is allowed."""

    run: Run
    taps: Taps | None
    drawn_item: DrawnItem | None


class Runner:
    """Computes steps on this rank, and sends each step to the other ranks, the followers."""

    def __init__(self, decoder: Decoder, head: Head, cache: KVCache, attention: AttentionBackend, followers: Followers = NOBODY) -> None:
        self._decoder, self._head, self._cache, self._attention = decoder, head, cache, attention
        self._followers = followers

    def follow(self, new: Many[int], freed: Many[int]) -> None:
        """Report to the cache, here and on the followers, which pages were taken and freed since the last step."""
        self._cache.follow(new, freed)
        if new or freed:
            self._followers.pages_changed(new, freed)

    def run(self, runs: Many[Run]) -> list[Computed]:
        """Compute the rows of some runs in one pass. For each run that ends with the last known row of its sequence, draw the next item."""
        plan = make_plan(runs, self._decoder.spec, pad_rows(1))
        device_plan = plan.to(self._decoder.spec.device)
        attention = self._attention.bind(self._cache, self._decoder.spec, device_plan)
        with self._followers.step(plan):
            hidden = self._decoder.hidden(device_plan.rows, attention)
        drawing = [run.sequence for run in runs if run.draws]
        items: list[DrawnItem | None] = []
        if drawing:
            last = last_rows(hidden.last, device_plan)
            items = self._head.draw(last, [sequence.draws for sequence in drawing], [sequence.banned for sequence in drawing])
        else:
            # Wait for an asynchronous device: otherwise a step would seem to take no time, and others would queue up.
            hidden.last[0, 0].item()
        cpu_taps = None if hidden.taps is None else hidden.taps.cpu()
        next_items = iter(items)
        results = []
        for run, planned_run in zip(runs, plan.runs, strict=True):
            taps = None
            if cpu_taps is not None and run.wants_taps:
                # Taps of this run alone: a reader that keeps a part of the step's tensor would keep all of it.
                taps = Taps(run.start, cpu_taps[planned_run.first : planned_run.first + run.count].clone())
            results.append(Computed(run, taps, next(next_items) if run.draws else None))
        return results


_STEP_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, MemoryError)
"""Errors that a model step may raise without breaking the engine."""


CLOSE_S = 10.0
"""Seconds that `close` waits for the running step."""


class Engine:
    """Runs a decoder for many requests at once.

    pages: number of pages of the KV cache (`page_bytes` each). limits: None: the defaults. kept_pages: how many pages may be kept for
    prompts that begin alike; None: a quarter. poison: see `KVCache` (tests). step_s: see `Pace`. attention: the backend for the decoder,
    and why; None: it is chosen here. followers: the other ranks. activity: state of the thread, which starts with the first request."""

    def __init__(
        self,
        decoder: Decoder,
        head: Head,
        *,
        pages: int,
        limits: SchedulerLimits | None = None,
        kept_pages: int | None = None,
        poison: bool = False,
        step_s: float | None = STEP_S,
        attention: BackendChoice | None = None,
        followers: Followers = NOBODY,
    ) -> None:
        limits = limits or SchedulerLimits()
        self.activity = Activity("omnistage-engine", processes=followers.processes)
        self.attention = attention or choose_backend(decoder.spec)
        self.spec = decoder.spec
        self._pool = PagePool(pages)
        self._prefixes = PrefixCache(self._pool, pages // 4 if kept_pages is None else min(kept_pages, pages))
        cache = KVCache(decoder.spec, pages, poison=poison)
        followers.new_cache(pages, poison=poison)
        self._scheduler = Scheduler(self._pool, self._prefixes, limits)
        self._runner = Runner(decoder, head, cache, self.attention.backend, followers)
        self._pace = Pace(limits.max_rows, step_s)
        self._mailbox = Mailbox(limits.max_waiting, self.activity.begin, self.activity.rest)
        self._outbox = StepOutputs()
        self._streams: dict[Sequence, SequenceStream] = {}
        self._idle = True  # whether the last plan was empty
        self._steps = self._stepped = self._rows = self._items = 0  # see EngineStats
        self._stats = EngineStats(pages_total=pages)
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    # Called on event loops --------------------------------------------------------------------------------------------------------

    def check(self, request: SequenceRequest) -> None:
        """Raises Unfit, with the bad field, for a request that can never run here, and ValueError for a request that was not made for this
        decoder."""
        spec, prompt = self.spec, request.prompt
        if len(prompt) > spec.context:
            raise Unfit("prompt", f"may have {spec.context} rows, has {len(prompt)}")
        if request.rows > spec.context:
            raise Unfit("max_items", f"prompt and answer may have {spec.context} rows together, asked for {request.rows}")
        if not self._scheduler.can_ever_run(request):
            raise Unfit("max_items", f"the cache of {self._pool.total} pages is too small for {request.rows} rows")
        if prompt.items.shape[1] != spec.codebooks:
            raise ValueError(f"an item of this model has {spec.codebooks} ids")
        if any(len(item) != spec.codebooks for item in request.history):
            raise Unfit("history", f"an item of this model has {spec.codebooks} ids")
        if prompt.positions is not None and len(prompt.positions) != spec.axes:
            raise ValueError(f"positions of this model have {spec.axes} axes, not {len(prompt.positions)}")
        if any(entry.rows.ndim != 2 or entry.rows.shape[1] != spec.given_width for entry in prompt.given):
            raise ValueError(f"vectors given for rows have the width {spec.given_width}")
        if (request.appended and not spec.given_width) or (request.taps_from is not None and not spec.tap_width):
            raise ValueError("this model takes no appended rows, or has no taps")
        if request.constraint is not None and (spec.codebooks, request.constraint.vocabulary) != (1, spec.drawn_ids):
            raise ValueError(
                f"a constraint is for one id of {request.constraint.vocabulary}; items here have {spec.codebooks} of {spec.drawn_ids}"
            )
        if prompt.positions is not None and not 0 <= prompt.positions.min() <= prompt.positions.max() < spec.context:
            raise Unfit("prompt", f"its positions must lie between 0 and {spec.context - 1}")
        if len(prompt) + prompt.delta < 0 or request.rows + prompt.delta > spec.context:
            raise Unfit("prompt", f"positions of the answer would lie outside of 0 to {spec.context - 1}: the delta is {prompt.delta}")
        self._check_ids(request)

    def _check_ids(self, request: SequenceRequest) -> None:
        """Check the ids of a request: an id that can be drawn, or that changes the draw, must have a logit. Raises what `check` raises."""
        spec, items = self.spec, request.prompt.items
        if not (items.min() >= 0 and (items.max(0) < spec.ids).all()):
            # Each size once, although several codebooks may have it.
            sizes = " or ".join(map(str, dict.fromkeys(spec.ids)))
            raise ValueError(f"an id of the prompt is not below {sizes}, which is the size of the vocabulary")
        ids_seen = request.seen_ids
        if ids_seen is None:
            # If all ids of the prompt can be drawn, so can the ids of its text, and they need not be collected.
            ids_seen = request.prompt.text_ids if items.max() >= spec.drawn_ids else frozenset()
        if not _are_below(spec.drawn_ids, request.end_ids | request.banned | ids_seen):
            raise ValueError(f"an id that ends the answer, is banned or counts as seen is not below {spec.drawn_ids}: it is never drawn")
        ids_by_field = {"history": {item[0] for item in request.history}, "sampling.logit_bias": request.sampling.logit_bias}
        for field, ids in ids_by_field.items():
            if not _are_below(spec.drawn_ids, ids):
                raise Unfit(field, f"ids must be below {spec.drawn_ids}, the size of the vocabulary")
        if not _are_below(spec.further_ids, {part for item in request.history for part in item[1:]}):
            raise Unfit("history", f"ids of the codebooks behind the first must be below {spec.further_ids}")
        if never := (request.end_ids | request.banned).intersection(item[0] for item in request.history):
            raise Unfit(
                "history", f"{min(never)} is part of no answer: it ends one, or is never drawn; give the items that came, no others"
            )

    def submit(self, request: SequenceRequest) -> SequenceStream:
        """Start a request; call it on a running event loop. Returns its stream of events. Raises as `check`, EngineFull or EngineClosed."""
        self.check(request)
        stream = SequenceStream(Sequence(request), self._mailbox, self.spec.given_width)
        self._mailbox.ask(stream)
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self.activity.name, daemon=True)
                self._thread.start()
                # A computing thread must not outlive the interpreter.
                atexit.register(self._stop)
        return stream

    def stats(self) -> EngineStats:
        """The counts after the last step."""
        return self._stats

    async def close(self) -> None:
        """End every request with EngineClosed and stop the thread."""
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        """Close the mailbox, which ends the thread, and wait at most CLOSE_S for its end."""
        self._mailbox.close()
        with self._starting:
            thread = self._thread
        if thread is not None:
            thread.join(CLOSE_S)
        atexit.unregister(self._stop)

    # The thread -------------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """The engine's thread: work until it is closed, then end all streams."""
        cause: BaseException | None = None
        self.activity.enter()
        try:
            with torch.inference_mode():
                while self._take_orders():
                    self._step()
                    self.activity.step()
        except BaseException as error:
            cause = error
            # Report it like the error of any thread that ends, but before the streams end with it. The process must know first that its
            # engine is gone: then an answer goes on elsewhere instead of ending with the engine's error.
            threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, threading.current_thread())))
        self._end_all(cause)

    def _step(self) -> None:
        """Do what the loop does after orders were carried out: admit, plan, compute, apply and publish."""
        self._admit()
        step = self._plan()
        for done in self._compute(step):
            self._apply(done)
        self._publish()

    def _take_orders(self) -> bool:
        """Carry out all orders. If there is nothing to run, wait for an order first. While requests wait for admission, the wait is at most
        IDLE_S, because idle sequences make room after that time. Returns False if the engine must close."""
        orders = self._mailbox.collect(wait=self._idle, most_s=IDLE_S if self._scheduler.waiting else None)
        for stream in orders.requests:
            self._streams[stream.sequence] = stream
            self._scheduler.add(stream.sequence)
        for stream, count in orders.taken_counts.items():
            stream.sequence.unread -= count
        for stream, entry in orders.prompt_vectors:
            stream.sequence.give(entry)
        for stream, rows, end in orders.appended:
            stream.sequence.append(rows, end)
        for stream in orders.cancelled:
            self._end(stream.sequence)
        return not orders.closing

    def _admit(self) -> None:
        """Admit the waiting requests that fit now."""
        admitted = self._scheduler.admit()
        self._mailbox.left_queue(sum(not sequence.has_begun for sequence in admitted))
        for sequence in admitted:
            sequence.has_begun = True

    def _put_found_taps(self, sequence: Sequence) -> None:
        """Put out the taps that were found with kept pages, before any computed taps. They are one event, because an event for each page
        could be more events than a reader may leave unread."""
        if kept_taps := sequence.found_taps:
            taps = Taps(kept_taps[0].first, torch.cat([part.rows for part in kept_taps]))
            self._put(sequence, SequenceEvent(taps=self._new_taps(sequence, taps)))
            kept_taps.clear()

    def _new_taps(self, sequence: Sequence, taps: Taps) -> Taps:
        """The part of these taps that was not put out before; it counts as put out from now on."""
        fresh = taps.beginning_at(sequence.taps_out or 0)
        sequence.taps_out = taps.first + len(taps.rows)
        return fresh

    def _plan(self) -> Step:
        """Plan the next step. Also puts out the taps that were found for running sequences, and reports to the cache which pages were taken
        and freed."""
        decoding = sum(sequence.rows_left == 1 and not sequence.parked for sequence in self._scheduler.running)
        step = self._scheduler.plan(self._pace.long_rows(decoding))
        for sequence in self._scheduler.running:
            self._put_found_taps(sequence)
        self._runner.follow(*self._pool.changes())
        self._idle = not step
        return step

    def _compute(self, step: Step) -> list[Computed]:
        """Compute a step, and record its duration and its numbers of rows and sequences."""
        started = time.perf_counter()
        done = self._compute_runs(step.runs) if step else []
        if step:
            self._pace.ran(step.decoding, step.rows - step.decoding, time.perf_counter() - started)
            self._steps += 1
            self._stepped += step.sequences
            self._rows += step.rows
        return done

    def _compute_runs(self, runs: list[Run]) -> list[Computed]:
        """Compute runs in one pass. If that fails, compute each run by itself, and end the sequence of a run that fails. The other runs
        write the same keys and values into their pages a second time."""
        try:
            return self._runner.run(runs)
        except _STEP_ERRORS as error:
            if len(runs) > 1:
                # A sequence whose earlier run has just failed has no stream any more.
                return [done for run in runs if run.sequence in self._streams for done in self._compute_runs([run])]
            self._fail(runs[0].sequence, error)
            return []

    def _apply(self, done: Computed) -> None:
        """Apply the result of a run to its sequence: put out its taps, and the next item or the end if one was drawn."""
        run, sequence = done.run, done.run.sequence
        if sequence not in self._streams:
            return
        sequence.computed = run.start + run.count
        taps = None
        if done.taps is not None:
            sequence.keep_taps(done.taps)
            taps = self._new_taps(sequence, done.taps)
        walk = sequence.draws.walk
        if run.draws and done.drawn_item is None:
            if walk is not None and not walk.allowed().any():
                self._end(sequence, DeadEnd(f"after {len(sequence.items)} tokens the constraint allows nothing that could follow"))
            else:
                self._fail(sequence, None)
            return
        if run.start < len(sequence.request.prompt) <= sequence.computed:  # The prompt ends within this run.
            self._scheduler.remember(sequence)
        if done.drawn_item is None:
            if taps is not None:
                self._put(sequence, SequenceEvent(taps=taps))
        elif done.drawn_item.item[0] in sequence.request.end_ids:
            self._put(sequence, SequenceEvent(None, done.drawn_item.logprob, finish_reason=FinishReason.STOP, taps=taps))
            self._end(sequence)
        else:
            self._items += 1
            sequence.items.append(done.drawn_item.item)
            sequence.draws.note(done.drawn_item.item[0])
            complete = walk is not None and walk.complete
            reason = FinishReason.LENGTH if len(sequence.items) == sequence.request.max_items else None
            # If taps are wanted, the answer goes on until an end is drawn: the taps of the last item are computed only then.
            if complete and (reason is not None or sequence.request.taps_from is None):
                reason = FinishReason.STOP
            self._put(sequence, SequenceEvent(done.drawn_item.item, done.drawn_item.logprob, done.drawn_item.top, reason, taps, complete))
            if reason is not None:
                self._end(sequence)

    def _put(self, sequence: Sequence, event: SequenceEvent) -> None:
        sequence.unread += 1
        self._outbox.put(self._streams[sequence], sequence.introduce(event))

    def _fail(self, sequence: Sequence, cause: BaseException | None) -> None:
        """End a sequence with SequenceFailed. cause: the error that its step raised; None: its logits were not finite."""
        error = SequenceFailed(f"a step raised {cause!r}" if cause else "the model's logits are not finite")
        error.__cause__ = cause
        self._end(sequence, error)

    def _end(self, sequence: Sequence, error: End | None = None) -> None:
        """Free everything that a sequence holds, and end its stream. Does nothing if the sequence ended before: a cancel may come after the
        end."""
        stream = self._streams.pop(sequence, None)
        if stream is None:
            return
        if not sequence.has_begun:
            self._mailbox.left_queue(1)
        elif error is None and sequence.pages:
            self._scheduler.remember(sequence)
        self._scheduler.remove(sequence)
        self._outbox.end(stream, error)

    def _publish(self) -> None:
        """Update the stats and deliver the outputs of the step; end each sequence whose reader's event loop is closed."""
        self._stats = self._measure()
        for orphan in self._outbox.send():
            self._end(orphan.sequence)

    def _measure(self) -> EngineStats:
        """Count what EngineStats reports."""
        running, waiting = self._scheduler.running, self._scheduler.waiting
        parked = sum(sequence.parked for sequence in running)
        starved = sum(sequence.starved and not sequence.parked for sequence in running)
        kept_pages = self._pool.only_kept
        return EngineStats(
            waiting=len(waiting),
            preempted=sum(sequence.has_begun for sequence in waiting),
            running=len(running) - parked - starved,
            parked=parked,
            starved=starved,
            pages_used=self._pool.used - kept_pages,
            pages_kept=kept_pages,
            pages_total=self._pool.total,
            steps=self._steps,
            stepped=self._stepped,
            rows=self._rows,
            items=self._items,
            preemptions=self._scheduler.preemptions,
        )

    def _end_all(self, cause: BaseException | None) -> None:
        """End all streams because the thread ends. cause: the error that ended it; None: the engine was closed."""
        self._mailbox.close()
        error = EngineClosed("the engine was closed" if cause is None else f"the engine's thread ended: {cause!r}")
        error.__cause__ = cause
        for stream in self._mailbox.collect(wait=False).requests:
            self._streams[stream.sequence] = stream
        if cause is None:
            for sequence in list(self._streams):
                self._end(sequence, error)
            self._publish()
            return
        # The error may have left any change half done, so nothing is freed; all streams end with the error.
        for stream in self._streams.values():
            self._outbox.end(stream, error)
        self._streams.clear()
        self._outbox.send()


def _are_below(size: int, ids: Collection[int]) -> bool:
    return all(0 <= item_id < size for item_id in ids)

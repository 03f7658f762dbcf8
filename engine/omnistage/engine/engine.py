"""The autoregressive engine: requests in, streams of tokens out, one thread of computation.

The thread's loop reads: take what was asked, admit, plan, run, publish. Callers live on event loops; the border is two bounded
queues: at most `Limits.max_waiting` requests wait, and an answer is at most `MAX_UNREAD` events ahead of its reader. Nothing polls:
the thread sleeps on a condition while there is nothing to run, and a reader on its event loop is woken once a step for all streams.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from omnistage.engine.activity import STEP_LIMIT_S, Activity
from omnistage.engine.adapter import Decoder
from omnistage.engine.kv import KVCache, PagePool, PrefixCache
from omnistage.engine.request import EngineClosed, EngineFull, EngineStats, SequenceFailed, TokenEvent, TokenRequest
from omnistage.engine.runner import Runner
from omnistage.engine.sampler import sample
from omnistage.engine.scheduler import Chunk, Limits, Scheduler, Sequence
from omnistage.engine.types import FinishReason

_STEP_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, MemoryError)
"""What a model step may raise without the engine being broken."""

_End = SequenceFailed | EngineClosed


class TokenStream:
    """The answer to one request, for one reader on the event loop that asked. Close it, or cancel by closing early."""

    def __init__(self, engine: Engine, sequence: Sequence) -> None:
        self._engine, self._sequence = engine, sequence
        self._loop = asyncio.get_running_loop()
        self._events: list[TokenEvent] = []
        self._error: _End | None = None
        self._ended = False
        self._changed = asyncio.Event()

    async def take(self) -> list[TokenEvent]:
        """Wait for events and take all there are. Empty only after the end. Raises SequenceFailed or EngineClosed after the last event."""
        while not self._events and not self._ended:
            self._changed.clear()
            await self._changed.wait()
        events, self._events = self._events, []
        if events:
            self._engine._taken(self._sequence, len(events))
        elif self._error is not None:
            raise self._error
        return events

    async def aclose(self) -> None:
        """Stop if it still runs, and return when every page of it is free."""
        if not self._ended:
            self._engine._cancel(self)
        while not self._ended:
            self._changed.clear()
            await self._changed.wait()

    def _deliver(self, part: _Part) -> None:
        self._events += part.events
        self._ended = self._ended or part.ended
        self._error = self._error or part.error
        self._changed.set()


@dataclass(slots=True)
class _Part:
    """What a step made for one stream."""

    events: list[TokenEvent] = field(default_factory=list)
    ended: bool = False
    error: _End | None = None


class _Outbox:
    """What a step made, by stream."""

    def __init__(self) -> None:
        self._parts: dict[TokenStream, _Part] = {}

    def put(self, stream: TokenStream, event: TokenEvent) -> None:
        self._parts.setdefault(stream, _Part()).events.append(event)

    def end(self, stream: TokenStream, error: _End | None) -> None:
        part = self._parts.setdefault(stream, _Part())
        part.ended, part.error = True, error

    def send(self) -> list[TokenStream]:
        """Wake each event loop once. Returns the streams whose loop is closed: nobody will ever read them."""
        loops: dict[asyncio.AbstractEventLoop, list[TokenStream]] = {}
        for stream in self._parts:
            loops.setdefault(stream._loop, []).append(stream)
        orphans: list[TokenStream] = []
        for loop, streams in loops.items():
            try:
                loop.call_soon_threadsafe(self._deliver, streams)
            except RuntimeError:
                orphans += streams
        return orphans

    def _deliver(self, streams: Iterable[TokenStream]) -> None:
        for stream in streams:
            stream._deliver(self._parts[stream])


class Engine:
    """Runs a decoder for many requests at once.

    pages: size of the KV cache in pages (`kv.page_bytes` each). kept_pages: how many of them may be kept for prompts that begin alike.
    poison: fill freed pages with NaN (tests). step_limit_s: see `Activity`; `activity` tells what
    the thread does. It starts with the first request.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        pages: int,
        limits: Limits | None = None,
        kept_pages: int = 32,
        poison: bool = False,
        step_limit_s: float = STEP_LIMIT_S,
    ) -> None:
        self.activity = Activity("omnistage-engine", step_limit_s)
        self._limits = limits or Limits()
        self._spec = decoder.spec
        self._pool = PagePool(pages)
        self._prefixes = PrefixCache(self._pool, kept_pages)
        self._cache = KVCache(decoder.spec, pages, poison=poison)
        self._scheduler = Scheduler(self._pool, self._prefixes, self._limits)
        self._runner = Runner(decoder, self._cache)
        self._lock = threading.Condition()
        self._asked: deque[TokenStream] = deque()
        self._cancelled: deque[TokenStream] = deque()
        self._wake = False
        self._closing = False
        self._waiting = 0
        self._streams: dict[Sequence, TokenStream] = {}
        self._steps = self._tokens = 0
        self._stats = EngineStats(pages_total=pages)
        self._thread: threading.Thread | None = None

    # Called on event loops --------------------------------------------------------------------------------------------------------

    def check(self, request: TokenRequest) -> None:
        """Raise ValueError for a request that can never run here."""
        if request.tokens > self._spec.context:
            raise ValueError(f"prompt and answer may have {self._spec.context} tokens together, asked for {request.tokens}")
        if not self._scheduler.can_ever_run(request):
            raise ValueError(f"the cache of {self._pool.total} pages is too small for {request.tokens} tokens")
        named = (*request.prompt, *request.history, *request.sampling.logit_bias, *request.end_ids)
        if not all(0 <= token_id < self._spec.vocab_size for token_id in named):
            raise ValueError(f"a token id is not below the vocabulary size {self._spec.vocab_size}")

    def submit(self, request: TokenRequest) -> TokenStream:
        """Start a request; call from a running event loop. Raises ValueError (see `check`), EngineFull or EngineClosed."""
        self.check(request)
        stream = TokenStream(self, Sequence(request))
        with self._lock:
            if self._closing:
                raise EngineClosed("the engine is closed")
            if self._waiting >= self._limits.max_waiting:
                raise EngineFull(f"{self._waiting} requests are waiting already")
            self._waiting += 1
            self._asked.append(stream)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self.activity.name, daemon=True)
                self._thread.start()
            self._notify()
        return stream

    def stats(self) -> EngineStats:
        """The state after the last step."""
        return self._stats

    async def close(self) -> None:
        """End every request with EngineClosed and stop the thread."""
        with self._lock:
            self._closing = True
            self._notify()
            thread = self._thread
        if thread is not None:
            await asyncio.to_thread(thread.join)

    def _cancel(self, stream: TokenStream) -> None:
        with self._lock:
            self._cancelled.append(stream)
            self._notify()

    def _taken(self, sequence: Sequence, count: int) -> None:
        with self._lock:
            was_parked = sequence.parked
            sequence.unread -= count
            if was_parked and not sequence.parked:
                self._notify()

    def _notify(self) -> None:
        self._wake = True
        self.activity.begin()
        self._lock.notify()

    # The thread -------------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        cause: BaseException | None = None
        self.activity.enter()
        try:
            with torch.inference_mode():
                while self._take_orders():
                    self._step()
                    self.activity.step()
        except BaseException as error:
            cause = error
            # As for any thread that ends by an error, but before the streams hear of it: the process is to know first, or an answer would
            # end with an error of its own instead of going on elsewhere.
            threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, threading.current_thread())))
        self._end_all(cause)

    def _take_orders(self) -> bool:
        """Wait until there is something to do, and take in what was asked. False when the engine is to close."""
        with self._lock:
            while not (self._wake or self._closing):
                self.activity.rest()
                self._lock.wait()
            self._wake = False
            asked, self._asked = self._asked, deque()
            cancelled, self._cancelled = self._cancelled, deque()
            closing = self._closing
        for stream in asked:
            self._streams[stream._sequence] = stream
            self._scheduler.add(stream._sequence)
        outbox = _Outbox()
        for stream in cancelled:
            self._end(stream._sequence, outbox)
        self._publish(outbox)
        return not closing

    def _step(self) -> None:
        """Admit, plan, run, publish; then ask to be called again if anything was run."""
        admitted, taken, freed = self._scheduler.admit()
        self._cache.retire(freed)
        self._cache.clear(taken)
        with self._lock:
            self._waiting -= len(admitted)
            step = self._scheduler.plan()
            self._wake = self._wake or bool(step)
        outbox = _Outbox()
        if step.decode:
            self._decode(step.decode, outbox)
        for chunk in step.chunks:
            self._chunk(chunk, outbox)
        self._steps += bool(step)
        self._publish(outbox)

    def _decode(self, sequences: list[Sequence], outbox: _Outbox) -> None:
        try:
            self._choose(sequences, self._runner.decode(sequences), outbox)
        except _STEP_ERRORS as error:
            if len(sequences) == 1:
                self._fail(sequences[0], error, outbox)
                return
            # One of them is the cause. A row is written to the same place each time, so each can be run again alone.
            for sequence in sequences:
                self._decode([sequence], outbox)

    def _chunk(self, chunk: Chunk, outbox: _Outbox) -> None:
        sequence = chunk.sequence
        if sequence not in self._streams:
            return
        try:
            logits = self._runner.chunk(chunk)
        except _STEP_ERRORS as error:
            self._fail(sequence, error, outbox)
            return
        sequence.computed = chunk.start + chunk.count
        if chunk.of_prompt and sequence.computed == len(sequence.request.prompt):
            self._cache.retire(self._scheduler.remember(sequence))
        if logits is not None:
            self._choose([sequence], logits, outbox)

    def _choose(self, sequences: list[Sequence], logits: torch.Tensor, outbox: _Outbox) -> None:
        """Draw each sequence's next token and put it out."""
        banned = [
            sequence.request.end_ids if sequence.request.ignore_end or len(sequence.tokens) < sequence.request.min_tokens else ()
            for sequence in sequences
        ]
        for sequence, drawn in zip(sequences, sample(logits, [sequence.draws for sequence in sequences], banned), strict=True):
            if drawn is None:
                self._fail(sequence, None, outbox)
                continue
            request, stream = sequence.request, self._streams[sequence]
            sequence.computed = sequence.known
            queued_s = sequence.queued_s if len(sequence.tokens) == len(request.history) else 0.0
            if drawn.token_id in request.end_ids:
                event = TokenEvent(None, drawn.logprob, FinishReason.STOP, queued_s)
            else:
                sequence.tokens.append(drawn.token_id)
                sequence.draws.note(drawn.token_id)
                self._tokens += 1
                finish_reason = FinishReason.LENGTH if len(sequence.tokens) == request.max_tokens else None
                event = TokenEvent(drawn.token_id, drawn.logprob, finish_reason, queued_s)
            with self._lock:
                sequence.unread += 1
            outbox.put(stream, event)
            if event.finish_reason is not None:
                self._end(sequence, outbox)

    def _fail(self, sequence: Sequence, cause: BaseException | None, outbox: _Outbox) -> None:
        error = SequenceFailed(f"a step raised {cause!r}" if cause else "the model's logits are not finite")
        error.__cause__ = cause
        self._end(sequence, outbox, error)

    def _end(self, sequence: Sequence, outbox: _Outbox, error: _End | None = None) -> None:
        """Free what a sequence holds and tell its stream. One that ended before is no error: a cancel may meet the end on its way."""
        stream = self._streams.pop(sequence, None)
        if stream is None:
            return
        if not sequence.pages:
            with self._lock:
                self._waiting -= 1
        self._cache.retire(self._scheduler.remove(sequence))
        outbox.end(stream, error)

    def _publish(self, outbox: _Outbox) -> None:
        self._stats = self._measure()
        for orphan in outbox.send():
            self._end(orphan._sequence, _Outbox())

    def _measure(self) -> EngineStats:
        admitted = self._scheduler.admitted
        parked = sum(sequence.parked for sequence in admitted)
        kept = self._prefixes.unshared()
        return EngineStats(
            waiting=self._scheduler.waiting,
            running=len(admitted) - parked,
            parked=parked,
            pages_used=self._pool.used - kept,
            pages_kept=kept,
            pages_total=self._pool.total,
            steps=self._steps,
            tokens=self._tokens,
        )

    def _end_all(self, cause: BaseException | None) -> None:
        """The thread ends: no stream may wait for ever."""
        with self._lock:
            self._closing = True
            asked, self._asked = self._asked, deque()
        outbox = _Outbox()
        error = EngineClosed("the engine was closed" if cause is None else f"the engine's thread ended: {cause!r}")
        error.__cause__ = cause
        for stream in asked:
            self._streams[stream._sequence] = stream
        for sequence in list(self._streams):
            self._end(sequence, outbox, error)
        self._publish(outbox)

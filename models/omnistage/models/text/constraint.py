"""Text that is restricted, token by token, to a JSON schema, a regular expression or one of some choices, for any tokenizer.

`text.grammar` makes the grammars, after another process (`text.grammar_child`) has made each one on trial: llguidance can take minutes and
gigabytes for a schema of some hundred bytes, and that process can be killed. Every request has its own grammar. A grammar grows as it is
used: if requests shared it, this growth would count against the bounds of the next request, and would reveal to one client what another
client has asked.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import weakref
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple
from functools import cached_property, partial
from typing import IO, Any, TypeVar

import numpy as np
import structlog
import torch
from llguidance import LLMatcher, LLTokenizer

from omnistage.engine.request import Constraint as EngineConstraint
from omnistage.engine.request import DeadEnd, Walk
from omnistage.models.conversation import TextConstraint
from omnistage.models.helper_process import HelperProcess, NotTaken
from omnistage.models.interface import BadRequest, Full, TextRequest
from omnistage.models.text.answer import Marks
from omnistage.models.text.grammar import TRIAL_BYTES, TRIAL_CPU_S, TokenPieces, UnfitConstraint, new_matcher, next_mask
from omnistage.models.turns import WaitingPlaces, has_room, host_of
from omnistage.models.worker import Worker

G = TypeVar("G")

MAX_WAITING = 64
START_LIMIT_S = 15.0
ANSWER_LIMIT_S = 5.0
"""Seconds after which the process must have said how a trial ended, which it ends itself after TRIAL_LIMIT_S."""
ALL_GRAMMARS_BYTES = 1 << 30
"""Bytes that the grammars of all running answers may take together in this process."""
MIN_GRAMMAR_BYTES = 16 << 20
"""Each grammar counts for so much at least: it grows by up to 14 MiB as it is used (measured)."""


class GrammarTrials:
    """Tries constraints one after the other, in a process that starts with the first one. Clients take turns.

    Call it from one event loop, on a thread that lives as long: the process ends with the thread that started it. vocabulary: called once
    for each process."""

    def __init__(self, vocabulary: Callable[[], TokenPieces]) -> None:
        self._vocabulary = vocabulary
        self._turns = WaitingPlaces(1, MAX_WAITING, lambda waiting: Full(f"{waiting} constraints wait for their grammars: ask again later"))
        self._process: HelperProcess | None = None
        self._sizes: dict[object, tuple[str, int]] = {}  # The host and the bytes of each grammar that lives.

    async def make(self, constraint: TextConstraint, client: str, make: Callable[[], Awaitable[G]]) -> G:
        """Wait for the client's turn, try the constraint, and then make its grammar, which counts for its host as long as it lives.
        Raises UnfitConstraint if it cannot be made within the bounds of a trial, and Full if that could not be found out, or if running
        answers take too much memory for grammars. If the caller is cancelled, the trial ends."""
        async with self._turns.hold(client):
            size_bytes = max(await self._try(constraint), MIN_GRAMMAR_BYTES)
            self._check_room(client, size_bytes)
            grammar = await make()
            self._count(grammar, client, size_bytes)
            return grammar

    def _check_room(self, client: str, size_bytes: int) -> None:
        """Raises Full if there is no room for a grammar of this size."""
        sizes = [*self._sizes.values()]
        held_bytes = sum(bytes_of_one for _, bytes_of_one in sizes)
        of_host_bytes = sum(bytes_of_one for host, bytes_of_one in sizes if host == host_of(client))
        if not has_room(size_bytes, held_bytes, of_host_bytes, ALL_GRAMMARS_BYTES):
            raise Full(f"the grammars of running answers take {held_bytes >> 20} MiB of {ALL_GRAMMARS_BYTES >> 20}: ask again later")

    def _count(self, grammar: object, client: str, size_bytes: int) -> None:
        """Count the bytes of a grammar for as long as it lives. It may end on any thread, while this one counts."""
        key = object()
        self._sizes[key] = host_of(client), size_bytes
        weakref.finalize(grammar, self._sizes.pop, key).atexit = False

    async def close(self) -> None:
        """End the process. Call it when nothing is being tried."""
        if self._process is not None:
            process, self._process = self._process, None
            await process.end()

    async def start(self) -> None:
        """Start the process, so that the first constraint need not wait for that. Raises Full."""
        async with self._turns.hold(""):
            with _failures_as_full():
                await self._live_process()

    async def _try(self, constraint: TextConstraint) -> int:
        """The bytes that the grammar takes. Raises UnfitConstraint or Full."""
        with _failures_as_full():
            try:
                outcome = await self._exchange(constraint)
            except NotTaken:  # once more: the process was killed before it took the constraint
                outcome = await self._exchange(constraint)
        match outcome:
            case {"passed": int(size_bytes)}:
                return size_bytes
            case {"unfit": str(reason)}:
                raise UnfitConstraint(reason)
            case {"ended": int(status)} if status == -signal.SIGPROF:
                raise UnfitConstraint(f"its grammar takes more than {TRIAL_CPU_S:g} s of a processor: make it simpler")
            case {"ended": int(status)} if status == -signal.SIGABRT:
                raise UnfitConstraint(f"its grammar takes more than {TRIAL_BYTES >> 20} MiB of memory: make it simpler")
            case {"ended": int(status)} if status != -signal.SIGKILL:
                raise UnfitConstraint("its grammar cannot be made: make it simpler")
        raise Full("the grammar of the constraint was not made in time: ask again later")

    async def _exchange(self, constraint: TextConstraint) -> dict[str, Any]:
        """Have the process try a constraint; returns the outcome. A process that does not answer is ended. Raises NotTaken."""
        process = await self._live_process()
        reading, writing = os.pipe()
        trial = asyncio.create_task(self._send(process, constraint, reading))
        try:
            return await asyncio.shield(trial)
        except asyncio.CancelledError:
            os.close(writing)  # The process then ends the trial.
            writing = -1
            # This waits until the process can try the next constraint, however often the caller is cancelled.
            while not trial.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([trial])
            trial.exception()  # Nobody wants to know.
            raise
        finally:
            os.close(reading)
            if writing >= 0:
                os.close(writing)

    async def _send(self, process: HelperProcess, constraint: TextConstraint, pipe: int) -> dict[str, Any]:
        """How the trial ended. A process that does not take it, or does not answer, is ended. Raises NotTaken."""
        try:
            with _file(json.dumps(astuple(constraint)).encode()) as file:
                await process.send(b"constraint", file.fileno(), pipe)
        except NotTaken:
            await self.close()
            raise
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                answer = await process.receive()
        except TimeoutError:
            answer = b""
        if not answer:
            await self.close()
            return {"late": True}
        outcome: dict[str, Any] = json.loads(answer)
        return outcome

    async def _live_process(self) -> HelperProcess:
        """The process, which has the vocabulary. Raises NotTaken."""
        if self._process is not None and self._process.wait(0) is not None:
            await self.close()
        if self._process is None:
            self._process = HelperProcess("omnistage.models.text.grammar_child", [], "makes grammars on trial", START_LIMIT_S)
            try:
                with _file(pickle.dumps(self._vocabulary())) as file, suppress(BrokenPipeError):  # It ended; the next line tells how.
                    self._process.post(b"vocabulary", file.fileno())
                await self._process.wait_ready()
            except BaseException:
                await self.close()
                raise
        return self._process


@contextmanager
def _file(content: bytes) -> Iterator[IO[bytes]]:
    """A file in memory, for the other process to read."""
    with os.fdopen(os.memfd_create("omnistage-constraint", os.MFD_CLOEXEC), "w+b") as file:
        file.write(content)
        file.flush()
        yield file


@contextmanager
def _failures_as_full() -> Iterator[None]:
    """Raises Full where no process could try a constraint, or this one lacks a descriptor."""
    try:
        yield
    except (NotTaken, OSError) as error:
        raise Full(f"the grammar of the constraint was not tried ({error}): ask again later") from error


log = structlog.get_logger("omnistage.models.common.constraint")

_FIELD = "thinker.constraint"
_HISTORY_PIECE = 256
"""Number of tokens of a history that the matcher gets in one call."""


def _field(constraint: TextConstraint) -> str:
    return f"{_FIELD}.{constraint.form}"


class Grammar:
    """A constraint as llguidance checks it; implements `engine.request.Constraint`. matcher: has read the history of the request; each
    walk gets a copy. ends: bits of the tokens that end a text, as in `Walk.allowed`. vocabulary: number of ids."""

    def __init__(self, matcher: LLMatcher, ends: torch.Tensor, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self._matcher, self._ends = matcher, ends

    def read(self, tokens: Sequence[int]) -> bool:
        """Go on behind these tokens; returns whether they keep to the constraint. Call it before the first walk."""
        return self._matcher.try_consume_tokens(list(tokens)) == len(tokens)

    def begin(self) -> GrammarWalk:
        return GrammarWalk(self, self._matcher.deep_copy(), self._ends)


class GrammarWalk:
    """Implements `engine.request.Walk`. grammar: counts as used as long as one of its walks. ends: bits of the tokens that end a text.
    `_allowed`: result of `allowed`; None: not computed yet."""

    def __init__(self, grammar: Grammar, matcher: LLMatcher, ends: torch.Tensor) -> None:
        self._grammar, self._matcher, self._ends = grammar, matcher, ends
        self._allowed: torch.Tensor | None = None

    @property
    def complete(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def must_end(self) -> bool:
        allowed = self.allowed()
        return bool(allowed.any()) and not bool((allowed & ~self._ends).any())

    def allowed(self) -> torch.Tensor:
        if self._allowed is None:
            self._allowed = torch.from_numpy(next_mask(self._matcher, len(self._ends)))
        return self._allowed

    def note(self, token_id: int) -> None:
        # If the token cannot continue the text, the matcher notes that and allows nothing.
        self._matcher.consume_token(token_id)
        self._allowed = None


class AfterThought:
    """Implements `engine.request.Constraint`: allows any text until the thought ends, then text that `constraint` allows. ends: ids that
    end an answer; they may not come within a thought."""

    def __init__(self, constraint: EngineConstraint, marks: Marks, ends: Sequence[int]) -> None:
        self._constraint, self._marks, self._ends = constraint, marks, ends
        self.vocabulary = constraint.vocabulary

    def begin(self) -> Walk:
        """A walk at the beginning of a thought, where every token may come except `ends`."""
        free = np.zeros(-(-self.vocabulary // 32) * 32, bool)  # a bit for each id, rounded up to words of 32 bits
        free[: self.vocabulary] = True
        free[list(self._ends)] = False
        bits = torch.from_numpy(np.packbits(free, bitorder="little").view(np.int32))
        return _ThinkingWalk(self._constraint.begin(), self._marks.closes, bits)


class _ThinkingWalk:
    """Implements `engine.request.Walk` for a thought and the answer after it. walk: for the answer. closes: id of the token that ends
    the thought. free: bits of the tokens that may come within the thought."""

    def __init__(self, walk: Walk, closes: int, free: torch.Tensor) -> None:
        self._walk, self._closes, self._free = walk, closes, free
        self._is_over = False

    @property
    def complete(self) -> bool:
        return self._is_over and self._walk.complete

    @property
    def must_end(self) -> bool:
        return self._is_over and self._walk.must_end

    def allowed(self) -> torch.Tensor:
        return self._walk.allowed() if self._is_over else self._free

    def note(self, token_id: int) -> None:
        if self._is_over:
            self._walk.note(token_id)
        self._is_over |= token_id == self._closes


class Constraints:
    """Makes grammars for one vocabulary, on a thread of its own. piece: returns the bytes of an id; b"" for an id without a token; not
    called for special ids. encode: turns text into ids, for text that can continue in only one way. special: ids that no text has. end_ids:
    the special ids that end the text. vocabulary: number of ids in the decoder's head."""

    def __init__(
        self,
        piece: Callable[[int], bytes],
        encode: Callable[[str], Sequence[int]],
        *,
        special: Collection[int],
        end_ids: Sequence[int],
        vocabulary: int,
    ) -> None:
        self._piece, self._encode = piece, encode
        self._special, self._end_ids, self._size = frozenset(special), end_ids, vocabulary
        self._trials = GrammarTrials(lambda: self._vocabulary)
        self._worker = Worker("grammars", threads=1)
        self.activity = self._worker.activity

    async def of(self, request: TextRequest, thinks: Marks | None = None) -> EngineConstraint | None:
        """The constraint of a request's text after its history; None: the text is free. thinks: marks of the thought with which the answer
        begins, which is not constrained. Raises BadRequest or Full."""
        if request.constraint is None or request.verbatim or request.finished is not None:
            return None
        answer_tokens = request.history if thinks is None else thinks.answer_tokens(request.history)
        grammar = await self._tried(request.constraint, request.client)
        await self._read(grammar, answer_tokens or (), _field(request.constraint))
        return grammar if thinks is None or answer_tokens is not None else AfterThought(grammar, thinks, self._end_ids)

    async def warm_up(self) -> None:
        """Make what all grammars share before any request needs it, because that takes long."""
        await self._worker.run(lambda: self._tokenizer)
        try:
            await self._trials.start()
        except Full as error:  # Free answers need no grammars, and the next constraint starts the process.
            log.warning("grammars.not_started", why=str(error))

    async def close(self) -> None:
        await self._trials.close()
        await self._worker.close()

    async def _tried(self, constraint: TextConstraint, client: str) -> Grammar:
        """The grammar of a constraint, which was made on trial before. Raises BadRequest or Full."""
        try:
            return await self._trials.make(constraint, client, lambda: self._worker.run(partial(self._grammar, constraint)))
        except UnfitConstraint as error:
            raise BadRequest(_field(constraint), str(error)) from None

    async def _read(self, grammar: Grammar, history: Sequence[int], field: str) -> None:
        """Have the grammar read the tokens of a history; others have their turns between pieces of it. Raises BadRequest."""
        for first in range(0, len(history), _HISTORY_PIECE):
            if not await self._worker.run(partial(grammar.read, history[first : first + _HISTORY_PIECE])):
                raise BadRequest("resume.history", f"the tokens do not keep to {field}")

    @cached_property
    def _vocabulary(self) -> TokenPieces:
        pieces = [f"<special {number}>".encode() if number in self._special else self._piece(number) for number in range(self._size)]
        return TokenPieces(pieces, sorted(self._special), self._end_ids)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """The vocabulary for llguidance, which only the worker touches."""
        return self._vocabulary.tokenizer(self._encode)

    @cached_property
    def _ends(self) -> torch.Tensor:
        """Bits of the tokens that end a text, as in `Walk.allowed`."""
        bits = np.zeros(32 * self._vocabulary.mask_words, bool)
        bits[list(self._end_ids)] = True
        return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))

    def _grammar(self, constraint: TextConstraint) -> Grammar:
        return Grammar(new_matcher(self._tokenizer, constraint), self._ends, self._size)


@contextmanager
def refuse_dead_ends() -> Iterator[None]:
    """Used around an answer of an engine: raises BadRequest if the constraint allows no further token. That is the fault of the request,
    however late it shows."""
    try:
        yield
    except DeadEnd as error:
        raise BadRequest(_FIELD, str(error)) from None

"""Who runs in the next step. Policy only: no tensor is touched here.

Each step runs one row of every sequence that can decode, then prompt chunks up to a budget. A sequence is admitted when pages for all
it may ever need are free, so an admitted one always reaches its end and is never put back. Admission is first come, first served,
but a request that fits may pass one that does not, until that one was passed MAX_PASSED times. A sequence whose reader does not read
is parked after MAX_UNREAD events: it keeps its pages and takes no step.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from omnistage.engine.kv import PAGE_TOKENS, PagePool, PrefixCache, pages_for
from omnistage.engine.request import TokenRequest
from omnistage.engine.sampler import Draws

MAX_UNREAD = 32
"""Events that an answer may be ahead of its reader."""

MAX_PASSED = 16
"""How often a waiting request may be passed by smaller ones."""


class Sequence:
    """One request on its way through the engine.

    computed: tokens of prompt and history whose keys and values are in the cache. unread: events made and not yet taken; written
    under the engine's lock. queued_s: seconds from the request to its admission.
    """

    __slots__ = ("asked_s", "computed", "draws", "pages", "passed", "queued_s", "request", "tokens", "unread")

    def __init__(self, request: TokenRequest) -> None:
        self.request = request
        self.tokens = list(request.history)
        self.pages: list[int] = []
        self.computed = 0
        self.passed = 0
        self.unread = 0
        self.asked_s = time.monotonic()
        self.queued_s = 0.0
        self.draws = Draws(request.sampling, request.seed, request.logprobs, set(request.prompt))
        for token_id in request.history:
            self.draws.note(token_id)

    @property
    def known(self) -> int:
        """Tokens that are known: prompt and answer so far."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def prefilling(self) -> bool:
        """Whether more than the newest token waits to be computed. A fresh prompt counts as such to its last token."""
        return self.computed < len(self.request.prompt) or self.computed < self.known - 1

    @property
    def parked(self) -> bool:
        return self.unread >= MAX_UNREAD

    def token(self, position: int) -> int:
        prompt = self.request.prompt
        return prompt[position] if position < len(prompt) else self.tokens[position - len(prompt)]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` .. `start + count - 1` of a sequence, all of the prompt or all of the history. last: its end gives the next token."""

    sequence: Sequence
    start: int
    count: int

    @property
    def of_prompt(self) -> bool:
        return self.start < len(self.sequence.request.prompt)

    @property
    def last(self) -> bool:
        return self.start + self.count == self.sequence.known


@dataclass(frozen=True, slots=True)
class Step:
    """What to run: one new row of each of `decode`, then each chunk."""

    decode: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.decode or self.chunks)


@dataclass(frozen=True, slots=True)
class Limits:
    """max_sequences: admitted at a time. max_waiting: requests that wait for admission. chunk_tokens: most tokens of a prompt chunk, a
    multiple of PAGE_TOKENS. step_tokens: most prompt tokens of a step."""

    max_sequences: int = 64
    max_waiting: int = 64
    chunk_tokens: int = 64
    step_tokens: int = 128

    def __post_init__(self) -> None:
        if self.chunk_tokens % PAGE_TOKENS or self.chunk_tokens < PAGE_TOKENS:
            raise ValueError(f"chunk_tokens must be a multiple of {PAGE_TOKENS}, got {self.chunk_tokens}")
        if self.step_tokens < self.chunk_tokens:
            raise ValueError("step_tokens must not be smaller than chunk_tokens")
        if self.max_sequences < 1 or self.max_waiting < 1:
            raise ValueError("max_sequences and max_waiting must be at least 1")


class Scheduler:
    """Holds waiting and admitted sequences; hands out pages."""

    def __init__(self, pool: PagePool, prefixes: PrefixCache, limits: Limits) -> None:
        self._pool, self._prefixes, self._limits = pool, prefixes, limits
        self._waiting: deque[Sequence] = deque()
        self._admitted: dict[Sequence, None] = {}

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def admitted(self) -> tuple[Sequence, ...]:
        return tuple(self._admitted)

    def can_ever_run(self, request: TokenRequest) -> bool:
        return pages_for(request.tokens) <= self._pool.total

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in the queue; the engine has seen to the queue's bound and to `can_ever_run`."""
        self._waiting.append(sequence)

    def admit(self) -> tuple[list[Sequence], list[int], list[int]]:
        """Admit what fits. Returns the sequences, the pages they took, and pages of forgotten prompts that became free on the way."""
        admitted: list[Sequence] = []
        taken: list[int] = []
        freed: list[int] = []
        refused: list[Sequence] = []
        while self._waiting and len(self._admitted) < self._limits.max_sequences:
            sequence = self._waiting.popleft()
            shared = self._prefixes.find(sequence.request.prompt)
            needed = pages_for(sequence.request.tokens) - len(shared)
            # Kept beginnings are forgotten only if that makes room.
            can_fit = needed <= self._pool.free + self._prefixes.unshared()
            while can_fit and needed > self._pool.free and len(self._prefixes):
                freed += self._prefixes.shrink(1)
            if needed > self._pool.free:
                freed += self._pool.give_back(shared)
                refused.append(sequence)
                if sequence.passed >= MAX_PASSED:
                    break
                continue
            fresh = self._pool.take(needed)
            taken += fresh
            sequence.pages = shared + fresh
            sequence.computed = len(shared) * PAGE_TOKENS
            sequence.queued_s = time.monotonic() - sequence.asked_s
            self._admitted[sequence] = None
            admitted.append(sequence)
            for earlier in refused:
                earlier.passed += 1
        self._waiting.extendleft(reversed(refused))
        return admitted, taken, freed

    def plan(self) -> Step:
        """The next step over admitted sequences; empty if all are parked."""
        step = Step()
        budget = self._limits.step_tokens
        for sequence in self._admitted:
            if sequence.parked:
                continue
            if not sequence.prefilling:
                step.decode.append(sequence)
            elif budget:
                for chunk in self._chunks(sequence, budget):
                    step.chunks.append(chunk)
                    budget -= chunk.count
        return step

    def _chunks(self, sequence: Sequence, budget: int) -> list[Chunk]:
        """The next chunks of a sequence within a budget. Each ends at a multiple of PAGE_TOKENS or at the end of prompt or history."""
        chunks: list[Chunk] = []
        start = sequence.computed
        while start < sequence.known:
            prompt = len(sequence.request.prompt)
            end = prompt if start < prompt else sequence.known
            count = min(end - start, self._limits.chunk_tokens)
            if count > budget:
                count = budget - budget % PAGE_TOKENS
            if count == 0:
                break
            chunks.append(Chunk(sequence, start, count))
            start += count
            budget -= count
        return chunks

    def remember(self, sequence: Sequence) -> list[int]:
        """The prompt of this sequence is in the cache: keep its full pages. Returns pages that became free to make room."""
        return self._prefixes.remember(sequence.request.prompt, sequence.pages)

    def remove(self, sequence: Sequence) -> list[int]:
        """Take a sequence out, wherever it is; returns the pages that became free. A sequence that is not here is no error."""
        if sequence in self._admitted:
            del self._admitted[sequence]
            freed = self._pool.give_back(sequence.pages)
            sequence.pages = []
            return freed
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        return []

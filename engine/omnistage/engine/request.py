"""What is asked of the engine, what comes back, and how it can fail."""

from __future__ import annotations

from dataclasses import dataclass, field

from omnistage.engine.types import FinishReason, Sampling


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """Tokens to be made after a prompt.

    max_tokens: tokens of the whole answer, `history` included; at least one more than the history has. min_tokens: no end token is
    drawn before. end_ids: tokens that end the answer; they are not part of it. ignore_end: never draw one. history: the beginning
    of the answer, made earlier by an equal request; it is computed again exactly as it was, and the answer goes on after it.
    """

    prompt: tuple[int, ...]
    seed: int
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    min_tokens: int = 0
    end_ids: frozenset[int] = frozenset()
    ignore_end: bool = False
    logprobs: bool = False
    history: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("the prompt has no token")
        if self.max_tokens <= len(self.history):
            raise ValueError(f"max_tokens is {self.max_tokens}, and the history has {len(self.history)} tokens: nothing is left to make")

    @property
    def tokens(self) -> int:
        """Tokens that prompt and answer have at most."""
        return len(self.prompt) + self.max_tokens


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One step of an answer. token_id: None where an end token was drawn. finish_reason: on the last event and only there.
    queued_s: on the first event, seconds from the request to its admission."""

    token_id: int | None
    logprob: float | None = None
    finish_reason: FinishReason | None = None
    queued_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """How busy an engine is. Sequences: waiting for a place, running, parked because nobody reads them. Pages held by sequences
    (`pages_used`) and pages kept only for prompts to come (`pages_kept`). Counted since the start: steps, tokens."""

    waiting: int = 0
    running: int = 0
    parked: int = 0
    pages_used: int = 0
    pages_kept: int = 0
    pages_total: int = 0
    steps: int = 0
    tokens: int = 0


class EngineFull(RuntimeError):
    """The waiting queue is full: ask again later or elsewhere."""


class EngineClosed(RuntimeError):
    """The engine was closed, or its thread ended by a bug (then the cause is attached)."""


class SequenceFailed(RuntimeError):
    """This sequence could not go on: its step raised (the cause is attached) or its logits were not finite. Other sequences go on."""

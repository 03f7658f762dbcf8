"""Types that the engine and its callers share: items, sampling parameters, reasons of an end. No torch here: the toy models use them
too."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

Item = tuple[int, ...]
"""An element of a sequence: one token id, or the codes of one frame."""


class FinishReason(enum.Enum):
    """Why a run of tokens or codes ended."""

    STOP = "stop"
    LENGTH = "length"
    INTERRUPTED = "interrupted"


class Unfit(ValueError):
    """The engine can never run this request. field: the bad field of SequenceRequest, or of a part of it, such as sampling.logit_bias.
    description: what is wrong with it."""

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}")
        self.field = field
        self.description = description


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. The caller has checked the ranges of `omnistage.v1.Sampling`. temperature: 0: always the likeliest token.
    top_k: 0: off. The penalties are defined as in Transformers (repetition) and by OpenAI (presence, frequency)."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

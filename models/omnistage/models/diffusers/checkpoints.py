"""Latents on the way, kept by the caller, so that a replica which takes over goes on at a step and not at the first one.

They are the bits of float32 values, as codes, for codes are what callers keep. A few times for a picture, and only as many as fit into the
message that opens the next session.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omnistage.models.diffusers.plan import Plan
from omnistage.models.interface import BadRequest

CHECKPOINT = "checkpoint"
MOST = 3
"""Of one picture."""
WORDS = 1 << 18
"""Of all checkpoints of a session together; a word takes up to five bytes of a message."""


def steps_of(plan: Plan, words: int) -> tuple[int, ...]:
    """Steps after which latents are kept, evenly spread. words: of all latents of the plan. What a step cache knows is not kept: with one
    there are none."""
    count = 0 if plan.step_cache else min(MOST, WORDS // words, plan.steps - 1)
    return tuple(-(-plan.steps * number // (count + 1)) for number in range(1, count + 1))


def words_of(latents: Sequence[Tensor], width: int) -> NDArray[np.uint32]:
    """[rows, width] of latents of any shape, one after the other."""
    flat = torch.cat([each.float().flatten() for each in latents]).cpu().numpy()
    return flat.view(np.uint32).reshape(-1, width)


def latents_of(words: NDArray[np.uint32], like: Tensor) -> Tensor:
    """The other way, in the shape and type of others."""
    values = torch.from_numpy(np.ascontiguousarray(words).view(np.float32).copy())
    return values.reshape(like.shape).to(like)


def check(history: NDArray[np.uint32], width: int, rows: int, steps: Sequence[int]) -> None:
    """Raises BadRequest for what this plan cannot have put out. rows: of one checkpoint."""
    if history.ndim != 2 or history.shape[1] != width or len(history) > rows * len(steps):
        raise BadRequest("resume.history", f"port {CHECKPOINT!r} has at most {rows * len(steps)} rows of {width} for this request")
    if not np.isfinite(np.ascontiguousarray(history).view(np.float32)).all():
        raise BadRequest("resume.history", f"port {CHECKPOINT!r} has values that are no numbers")

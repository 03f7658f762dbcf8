"""Noise that is a pure function of (seed, step, token id), so that a draw depends on nothing else.

Tokens race: each token gets an exponentially distributed time, divided by its probability, and the token with the earliest time is drawn.
That is a draw by these probabilities; with logits it is the arg max of `logit - log(time)` (Gumbel 1954; Maddison et al. 2014: Gumbel-max).
Because the noise depends on the token id, a tiny change of the logits almost never changes the choice, and a sequence that another replica
continues gets the same draws.

The times of a block of 32 tokens are made from the earliest of them. The least of 32 exponential times is distributed like an exponential
time divided by 32, and belongs to each of the 32 tokens with equal chance. Each other token comes later by a further exponential time,
because the exponential distribution has no memory. So these are still 32 independent times, and the earliest one alone shows whether any
token of the block can be early enough. Few tokens of a vocabulary need noise at all: see `race`. The hash is the finaliser of SplitMix64
(Steele, Lea, Flood 2014).
"""

from __future__ import annotations

import torch

BLOCK = 32
"""Number of tokens of a block, whose noise is made together: token id // BLOCK is a token's block."""

_STEP_STRIDE = 0x9E3779B97F4A7C15
_TOKEN_STRIDE = 0xD1B54A32D192ED03
_BLOCK_STRIDE = 0xAEF17502108EF2D9
_MASK = (1 << 64) - 1


def _to_int64(value: int) -> int:
    """The int64 with the same bits as the uint64 `value`."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


_FIRST = _to_int64(0xBF58476D1CE4E5B9)
_SECOND = _to_int64(0x94D049BB133111EB)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int64 to the right and fill up with zeros; torch would fill up with the sign."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64, applied to each int64."""
    x = (_shift_right(x, 30).bitwise_xor_(x)).mul_(_FIRST)
    x = (_shift_right(x, 27).bitwise_xor_(x)).mul_(_SECOND)
    return _shift_right(x, 31).bitwise_xor_(x)


def _times(bits: torch.Tensor) -> torch.Tensor:
    """Exponentially distributed float64 from the upper 52 of 64 random bits: with one more bit the uniform number could round to 1."""
    return _shift_right(bits, 12).to(torch.float64).add_(0.5).mul_(2.0**-52).log_().neg_()


def keys(seeds: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """The key of each row's noise in one step, int64 [rows]. seeds (see `seed_bits`), steps: int64 [rows]."""
    return _mix(_mix(seeds + _to_int64(_STEP_STRIDE)) + steps * _to_int64(_STEP_STRIDE))


def first_times(keys: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(the earliest time among the tokens of each block, the index in the block of the token that has this time).

    keys: int64 [rows]. blocks: int64, broadcast to [rows, n]. Returns float64 and int64, both [rows, n]; times lie strictly between 0 and
    1.2."""
    bits = _mix(_mix(keys + _to_int64(_BLOCK_STRIDE))[:, None] + blocks * _to_int64(_BLOCK_STRIDE))
    return _times(bits).mul_(1 / BLOCK), bits & (BLOCK - 1)


def times(keys: torch.Tensor, blocks: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The times of tokens, float64 [rows, n, m].

    keys: int64 [rows]. blocks: the tokens' blocks, int64 [rows, n]. places: the tokens' places in their blocks, int64, broadcast to [rows,
    n, m]."""
    first, place = first_times(keys, blocks)
    tokens = blocks[:, :, None] * BLOCK + places
    later = _times(_mix(keys[:, None, None] + tokens * _to_int64(_TOKEN_STRIDE)))
    return later.masked_fill_(places == place[:, :, None], 0.0).add_(first[:, :, None])


def seed_bits(seed: int) -> int:
    """An unsigned 64-bit seed as the int64 that the functions above take."""
    return _to_int64(seed)
